"""The overhead of a job over bare Ray and over a bare write, on a real four-node SLURM on this machine.

    python -m benchmarks.slurm_job bring-up [--nodes 4] [--repeats 3]
    python -m benchmarks.slurm_job commit [--config configs/tiny.yaml] [--signals 5]
    python -m benchmarks.slurm_job interruptions

``bring-up``: from the first line of the batch script to the moment when Ray's GCS knows all nodes, for
``slurm/train.sbatch`` and for a script that runs only ``ray start`` on the same nodes with the same options,
alternating. A process outside the nodes queries both GCS servers. Target: at most 1.2 times.

``commit``: from the signal to the batch shell to the durable commit, against writing and syncing the same
number of bytes and files on the same filesystem. Target: at most one second more.

``interruptions``: runs tests/slurm and prints what every interruption in it cost.

Needs root and Debian's slurm-wlm, munge and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orhpc.rundir.events import read_events
from tests.slurm.cluster import Cluster, die_with_parent, missing, running_cluster, wait_until
from tests.slurm.kit import ROOT, TABLE, assert_nothing_left, sbatch

PORT = 15100
PROCESSES = 3
"""Worker processes that Ray starts in advance on a node: a trainer, an engine and a rollout worker."""
BARE = f"""\
#!/bin/bash
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
date +%s.%N >started
head=$(getent hosts "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" | cut -d ' ' -f 1)
export head
srun --cpu-bind=none --mpi=none bash -c '
options="--block --disable-usage-stats --num-cpus {PROCESSES} --num-gpus 0 --object-store-memory 200000000"
options+=" --min-worker-port 15200 --max-worker-port 15400"
if [ $SLURM_PROCID = 0 ]; then
  echo $head:{PORT} >address.part && mv address.part address
  exec $python -m ray.scripts.scripts start --head --port {PORT} --include-dashboard false --no-monitor \\
    --node-ip-address $head $options
fi
until (exec 3<>/dev/tcp/$head/{PORT}) 2>/dev/null; do sleep 0.1; done
exec $python -m ray.scripts.scripts start --address $head:{PORT} $options
' &
wait
"""
OBSERVER = """\
import os, sys, time
from pathlib import Path
from ray._raylet import GcsClient
place, nodes = Path(sys.argv[1]), int(sys.argv[2])
print("waiting", flush=True)
while not place.exists():
    time.sleep(0.05)
text = place.read_text()
if place.suffix == ".yaml":
    import yaml
    text = yaml.safe_load(text)["ray_address"]
client, known = None, 0
while known < nodes:
    try:
        client = client or GcsClient(address=text.strip())
        known = sum(n.state == 0 for n in client.get_all_node_info(timeout=5).values())
    except Exception:
        client = None
    time.sleep(0.05)
print(time.time(), flush=True)
os._exit(0)
"""


@contextmanager
def cluster() -> Iterator[Cluster]:
    if problem := missing():
        sys.exit(f"no cluster: {problem}")
    with tempfile.TemporaryDirectory(prefix="orhpc-slurm-") as folder:
        Path(folder).chmod(0o755)
        with running_cluster(Path(folder)) as running:
            yield running


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


# --- script start to Ray ready ----------------------------------------------------------------------


@contextmanager
def observer(place: Path, token: Path, nodes: int) -> Iterator[subprocess.Popen[str]]:
    """A process, with its imports done, that reports when a Ray cluster has this many nodes."""
    arguments = [sys.executable, "-c", OBSERVER, str(place), str(nodes)]
    # Ray reads them when it is imported, and logs many warnings until the head answers.
    variables = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with subprocess.Popen(
        arguments,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=die_with_parent,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        yield process
        process.kill()


def answer(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


def bare(on: Cluster, folder: Path, nodes: int) -> float:
    """Seconds from script start to Ray ready of ``ray start`` alone."""
    folder.mkdir()
    token = folder / "token"
    token.write_text("x" * 43)
    token.chmod(0o600)
    (folder / "bare.sbatch").write_text(BARE)
    more = {"python": sys.executable, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with observer(folder / "address", token, nodes) as process:
        command = ["env", *(f"{k}={v}" for k, v in more.items()), "sbatch", "--parsable", f"--nodes={nodes}"]
        job = on.run(*command, "bare.sbatch", cwd=folder).stdout.strip()
        ready = answer(process)
    on.run("scancel", job)
    wait_until(lambda: on.state(job) == "CANCELLED" and not on.processes(), 60, "the end of bare Ray")
    return ready - float((folder / "started").read_text())


def ours(on: Cluster, folder: Path, nodes: int) -> float:
    """Seconds from script start to Ray ready of slurm/train.sbatch."""
    folder.mkdir()
    attempt = folder / "tiny/attempts/001"
    with observer(attempt / "placement.yaml", attempt / "ray.token", nodes) as process:
        run = sbatch(on, folder, "wandb.enabled=false", options=(f"--nodes={nodes}",))
        ready = answer(process)
    facts = json.loads((attempt / "attempt.json").read_text())
    on.run("scancel", run.job)
    run.wait_state("CANCELLED")
    run.wait_outcome(1)
    assert_nothing_left(run)
    return ready - facts["script_started"]


def bring_up(nodes: int, repeats: int) -> None:
    pairs: list[tuple[float, float]] = []
    with cluster() as on:
        sides = (("train.sbatch", ours), ("ray start", bare))
        for n in range(repeats):
            times = []
            for name, side in sides:
                before = load()
                times.append(side(on, on.shared / f"{side.__name__}{n}", nodes))
                print(f"{n}: {name}: {times[-1]:.2f} s ({before})", flush=True)
            pairs.append((times[0], times[1]))
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"script start to Ray ready on {nodes} nodes, medians of {repeats}: train.sbatch {mine:.2f} s, "
        f"ray start {theirs:.2f} s, ratio {mine / theirs:.2f} (target <= 1.2)"
    )


# --- signal to commit -------------------------------------------------------------------------------


def bare_write(folder: Path, sizes: list[int]) -> float:
    """Seconds to write files of these sizes and make them durable."""
    contents = [os.urandom(size) for size in sizes]
    folder.mkdir()
    start = time.perf_counter()
    for index, content in enumerate(contents):
        with (folder / str(index)).open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - start


def commit(config: str, signals: int) -> None:
    took: list[float] = []
    with cluster() as on:
        arguments = ["train.steps=100000", "checkpoint.save_interval=100000", "wandb.enabled=false"]
        run = sbatch(on, on.shared, *arguments, options=("--nodes=1",), config=config)
        for attempt in range(1, signals + 1):
            run.wait_step(attempt, 1, 600)
            time.sleep(0.37 * attempt % 2)  # a different phase of a step each time
            before = load()
            run.signal_batch("USR2")
            outcome = run.wait_outcome(attempt, 180)
            assert outcome.signalled is not None
            made = [e for e in read_events(run.run.events) if e["event"] == "commit"][-1]
            assert made["attempt"] == attempt
            took.append(made["time"] - outcome.signalled)
            print(f"{attempt}: {took[-1]:.2f} s from the signal to the commit ({before})", flush=True)
        on.run("scancel", run.job)
        run.wait_state("CANCELLED")
        wait_until(lambda: not on.processes(), 60, "the end of the job")
        files = [f for f in (run.run.checkpoints / str(run.run.lineage()[0])).iterdir() if f.is_file()]
        sizes = [f.stat().st_size for f in files]
        written = [bare_write(on.shared / f"bare{n}", sizes) for n in range(signals)]
    mine, theirs = statistics.median(took), statistics.median(written)
    print(
        f"signal to commit of {sum(sizes) / 1e6:.1f} MB, medians of {signals}: {mine:.2f} s (at most "
        f"{max(took):.2f}); writing the same bytes {theirs:.2f} s; {mine - theirs:+.2f} s (target <= +1)"
    )


# --- interruptions ----------------------------------------------------------------------------------


def interruptions() -> int:
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "costs.jsonl"
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "tests/slurm", "--durations=0"]
        code = subprocess.run(
            command, cwd=ROOT, env={**os.environ, TABLE: str(table)}, check=False
        ).returncode
        print(f"tests/slurm: {time.monotonic() - start:.0f} s, {load()}\n")
        costs = [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []
    print(
        "| interruption | nodes | steps lost | signal to commit, s | requeue to first new step, s | SLURM's |"
    )
    print("|---|---|---|---|---|---|")
    for c in costs:
        to_commit = "-" if c["to_commit_s"] is None else f"{c['to_commit_s']:.1f}"
        cells = [c["interruption"], c["nodes"], c["steps_lost"], to_commit]
        cells += [f"{c['to_step_s']:.1f}", f"{c['slurm_s']:.1f}"]
        print("| " + " | ".join(map(str, cells)) + " |")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["bring-up", "commit", "interruptions"])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--config", default="configs/tiny.yaml")
    parser.add_argument("--signals", type=int, default=5)
    options = parser.parse_args()
    if options.what == "bring-up":
        bring_up(options.nodes, options.repeats)
    elif options.what == "commit":
        commit(options.config, options.signals)
    else:
        return interruptions()
    return 0


if __name__ == "__main__":
    sys.exit(main())
