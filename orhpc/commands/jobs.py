"""``orhpc check | fetch | cancel``, and the state of a run's jobs from its directory and squeue."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from orhpc.commands.run_state import RUN_HELP, existing_run, runs_below
from orhpc.config.files import load_config
from orhpc.errors import EXIT_OK, ConfigError, PreflightError
from orhpc.launch import model
from orhpc.launch.checks import checklist
from orhpc.launch.command_line import add_nodes, node_overrides, split_command_line
from orhpc.launch.slurm import back_off, holder, ledger, scheduler
from orhpc.launch.sweep.sweep import is_sweep
from orhpc.models.folders import is_hub_name
from orhpc.rundir import RunDir
from orhpc.rundir.events import last_events


def jobs(rundir: RunDir) -> list[tuple[str, str]]:
    """(id, state) of every running or waiting job of the run; empty without SLURM."""
    if not scheduler.available():
        return []
    found = [(job, scheduler.job_state(job)) for job in holder.known_jobs(rundir)]
    return [(job, state) for job, state in found if state in scheduler.ACTIVE]


@dataclass(frozen=True, slots=True)
class Standing:
    """The jobs or the local process of a run, or why there are none."""

    jobs: dict[str, str]
    """State of every job of the run that SLURM still knows, by id."""
    line: str | None
    """The local process, or that no job or process is left and what to do, or why this is not known."""
    answered: bool = True
    """Whether SLURM has answered, or need not be asked."""
    ended: bool = False
    """Whether the run had begun, and no job or process of it is left."""

    @property
    def active(self) -> dict[str, str]:
        """States of the jobs that run or wait, by id."""
        return {job: state for job, state in self.jobs.items() if state in scheduler.ACTIVE}

    @classmethod
    def of(cls, rundir: RunDir) -> Standing:
        """Ask SLURM, or look for the process of ``--local``."""
        kind = rundir.attempt_metadata(rundir.newest_attempt()).get("kind")
        # An attempt that is just beginning has no description yet, but its process has the lock.
        process = rundir.lock_holder() if kind in ("local", None) else None
        if kind == "local" or (process is not None and not holder.known_jobs(rundir)):
            line = f"{process}: running" if process else _none_left(rundir, "process")
            return cls({}, line, ended=process is None)
        if not scheduler.available():
            return cls({}, None, answered=not holder.known_jobs(rundir))
        try:
            known = {job: state for job in holder.known_jobs(rundir) if (state := scheduler.job_state(job))}
        except PreflightError as error:
            return cls({}, f"SLURM does not answer: {error}", answered=False)
        active = scheduler.ACTIVE | {"COMPLETING"}
        left = any(state in active for state in known.values())
        begun = bool(known) or rundir.newest_attempt() > 0
        ended = begun and not left
        return cls(known, _none_left(rundir, "job") if ended else None, ended=ended)


def _none_left(rundir: RunDir, what: str) -> str:
    outcomes = ledger.known(rundir)
    last = outcomes[-1] if outcomes else None
    ended = any(event["event"] == "finished" for event in last_events(rundir.events)[-1:])
    if ended or (last is not None and last.reason is ledger.Reason.FINISHED):
        why = "it is finished"
    elif last is not None and (spent := last.given_up or ledger.exhausted(outcomes, last.chain or "")):
        why = f"crash loop, {spent}; once the cause is gone, the same command continues the run"
    else:
        why = "the same command continues the run"
    return f"no {what} of this run is left: {why}"


def describe(rundir: RunDir, standing: Standing) -> list[str]:
    """Lines about the run's jobs, how its latest attempts ended, and whether a job or process is left."""
    lines = [
        f"job {job}: {state.lower()}{_not_before(rundir, job, state)}" for job, state in standing.jobs.items()
    ]
    lines += [
        f"attempt {o.attempt} ended: {o.reason}, step {o.step} committed. {o.detail}".rstrip()
        for o in ledger.known(rundir)[-5:]
    ]
    return lines + ([standing.line] if standing.line is not None else [])


def _not_before(rundir: RunDir, job: str, state: str) -> str:
    """The earliest start of a waiting job, with the reason if the run itself set a delay."""
    if state != "PENDING":
        return ""
    try:
        info = scheduler.job_info(job)
    except PreflightError:
        info = None  # the state is known and is shown without a start time
    eligible = info.time_of("EligibleTime") if info is not None else None
    if eligible is None or eligible <= time.time():
        return ""
    outcomes = ledger.known(rundir)
    why = back_off.due(outcomes, outcomes[-1].chain or "") if outcomes else None
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(eligible))
    return f", not before {clock}" + (f": {why}" if why is not None else "")


def add_cancel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN | SWEEP", help=f"{RUN_HELP}, or a sweep's folder")
    parser.set_defaults(run=cancel)


def cancel(options: argparse.Namespace) -> int:
    """Cancel the jobs of a run, or of all runs of a sweep; they are not requeued."""
    folder: Path = options.run_dir
    runs = runs_below(folder) if is_sweep(folder) else [existing_run(folder)]
    active = [found for run in runs for found in jobs(run)]
    if not active:
        what = "sweep" if is_sweep(folder) else "run"
        raise ConfigError(f"{folder}: no job of this {what} is running or waiting")
    for job, state in active:
        scheduler.cancel(job)
        print(f"job {job} ({state.lower()}): canceled")
    return EXIT_OK


def add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="+", metavar="Organisation/Name | CONFIG | key=value")
    parser.add_argument("--revision", help="branch, tag or commit of a named model")
    parser.set_defaults(run=fetch)


def fetch(options: argparse.Namespace) -> int:
    """Download the named models, or those of a config, into the hub's cache and print their folders."""
    if all(is_hub_name(word) and not Path(word).exists() for word in options.arguments):
        models = [(name, options.revision) for name in options.arguments]
    else:
        models = model.hub_models(load_config(*split_command_line(options.arguments)))
        if options.revision is not None:
            raise ConfigError("--revision: needs a model's name; for a config, set model.revision")
    for name, revision in models:
        print(f"{name}: {model.fetch(name, revision)}")
    if not models:
        print("no model of this config comes from the hub")
    return EXIT_OK


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*", metavar="CONFIG | key=value")
    add_nodes(parser)
    parser.set_defaults(run=check)


def check(options: argparse.Namespace) -> int:
    """Check a config on the login node and print one line per check."""
    path, overrides = split_command_line(options.arguments)
    config = load_config(path, [*overrides, *node_overrides(options)])
    return checklist.report(checklist.on_the_login_node(config))
