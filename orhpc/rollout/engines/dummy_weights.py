"""Whether an engine may start with random weights, because the first weight sync replaces all of them.

No engine serves before a complete sync, so what it reads from the disk at its start is overwritten: 61 GB for
Qwen3-30B-A3B.  SGLang's ``load_format: dummy`` skips the reading.  It fills every tensor of the model's
``state_dict``, and a sync restores those that a checkpoint has; so it is used only where the trainer sends
all tensors of the checkpoint, and for families whose ``state_dict`` has no other tensors in SGLang.
"""

from __future__ import annotations

from pathlib import Path

from orhpc.config import Config
from orhpc.errors import ModelError
from orhpc.models import ModelShape, read_shape
from orhpc.models.folders import tensor_names


def starts_with_random_weights(config: Config, model_dir: str) -> bool:
    """Whether a run's weight syncs replace all weights of an engine of this model folder."""
    if config.engine.drafts_with_weights:
        return False  # the drafter's weights come only from a checkpoint
    if config.engine.option("model_loader_extra_config") is not None:
        return False  # SGLang refuses these options without a checkpoint to load
    try:
        shape = read_shape(model_dir)
    except ModelError:
        return False
    return shape.family.sglang_starts_empty and _sent_whole(tensor_names(Path(model_dir)), shape)


def _sent_whole(names: frozenset[str], shape: ModelShape) -> bool:
    """Whether a trainer of this shape has all tensors of a checkpoint."""
    trained = {name for tensor in shape.tensors() for name, _ in tensor.each()}
    tied = {shape.family.head} if shape.tied else set()  # some checkpoints have it nevertheless
    return trained <= names <= trained | tied
