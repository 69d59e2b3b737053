"""``orhpc status --ledger``: what became of every prompt group of a run, and whether the numbers add up."""

from __future__ import annotations

import json
import re
from typing import Any

from orhpc.errors import EXIT_FAILED, EXIT_OK, CheckpointError
from orhpc.rundir import CommitName, RunDir
from orhpc.rundir.commits import read_manifest
from orhpc.rundir.prompt_ledger import Balance, Lineage, balance_of, read_lineage, text_of


def print_balance(run: RunDir, *, as_json: bool) -> int:
    """Print the ledger of a run; returns EXIT_FAILED if a group was trained twice or skipped."""
    lineage, buffered = read_lineage(run.prompts), _buffered(run)
    balance = balance_of(lineage, buffered)
    committed = next(iter(run.lineage()), None)
    if committed is not None and (lineage.steps or lineage.before):
        balance.problems += _differences(run, lineage, committed)
    if as_json:
        print(json.dumps(_about(lineage, balance, buffered)))
    else:
        print("\n".join(_lines(run, lineage, balance)))
    return EXIT_FAILED if balance.problems else EXIT_OK


def _buffered(run: RunDir) -> list[int]:
    """Ids of the groups in the buffer, ascending."""
    if not run.buffer.is_dir():
        return []
    names = (re.fullmatch(r"group_(\d+)\.h5", path.name) for path in run.buffer.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _differences(run: RunDir, lineage: Lineage, committed: CommitName) -> list[str]:
    """Compare the ledger with the position in the newest commit, which is another record of the same."""
    fates = lineage.steps.get(committed.step)
    if fates is None:
        # A run that is stopped in its first rollouts commits step 0, which is not a step.
        known = committed.step == 0 or (lineage.before is not None and committed.step <= lineage.before[0])
        return [] if known else [f"commit {committed} is of a step without a line"]
    try:
        state = read_manifest(run.checkpoints / str(committed)).state
    except CheckpointError as error:
        return [f"the newest commit cannot be compared: {error}"]
    if (state["next_group"], text_of(state["pending"])) == (fates.next_group, fates.pending_text):
        return []
    return [f"commit {committed} has another position than its line"]


def _about(lineage: Lineage, balance: Balance, buffered: list[int]) -> dict[str, Any]:
    newest = lineage.steps.get(balance.step)
    pending = newest.pending if newest else ()
    waiting = [group for group in buffered if any(group in part for part in pending)]
    return {
        "step": balance.step,
        "started": balance.started,
        "trained": balance.trained,
        "dropped": dict(balance.dropped),
        "waiting": balance.waiting,
        "pending": balance.pending,
        "earlier": balance.earlier,
        "started_since": balance.since,
        "repeated_steps": balance.repeated,
        "balances": not balance.problems,
        "problems": balance.problems,
        "groups": {
            "trained": {step: _text(fates.trained) for step, fates in sorted(lineage.steps.items())},
            "dropped": {
                step: {reason: _text(groups) for reason, groups in fates.dropped.items()}
                for step, fates in sorted(lineage.steps.items())
                if fates.dropped
            },
            "waiting": text_of(waiting),
            "pending": text_of({group for part in pending for group in part}.difference(waiting)),
        },
    }


def _text(ranges: tuple[range, ...]) -> str:
    return text_of(group for part in ranges for group in part)


def _lines(run: RunDir, lineage: Lineage, balance: Balance) -> list[str]:
    if not lineage.steps and lineage.before is None:
        return [f"{run.path}: no step has recorded its prompt groups"]
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(balance.dropped.items()))
    steps = f"by steps {min(lineage.steps)} to {balance.step}" if lineage.steps else ""
    rows = [
        ("started", balance.started, f"groups 0 to {balance.started - 1}" if balance.started else ""),
        ("trained", balance.trained, steps),
        ("dropped", balance.dropped.total(), dropped),
        ("waiting", balance.waiting, "finished, in the buffer"),
        ("pending", balance.pending, "in flight, or to be generated again"),
    ]
    if lineage.before is not None:
        text = f"trained or dropped up to step {lineage.before[0]}, by a release without this ledger"
        rows.insert(1, ("earlier", balance.earlier, text))
    lines = [f"{run.path}: prompt groups after step {balance.step}"]
    lines += [f"{name:<8} {count:>9}  {text}".rstrip() for name, count, text in rows]
    lines.append(f"not started: group {balance.started} and later")
    if balance.since:
        lines[-1] += f", but for {balance.since} that have finished since and are in the buffer"
    if balance.repeated:
        lines.append(f"repeated: {balance.repeated} steps were trained again after a restart and count once")
    if balance.problems:
        return [*lines, *(f"does not balance: {problem}" for problem in balance.problems)]
    parts = [str(count) for _, count, _ in rows[1:]]
    return [*lines, f"balances: {balance.started} = {' + '.join(parts)}; none trained twice, none skipped"]
