"""Write Hugging Face folders: from live weights, or from a commit of either backend.

python -m orhpc.train.checkpoint.export COMMIT_DIR OUT --model-dir DIR [--dtype bfloat16]

An export of a commit is written to a hidden folder, loaded again and compared with the commit
(:mod:`orhpc.train.checkpoint.export_check`), and renamed last: a folder with the export's name is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orhpc.config import ModelSettings
from orhpc.errors import CheckpointError, OrhpcError, policy_of
from orhpc.rundir import origin
from orhpc.rundir.origin import write_origin
from orhpc.train.checkpoint.commit_weights import CommitWeights
from orhpc.train.checkpoint.export_check import Comparison, compare
from orhpc.train.checkpoint.shards import TensorSpec, fsync_folder, write_safetensors
from orhpc.train.dtypes import DTYPES
from orhpc.train.weights.buckets import BucketSpec, buckets_of, plan_buckets, quantized
from orhpc.train.weights.fp8 import Quantize
from orhpc.train.weights.source import WeightSource

FILE_BYTES = 5_000_000_000
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
LEFT_OUT = ("hf_quant_config.json", ".gitattributes", origin.FILE)
TEMPLATES = "additional_chat_templates"
"""Folder in which transformers keeps further chat templates (``PreTrainedTokenizerBase.save_pretrained``)."""
INDEX = "model.safetensors.index.json"


def write_hf_folder(
    folder: str | Path,
    model_dir: str | Path,
    buckets: Sequence[BucketSpec],
    tensors: Iterable[tuple[str, Tensor]],
) -> list[dict[str, Any]]:
    """Write weights as safetensors files; copy configuration, tokenizer, templates and code of ``model_dir``.

    ``tensors`` yields the buckets' tensors in order, under Hugging Face names; one file per bucket.
    Returns ``{"name", "size", "sha256"}`` of each weight file.  Raises CheckpointError when the
    folder cannot be written; ``tensors`` is consumed even then, because the other ranks take
    part in producing them.
    """
    target = Path(folder)
    stream = iter(tensors)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.glob("*.safetensors")):
            raise CheckpointError(f"{target} already holds weights; export into a new folder")
        _copy_rest(Path(model_dir), target, buckets)
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


def export_weights(
    source: WeightSource, folder: str, model_dir: str, quantize: Quantize, *, writes: bool
) -> list[dict[str, Any]]:
    """Write a trainer's current weights as a Hugging Face folder (collective).

    ``writes``: on one rank; it returns the result of :func:`write_hf_folder`, the others an empty list.
    """
    buckets = buckets_of(source, FILE_BYTES)
    exported = (source.export(bucket.parameters, quantize=quantize) for bucket in buckets)
    tensors = (item for bucket in exported for item in quantize(bucket))
    if writes:
        return write_hf_folder(folder, model_dir, [quantized(spec, quantize) for spec in buckets], tensors)
    for _ in tensors:
        pass
    return []


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
            raise ValueError(f"got tensor {name}, expected {spec.name}")
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


def _copy_rest(model_dir: Path, target: Path, buckets: Sequence[BucketSpec]) -> None:
    """Copy configuration, tokenizer, chat templates and code; set the weights' type in ``config.json``.

    ``quantization_config`` is removed unless the written weights are quantized.
    """
    for path in sorted(model_dir.iterdir()):
        weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in LEFT_OUT:
            shutil.copyfile(path, target / path.name)
    if (model_dir / TEMPLATES).is_dir():
        shutil.copytree(model_dir / TEMPLATES, target / TEMPLATES)
    types = [dtype for bucket in buckets for dtype in bucket.dtypes]
    config = json.loads((target / "config.json").read_text())
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        part.pop("torch_dtype", None)
        if not any(dtype.startswith("float8") for dtype in types):
            part.pop("quantization_config", None)
    config["dtype"] = max(set(types), key=types.count) if types[0].startswith("float8") else types[0]
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of :func:`export_checkpoint`."""

    files: list[dict[str, Any]]
    """``{"name", "size", "sha256"}`` of each weight file."""
    comparison: Comparison


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    model_dir: str,
    settings: ModelSettings,
    host_bytes: int | None = None,
) -> Exported:
    """Convert a commit to a Hugging Face folder, in one process, one tensor at a time, and verify it.

    ``model_dir`` is the folder the run started from: it provides the architecture, the tokenizer and the
    buffers.  ``host_bytes`` is the host memory that the comparison may use; null: what is available.
    The folder says which run, step and commit it is of (:mod:`orhpc.rundir.origin`).
    Raises CheckpointError for a bad commit or one of another model, ModelError for a bad folder; after a
    failure ``out`` is as it was.
    """
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not an empty folder; export into a new folder")
    weights = CommitWeights(checkpoint, model_dir, settings)
    buckets = plan_buckets(
        weights.shapes(), weights.layout.names.split, weights.dtype, FILE_BYTES, dtypes=weights.dtypes()
    )
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        files = write_hf_folder(partial, model_dir, buckets, weights.tensors())
        write_origin(Path(checkpoint), partial)
        comparison = compare(partial, weights, settings, host_bytes)
        partial.replace(target)
        fsync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(files, comparison)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code.  Every failure is one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m orhpc.train.checkpoint.export", description=__doc__)
    parser.add_argument("checkpoint", help="folder of a commit")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--model-dir", required=True, help="Hugging Face folder that the run started from")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args(argv)
    settings = ModelSettings(dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    try:
        exported = export_checkpoint(args.checkpoint, args.out, model_dir=args.model_dir, settings=settings)
    except OrhpcError as error:
        print(f"export: {error}", file=sys.stderr)
        return policy_of(error).exit_code
    size = sum(f["size"] for f in exported.files) / 1e9
    out = shlex.quote(str(Path(args.out).absolute()))
    print(
        f"{args.out}: {len(exported.files)} weight files, {size:.2f} GB; {exported.comparison.line()}; "
        f"to talk with it: orhpc chat {out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
