"""When the allocator may extend segments; tests/gpu/expandable_segments.py measures what it gains."""

from __future__ import annotations

import pytest
import torch

from orhpc.process.cuda_allocator import (
    expandable_segments,
    use_plain_segments,
    without_expandable_segments,
)

GPU = torch.device("cuda")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch is asked for, in order, without variables of the machine's user."""
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return found


def test_segments_expand_in_the_block_only(settings: list[str]) -> None:
    with pytest.raises(MemoryError), expandable_segments(GPU):
        assert settings == ["expandable_segments:True"]
        raise MemoryError
    assert settings == ["expandable_segments:True", "expandable_segments:False"]


def test_nothing_changes_on_a_cpu(settings: list[str]) -> None:
    use_plain_segments(torch.device("cpu"))
    with expandable_segments(torch.device("cpu")):
        pass
    assert settings == []


def test_the_users_other_options_are_repeated(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTORCH_CUDA_ALLOC_CONF",
        "max_split_size_mb:512,expandable_segments:True,roundup_power2_divisions:[256:1,>:4]",
    )
    use_plain_segments(GPU)
    with expandable_segments(GPU):
        pass
    others = "max_split_size_mb:512,roundup_power2_divisions:[256:1,>:4],expandable_segments:"
    assert settings == [f"{others}False", f"{others}True", f"{others}False"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_user_who_says_no_is_heard(settings: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "expandable_segments: False")
    with expandable_segments(GPU):
        pass
    assert settings == []


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("expandable_segments:True", None),
        ("expandable_segments:True,max_split_size_mb:128", "max_split_size_mb:128"),
        ("max_split_size_mb:128, expandable_segments:True", "max_split_size_mb:128"),
        ("max_split_size_mb:128", "max_split_size_mb:128"),
    ],
)
def test_an_engine_never_gets_the_option(given: str, left: str | None) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        expected = {"PATH": "/bin"} | ({} if left is None else {name: left})
        assert without_expandable_segments({"PATH": "/bin", name: given}) == expected


def test_torch_has_the_option() -> None:
    """The real function: a torch that drops it fails here, not in the first step on a GPU."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
