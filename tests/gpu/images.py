"""A model that sees images, trained on one GPU with SGLang's rollouts.

    python tests/gpu/images.py --out DIR [--models qwen3-vl qwen2.5-vl] [--steps 4] [--seconds 280]

For each model: a random one of some 10 million parameters, an environment that shows none, one or two
pictures, and some steps with FSDP and SGLang.  Then transformers computes the log-probabilities of the first
step's rollouts: with their images they must be SGLang's up to rounding, as those without images are, and with
other pictures of the same sizes they must not.  Every step shows the same pictures and changes the vision
tower much: SGLang must see them through its newest weights.  Prints a line per model and writes
DIR/images.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pil
from transformers import AutoModelForImageTextToText

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.models.images import ImageProcessor  # noqa: E402
from orhpc.rundir import RunDir  # noqa: E402
from orhpc.rundir.events import read_events, steps_of  # noqa: E402
from orhpc.rundir.record import RolloutFile, read_step  # noqa: E402
from orhpc.types import Image, Rollout  # noqa: E402
from tests.seeing_models import picture, seeing_model  # noqa: E402

TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
}
VISION = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 512}
DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
SETTINGS = [
    "environments={orhpc/arithmetic: null, pictures: {serve: 'tests.seeing_environment:Pictures'}}",
    "rollout.custom_reward=tests.seeing_environment:score",
    "rollout.batch_size=12",
    "rollout.n_samples=8",
    "rollout.max_total_tokens=1000",
    "train.global_batch_size=96",
    "train.lr=1e-3",
    "checkpoint.save_interval=null",
    "wandb.enabled=false",
    "engine.memory_fraction=0.3",
    "engine.extra.mm_attention_backend=sdpa",
]


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a model for some steps; returns what was seen."""
    model, rundir = options.work / f"{name}-model", RunDir(options.work / name)
    interleaved = {"mrope_interleaved": True} if name == "qwen3-vl" else {}
    rotary = TEXT["rope_parameters"] | interleaved  # type: ignore[operator]
    seeing_model(name, model, std=0.04, text=TEXT | {"rope_parameters": rotary}, vision=VISION)
    command = [sys.executable, "-m", "orhpc.launch", "--local", "configs/gpu-smollm2.yaml", *SETTINGS]
    command += [f"model.path={model}", f"run.name={name}", f"run.root={options.work}"]
    command += [f"train.steps={options.steps}", *options.set]
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    with (options.out / f"images-{name}.log").open("wb") as log:
        code = subprocess.run(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=max(1.0, options.end - time.monotonic()),
            env=os.environ | {"PYTHONPATH": paths},
            check=False,
        ).returncode
    for each in rundir.path.glob("attempts/*/*.log"):
        (options.out / f"images-{name}-{each.name}.txt").write_text(
            each.read_text(errors="replace")[-200_000:]
        )
    steps = steps_of(read_events(rundir.events)) if rundir.events.exists() else {}
    found: dict[str, Any] = {"model": name, "exit": code, "steps": len(steps)}
    for key in ("logprob_diff_mean", "logprob_diff_max", "grad_norm", "seconds"):
        found[key] = [steps[n].get(key) for n in sorted(steps)]
    return found | (against_transformers(model, rundir) if steps else {})


def against_transformers(folder: Path, rundir: RunDir) -> dict[str, Any]:
    """Mean absolute difference of SGLang's log-probabilities in step 1 from transformers', per sampled token.

    ``no_images``, ``images``: of the rollouts without and with images; ``other_images``: of the latter, if
    transformers sees other pictures of the same sizes.
    """
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=DTYPE).to(DEVICE).eval()
    processor = ImageProcessor(str(folder))
    found: dict[str, list[float]] = {"no_images": [], "images": [], "other_images": []}
    for summary in read_step(rundir.rollouts_of(1)):
        with RolloutFile(str(summary.location.file)) as record:
            rollout = record.rollout(summary.location.row)
        images = [placed.image for placed in rollout.images]
        other = [replace(image, png=_noise(image.png)) for image in images]
        for name, seen in (("images", images), ("other_images", other)) if images else (("no_images", []),):
            logprobs = _logprobs(model, processor, rollout, seen)
            found[name] += np.abs(logprobs - rollout.logprobs_T[1:])[rollout.loss_mask_T[1:]].tolist()
    return {f"difference_{name}": statistics.mean(each) for name, each in found.items() if each} | {
        f"tokens_{name}": len(each) for name, each in found.items()
    }


@torch.no_grad()
def _logprobs(model: Any, processor: ImageProcessor, rollout: Rollout, images: list[Image]) -> Any:
    """Log-probability of every token but the first, given what is before it; float32 ``[T - 1]``."""
    ids = torch.from_numpy(rollout.tokens_T).long().to(DEVICE)
    inputs: dict[str, Any] = {}
    if images:
        pixels, grids = processor.pixel_values(images)
        inputs = {
            "pixel_values": torch.from_numpy(pixels).to(DEVICE, DTYPE),
            "image_grid_thw": torch.from_numpy(grids).to(DEVICE),
            "mm_token_type_ids": (ids[:-1] == model.config.image_token_id).int()[None],
        }
    logits = model(input_ids=ids[None, :-1], use_cache=False, **inputs).logits[0].float()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].cpu().numpy()


def _noise(png: bytes) -> bytes:
    """Another picture of the same size."""
    with Pil.open(io.BytesIO(png)) as image:
        return picture(image.width, image.height, seed=12345)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["qwen3-vl", "qwen2.5-vl"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--work", type=Path, default=Path("/tmp/images"))
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="more settings")
    options = parser.parse_args()
    options.end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    found = []
    for name in options.models:
        try:
            found.append(train(name, options))
        except subprocess.TimeoutExpired:
            found.append({"model": name, "exit": "no time left"})
        print(json.dumps(found[-1]), flush=True)
    (options.out / "images.json").write_text(json.dumps(found, indent=1))
    return int(any(each["exit"] != 0 or not _sees(each) or not _follows(each) for each in found))


def _sees(found: dict[str, Any]) -> bool:
    """Whether images change what SGLang and transformers compute, and both see the same."""
    same, other = found["difference_images"], found["difference_other_images"]
    return same < 2 * found["difference_no_images"] and other > 4 * same


def _follows(found: dict[str, Any]) -> bool:
    """Whether SGLang and the trainer agree in the last step as in the first."""
    differences = found["logprob_diff_mean"]
    return len(differences) > 1 and differences[-1] < 3 * differences[0]


if __name__ == "__main__":
    sys.exit(main())
