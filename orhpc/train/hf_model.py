"""Models of transformers: loading them, their parameters under the names of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from orhpc.errors import ModelError
from orhpc.train.attention import llama4, phimoe
from orhpc.train.attention import packed as packed_attention
from orhpc.train.loss.head import LogitScaling

if TYPE_CHECKING:
    from orhpc.config import ModelSettings


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model_config(model_dir: str, settings: ModelSettings, *, quantised: bool = False) -> Any:
    """Read ``config.json`` and switch off whatever would make a forward pass random.

    ``quantised``: the caller can read quantised weights, or refuses them itself.
    Raises :class:`~orhpc.errors.ModelError` for folders and families that cannot be trained.
    """
    if not (Path(model_dir) / "config.json").is_file():
        raise ModelError(f"model.path: {model_dir} is not a model folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(
            model_dir, trust_remote_code=settings.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path: {model_dir}: {_one_line(error)}") from error
    if getattr(config, "quantization_config", None) and not quantised:
        raise ModelError(f"model.path: {model_dir} holds quantised weights, which cannot be trained")
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    config.use_cache = False
    return config


def empty_model(
    config: Any, settings: ModelSettings, dtype: torch.dtype = torch.float32, *, packed: bool = True
) -> PreTrainedModel:
    """Build the model without storage (on the meta device).

    ``packed``: with packed attention, and only of families that it computes; otherwise as transformers
    builds it, for its names and shapes.
    """
    packed_attention.register()
    attention = {"attn_implementation": packed_attention.NAME} if packed else {}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=settings.trust_remote_code, **attention
            )
    except (ValueError, KeyError) as error:
        raise _unusable(config, "model.path", error) from error
    if packed:
        _adapt(model, config)
    return model


def load_model(
    model_dir: str, config: Any, settings: ModelSettings, dtype: torch.dtype | str
) -> PreTrainedModel:
    """Load all weights into host memory; ``dtype`` "auto" is the type they are stored in.

    Raises :class:`~orhpc.errors.ModelError` when any weight is missing, so that no part of the
    model is ever random in silence.
    """
    packed_attention.register()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation=packed_attention.NAME,
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
    """Refuse what cannot be packed, and put into the modules what they do not say to attention functions."""
    packed_attention.check_family(type(model), config, adapted=llama4.adapt(model))
    phimoe.adapt(model)


def _unusable(config: Any, where: str, error: Exception) -> ModelError:
    if isinstance(error, KeyError) and error.args == (packed_attention.NAME,):
        # Its class has a separate table of attention functions, with those of transformers only.
        return ModelError(
            f"{config.model_type} cannot be packed: transformers lets no other attention into it"
        )
    return ModelError(f"{where}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def set_modes(model: nn.Module) -> None:
    """Put every module into evaluation mode, but for those that recompute activations.

    Nothing is random then: neither dropout nor noise on inputs or choices of routers, whatever a family calls
    it (PhiMoE's ``router_jitter_noise``, for one, is also a threshold that evaluation uses).  transformers
    recomputes only in modules in training mode.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.training = True


def logit_scaling_of(config: Any, temperature: float) -> LogitScaling:
    """Everything that a family does to logits, by the names families give it in ``config.json``."""
    scale = 1.0
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        scale /= divisor
    if factor := getattr(config, "logit_scale", None):  # Cohere
        scale *= factor
    if factor := getattr(config, "lm_head_multiplier", None):  # Falcon-H1
        scale *= factor
    return LogitScaling(scale, getattr(config, "final_logit_softcapping", None), temperature)


def model_parameters(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """Every parameter once, a tied one under its first name, in an order that all ranks share.

    Sorted, because a family may build its modules in the order of a set, which differs by process.
    """
    return sorted(model.named_parameters(), key=lambda item: item[0])


def saved_buffers(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Every buffer that a checkpoint of the model holds, in an order that all ranks share."""
    saved = model.state_dict(keep_vars=True)
    return sorted((name, buffer) for name, buffer in model.named_buffers() if name in saved)


class HfNames:
    """Names and shapes of Hugging Face checkpoints for the parameters of a model in memory.

    They differ where transformers fuses weights while loading (experts of MoE models, for one), and where
    the model is the language part of a checkpoint that has other parts (Llama 4).
    """

    def __init__(self, model: PreTrainedModel, config: Any = None) -> None:
        """``config``: the checkpoint's; null: the model's own."""
        self._model = model
        part = config is not None and config.model_type != model.config.model_type
        # Without a module of that name in itself, it is the name of the model in the larger one.
        self._prefix = f"{model.base_model_prefix}." if part and model.base_model is model else ""

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return what one whole parameter is in a checkpoint: usually itself under the same name."""
        found = self._reverted({name: tensor})
        return {f"{self._prefix}{name}": part for name, part in found.items()}

    def check(self) -> None:
        """Compare what :meth:`split` gives, tensor by tensor, with what transformers writes of all at once.

        Raises:
            ModelError: the family merges several tensors of the model into one of a checkpoint, or
                transformers cannot take a merged one apart: an export would not be the model.
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
            f"model.path: family {self._model.config.model_type!r} cannot be trained: its checkpoints hold "
            f"several tensors of the model as one, which cannot be exported one by one ({name} {why})"
        )
