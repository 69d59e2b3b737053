"""Losses against straightforward numpy, numerical gradients, and edge cases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.config.algorithm import AlgorithmSettings, CorrectionSettings
from orhpc.train.backend import Update
from orhpc.train.loss import grpo
from orhpc.train.loss.grpo import LossInputs, packed_loss
from orhpc.train.process_groups import join_default_group
from orhpc.train.step_report import StepReport
from tests.trainer_kit import free_port


class Reference:
    """Compute the same loss in loops over samples and tokens, from the papers' formulas."""

    def __init__(self, a: dict[str, np.ndarray], s: AlgorithmSettings, n_samples: int, n_tokens: int) -> None:
        self.a, self.s, self.n_samples, self.n_tokens = a, s, n_samples, n_tokens

    def loss(self) -> float:
        total = 0.0
        for segment in np.unique(self.a["segments"]):
            slots = np.flatnonzero((self.a["segments"] == segment) & self.a["mask"])
            if not len(slots):
                continue
            # GSPO-token: the mean is a constant, around which each token's ratio moves with its own
            # log-probability; "frozen" holds those at which the gradient is taken.
            log_ratios = self.a.get("frozen", self.a["logprobs"])[slots] - self.a["old"][slots]
            weights = self.corrections(slots)
            losses = [self.token(i, log_ratios.mean(), w) for i, w in zip(slots, weights, strict=True)]
            if self.s.normalise_loss == "sample":
                total += sum(losses) / len(slots) / self.n_samples
            elif self.s.normalise_loss == "constant":
                assert self.s.normalise_length is not None
                total += sum(losses) / self.s.normalise_length / self.n_samples
            else:
                total += sum(losses) / self.n_tokens
        return total

    def corrections(self, slots: np.ndarray) -> list[float]:
        """Compute the weights of one sample's tokens, one by one."""
        c = self.s.mismatch_correction
        rhos = [math.exp(self.a["old"][i] - self.a["rollout"][i]) for i in slots]
        if c.veto is not None and any(rho < c.veto for rho in rhos):
            return [0.0] * len(slots)
        product = math.prod(rhos)
        by_level = {"sequence": product, "geometric": product ** (1 / len(slots))}
        weights = []
        for token_rho in rhos:
            rho = by_level.get(c.level, token_rho)
            outside = 0.0 if not c.low <= rho <= c.high else rho
            by_mode = {"truncate": min(rho, c.high), "clip": min(max(rho, c.low), c.high), "mask": outside}
            weights.append(by_mode.get(c.mode, 1.0))
        return weights

    def advantage(self, i: int) -> float:
        """Compute the advantage of a token, less the KL penalties from it to the end of its sample."""
        a = self.a
        if not self.s.use_kl_reward:
            return a["advantages"][i]
        later = [j for j in range(i, len(a["mask"])) if a["mask"][j] and a["segments"][j] == a["segments"][i]]
        return a["advantages"][i] - self.s.kl_coef * sum(a["old"][j] - a["reference"][j] for j in later)

    def token(self, i: int, mean_log_ratio: float, correction: float) -> float:
        a, s = self.a, self.s
        high = s.eps_clip if s.eps_clip_high is None else s.eps_clip_high
        advantage, logprob = self.advantage(i), a["logprobs"][i]
        log_ratio = logprob - a["old"][i]
        if s.loss == "gspo":
            log_ratio = mean_log_ratio + logprob - a.get("frozen", a["logprobs"])[i]
        ratio = math.exp(log_ratio)
        clipped = min(max(ratio, 1 - s.eps_clip), 1 + high)
        if s.loss == "cispo":
            loss = -clipped * advantage * logprob
        else:
            loss = max(-ratio * advantage, -clipped * advantage)
            if s.dual_clip is not None and advantage < 0:
                loss = min(loss, -s.dual_clip * advantage)
        loss *= correction
        if s.use_kl_loss:
            d = logprob - a["reference"][i]
            estimates = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}
            estimates["k3_clamped"] = min(estimates["k3"], 10.0)
            loss += s.kl_coef * estimates[s.kl_type]
        return loss - s.entropy_coef * a["entropy"][i]


def arrays(rng: np.random.Generator, slots: int, n_segments: int) -> dict[str, np.ndarray]:
    logprobs = -rng.gamma(2, 1, slots)
    return {
        "segments": np.sort(rng.integers(0, n_segments, slots)),
        "mask": rng.random(slots) < 0.6,
        "logprobs": logprobs,
        "old": logprobs + rng.normal(0, 0.4, slots),
        "rollout": logprobs + rng.normal(0, 0.6, slots),
        "reference": logprobs + rng.normal(0, 1.0, slots),
        "advantages": rng.normal(0, 1, slots),
        "entropy": rng.random(slots) * 3,
    }


def inputs(a: dict[str, np.ndarray], logprobs: torch.Tensor | None = None, *, old: bool = True) -> LossInputs:
    t = {k: torch.from_numpy(v) for k, v in a.items()}
    return LossInputs(
        logprobs_P=t["logprobs"] if logprobs is None else logprobs,
        old_logprobs_P=t["old"] if old else None,
        rollout_logprobs_P=t["rollout"],
        advantages_P=t["advantages"],
        mask_P=t["mask"],
        segments_P=t["segments"],
        n_segments=int(a["segments"].max()) + 1,
        entropy_P=t["entropy"],
        reference_logprobs_P=t["reference"],
    )


def allowed(**values: Any) -> AlgorithmSettings:
    """Generate settings, with conflicting ones made consistent."""
    length = values.pop("length")
    if values["loss"] == "cispo":
        values["dual_clip"] = None
    if values["normalise_loss"] == "constant":
        values["normalise_length"] = length
    if (penalty := values.pop("penalty")) is not None:
        values[penalty] = True
    return AlgorithmSettings(**values)


algorithms = st.builds(
    allowed,
    loss=st.sampled_from(["grpo", "gspo", "cispo"]),
    eps_clip=st.floats(0.05, 0.4),
    eps_clip_high=st.none() | st.floats(0.05, 0.6),
    dual_clip=st.none() | st.floats(1.1, 4.0),
    normalise_loss=st.sampled_from(["sample", "token", "constant"]),
    length=st.integers(1, 50),
    penalty=st.sampled_from([None, "use_kl_loss", "use_kl_reward"]),
    kl_coef=st.floats(0, 0.5),
    kl_type=st.sampled_from(["k1", "k2", "k3", "k3_clamped"]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    correction=st.builds(
        CorrectionSettings,
        mode=st.sampled_from(["none", "truncate", "clip", "mask"]),
        level=st.sampled_from(["token", "sequence", "geometric"]),
        low=st.floats(0.2, 0.9),
        high=st.floats(1.0, 5.0),
        veto=st.none() | st.floats(0.05, 0.5),
    ),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(algorithms, st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 5))
def test_loss_equals_the_reference(s: AlgorithmSettings, seed: int, slots: int, segments: int) -> None:
    a = arrays(np.random.default_rng(seed), slots, segments)
    n_samples, n_tokens = segments + 3, int(a["mask"].sum()) + 11
    loss, _ = packed_loss(inputs(a), s, n_samples=n_samples, n_tokens=n_tokens)
    assert float(loss) == pytest.approx(Reference(a, s, n_samples, n_tokens).loss(), rel=1e-6, abs=1e-8)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(algorithms, st.integers(0, 2**31))
def test_gradient_equals_finite_differences(s: AlgorithmSettings, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = arrays(rng, 12, 3)
    logprobs = torch.from_numpy(a["logprobs"]).requires_grad_()
    loss, _ = packed_loss(inputs(a, logprobs), s, n_samples=3, n_tokens=9)
    loss.backward()
    assert logprobs.grad is not None
    gradient = logprobs.grad.numpy()
    assert not gradient[~a["mask"]].any()
    for i in np.flatnonzero(a["mask"])[:3]:
        # A kink (a clip bound, a maximum) inside the interval gives two different slopes.
        slopes = [_slope(a, s, i, step) for step in (1e-6, -1e-6)]
        if abs(slopes[0] - slopes[1]) < 1e-4:
            assert gradient[i] == pytest.approx(slopes[0], rel=1e-3, abs=1e-5)


def _slope(a: dict[str, np.ndarray], s: AlgorithmSettings, i: int, step: float) -> float:
    if s.loss == "cispo":  # its ratio has no gradient, so the slope is that of the frozen weight
        high = s.eps_clip if s.eps_clip_high is None else s.eps_clip_high
        weight = np.clip(np.exp(a["logprobs"] - a["old"]), 1 - s.eps_clip, 1 + high)
        frozen = s.model_copy(update={"eps_clip": 1e-12, "eps_clip_high": 1e-12, "use_kl_reward": False})
        own = Reference(a, s, 3, 9)
        base = a | {"advantages": weight * [own.advantage(j) for j in range(len(weight))]}
        here = Reference(base, frozen, 3, 9).loss()
        moved = base | {"logprobs": _moved(a["logprobs"], i, step)}
        return (Reference(moved, frozen, 3, 9).loss() - here) / step
    moved = a | {"logprobs": _moved(a["logprobs"], i, step), "frozen": a["logprobs"]}
    return (Reference(moved, s, 3, 9).loss() - Reference(a, s, 3, 9).loss()) / step


def _moved(values: np.ndarray, i: int, step: float) -> np.ndarray:
    moved = values.copy()
    moved[i] += step
    return moved


def test_no_sampled_token_gives_a_zero_loss_and_gradient() -> None:
    a = arrays(np.random.default_rng(1), 9, 2)
    a["mask"][:] = False
    logprobs = torch.from_numpy(a["logprobs"]).requires_grad_()
    loss, metrics = packed_loss(inputs(a, logprobs), AlgorithmSettings(), n_samples=0, n_tokens=0)
    loss.backward()
    assert float(loss.detach()) == 0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()
    assert float(metrics.sums["tokens"]) == 0
    assert float(metrics.maxima["logprob_diff_max"]) == 0


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient() -> None:
    a = arrays(np.random.default_rng(2), 20, 3)
    logprobs = torch.from_numpy(a["logprobs"]).requires_grad_()
    loss, metrics = packed_loss(
        inputs(a, logprobs, old=False), AlgorithmSettings(normalise_loss="token"), n_samples=3, n_tokens=10
    )
    loss.backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), np.where(a["mask"], -a["advantages"] / 10, 0))
    assert float(metrics.sums["ratio"]) == float(metrics.sums["tokens"])
    assert float(metrics.sums["clipped"]) == 0


def test_a_huge_log_ratio_stays_finite() -> None:
    log_ratio = torch.tensor([500.0, -500.0], requires_grad=True)
    loss, _ = grpo.grpo_loss(log_ratio, torch.tensor([-1.0, 1.0]), eps_low=0.2, eps_high=0.2)
    loss.sum().backward()
    assert log_ratio.grad is not None
    assert bool(loss.isfinite().all() and log_ratio.grad.isfinite().all())


@pytest.mark.parametrize(
    ("log_ratio", "used"), [(19.5, 19.5), (20.5, 20.0), (-19.5, -19.5), (-20.5, -20.0), (1.0, 1.0)]
)
def test_log_ratios_are_clamped_at_20(log_ratio: float, used: float) -> None:
    """Ratios are clamped in the loss (if no clip bounds them), the metrics and the correction weights."""
    ratios, mask = torch.tensor([log_ratio], dtype=torch.float64), torch.ones(1, dtype=torch.bool)
    # For A < 0 the larger ratio counts, for A > 0 the smaller one.
    advantage = -1.0 if log_ratio > 0 else 1.0
    loss, _ = grpo.grpo_loss(ratios, torch.tensor([advantage]), eps_low=0.2, eps_high=0.2)
    assert float(loss) == pytest.approx(-advantage * math.exp(used), rel=1e-9)
    correction = CorrectionSettings(mode="truncate", high=1e30)
    weights = grpo.correction_weights(ratios, mask, torch.zeros(1, dtype=torch.int64), 1, correction)
    assert float(weights) == pytest.approx(math.exp(used), rel=1e-9)
    assert float(grpo.mismatch(ratios, mask).sums["rho"]) == pytest.approx(math.exp(used), rel=1e-9)


# Ratios of the trainer's probability to the engine's.
RATIOS = [1.9, 0.55, 1.0, 2.1, 0.45, 3.9, 0.3]


def test_mismatch_metrics_have_the_values_of_their_formulas() -> None:
    """Samples are the engine's: k1 is its log-probability minus the trainer's, k3 is rho - 1 - log(rho)."""
    log_rho = torch.tensor([math.log(r) for r in RATIOS] + [5.0], dtype=torch.float64)
    mask = torch.tensor([True] * len(RATIOS) + [False])
    found = grpo.mismatch(log_rho, mask)
    sums = {name: float(value) for name, value in found.sums.items()}
    assert grpo.mismatch(log_rho[:1], mask[:1]).sums["rollout_kl"] == pytest.approx(
        0.2581461138
    )  # 0.9 - log 1.9
    assert grpo.mismatch(log_rho[1:2], mask[1:2]).sums["rollout_kl"] == pytest.approx(0.1478370008)
    assert sums["rollout_kl_k1"] == pytest.approx(-math.log(1.9 * 0.55 * 2.1 * 0.45 * 3.9 * 0.3))
    assert sums["rollout_kl"] == pytest.approx(10.2 - 7 - math.log(1.9 * 0.55 * 2.1 * 0.45 * 3.9 * 0.3))
    assert sums["rho"] == pytest.approx(10.2)
    assert sums["rho_squared"] == pytest.approx(3.61 + 0.3025 + 1 + 4.41 + 0.2025 + 15.21 + 0.09)
    assert sums["extreme"] == 4  # 2.1, 0.45, 3.9 and 0.3 are above 2 or below 1/2
    assert float(found.maxima["logprob_diff_max"]) == pytest.approx(math.log(3.9))


def test_a_steps_report_says_what_the_alarms_use() -> None:
    """Means over sampled tokens of all mini-batches; Kish's effective sample size as a share of these."""
    join_default_group(torch.device("cpu"), "127.0.0.1", free_port(), 0, 1, 30)
    try:
        report = StepReport(torch.device("cpu"))
        for ratios in (RATIOS[:3], RATIOS[3:]):
            n = len(ratios)
            a = {"rollout": np.full(n, -1.0), "old": -1.0 + np.log(ratios)}
            a |= {name: np.zeros(n) for name in ("advantages", "entropy", "reference")}
            a |= {"logprobs": a["old"], "mask": np.ones(n, bool), "segments": np.zeros(n, np.int64)}
            _, metrics = packed_loss(inputs(a), AlgorithmSettings(), n_samples=1, n_tokens=n)
            report.add_packed(n)
            report.add_update(Update(metrics, 1.0, 1e-3, 0.0))
        found = report.reduced()
    finally:
        dist.destroy_process_group()
    assert found["effective_sample_size"] == pytest.approx(10.2**2 / (24.825 * 7))  # 0.5987
    assert found["extreme_token_fraction"] == pytest.approx(4 / 7)
    product = 1.9 * 0.55 * 2.1 * 0.45 * 3.9 * 0.3
    assert found["rollout_kl_k1"] == pytest.approx(-math.log(product) / 7)
    assert found["rollout_kl"] == pytest.approx((10.2 - 7 - math.log(product)) / 7)
    assert found["logprob_diff_max"] == pytest.approx(math.log(3.9))


def test_a_constant_normalizer_weighs_tokens_of_long_and_short_samples_alike() -> None:
    """Dr.GRPO (arXiv:2503.20783): 1 / (samples x length), independent of each sample's own length."""
    mask = torch.tensor([True, True, True, False, True])
    segments = torch.tensor([0, 0, 0, 1, 1])
    weights = grpo.token_weights(mask, segments, 2, normalize="constant", n_samples=4, n_tokens=99, length=10)
    assert weights.tolist() == pytest.approx([1 / 40, 1 / 40, 1 / 40, 0, 1 / 40])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"normalise_loss": "constant"}, "normalise_length need each other"),
        ({"normalise_length": 10}, "normalise_length need each other"),
        ({"loss": "cispo", "dual_clip": 3.0}, "loss: cispo has no such bound"),
    ],
)
def test_settings_that_would_not_do_what_they_say_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AlgorithmSettings.model_validate(values)


def _gspo_gradient(a: dict[str, np.ndarray], **values: Any) -> np.ndarray:
    logprobs = torch.from_numpy(a["logprobs"]).requires_grad_()
    s = AlgorithmSettings.model_validate({"loss": "gspo", "eps_clip": 0.5, **values})
    packed_loss(inputs(a, logprobs), s, n_samples=3, n_tokens=9)[0].backward()
    assert logprobs.grad is not None
    return logprobs.grad.numpy()


@pytest.mark.parametrize("normalize", ["sample", "token"])
def test_gspo_with_one_advantage_per_sample_has_the_gradient_of_the_sequence_ratio(normalize: str) -> None:
    """arXiv:2507.18071, equation 10: ``-s_i A_i`` times the mean of the gradients of log p."""
    a = arrays(np.random.default_rng(5), 24, 3)
    a["old"] = a["logprobs"] + 0.1 * (a["old"] - a["logprobs"])
    a["advantages"] = np.array([1.0, -2.0, 0.5])[a["segments"]]
    found = _gspo_gradient(a, normalise_loss=normalize)
    for segment in range(3):
        slots = np.flatnonzero((a["segments"] == segment) & a["mask"])
        ratio = math.exp((a["logprobs"] - a["old"])[slots].mean())
        share = 1 / 9 if normalize == "token" else 1 / 3 / len(slots)
        np.testing.assert_allclose(found[slots], -ratio * a["advantages"][slots] * share)
        assert len(slots) > 1


def test_gspo_keeps_the_advantages_and_weights_of_single_tokens() -> None:
    """With a critic, a KL penalty in the rewards, or a correction: the mean must not average them."""
    a = arrays(np.random.default_rng(6), 4, 1)
    a["mask"][:] = True
    a["old"] = a["logprobs"] - np.array([1e-2, -1e-2, 2e-2, -2e-2])
    a["advantages"] = np.array([1.0, -1.0, 2.0, -2.0])
    np.testing.assert_allclose(_gspo_gradient(a, normalise_loss="token"), -a["advantages"] / 9)
    a["rollout"] = a["old"] - np.array([0.0, 3.0, 0.0, 0.0])
    masked = {"mode": "mask", "level": "token", "low": 0.5, "high": 5.0}
    found = _gspo_gradient(a, normalise_loss="token", correction=masked)
    np.testing.assert_allclose(found, -a["advantages"] / 9 * [1, 0, 1, 1], atol=1e-12)


@pytest.mark.parametrize("penalty", ["use_kl_loss", "use_kl_reward"])
def test_a_kl_penalty_needs_the_reference(penalty: str) -> None:
    a = arrays(np.random.default_rng(3), 5, 1)
    made = inputs(a)
    bare = LossInputs(**{f: getattr(made, f) for f in made.__slots__} | {"reference_logprobs_P": None})
    with pytest.raises(ValueError, match="reference"):
        packed_loss(bare, AlgorithmSettings.model_validate({penalty: True}), n_samples=1, n_tokens=1)


@pytest.mark.slow
@settings(deadline=None)
@given(algorithms, st.integers(0, 2**31))
def test_metrics_and_losses_of_parts_add_up_to_the_whole(s: AlgorithmSettings, seed: int) -> None:
    a = arrays(np.random.default_rng(seed), 30, 4)
    loss, whole = packed_loss(inputs(a), s, n_samples=4, n_tokens=17)
    summed = grpo.MetricSums()
    losses = 0.0
    for segments in ([0, 1], [2], [3]):
        here = np.isin(a["segments"], segments)
        if not here.any():
            continue
        part = {k: v[here] for k, v in a.items()}
        part["segments"] = part["segments"] - segments[0]
        part_loss, metrics = packed_loss(inputs(part), s, n_samples=4, n_tokens=17)
        losses += float(part_loss)
        summed.add(metrics)
    assert losses == pytest.approx(float(loss), rel=1e-9, abs=1e-12)
    for name, value in whole.sums.items():
        assert float(summed.sums[name]) == pytest.approx(float(value), rel=1e-9, abs=1e-9), name
    for name, value in whole.maxima.items():
        assert float(summed.maxima[name]) == float(value), name
