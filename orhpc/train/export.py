"""Hugging Face folders out of the trainer: from live weights, or from a committed checkpoint.

python -m orhpc.train.export CHECKPOINT_DIR OUT --model-dir DIR [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orhpc.config import ModelSettings
from orhpc.errors import CheckpointError, OrhpcError, policy_of
from orhpc.train.checkpoint import CheckpointReader, TensorSpec, fsync_folder, write_safetensors
from orhpc.train.model import DTYPES, HfNames, empty_model, load_model_config, model_parameters
from orhpc.train.weights import BucketSpec, plan_buckets

FILE_BYTES = 5_000_000_000
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
INDEX = "model.safetensors.index.json"


def write_hf_folder(
    folder: str | Path,
    model_dir: str | Path,
    buckets: Sequence[BucketSpec],
    tensors: Iterable[tuple[str, Tensor]],
) -> list[dict[str, Any]]:
    """Write weights as safetensors files beside a copy of everything else in ``model_dir``.

    ``tensors`` yields the buckets' tensors in order, under Hugging Face names; one file a bucket.
    Returns ``{"name", "size", "sha256"}`` of each weight file.  Raises CheckpointError when the
    folder cannot be written; ``tensors`` is then used up all the same, because the other ranks take
    part in producing them.
    """
    target = Path(folder)
    stream = iter(tensors)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.glob("*.safetensors")):
            raise CheckpointError(f"{target} already holds weights; export into a new folder")
        _copy_rest(Path(model_dir), target, buckets[0].dtypes[0])
        written = [_write_file(target, i, buckets, stream) for i in range(len(buckets))]
        if len(buckets) > 1:
            _write_index(target, buckets, written)
        fsync_folder(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    finally:
        for _ in stream:
            pass
    return written


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_file(
    target: Path, index: int, buckets: Sequence[BucketSpec], stream: Iterator[tuple[str, Tensor]]
) -> dict[str, Any]:
    spec = buckets[index]
    specs = [
        TensorSpec(name, getattr(torch, dtype), shape)
        for name, dtype, shape in zip(spec.names, spec.dtypes, spec.shapes, strict=True)
    ]
    path = target / _file_name(index, len(buckets))
    return write_safetensors(path, specs, _in_order(specs, stream), {"format": "pt"})


def _in_order(specs: Sequence[TensorSpec], stream: Iterator[tuple[str, Tensor]]) -> Iterator[Tensor]:
    for spec in specs:
        name, tensor = next(stream)
        if name != spec.name:
            raise ValueError(f"tensor {name} came where {spec.name} was announced")
        yield tensor.to("cpu", spec.dtype)


def _write_index(target: Path, buckets: Sequence[BucketSpec], written: Sequence[dict[str, Any]]) -> None:
    index = {
        "metadata": {"total_size": sum(bucket.nbytes for bucket in buckets)},
        "weight_map": {
            name: entry["name"]
            for bucket, entry in zip(buckets, written, strict=True)
            for name in bucket.names
        },
    }
    (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _copy_rest(model_dir: Path, target: Path, dtype: str) -> None:
    """Copy configuration, tokenizer, chat template and code; say the weights' type in config.json."""
    for path in sorted(model_dir.iterdir()):
        weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not weights:
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def export_checkpoint(
    checkpoint: str | Path, out: str | Path, *, model_dir: str, settings: ModelSettings
) -> list[dict[str, Any]]:
    """Convert a checkpoint's shards to a Hugging Face folder, in one process, a tensor at a time.

    ``model_dir`` is the folder the run started from: it gives the architecture and the tokenizer.
    Raises CheckpointError for a bad checkpoint or one of another model, ModelError for a bad folder.
    """
    reader = CheckpointReader(checkpoint)
    config = load_model_config(model_dir, settings)
    model = empty_model(config, settings)
    names = HfNames(model, config)
    dtype = DTYPES[settings.dtype]
    shapes = {name: tuple(p.shape) for name, p in model_parameters(model)}
    for name, shape in shapes.items():
        if reader.shapes.get(f"model/{name}") != shape:
            raise CheckpointError(f"{checkpoint} is no checkpoint of {model_dir}: {name} differs")
    buckets = plan_buckets(shapes, names.split, dtype, FILE_BYTES)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in shapes:
            yield from names.split(name, reader.whole(f"model/{name}").to(dtype)).items()

    return write_hf_folder(out, model_dir, buckets, tensors())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m orhpc.train.export", description=__doc__)
    parser.add_argument("checkpoint", help="folder of a commit")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--model-dir", required=True, help="Hugging Face folder that the run started from")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args(argv)
    settings = ModelSettings(dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    try:
        written = export_checkpoint(args.checkpoint, args.out, model_dir=args.model_dir, settings=settings)
    except OrhpcError as error:
        print(f"export: {error}", file=sys.stderr)
        return policy_of(error).exit_code
    print(f"{args.out}: {len(written)} weight files, {sum(f['size'] for f in written) / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
