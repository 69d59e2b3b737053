"""SGLang servers for the checks and benchmarks on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gpu.sglang_models import WORK

KERNELS = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "moe_runner_backend": "triton",
    "disable_prefill_cuda_graph": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
}
"""SGLang's options without FlashAttention-3, xgrammar, and FlashInfer's sampling and all-reduce."""

Row = tuple[str, bool, str]
"""A row of a check's table: name, whether it passed, and the result."""


def engine_config(**engine: Any) -> Any:
    from orhpc.config import Config

    extra = KERNELS | engine.pop("extra", {})
    routes = engine.pop("record_routes", False)
    context = engine.pop("context", 1024)
    precision = engine.pop("precision", "bf16")
    return Config.model_validate(
        {
            "precision": precision,
            "engine": {"tp": 1, "extra": extra, **engine},
            "placement": {"devices_per_node": engine.get("tp", 1)},
            "rollout": {"max_total_tokens": context, "max_response_tokens": 64, "record_routes": routes},
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
        }
    )


def start_engine(name: str, config: Any, folder: Path, key: str, *, shares: bool = False) -> Any:
    from orhpc.process.ports import free_ports
    from orhpc.rollout.engines.process import EngineProcess
    from orhpc.rollout.engines.sglang_command import EnginePart

    port, meeting = free_ports(2, "127.0.0.1")
    devices = tuple(range(config.engine.tp))
    process = EngineProcess(
        config, str(folder), "127.0.0.1", port, key, str(WORK / f"{name}.log"), 0,
        part=EnginePart(devices=devices, shares=shares, rendezvous=f"127.0.0.1:{meeting}"),
    )  # fmt: skip
    process.start()
    return process
