"""The engine's parameters by their Hugging Face names, and whether they can be served.

Mixtures of experts store all experts of a layer in one parameter in memory, and some families rename
modules.  Each name used in checkpoints and by trainers maps to a view of a parameter, so an update always
copies in place and never creates a second model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from orhpc.errors import ModelError
from orhpc.wire.weight_deltas import keeps_values
from orhpc.wire.weights import NamedTensor


class BadUpdate(ValueError):
    """An update that does not match this model; nothing of it was applied."""


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """A view of one contiguous tensor of the model."""

    name: str
    """Name of the tensor in the model."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Offset of the first element."""


class WeightStore:
    """Named targets of updates, and the state of an update that arrives in parts.

    Weights are in one of three states.  *Whole*: all of one version.  *Open*: parts of an update have been
    applied and it is not complete yet; it is completed by a part that has a weight version, by setting the
    version, or once every parameter has been written.  *Partial*: an update failed, or memory was released,
    so old and new values are mixed; only writing every parameter makes the weights whole again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shapes: dict[str, torch.Size] = {name: p.shape for name, p in model.named_parameters()}
        for tensor in model.parameters():
            tensor.data = tensor.data.contiguous()  # required for the views
        self._view_specs = _view_specs(model)
        self._targets = self._views()
        self._first_names = self._tied()
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        wanted = [part for part, place in self._view_specs.items() if place.name in parameters]
        self._required = frozenset(map(self._canonical, wanted))
        """The names that a complete update must cover: each parameter once, no buffers."""
        self._written: set[str] = set()
        self._partial: str | None = None
        self.released = False

    @property
    def not_servable(self) -> str | None:
        """Why these weights must not be served; None if they may be."""
        if self.released:
            return "the weights are released; resume them and send new ones"
        if self._partial is not None:
            return f"weights are partial ({self._partial}); a complete update must follow"
        if self._written:
            return (
                f"a weight update is open: {len(self._written)} of {len(self._required)} parameters written"
            )
        return None

    def apply(self, named: Iterable[NamedTensor], *, last: bool) -> int:
        """Copy tensors in place, cast to the model's dtypes; returns how many.

        ``last`` completes the update.  Raises BadUpdate before anything is written for a name or shape that
        the model does not have.
        """
        if self.released:
            raise BadUpdate("the weights are released: resume them first")
        pairs = list(named)
        for name, tensor in pairs:
            self.check(name, tensor.shape)
        with torch.no_grad():
            for name, tensor in pairs:
                self._targets[name].copy_(tensor)
                self._written.add(self._canonical(name))
        if self._required <= self._written:
            self._partial = None
            self._written.clear()
        elif last:
            self.finish_update()
        return len(pairs)

    def check(self, name: str, shape: Iterable[int]) -> None:
        """Raise BadUpdate if the model has no such parameter of this shape."""
        target = self._targets.get(name)
        if target is None:
            raise BadUpdate(f"the model has no parameter {name!r}")
        if target.shape != torch.Size(shape):
            raise BadUpdate(f"{name} has shape {list(target.shape)} in the model, not {list(shape)}")

    def finish_update(self) -> None:
        """Complete an open update; partial weights stay partial."""
        if self._partial is None:
            self._written.clear()

    def fail(self, why: str) -> None:
        """Mark the weights as partial, because an update did not arrive completely."""
        self._partial = why
        self._written.clear()

    def load_folder(self, folder: str) -> int:
        """Load all parameters from a Hugging Face folder of safetensors; returns how many.

        Raises BadUpdate before anything is written if the folder does not contain the whole model.
        """
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise BadUpdate(f"{folder} contains no safetensors")
        try:
            found: set[str] = set()
            for file in files:
                with safe_open(file, framework="pt") as shard:
                    for name in shard.keys():  # noqa: SIM118 - the object is not a mapping
                        self.check(name, shard.get_slice(name).get_shape())
                        found.add(self._canonical(name))
        except (OSError, SafetensorError) as error:
            raise BadUpdate(f"cannot read the weights in {folder}: {error}") from error
        missing = sorted(self._required - found)
        if missing:
            raise BadUpdate(f"{folder} lacks {len(missing)} parameters, the first is {missing[0]}")
        count = 0
        for file in files:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118
                    count += self.apply([(name, shard.get_tensor(name))], last=False)
        return count

    def release(self) -> None:
        """Free the parameters' memory; buffers stay."""
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self._targets = {}
        self.released = True

    def resume(self) -> None:
        """Allocate the parameters again; their contents are undefined until a complete update."""
        for name, parameter in self._model.named_parameters():
            parameter.data = torch.zeros(self._shapes[name], dtype=parameter.dtype)
        self._targets = self._views()
        self.released = False
        self.fail("their memory was released")

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Copy a parameter or buffer, in this type.

        Raises ValueError if the model does not have it or its memory is released.
        """
        if name not in self._targets:
            raise ValueError(f"{name!r} is unknown or released")
        return self._targets[name].detach().to(dtype, copy=True)

    def holds(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a parameter or buffer keeps tensors of this type as they are."""
        target = self._targets.get(name)
        return target is not None and keeps_values(target.dtype, dtype)

    def values(self, name: str, limit: int) -> list[object]:
        """First ``limit`` rows of a parameter as nested lists; raises BadUpdate for an unknown name."""
        if name not in self._targets:
            raise BadUpdate(f"the model has no parameter {name!r}")
        return self._targets[name][:limit].float().tolist()

    def checksums(self) -> dict[str, str]:
        """A 64-bit BLAKE2b of each parameter's bytes, under its Hugging Face name."""
        sums: dict[str, str] = {}
        for name in sorted(self._required):
            data = self._targets[name].detach().contiguous().flatten().view(torch.uint8)
            sums[name] = hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()
        return sums

    def _views(self) -> dict[str, torch.Tensor]:
        """The target tensor of each checkpoint name."""
        tensors = self._model.state_dict(keep_vars=False)
        return {
            part: tensors[at.name].as_strided(
                at.shape, at.stride, tensors[at.name].storage_offset() + at.offset
            )
            for part, at in self._view_specs.items()
        }

    def _tied(self) -> dict[str, str]:
        """For each checkpoint name, the first name of the same (tied) values."""
        first: dict[tuple[int, int], str] = {}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        return {
            part: first.setdefault((id(parameters[at.name]), at.offset), part)
            for part, at in self._view_specs.items()
            if at.name in parameters
        }

    def _canonical(self, name: str) -> str:
        """The canonical name of a parameter that has several names."""
        return self._first_names.get(name, name)


def _view_specs(model: PreTrainedModel) -> dict[str, ViewSpec]:
    """The target view of each checkpoint name, for parameters (tied ones by every name) and buffers.

    Raises ModelError if the values of a name are not a regular view of one tensor.
    """
    places: dict[str, ViewSpec] = {}
    tensors = model.state_dict()
    # Use the names that trainers export, i.e. those of a model that was not loaded from a folder.
    conversions = model.__dict__.pop("_weight_conversions", None)
    try:
        for name, tensor in tensors.items():
            parts = revert_weight_conversion(model, {name: tensor})
            if list(map(id, parts.values())) != [id(tensor)]:
                # Convert a tensor of element indices to find out where each part comes from.
                numbers = torch.arange(tensor.numel()).view(tensor.shape)
                parts = revert_weight_conversion(model, {name: numbers})
                places |= {part: _view_spec(name, part, found) for part, found in parts.items()}
            else:
                (part,) = parts
                if not tensor.is_contiguous():
                    raise ValueError(f"buffer {name} is not contiguous")
                places[part] = ViewSpec(name, tensor.shape, tensor.stride(), 0)
    except (ValueError, KeyError, AttributeError, RuntimeError) as error:
        problem = " ".join(str(error).split())[:200]
        raise ModelError(
            f"the cpu engine cannot update weights of {model.config.model_type}: {problem}"
        ) from error
    finally:
        if conversions is not None:
            model._weight_conversions = conversions  # type: ignore[assignment]
    return places


def _view_spec(name: str, part: str, numbers: torch.Tensor) -> ViewSpec:
    """The view of tensor ``name`` whose elements have these indices.

    Raises ValueError if there is none.
    """
    first = int(numbers.flatten()[0])
    stride = tuple(
        int(numbers.select(dim, 1).flatten()[0]) - first if numbers.shape[dim] > 1 else 1
        for dim in range(numbers.dim())
    )
    count = sum((size - 1) * step for size, step in zip(numbers.shape, stride, strict=True))
    regular = all(step > 0 for step in stride) and first + count == int(numbers.max())
    if not regular or not torch.equal(
        torch.arange(first + count + 1).as_strided(numbers.shape, stride, first), numbers
    ):
        raise ValueError(f"{part} is not a regular view of {name}")
    return ViewSpec(name, numbers.shape, stride, first)
