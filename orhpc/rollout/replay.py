"""Goes on with a rollout that a stop of the run has interrupted: its turns again, in a new session.

The environment session of an interrupted rollout is lost with its attempt.  A new session of the same task
is brought to the same state: it gets the recorded turns one after another, whose tool calls are made again.
After each, what the environment answers must be what is recorded: the tokens of the answer as the model saw
them, the reward, the kinds of errors, and that the task goes on.  If everything is equal, the rollout goes
on from its own tokens.  If anything differs, it is generated again from the start, in another session.

An environment may draw random numbers: a session that has given equal answers is then as likely a
continuation of the recorded tokens as the lost one, so the rollout is still a sample of the policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from orhpc.errors import BadTask, ReplayDiffers
from orhpc.rollout.transcript import RolloutBuilder
from orhpc.types import FinishReason, Rollout, Turn


class Replay:
    """The recorded turns of one rollout, for the agent loop; without ``begun`` there are none."""

    def __init__(self, begun: Rollout | None) -> None:
        self._begun = begun
        self._turns: list[Turn] = []
        self._next = 0
        self._compared = begun is None
        self.repeated = 0
        """Turns whose answers were given again by the new session, and were equal."""

    @property
    def is_done(self) -> bool:
        """Whether the rollout is beyond what is recorded, or will not use it."""
        return self._compared and self._next >= len(self._turns)

    def begin(self, builder: RolloutBuilder, *, routes: bool) -> None:
        """Compare the prompt, which is all that the builder has; if it differs, nothing is replayed.

        ``routes``: whether expert routes are recorded; a rollout without them cannot go on then.

        Raises:
            ReplayDiffers: the prompt of a rollout that has called tools differs.
        """
        begun, self._compared = self._begun, True
        if begun is None or (routes and begun.routes is None):
            return
        if not _is_at(builder, begun, begun.turns[0].start):
            if len(begun.turns) == 1:
                return  # there is nothing to call again: this session is as good as another
            raise ReplayDiffers("the prompt differs")
        self._turns = begun.turns

    def restore(self, builder: RolloutBuilder, number: int) -> FinishReason | None:
        """Append what is recorded of a turn; returns its finish reason, or None if there is nothing.

        Raises:
            ReplayDiffers: the answers to the previous turn differ.
        """
        if number >= len(self._turns) or self._begun is None:
            return None
        turn = self._turns[number]
        if not _is_at(builder, self._begun, turn.start):
            raise ReplayDiffers(f"the answer to turn {number} differs")
        self._next = number + 1
        self.repeated = number
        builder.restore_turn(self._begun, number)
        return turn.finish_reason

    @contextlib.contextmanager
    def expecting(self, builder: RolloutBuilder, number: int) -> Iterator[None]:
        """Check in the block that makes the calls of a turn that they do what they did before.

        Raises:
            ReplayDiffers: the environment refuses what it has accepted, or gives other rewards or errors.
        """
        if number + 1 >= len(self._turns):
            yield
            return
        try:
            yield
        except BadTask as error:
            raise ReplayDiffers(f"a call of turn {number + 1} fails: {error}") from error
        before, now = self._turns[number], builder.turns[number]
        for what in ("tool_calls", "malformed", "raised", "reward"):
            if getattr(before, what) != getattr(now, what):
                values = f"{getattr(now, what)}, not {getattr(before, what)}"
                raise ReplayDiffers(f"{what} of turn {number + 1} is {values}")

    def require_unfinished(self, number: int) -> None:
        """Raise ReplayDiffers if the task, which a turn has just ended, went on when it was recorded."""
        if number + 1 < len(self._turns):
            raise ReplayDiffers(f"turn {number + 1} ends the task")


def _is_at(builder: RolloutBuilder, begun: Rollout, length: int) -> bool:
    """Whether the builder has exactly the first tokens of a rollout, and the images among them."""
    if builder.tokens.tolist() != begun.tokens_T[:length].tolist():
        return False
    return builder.images == [placed for placed in begun.images if placed.start < length]
