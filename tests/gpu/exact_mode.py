"""On-policy exact mode on one Hopper GPU: the difference of engine and trainer under ``configs/exact.yaml``.

    python tests/gpu/exact_mode.py --out DIR [--seconds 20] [--responses 64]

A dense model of SmolLM2-135M's shape is first trained on Python source, so that its distributions differ from
a random model's. SGLang servers with several settings sample from it at temperature 1; the trainer with the
same settings computes the same tokens. ``exact`` must stay within :data:`BOUND`; the other rows show the
effect of its settings. Engines with batch-invariant kernels must also reproduce some responses bit for bit in
a different batch. The exit code is the number of failed rows. ``--device cpu`` runs the first row with the
CPU engine, to test this program.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.config.files import load_config  # noqa: E402
from tests.gpu import mismatch_kit as kit  # noqa: E402
from tests.gpu import mismatch_metrics as metrics  # noqa: E402

SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "tie_word_embeddings": True, "rope_theta": 1e5, "max_position_embeddings": 2048, "eos_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
}  # fmt: skip
BOUND = 1e-4
"""Largest difference of a log-probability under ``configs/exact.yaml``, in nats; float32 leaves 5e-6."""
REPEATED = 16
"""Number of responses that are sampled again in small batches."""
GRAPHS_OFF = {"disable_decode_cuda_graph": True}


@dataclass(frozen=True)
class Setting:
    """Settings of engine and trainer."""

    dtype: str
    engine: dict[str, Any] = field(default_factory=dict)
    bound: float | None = None

    @property
    def batch_invariant(self) -> bool:
        return bool(self.engine.get("deterministic"))


EXACT = load_config(ROOT / "configs/exact.yaml")


def documented() -> Setting:
    """Engine settings of ``configs/exact.yaml``, without CUDA graphs, which do not change results."""
    kept = {name: v for name, v in EXACT.engine.extra.items() if not name.startswith("cuda_graph")}
    engine = {"deterministic": EXACT.engine.deterministic, "extra": {**kept, **GRAPHS_OFF}}
    return Setting(EXACT.engine.dtype or EXACT.model.dtype, engine, BOUND)


SETTINGS = {
    "exact": documented(),
    "bfloat16, float32 head": Setting(
        "bfloat16", {"deterministic": True, "extra": {"enable_fp32_lm_head": True, **GRAPHS_OFF}}
    ),
}


def start(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    engines: dict[str, Any] = {}
    for number, (name, setting) in enumerate(options.settings.items()):
        engine = {**setting.engine, "extra": {"max_total_tokens": 32768, **setting.engine.get("extra", {})}}
        engines[name] = kit.start_engine(
            f"exact-{number}", folder, options.device, dtype=setting.dtype, max_running=64,
            context=512, **engine,
        )  # fmt: skip
    return engines


def config_of(options: argparse.Namespace, dtype: str, **more: Any) -> Any:
    train = {"lr": 1e-3, "gradient_checkpointing": True, "max_tokens_per_gpu": options.tokens, **more}
    return kit.trainer_config(options.device, dtype=dtype, train=train)


def trained(options: argparse.Namespace, report: kit.Report, folder: Path, text: kit.Text) -> Path:
    """Folder of the model after some training."""
    trainer = kit.start_trainer(
        config_of(options, "bfloat16" if options.device == "cuda" else "float32"), folder
    )
    losses = kit.pretrain(trainer, text, seconds=options.seconds, tokens=options.tokens)
    report.put("training", {"steps": len(losses), "first": losses[0], "last": losses[-1]})
    out = kit.WORK / "dense-trained"
    shutil.rmtree(out, ignore_errors=True)  # from an earlier run
    trainer.export_hf(str(out))
    kit.close_trainer(trainer)
    return out


async def answers(
    options: argparse.Namespace, report: kit.Report, engines: dict[str, Any], folder: Path, text: kit.Text
) -> dict[str, list[kit.Response]]:
    rng = np.random.default_rng(3)
    prompts = list(kit.pieces(text.held_N, rng, options.responses, 128))
    found: dict[str, list[kit.Response]] = {}

    async def one(name: str) -> None:
        try:
            await engines[name].wait_ready(options.patience)
            client = kit.client_of(engines[name], folder)
            try:
                await client.update_weights_from_disk(str(folder), weight_version="1")
                found[name] = await kit.ask(client, prompts, options.response, concurrent=64)
                if options.settings[name].batch_invariant and options.device == "cuda":
                    await client.flush_cache()
                    again = await kit.ask(client, prompts[:REPEATED], options.response, concurrent=3)
                    report.put(f"{name}: repeated", repeated(found[name], again))
            finally:
                await client.close()
        except Exception as error:
            traceback.print_exc()
            report.failed(name, error)

    await asyncio.gather(*(one(name) for name in engines))
    return found


def repeated(first: list[kit.Response], again: list[kit.Response]) -> dict[str, Any]:
    """Number of responses that are equal when sampled in another batch."""
    tokens = sum(np.array_equal(a.tokens_N, b.tokens_N) for a, b in zip(first, again, strict=False))
    bits = sum(np.array_equal(a.logprobs_N, b.logprobs_N) for a, b in zip(first, again, strict=False))
    return {"responses": len(again), "same tokens": tokens, "log-probabilities bit for bit": bits}


def compare(
    options: argparse.Namespace, report: kit.Report, folder: Path, found: dict[str, list[kit.Response]]
) -> None:
    of_trainer = {"backend": EXACT.train.backend, "deterministic": EXACT.train.deterministic}
    for dtype in ("float32", "bfloat16"):
        names = [name for name in found if options.settings[name].dtype == dtype]
        if not names:
            continue
        trainer = kit.start_trainer(config_of(options, dtype, **of_trainer), folder)
        for name in names:
            values = kit.logprobs(trainer, [response.sample() for response in found[name]])
            sums, largest = metrics.differences(found[name], values)
            row, _ = metrics.with_intervals(sums)
            equal = [np.mean(values[r.name] == r.logprobs_N) for r in found[name]]
            report.put(
                name,
                row
                | {"logprob_diff_max": largest, "tokens": int(sums["tokens"].sum())}
                | {"bit_for_bit": float(np.mean(equal)), "bound": options.settings[name].bound},
            )
        kit.close_trainer(trainer)


def run(options: argparse.Namespace, report: kit.Report) -> None:
    shape = SHAPE | (SMALL if options.device == "cpu" else {})
    folder = kit.write_config(kit.WORK / "dense", shape)
    kit.write_weights(folder, "cpu", spread=0.04)
    engines = start(options, folder)
    try:
        text = kit.read_text()
        folder = trained(options, report, folder, text)
        found = asyncio.run(answers(options, report, engines, folder, text))
    finally:
        for number, engine in enumerate(engines.values()):
            engine.stop()
            kit.log_tail(f"exact-{number}", options.out)
    compare(options, report, folder, found)


def failures(options: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    failed = [name for name in found if name.startswith("failed")]
    for name, setting in options.settings.items():
        row = found.get(name)
        if row is None:
            failed.append(f"{name}: no result")
        elif setting.bound is not None and not row["logprob_diff_max"] <= setting.bound:
            failed.append(f"{name}: {row['logprob_diff_max']:.2e} above {setting.bound:g}")
        same = found.get(f"{name}: repeated")
        if same is not None and same["log-probabilities bit for bit"] < same["responses"]:
            failed.append(f"{name}: not batch-invariant: {same}")
    return failed


def table(options: argparse.Namespace, found: dict[str, Any]) -> str:
    lines = [
        "| engine and trainer | tokens | mean difference | largest | KL k3 | bit for bit |",
        "|---" * 6 + "|",
    ]
    for name in options.settings:
        if (row := found.get(name)) is not None:
            mean, kl = row["logprob_diff_mean"][0], row["rollout_kl"][0]
            lines.append(
                f"| {name} | {row['tokens']} | {mean:.2e} | {row['logprob_diff_max']:.2e} | {kl:.2e} "
                f"| {row['bit_for_bit']:.3f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training")
    parser.add_argument("--tokens", type=int, default=32768, help="of a training step")
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--response", type=int, default=96, help="tokens")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds for engines after training")
    options = parser.parse_args()
    options.settings = dict(list(SETTINGS.items())[: 1 if options.device == "cpu" else None])
    # The trainer sets this too, but cuBLAS is used here before the deterministic trainer is built.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # DeepGEMM would compile a kernel for every GEMM shape of the bfloat16 engine.
    os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    kit.WORK.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    report = kit.Report(options.out / "exact_mode.json")
    try:
        run(options, report)
    except Exception as error:
        traceback.print_exc()
        report.failed("run", error)
    print(table(options, report.found))
    failed = failures(options, report.found)
    print(f"failed: {failed or 'nothing'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
