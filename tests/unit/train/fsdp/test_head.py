"""The chunked head against log_softmax over whole logits, and its memory use."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from orhpc.train.loss.head import LogitScaling, token_logprobs


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    s: LogitScaling,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * s.scale
    if s.softcap is not None:
        logits = s.softcap * torch.tanh(logits / s.softcap)
    logprobs = (logits / s.temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 23),
    chunk=st.sampled_from([1, 4, 7, 64]),
    softcap=st.none() | st.floats(1.0, 10.0),
    scale=st.sampled_from([1.0, 0.25]),
    temperature=st.sampled_from([1.0, 0.7]),
    with_bias=st.booleans(),
    entropy_gradient=st.booleans(),
)
def test_values_and_gradients_equal_log_softmax(
    rows: int,
    chunk: int,
    softcap: float | None,
    scale: float,
    temperature: float,
    with_bias: bool,
    entropy_gradient: bool,
) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + chunk)
    scaling = LogitScaling(scale, softcap, temperature)
    leaves = [torch.randn(rows, 12, generator=generator), torch.randn(31, 12, generator=generator)]
    if with_bias:
        leaves.append(torch.randn(31, generator=generator))
    targets = torch.randint(0, 31, (rows,), generator=generator)
    weights = torch.randn(2, rows, generator=generator)
    results = []
    for chunked in (True, False):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        hidden, weight, bias = inputs[0], inputs[1], inputs[2] if with_bias else None
        if chunked:
            logprobs, entropy = token_logprobs(
                hidden, weight, bias, targets, scaling=scaling, chunk=chunk, entropy_gradient=entropy_gradient
            )
        else:
            logprobs, entropy = plain(hidden, weight, bias, targets, scaling)
        loss = (logprobs * weights[0]).sum()
        if entropy_gradient:
            loss = loss + (entropy * weights[1]).sum()
        loss.backward()
        results.append((logprobs, entropy, [leaf.grad for leaf in inputs]))
    (ours, our_entropy, our_grads), (theirs, their_entropy, their_grads) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_entropy, their_entropy, rtol=1e-4, atol=1e-5)
    assert our_entropy.requires_grad == (entropy_gradient and ours.requires_grad)
    for a, b in zip(our_grads, their_grads, strict=True):
        assert a is not None  # zeros, not None: sharded ranks reduce them together
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-4, atol=1e-5)


def test_small_blocks_on_a_cpu_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = torch.randn(9, 4), torch.randn(17, 4), torch.randint(0, 17, (9,))
    whole = token_logprobs(hidden, weight, None, targets, scaling=LogitScaling(), chunk=9)
    monkeypatch.setattr("orhpc.train.loss.head.CACHE_ELEMENTS", 34)
    blocks = token_logprobs(hidden, weight, None, targets, scaling=LogitScaling(), chunk=9)
    torch.testing.assert_close(whole, blocks, rtol=1e-6, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_exists(entropy_gradient: bool) -> None:
    rows, vocabulary, hidden_size, chunk = 256, 500, 8, 16
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    with LargestTensor() as largest:
        logprobs, entropy = token_logprobs(
            hidden,
            weight,
            None,
            targets,
            scaling=LogitScaling(temperature=0.7),
            chunk=chunk,
            entropy_gradient=entropy_gradient,
        )
        (logprobs.sum() + (entropy.sum() if entropy_gradient else 0.0)).backward()
    assert largest.elements == chunk * vocabulary


class LivingChunks(TorchDispatchMode):
    """Records how many different memories of a chunk of logits exist at once, at most."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.most = 0
        self._elements = elements
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self._elements:
            self._tensors.append(weakref.ref(result))
        living = [tensor for known in self._tensors if (tensor := known()) is not None]
        self.most = max(self.most, len({tensor.untyped_storage().data_ptr() for tensor in living}))
        return result


def test_a_chunk_of_logits_is_freed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocabulary, chunk = 64, 500, 16
    monkeypatch.setattr("orhpc.train.loss.head.CACHE_ELEMENTS", vocabulary)  # temporary tensors have one row
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    with LivingChunks(chunk * vocabulary) as living:
        logprobs, _ = token_logprobs(hidden, weight, None, targets, scaling=LogitScaling(), chunk=chunk)
        logprobs.sum().backward()
    assert living.most == 1
