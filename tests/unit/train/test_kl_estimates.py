"""KL estimates against values computed by hand, and at extreme log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from orhpc.train.loss import grpo


@pytest.mark.parametrize(
    ("difference", "k1", "k2", "k3", "bounded"),
    [
        (0.5, 0.5, 0.125, 0.1065306597, 0.1065306597),
        (-0.5, -0.5, 0.125, 0.1487212707, 0.1487212707),
        (-2.0, -2.0, 2.0, 4.3890560989, 4.3890560989),
        (-2.6, -2.6, 3.38, 9.8637380350, 9.8637380350),
        (-2.7, -2.7, 3.645, 11.1797317249, 10.0),
        (9.0, 9.0, 40.5, 8.0001234098, 8.0001234098),
        (12.0, 12.0, 72.0, 11.0000061442, 10.0),
    ],
)
def test_kl_estimates_have_the_values_of_their_formulas(
    difference: float, k1: float, k2: float, k3: float, bounded: float
) -> None:
    """Computed by hand: exp(-0.5) + 0.5 - 1 = 0.1065, exp(2) - 2 - 1 = 4.389."""
    policy, reference = torch.tensor([-3.0 + difference], dtype=torch.float64), torch.tensor([-3.0])
    for kind, wanted in (("k1", k1), ("k2", k2), ("k3", k3), ("k3_clamped", bounded)):
        assert float(grpo.kl_estimate(policy, reference, kind)) == pytest.approx(wanted, rel=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["k3", "k3_clamped"])
def test_a_kl_estimate_of_a_token_that_the_policy_has_given_up_is_finite(kind: Any) -> None:
    """It is finite in float32, where exp(100) is not; the gradient still points towards the reference."""
    policy = torch.tensor([-100.0, -200.0, -25.0, -15.0], requires_grad=True)
    estimate = grpo.kl_estimate(policy, torch.zeros(4), kind)
    estimate.sum().backward()
    assert policy.grad is not None
    assert bool(estimate.isfinite().all() and policy.grad.isfinite().all())
    if kind == "k3":
        assert bool((policy.grad < -1e6).all())
        assert float(policy.grad[3]) == pytest.approx(1 - math.exp(15), rel=1e-5)
        assert float(policy.grad[0]) == pytest.approx(1 - math.exp(20), rel=1e-5)
        assert bool(estimate[1] > estimate[0] > estimate[2] > estimate[3])
    else:
        assert bool((estimate == 10).all())


@given(hnp.arrays(np.float64, 6, elements=st.floats(-30, 0)), st.integers(0, 2**31))
def test_k2_and_k3_are_never_negative(logprobs: np.ndarray, seed: int) -> None:
    reference = torch.from_numpy(np.random.default_rng(seed).normal(-3, 4, 6))
    for kind in ("k2", "k3", "k3_clamped"):
        assert bool((grpo.kl_estimate(torch.from_numpy(logprobs), reference, kind) >= 0).all())


def test_the_gradients_of_kl_estimates_are_in_expectation_what_the_guide_says() -> None:
    """On-policy: k2 has that of the divergence, k1 one of 0, and k3 that of k2 near the reference."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(30, dtype=torch.float64, generator=generator).requires_grad_()
    change = torch.randn(30, dtype=torch.float64, generator=generator)

    def gradient(kind: Any, distance: float) -> torch.Tensor:
        logprobs = logits.log_softmax(0)
        reference = (logits.detach() + distance * change).log_softmax(0)
        expected = logprobs.exp() * (logprobs - reference)
        if kind is not None:
            expected = logprobs.exp().detach() * grpo.kl_estimate(logprobs, reference, kind)
        return torch.autograd.grad(expected.sum(), logits)[0]

    for distance in (1.0, 1e-3):
        true = gradient(None, distance)
        assert float(true.norm()) > 1e-5
        torch.testing.assert_close(gradient("k2", distance), true)
        torch.testing.assert_close(gradient("k1", distance), torch.zeros(30, dtype=torch.float64))
        off = float((gradient("k3", distance) - true).norm() / true.norm())
        assert (off > 0.2) if distance == 1 else (off < 0.01)
