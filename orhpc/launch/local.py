"""``--local``: run the whole job on this machine in the foreground, with the same code as on a cluster."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orhpc.config import Config
from orhpc.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, ConfigError
from orhpc.launch import model, prepare, task_files
from orhpc.launch.checks import checklist, commit_space, host_memory
from orhpc.launch.display import Display
from orhpc.launch.node.first_node import Attempt
from orhpc.launch.node.notifications import Notifier
from orhpc.launch.slurm import holder
from orhpc.models import chat_formats
from orhpc.plan.placement import local_node, plan
from orhpc.process.memory_limit import MemoryWatch
from orhpc.rundir import RunDir
from orhpc.rundir.storage import probe


class LocalAttempt(Attempt):
    """An attempt on this machine alone, shown on the terminal."""

    def __init__(
        self,
        rundir: RunDir,
        number: int,
        config: Config,
        stop_file: Path,
        signals: Sequence[int],
        display: Display,
    ) -> None:
        """``signals``: those received so far; the second one ends the driver without a commit."""
        super().__init__(rundir, number, config, local_node(), stop_file)
        self._signals, self._display = signals, display
        self._memory = MemoryWatch()

    def tick(self) -> None:
        self._display.tick()

    def must_kill(self) -> bool:
        return len(self._signals) > 1

    def restarts_after(self, status: int) -> bool:
        """False if the kernel has killed processes for memory: nothing here would need less of it."""
        killed = self._memory.verdict_on_machine(self.node.name) if status == -signal.SIGKILL else None
        if killed is not None:
            self._display.say(killed)
        return killed is None


def run_local(config: Config) -> int:
    """Train on this machine until the run is finished or stopped.

    The first Ctrl-C (or SIGTERM) commits and exits; the second exits at once.

    Returns:
        0 when the run is finished, 75 when it was stopped and can be resumed, also without a commit
        at the second signal, else the failure's code.

    Raises:
        OrhpcError: the run could not be started.
    """
    if config.placement.nodes != 1:
        raise ConfigError(f"placement.nodes: --local is one node, not {config.placement.nodes}")
    checklist.require(checklist.of_config(config))
    plan(config, (local_node(),))
    prepare.check_machine(config)
    host_memory.check(config)
    prepare.check_keys(config)
    rundir = prepare.create_directory(config)
    probe(rundir.path)
    with rundir.locked():
        holder.check_free(rundir)
        changes = prepare.write_config(rundir, config)
        done = prepare.committed_step(rundir)
        if prepare.is_finished(rundir, config):
            print(f"{rundir.path}: finished, {done} steps; raise train.steps to go on")
            return EXIT_OK
        commit_space.check(config, rundir)
        for change in changes:
            print(f"changed since the last start: {change}")
        model.ensure_models(config, rundir)
        task_files.ensure(config, rundir)
        chat_formats.check(config, model.model_folder(config, rundir))
        number = prepare.begin_attempt(rundir, config, kind="local", changes=changes)
        print(f"run directory: {rundir.path} (attempt {number}, step {done} of {config.train.steps} done)")
        stop_file = rundir.attempt(number) / "stop"
        with (
            _stop_on_signals(stop_file) as signals,
            Display(rundir.events, number) as display,
            Notifier(config, rundir, number, stop_file.exists, display.say),
        ):
            attempt = LocalAttempt(rundir, number, config, stop_file, signals, display)
            status = attempt.run()
    code = exit_code(status, left_at_once=attempt.must_kill(), failed=display.failure is not None)
    _print_outcome(rundir, number, code, display)
    return code


def exit_code(status: int, *, left_at_once: bool, failed: bool) -> int:
    """Return the exit code of the command.

    Args:
        status: the driver's exit status; negative when a signal ended it.
        left_at_once: whether the user ended the driver with a second signal.
        failed: whether the attempt had reported a failure before it ended.
    """
    if left_at_once and status != EXIT_OK and not failed:
        return EXIT_REQUEUE
    return status if status >= 0 else EXIT_FAILED


def _print_outcome(rundir: RunDir, attempt: int, code: int, display: Display) -> None:
    if code == EXIT_OK:
        print(f"finished; the run directory is {rundir.path}")
    elif code == EXIT_REQUEUE and display.failure is None:
        step = prepare.committed_step(rundir)
        print(f"stopped with step {step} committed; the same command resumes ({rundir.path})")
    else:
        reason = display.failure or "the driver ended without an error message"
        log = rundir.attempt(attempt) / "driver.log"
        print(f"orhpc: {reason} (exit {code}; details: {log})", file=sys.stderr)


@contextmanager
def _stop_on_signals(stop_file: Path) -> Iterator[list[int]]:
    """Create the stop file on SIGINT, SIGTERM and SIGUSR2; yield the list of received signals."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        stop_file.touch()
        name, first = signal.Signals(number).name, len(received) == 1
        doing = "committing, then leaving (once more: leave at once)" if first else "leaving at once"
        print(f"{name}: {doing}", file=sys.stderr)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    before = {n: signal.signal(n, stop) for n in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
