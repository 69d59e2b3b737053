"""``orhpc logs``: what a run's processes have written, the run's own lines first."""

from __future__ import annotations

import argparse
import contextlib
import heapq
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orhpc.commands.jobs import Standing
from orhpc.commands.log_files import (
    DRIVER,
    LogFile,
    attempt_begun_by,
    batch_outputs,
    check_rank,
    files_of,
    node_named,
)
from orhpc.commands.log_lines import Level, Line, Reader
from orhpc.commands.run_state import RUN_HELP, existing_run
from orhpc.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, ConfigError
from orhpc.launch.slurm import ledger
from orhpc.process.terminal import safe, styled_output
from orhpc.rundir import RunDir
from orhpc.rundir.events import last_events

_POLL_S = 0.5
_ASK_S = 10.0
"""Seconds between two questions to SLURM whether the run goes on."""
_COLORS = {Level.ERROR: "\x1b[31m", Level.WARNING: "\x1b[33m"}
_PLAIN = "\x1b[0m"


def add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("--attempt", type=int, metavar="N", help="default: the newest")
    parser.add_argument("--node", metavar="NAME", help="all logs of this node: its name, or its index")
    parser.add_argument("--rank", type=int, metavar="N", help="lines of this trainer rank")
    parser.add_argument("--engine", type=int, metavar="N", help="the log of this engine")
    parser.add_argument("--file", metavar="FILE", help="one log, whole; --list names them")
    parser.add_argument(
        "--errors", action="store_true", help="only errors and tracebacks of all logs, with file and line"
    )
    parser.add_argument("--ray", action="store_true", help="what Ray itself has written, too")
    parser.add_argument("--list", action="store_true", help="name the attempt's logs")
    parser.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="default: 50; 0: none")
    parser.add_argument(
        "-f", "--follow", action="store_true",
        help="print new lines, also of later attempts, until the run has ended; the exit code is the run's",
    )  # fmt: skip
    parser.set_defaults(run=logs)


def logs(options: argparse.Namespace) -> int:
    """Print the end of an attempt's logs; with ``--follow``, return the exit code of the run once it ends."""
    run = existing_run(options.run_dir)
    newest = run.newest_attempt()
    if options.attempt is not None and not 1 <= options.attempt <= newest:
        raise ConfigError(f"--attempt: {options.attempt} is not an attempt of this run; it has {newest}")
    if options.lines < 0:
        raise ConfigError(f"--lines: {options.lines} is negative")
    attempt = options.attempt or newest
    if options.list:
        _list(run, attempt)
        return EXIT_OK
    chosen = Choice.of(run, attempt, options)
    files = chosen.files(run, attempt)
    if not files and not options.follow:
        raise ConfigError(f"{run.attempt(attempt)}: no {options.file or DRIVER} yet")
    follow = _Follow(run, attempt, chosen, fixed=options.attempt is not None)
    follow.print_end(files, options.lines)
    with contextlib.suppress(KeyboardInterrupt):
        if options.follow:
            return follow.until_the_end()
    return EXIT_OK


def _list(run: RunDir, attempt: int) -> None:
    paths = {path.resolve(): None for path in batch_outputs(run)}
    paths |= {f.path: None for f in files_of(run, attempt) if f.kind != "job"}
    print("\n".join(map(str, paths)))


@dataclass(frozen=True, slots=True)
class Choice:
    """Which logs, and which lines of them, the options name."""

    file: str | None
    node: tuple[str, str, bool] | None
    """Name, address, and whether it is the first node."""
    rank: int | None
    engine: int | None
    errors: bool
    ray: bool

    @classmethod
    def of(cls, run: RunDir, attempt: int, options: argparse.Namespace) -> Choice:
        """Raises ConfigError for a file, node, rank or engine that the attempt does not have."""
        found = files_of(run, attempt)
        names = [f.name for f in found]
        if options.file is not None:
            if [o for o in (options.node, options.rank, options.engine) if o is not None]:
                raise ConfigError("--file: it is one log; leave --node, --rank and --engine out")
            if options.file not in names and not options.follow:
                there = f"the logs are {', '.join(names)}" if names else "no log yet"
                raise ConfigError(f"{run.attempt(attempt)}: no {options.file}; {there}")
        if options.rank is not None:
            check_rank(run, attempt, options.rank)
            if options.engine is not None:
                raise ConfigError("--rank: a trainer's; leave --engine out")
        engines = sorted({f.engine for f in found if f.engine is not None})
        if options.engine is not None and options.engine not in engines and not options.follow:
            there = f"; there are {', '.join(map(str, engines))}" if engines else ""
            raise ConfigError(f"--engine: attempt {attempt} has no log of engine {options.engine}{there}")
        node = node_named(run, attempt, options.node) if options.node is not None else None
        return cls(options.file, node, options.rank, options.engine, options.errors, options.ray)

    def files(self, run: RunDir, attempt: int) -> list[LogFile]:
        """The logs to read; before the driver's log, the output of the batch script."""
        found = files_of(run, attempt)
        if self.file is not None:
            return [f for f in found if f.name == self.file]
        chosen = [f for f in found if self._takes(f)]
        plain = self.node is None and self.rank is None and self.engine is None and not self.errors
        if plain and not [f for f in chosen if f.kind == "driver"]:
            return [LogFile(path, "job") for path in batch_outputs(run)[-1:]]
        return chosen

    def _takes(self, log: LogFile) -> bool:
        if log.kind == "ray" and not self.ray:
            return False
        if self.engine is not None:
            return log.engine == self.engine
        if self.rank is not None:
            return log.kind == "driver"
        if self.node is not None:  # the driver's log has lines of all nodes
            return log.kind == "driver" or log.node == self.node[0]
        return self.errors or log.kind in ("driver", "ray")

    def shows(self, line: Line) -> bool:
        """Whether a line of these logs is wanted."""
        if self.file is not None:
            return not self.errors or line.level is Level.ERROR
        if (line.is_ray and not self.ray) or (self.errors and line.level is not Level.ERROR):
            return False
        if self.rank is not None:
            return line.rank == self.rank or (line.merged and line.rank is not None)
        if self.node is not None:
            _, address, is_first = self.node
            is_driver = line.source == DRIVER
            return not is_driver or (line.address == address if line.address else is_first)
        return True


class _Log:
    """One log file that is read as it grows."""

    def __init__(self, log: LogFile, attempt: int) -> None:
        self.log = log
        self._reader = Reader(log.name)
        self._attempt = attempt
        self._own = True
        """Whether the lines belong to the attempt; a batch script's output has those of all its starts."""
        self._stream = log.path.open("rb")
        self._rest = b""

    def new(self, *, at_end: bool = False) -> Iterator[Line]:
        """Yield the lines written since the last call; ``at_end``: also the last one, if it is incomplete."""
        for raw in self._stream:
            self._rest += raw
            if self._rest.endswith(b"\n") or len(self._rest) > 1 << 20:
                whole, self._rest = self._rest, b""
                yield from self._parsed(whole)
        if at_end and self._rest:
            whole, self._rest = self._rest, b""
            yield from self._parsed(whole)

    def _parsed(self, raw: bytes) -> Iterator[Line]:
        line = self._reader.line(raw.decode("utf-8", errors="replace"))
        if self.log.kind == "job" and self._attempt:
            begun = attempt_begun_by(line.text)
            if begun is not None:
                self._own = begun == self._attempt
        if self._own:
            yield line

    def close(self) -> None:
        self._stream.close()


class _Follow:
    """Prints the chosen lines of the logs of an attempt, and of the attempts after it."""

    def __init__(self, run: RunDir, attempt: int, choice: Choice, *, fixed: bool) -> None:
        """``fixed``: whether to end with this attempt."""
        self._run, self._attempt, self._choice, self._fixed = run, attempt, choice, fixed
        self._logs: dict[Path, _Log] = {}
        self._asked = 0.0

    def print_end(self, files: Sequence[LogFile], most: int) -> None:
        """Print the last lines of the logs, in the order in which they were written."""
        ends: list[deque[Line]] = []
        for log in files:
            self._logs[log.path] = reader = _Log(log, self._attempt)
            ends.append(deque(filter(self._choice.shows, reader.new()), maxlen=max(1, most)))
        merged = heapq.merge(*ends, key=lambda line: line.time) if most else iter(())
        lines = deque(merged, maxlen=max(1, most))
        self._print(lines)
        if not lines and most and files:
            rank = self._choice.rank
            what = (
                "error" if self._choice.errors else "line" if rank is None else f"line of trainer rank {rank}"
            )
            print(f"no {what} in {', '.join(f.name for f in files)}", file=sys.stderr)

    def until_the_end(self) -> int:
        """Print new lines until the run (or the attempt asked for) has ended; return its exit code."""
        while True:
            newest = self._run.newest_attempt()
            over = self._is_over() if newest == self._attempt or self._fixed else False
            self._print_new(at_end=over or newest != self._attempt)
            if over or (self._fixed and newest != self._attempt):
                return exit_code_of(self._run, self._attempt)
            if newest != self._attempt:
                self._begin(newest)
            sys.stdout.flush()
            time.sleep(_POLL_S)

    def _begin(self, attempt: int) -> None:
        """Continue with the logs of a newer attempt."""
        print(f"--- attempt {attempt} ---")
        for log in self._logs.values():
            log.close()
        self._logs, self._attempt = {}, attempt

    def _print_new(self, *, at_end: bool) -> None:
        for log in self._choice.files(self._run, self._attempt):
            if log.path not in self._logs:
                with contextlib.suppress(OSError):
                    self._logs[log.path] = _Log(log, self._attempt)
        for log in self._logs.values():
            self._print(line for line in log.new(at_end=at_end) if self._choice.shows(line))

    def _is_over(self) -> bool:
        """Whether no job and no process of the run is left; asks SLURM only now and then."""
        if time.monotonic() < self._asked + _ASK_S and self._asked:
            return False
        self._asked = time.monotonic()
        return Standing.of(self._run).ended

    def _print(self, lines: Iterable[Line]) -> None:
        several = len(self._logs) > 1
        colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for line in lines:
            text = line.text
            if self._choice.errors:
                text = f"{line.source}:{line.number}: {text}"
            elif several:
                text = f"{line.source}: {text}"
            color = _COLORS.get(line.level, "") if colored else ""
            if color:
                print(f"{color}{safe(text)}{_PLAIN}", file=styled_output())
            else:
                print(text)


def exit_code_of(run: RunDir, attempt: int) -> int:
    """The exit code with which an attempt has ended: 0 if the run is finished, 75 if it was stopped."""
    outcome = ledger.outcome_of(run, attempt)
    if outcome is not None and outcome.exit_code is not None:
        return outcome.exit_code
    own = [e for e in last_events(run.events) if e.get("attempt") == attempt]
    last = own[-1] if own else {"event": ""}
    if last["event"] == "finished":
        return EXIT_OK
    code = last.get("exit_code")
    if last["event"] == "failed" and isinstance(code, int) and 0 <= code < 256:
        return code
    return EXIT_REQUEUE if last["event"] == "stopped" else EXIT_FAILED
