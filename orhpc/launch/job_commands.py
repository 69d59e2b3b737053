"""``orhpc check | logs | cancel``, and the jobs of a run, from its directory and squeue alone."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from orhpc.config import Config
from orhpc.config_files import load_config
from orhpc.errors import EXIT_OK, EXIT_PREFLIGHT, ConfigError, OrhpcError, PreflightError
from orhpc.launch import commit_space, holder, host_memory, internet, ledger, prepare, scheduler, slurm
from orhpc.launch.placement import Node, local_node, plan
from orhpc.launch.words import split_words
from orhpc.rundir import RunDir

_LEAST_FREE_BYTES = 5e9


def jobs(rundir: RunDir) -> list[tuple[str, str]]:
    """Id and state of every job of the run that runs or waits; empty where there is no SLURM."""
    if not scheduler.available():
        return []
    found = [(job, scheduler.job_state(job)) for job in holder.known_jobs(rundir)]
    return [(job, state) for job, state in found if state in scheduler.ACTIVE]


def describe(rundir: RunDir) -> list[str]:
    """Lines about the run's jobs and how its latest attempts ended."""
    lines = [f"job {job}: {state.lower()}" for job, state in jobs(rundir)]
    outcomes = [o for n in range(rundir.newest_attempt(), 0, -1) if (o := ledger.outcome_of(rundir, n))]
    lines += [
        f"attempt {o.attempt} ended: {o.reason}, step {o.step} committed. {o.detail}".rstrip()
        for o in reversed(outcomes[:5])
    ]
    return lines


def add_cancel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path)
    parser.set_defaults(run=cancel)


def cancel(options: argparse.Namespace) -> int:
    """Cancel the run's jobs; they do not return."""
    active = jobs(_run(options.run_dir))
    if not active:
        raise ConfigError(f"{options.run_dir}: no job of this run is running or waiting")
    for job, state in active:
        scheduler.cancel(job)
        print(f"job {job} ({state.lower()}): cancelled")
    return EXIT_OK


def add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, help="default: the newest")
    parser.add_argument("--file", default="driver.log", help="which log; --list names them")
    parser.add_argument("--list", action="store_true", help="name the attempt's logs")
    parser.add_argument("--lines", type=int, default=50)
    parser.add_argument("--follow", action="store_true", help="go on as the log grows")
    parser.set_defaults(run=logs)


def logs(options: argparse.Namespace) -> int:
    """Print the end of one of an attempt's logs."""
    run = _run(options.run_dir)
    folder = run.attempt(options.attempt or run.newest_attempt())
    files = sorted(folder.glob("*.log"))
    if options.list or not (folder / options.file).is_file():
        batch = sorted(run.path.glob("slurm-*.out"))
        if not options.list and not files:
            if not batch:
                raise ConfigError(f"{folder}: no {options.file} yet")
            folder, options.file = batch[-1].parent, batch[-1].name
        elif not options.list:
            raise ConfigError(f"{folder}: no {options.file}; there are {', '.join(f.name for f in files)}")
        else:
            print("\n".join(str(f) for f in [*batch, *files]))
            return EXIT_OK
    with (folder / options.file).open(errors="replace") as stream:
        sys.stdout.writelines(stream.readlines()[-options.lines :])
        while options.follow:
            sys.stdout.writelines(stream.readlines())
            sys.stdout.flush()
            time.sleep(0.5)
    return EXIT_OK


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="CONFIG | key=value")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the job (placement.nodes)")
    parser.set_defaults(run=check)


def check(options: argparse.Namespace) -> int:
    """Check a config on the login node: a line for each thing the run will need."""
    path, overrides = split_words(options.words)
    overrides += [] if options.nodes is None else [f"placement.nodes={options.nodes}"]
    config = load_config(path, overrides)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("placement", lambda: _placement(config)),
        ("model and data", lambda: _paths(config)),
        ("memory of a node", lambda: host_memory.check_told(config)),
        ("keys", lambda: _keys(config)),
        ("internet", lambda: internet.survey(config).line),
        ("run directory", lambda: _directory(config)),
        ("cluster", lambda: _cluster(config)),
    ]
    good = True
    for name, run in checks:
        try:
            print(f"ok   {name}: {run()}")
        except OrhpcError as error:
            good = False
            print(f"BAD  {name}: {' '.join(str(error).split())}")
    return EXIT_OK if good else EXIT_PREFLIGHT


def _placement(config: Config) -> str:
    nodes = tuple(Node(f"node{i}", "", local_node().cpus) for i in range(config.placement.nodes))
    placed = plan(config, nodes)
    return (
        f"{len(nodes)} nodes, {len(placed.trainers)} trainers, {len(placed.engines)} engines, "
        f"{len(placed.workers)} workers"
    )


def _cluster(config: Config) -> str:
    """Whether the cluster has nodes for the job: SLURM itself judges the script, and submits nothing."""
    if shutil.which("sbatch") is None:
        return "there is no sbatch here to ask"
    with tempfile.NamedTemporaryFile("w", prefix="orhpc-", suffix=".sbatch") as script:
        script.write(slurm.render(config))
        script.flush()
        answer = scheduler.query("sbatch", "--test-only", script.name)
    said = [line.removeprefix("sbatch: ") for line in answer.stderr.splitlines() if line.strip()]
    if answer.returncode:
        raise PreflightError(f"sbatch refuses: {'; '.join(said)[-300:]}")
    return next((line for line in said if " to start at " in line), "sbatch accepts it")


def _paths(config: Config) -> str:
    prepare.check_paths(config)
    return config.model.path


def _keys(config: Config) -> str:
    prepare.check_keys(config)
    return "all are set"


def _directory(config: Config) -> str:
    rundir = prepare.run_directory(config)
    holder.check_free(rundir)
    if (free := commit_space.free_bytes(rundir.path)) < _LEAST_FREE_BYTES:
        raise ConfigError(f"{rundir.path}: {free / 1e9:.1f} GB free")
    return commit_space.check(config, rundir)


def _run(path: Path) -> RunDir:
    run = RunDir(path)
    if not run.config.is_file():
        raise ConfigError(f"{path} is not a run directory: it has no config.yaml")
    return run
