"""The report in a real browser: every chart is drawn, at three widths, and no script fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orhpc.commands.report import write_report
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog
from orhpc.rundir.record import write_rollouts
from tests.browser.conftest import Probe
from tests.unit.rundir.test_record import make_rollout

PROBE = """<script>
window.errors = [];
window.addEventListener("error", (event) => errors.push(String(event.message)));
window.addEventListener("load", () => setTimeout(() => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  for (const element of document.querySelectorAll(".chart")) element.scrollIntoView();
  setTimeout(() => {
    const charts = [...document.querySelectorAll(".chart")];
    const found = document.createElement("output");
    found.textContent = [charts.length, charts.filter((c) => c.querySelector("canvas")).length,
      document.documentElement.scrollWidth - window.innerWidth, errors.join("; ") || "no error"].join("|");
    document.body.append(found);
  }, 3000);
}, 500));
</script>"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of two attempts with evaluations, alarms, failures and recorded rollouts."""
    run = RunDir(tmp_path / "a run with a long name that must not make a phone scroll")
    run.create()
    run.config.write_text("run: {name: x}\n")
    for attempt, steps in ((1, range(1, 20)), (2, range(18, 40))):
        run.begin_attempt(kind="local")
        log = EventLog(run.events, attempt)
        log.write("bring_up", step=steps[0], commit=None)
        log.write("ready", step=steps[0], seconds=1.0, phases={})
        for step in steps:
            log.write("step", step=step, steps=50, seconds=1.5, phases={"rollout": 1.0, "update": 0.5},
                      reward_mean=0.1 * step, **{"reward_mean/a": 0.2 * step, "failed_rollouts/a": 1.0},
                      rollout_kl=1e-4 * step, memory_peak_gb=60.0, grad_norm=0.0)  # fmt: skip
        log.write("evaluation", step=steps[-1], **{"reward_mean/test": 0.5})
        log.write("alarm", step=steps[-1], reason="rollout_kl is above 0.01")
        log.write("restart", kind="RayLost", error="<img src=x onerror=errors.push('markup')>", exit_code=75)
        log.close()
    gpus = {f"node-{i}": [[0.1 * i, 60.0, 400.0]] * 4 for i in range(3)}
    lines = [json.dumps({"step": step, "nodes": gpus}) for step in range(1, 40)]
    (run.attempt(2) / "gpus.jsonl").write_text("\n".join(lines))
    rollouts = [make_rollout(i, 0, 12, reward=i / 8) for i in range(8)]
    write_rollouts(run.rollouts_of(39) / "a002.worker_000.h5", rollouts)
    return run


@pytest.mark.parametrize("width", [500, 1000, 1600])
@pytest.mark.parametrize("several", [False, True])
def test_every_chart_is_drawn(run: RunDir, tmp_path: Path, probe: Probe, width: int, several: bool) -> None:
    path = write_report([run, run] if several else [run], tmp_path / "page.html")
    path.write_text(path.read_text().replace("<body>", f"<body>{PROBE}"))
    charts, drawn, beyond, errors = probe(path.as_uri(), width).split("|")
    assert errors == "no error"
    assert int(charts) == int(drawn) >= 11
    assert int(beyond) <= 0
