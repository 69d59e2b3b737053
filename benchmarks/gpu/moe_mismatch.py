"""Mismatch of engine and trainer for a mixture of experts: SGLang against TransformerEngine on one GPU.

    python benchmarks/gpu/moe_mismatch.py --out DIR [--layers 8] [--seconds 90] [--responses 512]

The Megatron trainer first trains a model of Qwen3-30B-A3B's layer shapes (128 experts, 8 per token) on Python
source, because random routers would prove nothing. SGLang servers, in bfloat16 and in block-wise FP8, receive
its weights through a weight sync and sample with log-probabilities and routes; the trainer computes the same
tokens with routing replay off and on, in bfloat16 and in FP8. The compared metrics are those of a training
step (:func:`orhpc.train.loss.grpo.mismatch`), with 95 % intervals by bootstrap over responses. A weight sync
is also timed against direct calls of SGLang's API. Results are written to ``DIR/moe_mismatch.json`` as they
are measured; the table is printed last. ``--device cpu`` (with ``PYTHONPATH=tests/megatron/site``) runs
everything except FP8 and the direct calls on a small model, with a CPU engine in float32 and a trainer in
bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu import mismatch_kit as kit  # noqa: E402
from tests.gpu import mismatch_metrics as metrics  # noqa: E402
from tests.gpu import mismatch_routers as routing  # noqa: E402
from tests.gpu import straight_sync  # noqa: E402

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 4096,
    "rope_theta": 1e6, "tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": None,
}  # fmt: skip
"""Qwen3-30B-A3B's layers with a vocabulary of bytes."""
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip
PUBLISHED = "published, Qwen3-30B-A3B: KL 1.5e-3 without replay, 7.5e-4 with it (0.50); dense 8B: 6.4e-4"
TARGET = 0.5
PRECISIONS = {"bf16": "bf16", "fp8-rollout": "fp8", "fp8": "fp8"}
"""Maps ``precision`` to the engine that samples with it."""


# --- differences ----------------------------------------------------------------------------------------


def measured(trainer: Any, responses: Sequence[kit.Response], *, replay: bool) -> tuple[metrics.Sums, float]:
    """The metrics that a training step would report, for each response."""
    found: dict[str, np.ndarray] = {}
    counts: dict[str, dict[str, float]] = {}
    minibatch = kit.planned(trainer, [response.sample() for response in responses])
    with routing.Watched(trainer, replay=replay) as watched:
        for micro_batch in minibatch.ranks[0]:
            for name, values, own in watched.pass_over(micro_batch):
                found[name], counts[name] = values, own
    sums, largest = metrics.differences(responses, found)
    for what in next(iter(counts.values())):
        sums[what] = np.array([counts[response.name][what] for response in responses])
    return sums, largest


def compare(report: kit.Report, precision: str, trainer: Any, responses: Sequence[kit.Response]) -> None:
    """Both rows of one precision, and the ratio of their KL; a failure also becomes a row."""
    try:
        _compare(report, precision, trainer, responses)
    except Exception as error:
        traceback.print_exc()
        report.failed(precision, error)


def _compare(report: kit.Report, precision: str, trainer: Any, responses: Sequence[kit.Response]) -> None:
    began = time.monotonic()
    resampled: dict[bool, dict[str, np.ndarray]] = {}
    rows: dict[bool, dict[str, Any]] = {}
    for replay in (False, True):
        sums, largest = measured(trainer, responses, replay=replay)
        row, resampled[replay] = metrics.with_intervals(sums)
        rows[replay] = row | {"logprob_diff_max": largest, "tokens": int(sums["tokens"].sum())}
        report.put(f"{precision}, replay {'on' if replay else 'off'}", rows[replay])
    kl = "rollout_kl"
    low, high = np.percentile(resampled[True][kl] / resampled[False][kl], [2.5, 97.5])
    report.put(f"{precision}, KL on / off", [rows[True][kl][0] / rows[False][kl][0], float(low), float(high)])
    report.put(f"{precision}, seconds", round(time.monotonic() - began, 1))


# --- the run --------------------------------------------------------------------------------------------


def config_of(options: argparse.Namespace, precision: str) -> Any:
    cpu = options.device == "cpu"
    train = {
        "backend": "megatron", "routing_replay": True, "gradient_checkpointing": True,
        "lr": 3e-3 if cpu else 5e-4, "max_tokens_per_gpu": options.tokens,
    }  # fmt: skip
    rollout = {"record_routes": True}
    return kit.trainer_config(options.device, precision=precision, train=train, rollout=rollout)


def start_engines(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    engines: dict[str, Any] = {}
    context = options.prompt + options.response + 16
    for name, precision in (("bf16", "bf16"), ("fp8", "fp8-rollout")):
        if all(PRECISIONS[p] != name for p in options.precisions):
            continue
        extra = {
            "max_total_tokens": context * options.concurrent, "disable_decode_cuda_graph": True,
            # As in configs/gpu-smollm2.yaml: log-probabilities are not rounded to bfloat16.
            "enable_fp32_lm_head": True,
        }  # fmt: skip
        if name == "fp8":
            extra["fp8_gemm_backend"] = "triton"  # DeepGEMM compiles for two minutes on a new machine
        engines[name] = kit.start_engine(
            f"moe-{name}", folder, options.device, record_routes=True, precision=precision,
            max_running=options.concurrent, context=context, extra=extra,
        )  # fmt: skip
    return engines


def train(options: argparse.Namespace, report: kit.Report, folder: Path, text: kit.Text) -> Any:
    """A trainer of the model, after some seconds of next-token training."""
    from tests.gpu.megatron_replay import NoReplay

    precision = "fp8-rollout" if options.device == "cuda" else "bf16"
    trainer = kit.start_trainer(config_of(options, precision), folder)
    held = kit.plain_samples(list(kit.pieces(text.held_N, np.random.default_rng(2), 32, 1024)))
    report.put("before training", routing.usage(trainer, held))
    with NoReplay(trainer):
        routing.balanced(trainer, options.tokens)
        losses = kit.pretrain(trainer, text, seconds=options.seconds, tokens=options.tokens)
        for router in routing.routers(trainer):
            router.routing_type = "none"
    report.put("training", {"steps": len(losses), "tokens_a_step": options.tokens, "losses": losses[::10]})
    report.put("after training", routing.usage(trainer, held))
    return trainer


async def sampled(
    options: argparse.Namespace,
    report: kit.Report,
    engines: dict[str, Any],
    trainer: Any,
    folder: Path,
    text: kit.Text,
) -> dict[str, list[kit.Response]]:
    """Every engine's responses to the same prompts, from the trainer's weights."""
    rng = np.random.default_rng(3)
    prompts = list(kit.pieces(text.held_N, rng, options.responses, options.prompt))
    clients: dict[str, Any] = {}
    for name, engine in engines.items():
        try:
            await engine.wait_ready(options.patience)
            clients[name] = kit.client_of(engine, folder)
            seconds = await kit.give_weights(trainer, engine.url, quantized=name == "fp8", rounds=4)
            report.put(f"engine {name}: seconds of its weights", [round(s, 3) for s in seconds])
            if name == "bf16" and options.device == "cuda":
                await straight_sync.compare(report, trainer, engine.url)
        except Exception as error:
            traceback.print_exc()
            report.failed(f"engine {name}", error)
            clients.pop(name, None)

    async def one(name: str) -> list[kit.Response]:
        began = time.monotonic()
        found = await kit.ask(
            clients[name], prompts, options.response, concurrent=options.concurrent, routes=True
        )
        tokens = sum(len(response.tokens_N) for response in found)
        report.put(
            f"engine {name}: sampled", {"tokens": tokens, "seconds": round(time.monotonic() - began, 1)}
        )
        return found

    answers = await asyncio.gather(*(one(name) for name in clients), return_exceptions=True)
    responses: dict[str, list[kit.Response]] = {}
    for name, answer in zip(clients, answers, strict=True):
        if isinstance(answer, BaseException):
            report.failed(f"sampling from {name}", answer)
        else:
            responses[name] = answer
        await clients[name].close()
    return responses


def run(options: argparse.Namespace, report: kit.Report) -> None:
    shape = SHAPE | {"num_hidden_layers": options.layers} | (SMALL if options.device == "cpu" else {})
    folder = kit.write_config(kit.WORK / "moe", shape)
    if options.device == "cpu":
        kit.write_weights(folder, "cpu", spread=0.1)
    engines = start_engines(options, folder)
    report.put("model", shape)
    try:
        # Import TransformerEngine before anything uses cuDNN: on a machine with two, it must load its own.
        importlib.import_module("tests.gpu.megatron_kit")
        if options.device == "cuda":
            kit.write_weights(folder, "cuda")
            report.put("weights written", True)
        text = kit.read_text()
        trainer = train(options, report, folder, text)
        responses = asyncio.run(sampled(options, report, engines, trainer, folder, text))
    finally:
        for name, engine in engines.items():
            engine.stop()
            kit.log_tail(f"moe-{name}", options.out)
    wanted = {p: responses[n] for p, n in PRECISIONS.items() if p in options.precisions and n in responses}
    for precision in wanted:
        if precision != "fp8":
            compare(report, precision, trainer, wanted[precision])
    if "fp8" not in wanted:
        return kit.close_trainer(trainer)
    folder = exported(report, trainer)
    del trainer  # otherwise its memory would still be allocated when the next one is built
    trainer = in_fp8(options, report, folder)
    compare(report, "fp8", trainer, wanted["fp8"])
    kit.close_trainer(trainer)


def exported(report: kit.Report, trainer: Any) -> Path:
    """Write a trainer's weights, and close it."""
    folder = kit.WORK / "moe-trained"
    shutil.rmtree(folder, ignore_errors=True)  # from an earlier run
    began = time.monotonic()
    trainer.export_hf(str(folder))
    report.put("seconds of the export", round(time.monotonic() - began, 1))
    kit.close_trainer(trainer)
    return folder


def in_fp8(options: argparse.Namespace, report: kit.Report, folder: Path) -> Any:
    """A trainer with those weights whose layers compute in FP8."""
    gc.collect()
    torch.cuda.empty_cache()
    report.put("GB that the trainer before has left", round(torch.cuda.memory_allocated() / 1e9, 2))
    began = time.monotonic()
    trainer = kit.start_trainer(config_of(options, "fp8"), folder)
    report.put("seconds of the FP8 trainer's start", round(time.monotonic() - began, 1))
    return trainer


# --- the table ------------------------------------------------------------------------------------------

COLUMNS = {
    "tokens rerouted": ("token_mismatch_fraction", "{:.4f}"),
    "token-layers": ("router_mismatch_fraction", "{:.5f}"),
    "choices": ("choice_mismatch_fraction", "{:.5f}"),
    "mean difference": ("logprob_diff_mean", "{:.5f}"),
    "largest": ("logprob_diff_max", "{:.3f}"),
    "KL k1": ("rollout_kl_k1", "{:.2e}"),
    "KL k3": ("rollout_kl", "{:.2e}"),
    "extreme tokens": ("extreme_token_fraction", "{:.2e}"),
    "ESS": ("effective_sample_size", "{:.5f}"),
}


def table(found: dict[str, Any]) -> str:
    """A Markdown table of values with their intervals."""
    lines = ["| precision, replay | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for precision in PRECISIONS:
        for replay in ("off", "on"):
            row = found.get(f"{precision}, replay {replay}")
            if row is None:
                continue
            cells = []
            for name, form in COLUMNS.values():
                value = row[name]
                if isinstance(value, float):
                    cells.append(form.format(value))
                else:
                    cells.append("{} ({} to {})".format(*(form.format(v) for v in value)))
            lines.append(f"| {precision}, {replay} | " + " | ".join(cells) + " |")
    for precision in PRECISIONS:
        if ratio := found.get(f"{precision}, KL on / off"):
            text = "{:.3f} ({:.3f} to {:.3f})".format(*ratio)
            lines.append(f"{precision}: KL with replay over without {text}, target <= {TARGET}")
    return "\n".join([*lines, PUBLISHED])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=90.0, help="of training")
    parser.add_argument("--tokens", type=int, default=32768, help="of a training step")
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=192, help="tokens")
    parser.add_argument("--response", type=int, default=256, help="tokens")
    parser.add_argument("--concurrent", type=int, default=256, help="requests an engine decodes together")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds for engines after training")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    options = parser.parse_args()
    if options.device == "cpu":
        options.precisions = ["bf16"]
    kit.WORK.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    report = kit.Report(options.out / "moe_mismatch.json")
    try:
        run(options, report)
    except Exception as error:
        traceback.print_exc()
        report.failed("run", error)
    text = table(report.found)
    (options.out / "moe_mismatch.md").write_text(text + "\n")
    print(text)
    failed = [name for name in report.found if name.startswith("failed")]
    for precision in options.precisions:
        on, off = (report.found.get(f"{precision}, replay {r}", {}) for r in ("on", "off"))
        if not on or on["choice_mismatch_fraction"][0] != 0 or off["choice_mismatch_fraction"][0] <= 0:
            failed.append(f"{precision}: experts")
    print(f"failed: {failed or 'nothing'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
