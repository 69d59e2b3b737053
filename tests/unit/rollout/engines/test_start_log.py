"""Where an engine's start took its time, from lines as SGLang 0.5.16 logs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.driver.attempt import _slowest_engine_start
from orhpc.rollout.engines.start_log import BEGIN, start_phases
from orhpc.rundir.event_lines import line_of

ONE_GPU = f"""\
2026-11-27 00:49:46,101 INFO root: {BEGIN}
2026-11-27 00:49:55,174 INFO sglang.srt.plugins: Available plugins for group sglang.srt.plugins:
[2026-11-27 00:49:59] server_args=ServerArgs(model_path='/models/small', tokenizer_mode='auto')
[2026-11-27 00:50:13] Init torch distributed begin.
[2026-11-27 00:50:13] Init torch distributed ends. elapsed=0.21 s, mem usage=0.09 GB
[2026-11-27 00:50:14] Load weight begin. avail mem=77.95 GB
[2026-11-27 00:50:14] Load weight end. elapsed=0.13 s, type=Qwen3ForCausalLM, avail mem=76.76 GB.
[2026-11-27 00:50:14] Memory pool end. avail mem=38.90 GB
[2026-11-27 00:50:14] Capture target decode CUDA graph begin. backend=full, bs=[1, 8], avail mem=38.80 GB
  0%|          | 0/2 [00:00<?, ?it/s]Capturing batches (bs=8 avail_mem=38.64 GB): 100%|###| 2/2
[2026-11-27 00:50:20] Capture target decode CUDA graph end. elapsed=5.44 s, mem usage=0.30 GB.
[2026-11-27 00:50:24] Prefill batch, #new-seq: 1, #new-token: 3, cuda graph: False
[2026-11-27 00:50:24] The server is fired up and ready to roll!
"""
PHASES = {
    "imports": 13.0, "processes of ranks": 15.0, "weights": 0.0, "KV cache": 0.0, "CUDA graphs": 6.0,
    "first request": 4.0,
}  # fmt: skip
TWO_RANKS = f"""\
2026-11-27 07:53:35,000 INFO root: {BEGIN}
[2026-11-27 07:53:50] server_args=ServerArgs(model_path='/models/large')
[2026-11-27 07:54:10 TP0 EP0] Load weight begin. avail mem=139.00 GB
[2026-11-27 07:54:12 TP0 EP0] Load weight end. elapsed=2.00 s
[2026-11-27 07:54:13 TP1 EP1] Load weight begin. avail mem=139.00 GB
[2026-11-27 07:54:16 TP1 EP1] Load weight end. elapsed=3.00 s
[2026-11-27 07:57:26 TP1 EP1] Capture target decode CUDA graph end. elapsed=122.26 s
[2026-11-27 07:57:28 TP0 EP0] Capture target decode CUDA graph end. elapsed=122.36 s
[2026-11-27 07:57:46] The server is fired up and ready to roll!
[2026-11-27 07:59:46] Load weight begin. avail mem=1.00 GB, long after its start
"""


def written(folder: Path, text: str, index: int = 0) -> Path:
    path = folder / f"engine_{index:03d}.log"
    path.write_text(text)
    return path


def test_each_phase_ends_when_the_last_rank_has_ended_it(tmp_path: Path) -> None:
    assert start_phases(written(tmp_path, ONE_GPU)) == PHASES
    found = start_phases(written(tmp_path, TWO_RANKS))
    # No line on the KV cache: its time is part of the CUDA graphs'.
    assert found == {
        "imports": 15.0, "processes of ranks": 23.0, "weights": 3.0, "CUDA graphs": 192.0,
        "first request": 18.0,
    }  # fmt: skip
    assert sum(found.values()) == 251


@pytest.mark.parametrize("restarted", [False, True])
def test_the_newest_start_counts(tmp_path: Path, *, restarted: bool) -> None:
    text = TWO_RANKS + ONE_GPU if restarted else ONE_GPU + TWO_RANKS
    assert sum(start_phases(written(tmp_path, text)).values()) == (38 if restarted else 251)
    assert start_phases(written(tmp_path, text + ONE_GPU[:300])) == {}, "it has not ended"


@pytest.mark.parametrize("text", ["", "INFO: Uvicorn running\n", ONE_GPU[100:], "\x00" * 1000])
def test_other_logs_have_no_phases(tmp_path: Path, text: str) -> None:
    assert start_phases(written(tmp_path, text)) == {}
    assert start_phases(tmp_path / "none.log") == {}


def test_the_line_of_a_start_names_the_slowest_engine(tmp_path: Path) -> None:
    for index, text in enumerate([ONE_GPU, TWO_RANKS, "another backend's"]):
        written(tmp_path, text, index)
    event = {
        "event": "ready", "seconds": 268.5, "phases": {"workers": 9.4, "engines": 252.1}, "step": 0,
        "parameters": 30.5e9, "engine_start": _slowest_engine_start(tmp_path),
    }  # fmt: skip
    assert line_of(event) == (
        "ready after 268 s (workers 9, engines 252; in the slowest engine: imports 15, processes of ranks "
        "23, weights 3, CUDA graphs 192, first request 18): 30500.0 M parameters, step 0"
    )
    assert line_of(event | {"engine_start": {}}) == (
        "ready after 268 s (workers 9, engines 252): 30500.0 M parameters, step 0"
    )
