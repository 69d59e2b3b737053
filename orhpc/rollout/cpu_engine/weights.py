"""The engine's parameters under their Hugging Face names, and whether they may be served.

Mixtures of experts keep all experts of a layer in one parameter in memory; under the names that
checkpoints and trainers use, each expert's part of it is a view, so an update is always a copy
into place and never a second model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from orhpc.weight_wire import NamedTensor

_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")


class BadUpdate(ValueError):
    """An update that does not fit this model; nothing of it was applied."""


class WeightStore:
    """Named targets of updates, and the state of an update that comes in parts.

    Weights are in one of three states.  *Whole*: all of one version.  *Open*: some parts of an update
    have been applied and it is not yet declared finished; it is finished by a part that carries a weight
    version, by setting the version, or once every parameter has been written.  *Partial*: an update
    failed, or memory was released, so old and new lie mixed; only writing every parameter helps.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shapes: dict[str, torch.Size] = {name: p.shape for name, p in model.named_parameters()}
        self._targets = _targets(model)
        self._required = frozenset(_required(model))
        self._first_names = _tied(model)
        self._written: set[str] = set()
        self._partial: str | None = None
        self.released = False

    @property
    def not_servable(self) -> str | None:
        """Why these weights must not be served; None when they may."""
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
        """Write tensors into place, cast to the model's types; returns how many.

        ``last`` declares the update finished.  Raises BadUpdate before anything is written for a
        name or shape the model does not have.
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
        """Raise BadUpdate when the model has no such parameter of this shape."""
        target = self._targets.get(name)
        if target is None:
            raise BadUpdate(f"the model has no parameter {name!r}")
        if target.shape != torch.Size(shape):
            raise BadUpdate(f"{name} has shape {list(target.shape)} in the model, not {list(shape)}")

    def finish_update(self) -> None:
        """Declare an open update finished; a partial one stays partial."""
        if self._partial is None:
            self._written.clear()

    def fail(self, why: str) -> None:
        """Mark the weights as partial: what was being written did not arrive whole."""
        self._partial = why
        self._written.clear()

    def load_folder(self, folder: str) -> int:
        """Write all parameters from a Hugging Face folder of safetensors; returns how many.

        Raises BadUpdate before anything is written when the folder does not hold the whole model.
        """
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise BadUpdate(f"{folder} holds no safetensors")
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
        """Give the parameters' memory back; buffers stay."""
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self._targets = {}
        self.released = True

    def resume(self) -> None:
        """Allocate the parameters again; their contents are undefined until a complete update."""
        for name, parameter in self._model.named_parameters():
            parameter.data = torch.zeros(self._shapes[name], dtype=parameter.dtype)
        self._targets = _targets(self._model)
        self.released = False
        self.fail("they were released")

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

    def _canonical(self, name: str) -> str:
        """The one name that stands for a parameter that several names share."""
        return self._first_names.get(name, name)


def _targets(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Where each checkpoint name's values go."""
    targets: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=False).items():
        fused = _FUSED.match(name)
        if fused and tensor.dim() == 3:
            targets.update(_expert_views(fused[1], fused[2], tensor))
        else:
            targets[name] = tensor
    return targets


def _expert_views(prefix: str, kind: str, fused: torch.Tensor) -> dict[str, torch.Tensor]:
    views: dict[str, torch.Tensor] = {}
    for expert in range(fused.shape[0]):
        if kind == "down_proj":
            views[f"{prefix}.{expert}.down_proj.weight"] = fused[expert]
        else:
            half = fused.shape[1] // 2
            views[f"{prefix}.{expert}.gate_proj.weight"] = fused[expert, :half]
            views[f"{prefix}.{expert}.up_proj.weight"] = fused[expert, half:]
    return views


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Every parameter name to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _required(model: PreTrainedModel) -> set[str]:
    """The names that a complete update must cover: each parameter once, buffers not."""
    required: set[str] = set()
    for name, parameter in model.named_parameters():
        fused = _FUSED.match(name)
        if fused and parameter.dim() == 3:
            required.update(_expert_views(fused[1], fused[2], parameter.detach()))
        else:
            required.add(name)
    return required
