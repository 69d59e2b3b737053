"""A transformers causal language model on a slot cache: packed tokens in, logits and expert routes out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedModel

from orhpc.errors import ConfigError, ModelError
from orhpc.models.forward_check import (
    Difference,
    Samples,
    plain_logprobs,
    refuse,
    samples_for,
    target_logprobs,
    unknown_positions,
)
from orhpc.models.images import ImageProcessor
from orhpc.models.seeing import (
    ImageFeatures,
    attention_of,
    auto_class,
    language_inputs,
    transformers_config,
)
from orhpc.rollout.engines.cpu.kv_cache import SlotCache, make_plan
from orhpc.types import Image
from orhpc.wire.routes import RouteShape

_ROUTER_CLASS = re.compile(r"Top[kK]Router$")
_LAYER_INDEX = re.compile(r"\.layers\.(\d+)\.")
DECODED = 4
"""Number of tokens per sample that the check at startup decodes one by one."""
ENGINE_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Maximum mean difference in nats; both sides round to the model's dtype."""


@dataclass(frozen=True, slots=True)
class SeenRow:
    """What a packed row needs in addition to its tokens if any of its requests has images."""

    positions_3N: torch.Tensor
    slots_V: torch.Tensor
    """Rows of images' tokens, ascending."""
    features: ImageFeatures | None
    """None: no image is in this row."""

    @classmethod
    def of(cls, positions: np.ndarray, slots: list[np.ndarray], features: list[ImageFeatures]) -> SeenRow:
        found = ImageFeatures.joined(features) if features else None
        where = np.concatenate([np.zeros(0, np.int64), *slots])
        return cls(torch.from_numpy(positions), torch.from_numpy(where), found)


class SlotModel:
    """The model, its slot cache and, for mixtures of experts, the recorded expert routes.

    ``context`` and ``slots`` determine the cache's size.  ``record_routes`` stores, per slot and position,
    the experts chosen by each layer's router when the position was computed.  ``check`` compares a few
    log-probabilities with transformers' own forward pass, see :mod:`orhpc.models.forward_check`.

    Raises ModelError for a model that does not work with the slot cache and its attention.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        context: int,
        *,
        record_routes: bool = False,
        check: bool = True,
        images: ImageProcessor | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.images = images
        """Of a model that sees images."""
        self.slots = slots
        self.context = context
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.eos_token_ids = _eos_token_ids(model)
        self.dtype = model.dtype
        compressed = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
        self.cache = SlotCache(slots, context, gather=compressed)
        self.routes: RouteRecorder | None = None
        try:
            samples, expected = self._reference(model) if check else (None, [])
            model.set_attn_implementation(attention_of(model.config, self.cache.attention_name))
            self.routes = RouteRecorder(model, slots, context) if record_routes else None
            if samples is None:
                self._check_runs()
            else:
                self._compare(samples, expected)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            kind = type(model).__name__
            raise ModelError(f"the cpu engine cannot run {kind}: {' '.join(str(error).split())}") from error

    @torch.inference_mode()
    def forward(
        self,
        tokens: list[int],
        decode: list[tuple[int, int]],
        prefill: list[tuple[int, int, int]],
        seen: SeenRow | None = None,
    ) -> torch.Tensor:
        """Compute one packed row of tokens; see :func:`make_plan` for ``decode`` and ``prefill``.

        Returns float32 logits ``[decoding rows, vocabulary]``; prompt pieces only update the cache.
        """
        plan = make_plan(decode, prefill, self.context, self.dtype, gather=self.cache.gather)
        self.cache.plan = plan
        if self.routes is not None:
            self.routes.start(plan.flat_N)
        if seen is not None and seen.features is not None:
            logits = self._with_images(tokens, len(decode), seen, seen.features)
        else:
            positions = plan.flat_N % self.context if seen is None else seen.positions_3N
            output = self.model(
                input_ids=torch.tensor([tokens]),
                position_ids=positions.unsqueeze(-2),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=torch.arange(len(decode)),
            )
            logits = output.logits[0]
        if self.routes is not None:
            self.routes.finish()
        return logits.float()

    def _with_images(
        self, tokens: list[int], decoding: int, seen: SeenRow, features: ImageFeatures
    ) -> torch.Tensor:
        body: Any = self.model.base_model
        output = body.language_model(
            **language_inputs(body, torch.tensor(tokens), features, seen.slots_V),
            position_ids=seen.positions_3N[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        head: Any = self.model.get_output_embeddings()
        return head(output.last_hidden_state[0, :decoding])

    def see(self, images: Sequence[Image]) -> ImageFeatures:
        """Compute images with the vision tower."""
        assert self.images is not None
        pixels, grids = self.images.pixel_values(images)
        return ImageFeatures.of(self.model.base_model, torch.from_numpy(pixels), torch.from_numpy(grids))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions from ``source`` to ``target``."""
        self.cache.copy_prefix(source, target, length)
        if self.routes is not None:
            self.routes.store[target, :length] = self.routes.store[source, :length]

    def _check_runs(self) -> None:
        """Compute two tokens, so that an unsupported model family fails at startup."""
        self.forward([0], [], [(0, 0, 1)])
        self.forward([0], [(0, 1)], [])

    def _reference(self, model: PreTrainedModel) -> tuple[Samples, list[torch.Tensor]]:
        """Log-probabilities of a few samples from transformers' own forward pass, before any patching."""
        samples = samples_for(
            model.config,
            longest=self.context,
            parameters=model.num_parameters(),
            threads=torch.get_num_threads(),
        )
        samples = replace(samples, tokens=samples.tokens[: self.slots])
        return samples, plain_logprobs(model, samples, 1.0)

    def _compare(self, samples: Samples, expected: list[torch.Tensor]) -> None:
        """Prefill all samples together in two pieces, then decode the last tokens one at a time."""
        steps = min(DECODED, *(len(tokens) - 1 for tokens in samples.tokens))
        ends = [len(tokens) - 1 - steps for tokens in samples.tokens]
        for first, last in ([0] * len(ends), [n // 2 for n in ends]), ([n // 2 for n in ends], ends):
            pieces = [(slot, a, b) for slot, (a, b) in enumerate(zip(first, last, strict=True)) if a < b]
            row = [t for slot, a, b in pieces for t in samples.tokens[slot][a:b].tolist()]
            if row:
                self.forward(row, [], pieces)
        actual: list[list[torch.Tensor]] = [[] for _ in ends]
        for step in range(steps):
            at = [end + step for end in ends]
            row = [int(tokens[n]) for tokens, n in zip(samples.tokens, at, strict=True)]
            logits = self.forward(row, list(enumerate(at)), [])
            targets = torch.stack([tokens[n + 1] for tokens, n in zip(samples.tokens, at, strict=True)])
            for slot, value in enumerate(target_logprobs(logits, targets, 1.0)):
                actual[slot].append(value)
        refuse(
            str(self.model.config.model_type),
            "the cpu engine",
            Difference.of([torch.stack(values) for values in actual], [t[-steps:] for t in expected]),
            ENGINE_BOUNDS[self.dtype],
            "engine.backend: sglang may",
        )


class RouteRecorder:
    """Stores the chosen experts as ``[slots, context, layers, topk]`` in the smallest unsigned dtype."""

    def __init__(self, model: PreTrainedModel, slots: int, context: int) -> None:
        shape = RouteShape.of_config(model.config.to_dict())
        if shape is None:
            raise ConfigError(
                f"{type(model).__name__} is dense: --enable-return-routed-experts needs experts"
            )
        self.shape = shape
        self.store = np.zeros((slots, context, shape.layers, shape.topk), dtype=shape.dtype)
        self._flat_N: torch.Tensor | None = None
        self._chosen: dict[int, torch.Tensor] = {}
        routers = 0
        for name, module in model.named_modules():
            layer = _LAYER_INDEX.search(f".{name}.")
            if _ROUTER_CLASS.search(type(module).__name__) and layer:
                module.register_forward_hook(self._hook(int(layer[1])))
                routers += 1
        if not routers:
            raise ModelError(
                f"no router was found in {type(model).__name__}, so its routes cannot be recorded"
            )

    def _hook(self, layer: int) -> Any:
        def record(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            chosen = output[2] if isinstance(output, tuple) and len(output) == 3 else None
            if chosen is None or chosen.is_floating_point() or chosen.shape[-1] != self.shape.topk:
                raise ModelError(
                    f"{type(module).__name__} does not return which {self.shape.topk} experts it chooses, so "
                    "its routes cannot be recorded"
                )
            self._chosen[layer] = chosen.reshape(-1, self.shape.topk)

        return record

    def start(self, flat_N: torch.Tensor) -> None:
        """Record the next forward pass at these positions, ``slot * context + position``."""
        self._flat_N = flat_N
        self._chosen.clear()

    def finish(self) -> None:
        """Store the experts chosen in the pass; dense layers stay zero."""
        assert self._flat_N is not None
        flat_N = self._flat_N.numpy()
        rows = self.store.reshape(-1, self.shape.layers, self.shape.topk)
        for layer, chosen in self._chosen.items():
            rows[flat_N, layer] = chosen.numpy()


def load_model(
    path: str, *, dtype: str, load_format: str, seed: int, trust_remote_code: bool
) -> PreTrainedModel:
    """Load a Hugging Face folder for the CPU.

    ``load_format`` ``dummy`` creates random weights for the folder's config, determined by the seed.
    Raises ModelError when the folder is not a causal language model that transformers can load.
    """
    if not (Path(path) / "config.json").is_file():
        raise ModelError(f"{path} is not a model folder: it has no config.json")
    wanted = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    config: Any = None
    try:
        config = transformers_config(path, trust_remote_code=trust_remote_code)
        if load_format == "dummy":
            torch.manual_seed(seed)
            model = auto_class(config).from_config(config, dtype=wanted, trust_remote_code=trust_remote_code)
        else:
            model = auto_class(config).from_pretrained(
                path,
                config=config,
                dtype=wanted,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            )
    except (OSError, ValueError, KeyError, RuntimeError, StrictDataclassError) as error:
        if isinstance(error, KeyError) and config is not None and (problem := unknown_positions(config)):
            raise problem from error
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot load the model in {path}: {first_line}") from error
    _refuse_unsupported(model)
    return model


def _refuse_unsupported(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        odd = ", ".join(sorted(kinds - {"full_attention"}))
        raise ModelError(f"the cpu engine runs full attention only; {config.model_type} has {odd} layers")


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    found: set[int] = set()
    generation: GenerationConfig | None = model.generation_config
    for value in (
        getattr(model.config.get_text_config(), "eos_token_id", None),
        generation and generation.eos_token_id,
    ):
        if isinstance(value, int):
            found.add(value)
        elif value:
            found.update(int(token) for token in value)
    return frozenset(found)
