"""Run the CPU engine's protocol tests against SGLang servers."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.sglang_engines import Row, engine_config, start_engine
from tests.gpu.sglang_models import WORK, perturbed, smollm2

ROOT = Path(__file__).parents[2]

TOLERANCE = {"tiny moe": 0.005}
"""Maximum error of a log-probability in float32, by model; for others :data:`PLAIN_TOLERANCE`.

SGLang's fused experts store results in float16 even in a float32 model
(``moe_runner/triton_utils/fused_moe.py`` of 0.5.16, ``compute_type``).  With the same experts this explains
at most 0.0027 over about 1,800 sampled tokens of three such models (the CPU engine with this rounding,
tests/protocol/faulty_engine.py); a real server differed by at most 0.0017.
"""

PLAIN_TOLERANCE = 0.001

ROUTER_MARGIN = 0.01
"""Maximum margin, in router logits, of an expert that the engine did not choose.

The same rounding changes a logit by at most 0.003 (400 prompts of 26 tokens), so it can swap experts whose
logits differ by up to 0.006; a logit's standard deviation is 1.8.
"""


def protocol(options: argparse.Namespace) -> list[Row]:
    """Run the CPU engine's suite against SGLang, with a real model and two tiny ones."""
    from tests.protocol.tiny_models import dense_config, make_folder, moe_config

    folders = {
        "tiny dense": tuple(make_folder(dense_config(), WORK / f"dense{i}", i) for i in (0, 1)),
        # SGLang's Qwen3-MoE treats every layer as sparse, regardless of the config.
        "tiny moe": tuple(make_folder(moe_config(()), WORK / f"tiny-moe{i}", i) for i in (0, 1)),
    }
    if options.gguf is not None:
        real = smollm2(options.gguf)
        folders["smollm2"] = (real, perturbed(real))
    folders = {name: found for name, found in folders.items() if options.only in name}
    key = os.urandom(16).hex()
    key_file = WORK / "key"
    key_file.write_text(key)
    engines: dict[str, Any] = {}
    for name, (folder, _) in folders.items():
        # A token limit bounds its memory; a high memory fraction tolerates processes that start concurrently.
        config = engine_config(
            dtype="float32", memory_fraction=0.8, deterministic=True, max_running=16,
            record_routes=name == "tiny moe", context=1024 if name == "smollm2" else 192,
            extra={"weight_version": "0", "max_total_tokens": 16384},
        )  # fmt: skip
        engines[name] = start_engine(f"protocol-{name.replace(' ', '-')}", config, folder, key, shares=True)
    try:
        with ThreadPoolExecutor() as pool:
            found = {
                n: pool.submit(_suite, n, e, folders[n][0], folders[n][1], key, key_file, options)
                for n, e in engines.items()
            }
            rows = [suite.result() for suite in found.values()]
    finally:
        for engine in engines.values():
            engine.stop()
    return rows


def _suite(
    name: str, engine: Any, folder: Path, other: Path, key: str, key_file: Path, options: argparse.Namespace
) -> Row:
    started = time.monotonic()
    try:
        asyncio.run(engine.wait_ready(240.0))
    except Exception as error:
        return f"protocol, {name}", False, f"did not start: {error}"
    waited = time.monotonic() - started
    argv = Path(f"/proc/{engine.pid}/cmdline").read_bytes() + Path(f"/proc/{engine.pid}/environ").read_bytes()
    log = WORK / f"protocol-{name.replace(' ', '-')}.log"
    secret = key.encode() not in argv and key not in log.read_text()
    command = [
        sys.executable, "-m", "pytest", "tests/protocol", "-v", "-s", "-p", "no:cacheprovider",
        "--timeout", "60",
        "--engine-url", engine.url, "--engine-key-file", str(key_file), "--engine-model", str(folder),
        "--engine-other", str(other), "--engine-tolerance", str(TOLERANCE.get(name, PLAIN_TOLERANCE)),
        "--engine-router-margin", str(ROUTER_MARGIN), "--tb=short", "--maxfail", "12",
    ]  # fmt: skip
    report = options.out / f"protocol-{name.replace(' ', '-')}.txt"
    try:
        with report.open("w") as out:
            code = subprocess.run(
                command, cwd=ROOT, stdout=out, stderr=out, timeout=options.deadline
            ).returncode
    except subprocess.TimeoutExpired:
        code = 124
    lines = report.read_text().strip().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR", "E  ")):
            print(f"   {name}: {line[:220]}", flush=True)
    output = lines[-1] if lines else "nothing"
    return (
        f"protocol, {name}",
        code == 0 and secret,
        f"{output}; ready after {waited:.0f} s; key hidden: {secret}",
    )
