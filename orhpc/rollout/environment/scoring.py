"""Scores of a group's rollouts against each other, from the environment's server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orhpc.errors import BadTask
from orhpc.rollout.environment import answers
from orhpc.rollout.environment.deadline import Deadline
from orhpc.rollout.environment.openreward_session import ToolRaised
from orhpc.rollout.environment.receiving import Refused
from orhpc.rollout.environment.session import failure
from orhpc.types import Task

if TYPE_CHECKING:
    from orhpc.rollout.environment.environment import Environment


async def score_group(
    environment: Environment, task: Task, transcripts: Sequence[Sequence[dict[str, Any]]]
) -> list[float]:
    """Score the finished rollouts of a group against each other; ``transcripts``: their ``messages``.

    Returns one score per transcript, to be added to the rollout's step rewards.

    Raises:
        BadTask: scoring fails.
        EnvironmentUnavailable: the server does not answer.
    """
    rich, budget = environment._rich, environment.rollout.tool_timeout_s
    candidates = [{"messages": answers.wire_messages(messages, rich=rich)} for messages in transcripts]
    what, path = f"{task.id}: group scoring", environment.path("/score_group")
    async with environment.session(task) as session:
        try:
            async with Deadline(what, budget, budget) as deadline:
                answer = await session._wire.invoke(path, {"candidates": candidates}, deadline)
        except ToolRaised as error:
            raise BadTask(f"{what} failed: {error}") from None
        except Refused as refused:
            raise failure(session._wire, refused) from None
    return answers.group_scores(answer, len(candidates), what)
