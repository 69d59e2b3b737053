"""Load models of transformers and name their parameters as in a Hugging Face folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from orhpc.errors import ModelError
from orhpc.models.forward_check import unknown_positions
from orhpc.models.images import sees_images
from orhpc.models.seeing import attention_of, auto_class, transformers_config
from orhpc.train.attention import adapters
from orhpc.train.attention import packed as packed_attention
from orhpc.train.loss.head import LogitScaling

if TYPE_CHECKING:
    from orhpc.config import ModelSettings


_CORRECTION_BIAS = "e_score_correction_bias"
"""transformers' name of the buffer that affects the choice of experts but not their weights."""


def load_model_config(model_dir: str, settings: ModelSettings, *, quantized: bool = False) -> Any:
    """Read ``config.json`` and disable all dropout, so that the forward pass is deterministic.

    ``quantized``: the caller reads quantized weights, or refuses them itself.
    Raises :class:`~orhpc.errors.ModelError` for folders and families that cannot be trained.
    """
    if not (Path(model_dir) / "config.json").is_file():
        raise ModelError(f"model.path: {model_dir} is not a model folder: it has no config.json")
    try:
        config = transformers_config(
            model_dir, trust_remote_code=settings.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"model.path: {model_dir}: {_one_line(error)}") from error
    if getattr(config, "quantization_config", None) and not quantized:
        raise ModelError(f"model.path: {model_dir} holds quantized weights, which cannot be trained")
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    config.use_cache = False
    return config


def empty_model(
    config: Any, settings: ModelSettings, dtype: torch.dtype = torch.float32, *, packed: bool = True
) -> PreTrainedModel:
    """Build the model without storage (on the meta device).

    ``packed``: with packed attention, for supported families only; otherwise with transformers' default
    attention, for names and shapes.
    """
    packed_attention.register()
    attention = {"attn_implementation": attention_of(config, packed_attention.NAME)} if packed else {}
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(
                config, dtype=dtype, trust_remote_code=settings.trust_remote_code, **attention
            )
    except (ValueError, KeyError) as error:
        raise _unusable(config, "model.path", error) from error
    if packed:
        _adapt(model, config)
    _keep_correction_biases(model)
    return model


def _keep_correction_biases(model: PreTrainedModel) -> None:
    """Keep routers' correction biases in float32, in this model and in those of its class loaded later.

    Rounding them to half precision would change the choice of experts.  transformers keeps those of some
    families only, and only in models that it loads.
    """
    kind = type(model)
    for name, buffer in saved_buffers(model):
        owner, _, attribute = name.rpartition(".")
        if attribute == _CORRECTION_BIAS:
            setattr(model.get_submodule(owner), attribute, buffer.float())
            kind._keep_in_fp32_modules_strict = {*(kind._keep_in_fp32_modules_strict or ()), attribute}


def load_model(
    model_dir: str, config: Any, settings: ModelSettings, dtype: torch.dtype | str
) -> PreTrainedModel:
    """Load all weights into host memory; ``dtype`` "auto" is the type they are stored in.

    Routers' correction biases are float32.

    Raises :class:`~orhpc.errors.ModelError` when any weight is missing, because transformers would
    initialize it randomly.
    """
    empty_model(copy.deepcopy(config), settings)  # for the class; it sets the config's type
    try:
        loaded: Any = auto_class(config).from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation=attention_of(config, packed_attention.NAME),
            trust_remote_code=settings.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unusable(config, f"model.path: {model_dir}", error) from error
    model, info = loaded
    _adapt(model, config)
    for what in ("missing_keys", "mismatched_keys"):
        if names := sorted(str(name) for name in info.get(what) or ()):
            raise ModelError(f"model.path: {model_dir}: {what.replace('_', ' ')}: {', '.join(names[:3])}")
    return model


def _adapt(model: PreTrainedModel, config: Any) -> None:
    """Refuse families that cannot be packed, and set attributes that packed attention needs on modules."""
    packed_attention.check_family(type(model), config, adapted=adapters.adapt(model))


def _unusable(config: Any, where: str, error: Exception) -> ModelError:
    if isinstance(error, KeyError) and error.args == (packed_attention.NAME,):
        # The model class has its own table of attention functions, without the registered one.
        return ModelError(
            f"{config.model_type} cannot be packed: its transformers class accepts no custom attention"
        )
    if isinstance(error, KeyError) and (problem := unknown_positions(config)) is not None:
        return problem
    return ModelError(f"{where}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def set_modes(model: nn.Module) -> None:
    """Put every module into evaluation mode, except those that recompute activations.

    This disables all randomness: dropout, and noise on inputs or router choices, whatever a family names
    it (PhiMoE's ``router_jitter_noise`` cannot be set to 0: evaluation uses it as a threshold).  transformers
    recomputes activations only in modules in training mode.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.training = True


def logit_scaling_of(config: Any, temperature: float) -> LogitScaling:
    """Return the scale, soft cap and temperature of logits, by each family's key in ``config.json``."""
    scale = 1.0
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        scale /= divisor
    if factor := getattr(config, "logit_scale", None):  # Cohere
        scale *= factor
    if factor := getattr(config, "lm_head_multiplier", None):  # Falcon-H1
        scale *= factor
    return LogitScaling(scale, getattr(config, "final_logit_softcapping", None), temperature)


def vision_tower(model: PreTrainedModel) -> nn.Module | None:
    """Return the part of the model that sees; None: it has none, or is trained with text only."""
    if not sees_images({"model_type": model.config.model_type}):
        return None
    return model.base_model.get_submodule("visual")


def model_parameters(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter once, a tied one under its first name, in the same order on all ranks.

    Sorted, because a family may build its modules in the order of a set, which differs by process.
    """
    return sorted(model.named_parameters(), key=lambda item: item[0])


def saved_buffers(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Return every buffer that a checkpoint of the model holds, in the same order on all ranks."""
    saved = model.state_dict(keep_vars=True)
    return sorted((name, buffer) for name, buffer in model.named_buffers() if name in saved)


class HfNames:
    """Map parameters of a model in memory to names and shapes of its Hugging Face checkpoint.

    The two differ where transformers fuses weights while loading (such as experts of MoE models), and where
    the model is the language part of a checkpoint that has other parts (Llama 4).
    """

    def __init__(self, model: PreTrainedModel, config: Any = None) -> None:
        """``config``: of the checkpoint; null: of the model."""
        self._model = model
        part = config is not None and config.model_type != model.config.model_type
        # A base model has no prefix of its own; in the larger checkpoint its prefix is its base name.
        self._prefix = f"{model.base_model_prefix}." if part and model.base_model is model else ""

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint tensors of one whole parameter: usually itself under the same name."""
        found = self._reverted({name: tensor})
        return {f"{self._prefix}{name}": part for name, part in found.items()}

    def check(self) -> None:
        """Compare :meth:`split`, tensor by tensor, with transformers' conversion of all tensors at once.

        Raises:
            ModelError: the family merges several tensors of the model into one of a checkpoint, or
                transformers cannot split a merged one: an export would differ from the model.
        """
        state = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in [*model_parameters(self._model), *saved_buffers(self._model)]
        }
        found: dict[str, tuple[int, ...]] = {}
        name = "all tensors at once"
        try:
            whole = {f"{self._prefix}{n}": tuple(t.shape) for n, t in self._reverted(state).items()}
            for name, tensor in state.items():
                for part, value in self.split(name, tensor).items():
                    if whole.get(part) != tuple(value.shape) or part in found:
                        raise ModelError(self._refusal(name, f"is not all of {part}"))
                    found[part] = tuple(value.shape)
        except (ValueError, KeyError, RuntimeError, IndexError, AttributeError) as error:
            raise ModelError(self._refusal(name, _one_line(error))) from error
        if missing := sorted(whole.keys() - found.keys()):
            raise ModelError(self._refusal(missing[0], "is made of several tensors"))

    def _reverted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return revert_weight_conversion(self._model, state)

    def _refusal(self, name: str, why: str) -> str:
        return (
            f"model.path: family {self._model.config.model_type!r} cannot be trained: its checkpoints merge "
            f"several tensors of the model into one, which cannot be exported separately ({name} {why})"
        )
