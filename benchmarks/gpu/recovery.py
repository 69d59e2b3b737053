"""Kill trainers and Ray, and exhaust the GPU's memory, in a run on one GPU; measure what each costs.

    python benchmarks/gpu/recovery.py --out DIR [--gguf FILE] [--steps 16] [--seconds 560]

Three runs of SmolLM2-135M (configs/gpu-smollm2.yaml), whose only commit is the last step:

* ``faults``: a trainer is killed during an update, then while rollouts are generated; another process takes
  so much of the GPU that an update runs out of memory, from which the trainer recovers in place (``by`` says
  whether it did, or had to restart); the raylet is killed.
* ``replay``: trains on the recorded rollouts of ``faults``, undisturbed: its gradient norms must be those of
  the disturbed steps, up to rounding.
* ``without``: no faults, and no copies of the state (``checkpoint.keep_in_memory: false``): what
  the copies cost.

Then the copies alone, of a larger state (``--layers`` of Qwen3-30B-A3B's shapes under FSDP): seconds and
bytes per second, and seconds of a restore.  DIR gets ``recovery.json`` and the events.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.config import Config  # noqa: E402
from orhpc.rundir import RunDir  # noqa: E402
from orhpc.rundir.events import read_events, steps_of  # noqa: E402
from tests.gpu.sglang_models import smollm2  # noqa: E402

Event = dict[str, Any]
HOLD = """
import sys, torch
torch.cuda.init()
print("ready", flush=True)
left = int(float(sys.stdin.readline()) * 1e9)
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - left), dtype=torch.uint8, device="cuda").zero_()
print(held.nbytes, flush=True)
sys.stdin.read()
"""
"""Takes all free memory of the GPU but as many GB as the line on standard input says."""
ENGINE_GB = 4.0
"""Memory of the GPU for the engine: little, so that the update's memory can be taken."""
ROOM_GB = 1.5
"""What an engine allocates beyond its share while it generates."""
KILLED = "faults.inject=[trainer_killed@4:0]"
"""The run itself ends a rank where an update of half a second could be missed."""
_OTHERS = ("EngineProcess", "RolloutWorker", "sglang")


def card_gb() -> float:
    """Memory of the first GPU, in 10^9 bytes."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(found.stdout.split()[0]) * 2**20 / 1e9


class Run:
    """A run of the suite, in a separate process."""

    def __init__(self, name: str, options: argparse.Namespace, *settings: str) -> None:
        self.rundir = RunDir(options.work / name)
        shutil.rmtree(self.rundir.path, ignore_errors=True)
        overrides = [f"run.name={name}", f"run.root={options.work}", "wandb.enabled=false", *settings]
        overrides += [
            "checkpoint.save_interval=1000",
            f"engine.memory_fraction={ENGINE_GB / card_gb():.3f}",
            *options.set,
        ]
        command = [sys.executable, "-m", "orhpc.launch", "--local", "configs/gpu-smollm2.yaml", *overrides]
        with (options.out / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._end = options.end

    def events(self) -> list[Event]:
        return read_events(self.rundir.events) if self.rundir.events.exists() else []

    def wait(self, wanted: Callable[[Event], bool]) -> Event:
        """Wait for an event; raises RuntimeError if the run or the time ends first."""
        while True:
            ended = self.process.poll() is not None
            if found := next(filter(wanted, self.events()), None):
                return found
            if ended or time.monotonic() > self._end:
                raise RuntimeError(f"{self.rundir.path.name}: the event never came")
            time.sleep(0.05)

    def children(self, *names: str) -> list[psutil.Process]:
        """The run's processes whose name or command has one of these parts."""
        found = []
        for p in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if any(n in p.name() or n in " ".join(p.cmdline()) for n in names):
                    found.append(p)
            except psutil.NoSuchProcess:
                continue
        return found

    def finish(self) -> None:
        """Wait for its end; raises RuntimeError if it failed."""
        try:
            code = self.process.wait(max(1.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            code = self.process.wait(60)
        if code:
            raise RuntimeError(f"{self.rundir.path.name}: exit {code}")

    def next_step(self, least: int) -> Event:
        """Wait for the end of a step that goes on now, or of this step."""
        now = time.time()
        return self.wait(lambda e: e["event"] == "step" and e["step"] >= least and e["time"] > now)

    def after(self, event: Event, kind: str) -> Event:
        return self.wait(lambda e: e["event"] == kind and e["time"] > event["time"])


def faults(run: Run) -> list[dict[str, Any]]:
    """Inject the faults one after the other, each after two undisturbed steps; one row each."""
    other = OtherProcess()
    rows = [killed_in_update(run, 4), killed_in_rollouts(run, 6), memory_taken(run, 9, other)]
    step = run.next_step(12)
    killed = time.time()
    run.children("raylet/raylet")[0].kill()
    rows.append(row("raylet killed", step, run.after(step, "bring_up"), run, killed))
    return rows


class OtherProcess:
    """A process of another user of one of the visible GPUs."""

    def __init__(self, gpu: int = 0) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        env = os.environ | {"CUDA_VISIBLE_DEVICES": visible[gpu]}
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._answer()  # torch is imported: from now on it takes memory at once

    def take(self, left: float) -> None:
        """Take all free memory of the GPU except ``left`` GB."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{left}\n")
        self._process.stdin.flush()
        print(f"another process took {int(self._answer()) / 1e9:.1f} GB", flush=True)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def memory_taken(run: Run, after: int, other: OtherProcess) -> dict[str, Any]:
    """While the next rollouts are generated, another process takes memory that their update needs."""
    step = run.next_step(after)
    time.sleep(step["phases"]["rollout"] / 2)
    # For the update the engines free their memory too.
    other.take(max(ROOM_GB, 0.75 * step["memory_trainer_peak_gb"] - ENGINE_GB))
    began = time.time()
    kinds = ("out_of_memory_recovered", "trainers_restarted")  # in place, or by a restart
    handled = run.wait(lambda e: e["event"] in kinds and e["time"] > step["time"])
    other.end()
    found = row("GPU memory exhausted in an update", step, handled, run, began)
    return found | {"by": handled["event"], "peak_before_gb": step["memory_trainer_peak_gb"]}


def killed_in_update(run: Run, step: int) -> dict[str, Any]:
    """Wait until :data:`KILLED` has ended a trainer rank in a step's update."""
    before = run.wait(lambda e: e["event"] == "step" and e["step"] == step - 1)
    return _trainer_restarted(run, before, "update", lambda: run.after(before, "fault_injected")["time"])


def killed_in_rollouts(run: Run, after: int) -> dict[str, Any]:
    """Kill the last trainer rank while the rollouts that follow a step are generated."""
    step = run.wait(lambda e: e["event"] == "step" and e["step"] == after)

    def kill() -> float:
        time.sleep(step["phases"]["rollout"] / 2)
        run.children("TrainerRank")[-1].kill()
        return time.time()

    return _trainer_restarted(run, step, "rollout", kill)


def _trainer_restarted(run: Run, step: Event, phase: str, kill: Callable[[], float]) -> dict[str, Any]:
    """Kill a trainer after a step and wait for its restart; ``kill`` returns the time."""
    before = {p.pid for p in run.children(*_OTHERS)}
    killed = kill()
    found = row(f"trainer killed during {phase}", step, run.after(step, "trainers_restarted"), run, killed)
    return found | {"others_untouched": before <= {p.pid for p in run.children(*_OTHERS)}}


def row(what: str, step: Event, handled: Event, run: Run, since: float) -> dict[str, Any]:
    """What a fault cost that was handled by an event; ``since``: the time of the fault."""
    following = run.after(handled, "step")
    return {
        "fault": what,
        "after_step": step["step"],
        "steps_lost": step["step"] - handled["step"],
        "restart_s": handled.get("seconds"),
        "to_next_step_s": following["time"] - since,
        "next_step": following["step"],
        "max_tokens": handled.get("max_tokens"),
    }


def medians(rundir: RunDir, disturbed: set[int]) -> dict[str, float]:
    """Median seconds of undisturbed steps after the second, whole and by phase."""
    steps = [e for n, e in steps_of(read_events(rundir.events)).items() if n > 2 and n not in disturbed]
    phases = {name for e in steps for name in e["phases"]}
    found = {name: statistics.median(e["phases"].get(name, 0.0) for e in steps) for name in sorted(phases)}
    return {"steps": len(steps), "seconds": statistics.median(e["seconds"] for e in steps), **found}


def gradients(disturbed: RunDir, replayed: RunDir) -> dict[int, float]:
    """Relative difference of each step's gradient norm between two runs on the same rollouts."""
    one, other = (steps_of(read_events(run.events)) for run in (disturbed, replayed))
    return {
        n: abs(one[n]["grad_norm"] / other[n]["grad_norm"] - 1)
        for n in sorted(one.keys() & other.keys())
        if "grad_norm" in one[n] and "grad_norm" in other[n]
    }


def one_rank(model: Path) -> Config:
    """A run of one trainer rank on one of two devices."""
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "placement": {"devices_per_node": 2, "trainer_devices": 1, "mode": "split"},
            "engine": {"tp": 1},
            "environments": {"local": {"serve": "package.module:Class"}},
            "rollout": {"batch_size": 2, "n_samples": 4},
            "train": {"global_batch_size": 8, "lr": 1e-5},
        }
    )


def copies_alone(layers: int, work: Path) -> dict[str, float]:
    """Copy a larger state while steps are computed, and restore it."""
    import torch

    from orhpc.process import state_folder
    from orhpc.train.actor import TrainerRank
    from orhpc.train.checkpoint.copy_files import CopyId
    from tests.gpu.random_model import write_model
    from tests.trainer_kit import make_samples, plan_batches

    folder = write_model(work / f"moe-{layers}", layers)
    config = one_rank(folder)
    samples = make_samples(64, longest=512)
    batch = plan_batches(samples, ranks=1, n_minibatches=1, max_tokens=8192).minibatches
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="orhpc-state-") as states:
        os.environ[state_folder.VARIABLE] = states
        rank = TrainerRank(config, str(folder), 0, 1, 8)
        rank.connect("127.0.0.1", rank.meeting_file(), 120)
        problem = rank.build()["copies_problem"]
        found: dict[str, float] = {"shared_memory_gb": shutil.disk_usage(states).total / 1e9}
        if problem:
            return found | {"problem": problem}
        size = sum(s.tensor.nbytes for s in rank.backend.shards())
        found["state_gb"] = size / 1e9

        def step(number: int) -> float:
            began = time.perf_counter()
            rank.step(batch, step=number)
            torch.cuda.synchronize()
            return time.perf_counter() - began

        step(1)
        alone = [step(n) for n in (2, 3, 4)]
        copying: list[float] = []
        for n in (5, 6, 7, 8, 9):
            began = time.perf_counter()
            rank.copy_state(CopyId(n, ""))
            found["begin_s"] = time.perf_counter() - began
            assert rank._copies is not None
            rank._copies.join()
            copying.append(time.perf_counter() - began)
        found |= {"step_s": statistics.median(alone), "first_copy_s": max(copying[:2])}
        found |= {"copy_s": statistics.median(copying[2:])}
        found["copy_gb_per_s"] = size / 1e9 / found["copy_s"]
        kept = {s.key: s.tensor[..., :4].clone() for s in rank.backend.shards()}
        step(10)
        began = time.perf_counter()
        rank.restore_copy(CopyId(9, ""))
        torch.cuda.synchronize()
        found["restore_s"] = time.perf_counter() - began
        found["equal"] = float(
            all(torch.equal(s.tensor[..., :4], kept[s.key]) for s in rank.backend.shards())
        )
        rank.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct, where nothing can be downloaded")
    parser.add_argument("--work", type=Path, default=Path("/tmp/recovery"))
    parser.add_argument("--only", nargs="*", choices=["faults", "without", "replay", "copies"])
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="more settings of all runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    options.end = time.monotonic() + options.seconds
    path = options.work / "recovery.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    smollm2(options.gguf)
    try:
        _measure(options, found)
    finally:
        path.write_text(json.dumps(found, indent=1))
        shutil.copy(path, options.out)
        print(json.dumps(found, indent=1))
        for name in ("faults", "without", "replay"):
            if (events := options.work / name / "events.jsonl").exists():
                shutil.copy(events, options.out / f"{name}.jsonl")
    return 0


def _measure(options: argparse.Namespace, found: dict[str, Any]) -> None:
    only, steps = options.only or ["copies", "faults", "without", "replay"], f"train.steps={options.steps}"
    if "copies" in only:
        program = "import json, sys; sys.path.insert(0, '.'); from pathlib import Path\n"
        program += "from benchmarks.gpu.recovery import copies_alone\n"
        program += f"print(json.dumps(copies_alone({options.layers}, Path({str(options.work)!r}))))"
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, check=False)
        found["copies"] = (
            json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.returncode
        )
        print(json.dumps(found["copies"]), flush=True)
    if "faults" in only:
        run = Run("faults", options, steps, KILLED)
        found["faults"] = faults(run)
        run.finish()
        found["with_copies"] = medians(run.rundir, {row["next_step"] for row in found["faults"]})
    if "without" in only:
        without = Run("without", options, steps, "checkpoint.keep_in_memory=false")
        without.finish()
        found["without_copies"] = medians(without.rundir, set())
    if "replay" in only:
        disturbed = RunDir(options.work / "faults")
        again = Run("replay", options, steps, f"train.replay_rollouts={disturbed.rollouts}")
        again.finish()
        differences = gradients(disturbed, again.rundir)
        steps_hit = {row["next_step"] for row in found["faults"]}
        others = [d for n, d in differences.items() if n not in steps_hit]
        found["gradients"] = {
            "disturbed": {n: differences.get(n) for n in sorted(steps_hit)},
            "others_median": statistics.median(others),
            "others_max": max(others),
        }


if __name__ == "__main__":
    sys.exit(main())
