"""``orhpc runs``: all runs of a folder with their state, progress and jobs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orhpc.commands.run_state import RunState, State, duration, runs_below, states_of
from orhpc.errors import EXIT_OK, ConfigError
from orhpc.process.terminal import safe, styled_output

_COLORS = {State.RUNNING: "green", State.STARTING: "green", State.DEAD: "red", State.WAITING: "yellow"}

_LEAST = 16
"""Characters of a name that are kept in one line."""
_WIDEST = 10_000


def add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "roots", nargs="*", type=Path, default=[Path("runs")], metavar="FOLDER", help="default: runs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.set_defaults(run=runs)


def runs(options: argparse.Namespace) -> int:
    """Print one line per run, those with the newest events first."""
    found = []
    for root in options.roots:
        if not root.is_dir():
            raise ConfigError(f"{root}: no such folder; name the folder of run.root")
        found += runs_below(root)
    if not found:
        raise ConfigError(f"{', '.join(map(str, options.roots))}: no run is in there")
    if options.json:
        for state in states_of(found):
            print(json.dumps(state.as_json()))
        return EXIT_OK
    print_table(states_of(found))
    return EXIT_OK


def print_table(states: Iterable[RunState]) -> None:
    """Print one line per run.

    On a terminal that is too narrow the names of runs and jobs are folded, down to :data:`_LEAST` characters;
    then the lines are longer than the terminal, which shows what a narrower table would leave out.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("run", "state", "step", "reward", "eval", "left", "last event", "job"):
        table.add_column(head, no_wrap=head not in ("run", "job"), overflow="fold")
    for state in states:
        table.add_row(*_row(state), style=_COLORS.get(state.state, ""))
    # Without a terminal nothing must be folded: a script reads one line per run.
    console = Console(file=styled_output(), highlight=False, width=None if sys.stdout.isatty() else 200)
    console.width = max(console.width, _least_width(console, table))
    console.print(table)


def _least_width(console: Console, table: Table) -> int:
    """Columns of the terminal that the table needs if only long names are folded."""
    natural = console.measure(table, options=console.options.update_width(_WIDEST)).maximum
    for column in table.columns:
        if not column.no_wrap:
            longest = max(len(str(cell)) for cell in (column.header, *column.cells))
            natural -= max(0, longest - _LEAST)
    return natural


def _row(state: RunState) -> tuple[str, ...]:
    total = "?" if state.steps is None else str(state.steps)
    return (
        safe(state.name),
        str(state.state),
        f"{state.step}/{total}",
        _number(state.reward_mean),
        _number(state.evaluation),
        "-" if state.seconds_left is None else duration(state.seconds_left),
        "-" if state.last_event is None else f"{duration(max(0.0, time.time() - state.last_event))} ago",
        ", ".join(f"{job} {what.lower()}" for job, what in state.jobs.items()) or "-",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
