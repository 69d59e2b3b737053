"""``orhpc view``: recorded rollouts as text, with tool calls, rewards, reasoning and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orhpc.errors import EXIT_OK, RecordError
from orhpc.process.terminal import safe
from orhpc.rundir import RunDir
from orhpc.rundir.record import RolloutFile, read_step
from orhpc.types import Rollout, RolloutSummary


def show(run: RunDir, step: int | None, evaluation: int | None, rollout: str | None) -> int:
    """Print the rollouts of a step or an evaluation, or one of them.

    Args:
        run: the run whose record is read.
        step: training step; None: the newest one, or the one that has ``rollout``.
        evaluation: show the evaluation after this step instead of a training step.
        rollout: id of the rollout to print in full.

    Raises:
        RecordError: no such step, evaluation or rollout is recorded.
    """
    folders = _folders(run, step, evaluation)
    if rollout is None:
        title, folder = folders[0]
        found = read_step(folder, trained_only=False)
        print(f"{title}: {len(found)} rollouts")
        for summary in found:
            print(_row(summary))
        return EXIT_OK
    for _, folder in folders:
        for summary in read_step(folder, trained_only=False):
            if summary.id == rollout and summary.location.file is not None:
                with RolloutFile(summary.location.file) as record:
                    print("\n".join(lines(record.rollout(summary.location.row))))
                return EXIT_OK
    where = folders[0][0] if len(folders) == 1 else "any recorded step"
    raise RecordError(f"there is no rollout {rollout!r} in {where}")


def _folders(run: RunDir, step: int | None, evaluation: int | None) -> list[tuple[str, Path]]:
    """Titles and folders to look in, the newest first."""
    if evaluation is not None:
        return [(f"evaluation after step {evaluation}", run.rollouts / f"evaluation_{evaluation}")]
    if step is not None:
        return [(f"step {step}", run.rollouts_of(step))]
    recorded = sorted((int(p.name.removeprefix("step_")) for p in run.rollouts.glob("step_*")), reverse=True)
    if not recorded:
        hint = "; orhpc view RUN --evaluation STEP" if list(run.rollouts.glob("evaluation_*")) else ""
        raise RecordError(f"{run.rollouts}: no step is recorded yet{hint}")
    return [(f"step {number}", run.rollouts_of(number)) for number in recorded]


def _row(s: RolloutSummary) -> str:
    reward = "-" if s.reward is None else f"{s.reward:.3f}"
    about = safe(f"{s.task.id}  {s.error}" if s.error else s.task.id)
    return f"{s.id:>10}  {reward:>7}  {s.length:>6} tokens  {s.turns} turns  {s.end:<10} {about}"


def lines(rollout: Rollout) -> Iterator[str]:
    """Yield a rollout's transcript: roles, content, tool calls with arguments, rewards and errors."""
    for message in rollout.messages:
        yield f"--- {_heading(message)}"
        if reasoning := message.get("reasoning"):
            yield f"(reasoning) {safe(reasoning)}"
        if content := message.get("content"):
            yield safe(content)
        for call in message.get("tool_calls") or ():
            yield f"=> {_call(call)}"
        if message.get("metadata"):
            yield f"(metadata) {safe(json.dumps(message['metadata'], ensure_ascii=False))}"
    error = f", {safe(rollout.error)}" if rollout.error else ""
    yield f"--- end: {rollout.end}, reward {rollout.reward}{error}"


def _heading(message: Mapping[str, Any]) -> str:
    role = str(message.get("role"))
    parts = [f"{role} {message['name']}" if message.get("name") else role]
    parts += [f"reward {message['reward']:g}"] if message.get("reward") is not None else []
    parts += [f"error: {message['error']}"] if message.get("error") else []
    parts += [f"unfinished: {message['unfinished']}"] if message.get("unfinished") else []
    return safe(", ".join(parts))


def _call(call: Mapping[str, Any]) -> str:
    if "error" in call:
        return f"malformed call: {safe(str(call['error']))}"
    return safe(f"{call.get('name')} {json.dumps(call.get('arguments'), ensure_ascii=False)}")
