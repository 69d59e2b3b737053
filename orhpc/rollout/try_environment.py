"""Play one session of an environment by hand or from a script: ``orhpc try-env CONFIG``.

    orhpc try-env CONFIG [key=value ...] [--env NAME] [--split S] [--task N] [--script FILE]

Shows the prompt and the tools that a model would receive, sends each typed turn as a model's turn, and
explains every failure in one line, with the traceback if the environment's code raised.  Needs neither a
GPU nor a model.  A turn is ``tool {"argument": 1}``, or any other text: a plain answer.  Each line of a
script is a turn; lines that begin with # are ignored.

Exit codes: 0; 1 if the environment broke the protocol, raised or gave no reward at its end, or if a script
ended before the task; 2 for an invalid config or an environment that cannot be opened.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from orhpc.config import Config, EnvironmentSettings
from orhpc.errors import (
    EXIT_FAILED,
    EXIT_OK,
    BadAnswer,
    BadTask,
    ConfigError,
    EnvironmentRaised,
    EnvironmentUnavailable,
    MalformedToolCall,
    OrhpcError,
    ToolTimeout,
    UserCodeError,
)
from orhpc.process.user_code import user_error, user_frames
from orhpc.rollout.chat.messages import load_json
from orhpc.rollout.environment.own_server import OwnServer
from orhpc.rollout.environment.rewards import check_custom_reward, reduce_rewards
from orhpc.rollout.environment.session import Session
from orhpc.rollout.environment.tools import ToolResult
from orhpc.rollout.functions import load_function
from orhpc.rollout.opened import config_of, exit_code_of, opened
from orhpc.rollout.slime import is_for_slime
from orhpc.rollout.transcript import RolloutBuilder, RolloutRequest
from orhpc.rollout.try_options import add_try_env
from orhpc.types import FinishReason, RolloutEnd, Task, Turn

ERROR_EXPLANATIONS = {
    "not_found": "the environment has no such tool; a model would see this text and continue",
    "name_collision": "two tools of the environment have this name; rename one of them",
    "input_validation": "the arguments violate the tool's schema; a model would see this text and continue",
    "bad_input_shape": "the server could not parse the call; a model would see this text and continue",
    "episode_finished": "the task had already ended; the rollout ends here",
    "malformed": "this is not a valid call; a model would see this text and continue",
    "tool_raised": "your tool raised; a model would see this text and continue (metric tool_errors)",
}
"""Explanation of a call's error, by :attr:`~orhpc.rollout.environment.tools.ToolResult.error`."""
_CONSEQUENCES = {
    ToolTimeout: "the call exceeded its timeout (rollout.tool_timeout_s): the rollout would fail",
    BadAnswer: "the server's answer violates the protocol: the rollout would fail",
    UserCodeError: "your function raised: the rollout would fail (rollout.max_user_errors)",
    EnvironmentRaised: "the environment's code raised: the rollout would be retried, then fail",
    EnvironmentUnavailable: "the session or the server is lost: the rollout would be retried, then fail",
    BadTask: "the environment refused this task: the rollout would fail",
}
"""Consequence of an exception for a rollout; the first matching class applies."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="orhpc try-env", description=(__doc__ or "").split("\n\n")[0])
    add_try_env(parser)
    options = parser.parse_intermixed_args(arguments)
    return exit_code_of(lambda: _main(options))


def _main(options: argparse.Namespace) -> int:
    config = config_of(options.arguments)
    turns = _script(options.script) if options.script else _typed()
    try:
        return asyncio.run(play(config, options.env, options.split, options.task, turns))
    except KeyboardInterrupt:
        return EXIT_OK


def _script(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--script {path}: cannot be read: {error}") from None
    turns = [line for line in lines if line.strip() and not line.startswith("#")]
    return _echoed(turns)


def _echoed(turns: Sequence[str]) -> Iterator[str]:
    for turn in turns:
        print(f"> {turn}")
        yield turn


def _typed() -> Iterator[str]:
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line


async def play(config: Config, name: str | None, split: str | None, index: int, turns: Iterator[str]) -> int:
    """Play one session; returns the exit code.

    Args:
        config: of the run.
        name: of the environment; None if there is only one.
        split: None: the first.
        index: of the task in its split.
        turns: the turns of the model.

    Raises:
        ConfigError: no such environment, split or task.
        OrhpcError: the environment cannot be opened.
    """
    name, settings = _chosen(config, name)
    split = split or _first_split(config, name, settings)
    async with opened(config, name) as (environment, own):
        try:
            count = await environment.num_tasks(split)
            if not 0 <= index < count:
                raise ConfigError(f"--task: split {split!r} has {count} tasks; choose 0 to {count - 1}")
            where = _where(settings)
            print(f"environment {name!r} ({where}), split {split}, task {index} of {count}")
            play_session = _Play(config, name, settings, own)
            async with environment.session(Task(name, split, index)) as session:
                await play_session.play(session, turns)
            for line in environment.notices.drain():
                if " raised: " not in line:  # already explained by _show()
                    print(f"!! {line}")
            return await play_session.judge()
        except (BadTask, EnvironmentUnavailable) as error:
            _explain(error, own)
            return EXIT_FAILED


def _chosen(config: Config, name: str | None) -> tuple[str, EnvironmentSettings]:
    known = config.environments
    if name is None and len(known) == 1:
        name = next(iter(known))
    if name is None or name not in known:
        problem = "there are several" if name is None else f"there is no {name!r}"
        raise ConfigError(f"--env: {problem}: choose one of {', '.join(known)}")
    return name, known[name]


def _where(settings: EnvironmentSettings) -> str:
    if settings.data is not None:
        return f"{settings.data.verifier}: {', '.join(settings.data.paths.values())}"
    return settings.serve or settings.url or "OpenReward"


def _first_split(config: Config, name: str, settings: EnvironmentSettings) -> str:
    splits = [*settings.splits, *config.evaluation.splits.get(name, [])]
    if not splits:
        raise ConfigError(f"--split: environments.{name} has no splits; choose one with --split")
    return splits[0]


def _explain(error: OrhpcError, own: OwnServer | None) -> None:
    """Print the consequence of an exception in one line, and the traceback if there is one."""
    trace = user_frames(getattr(error, "trace", "")) or (own.last_traceback() if own else "")
    if trace and isinstance(error, EnvironmentRaised | UserCodeError):
        print(trace.rstrip())
    meaning = next(
        (text for kind, text in _CONSEQUENCES.items() if isinstance(error, kind)), "the rollout would fail"
    )
    print(f"!! {' '.join(str(error).split())}\n!! {meaning}")


class _Play:
    """One session: transcript, rewards, and how it ended."""

    def __init__(
        self, config: Config, name: str, settings: EnvironmentSettings, own: OwnServer | None
    ) -> None:
        self._config, self._name, self._settings, self._own = config, name, settings, own
        self._builder = RolloutBuilder()
        self._problems = 0
        self._end: RolloutEnd | None = None

    async def play(self, session: Session, turns: Iterator[str]) -> None:
        """Show the prompt and tools, then send turns until the task ends or no turns are left."""
        self._show_task(session)
        self._builder.add_message("user", session.prompt)
        for number, turn in enumerate(turns, 1):
            self._builder.turns.append(Turn(0, 0, FinishReason.STOP, 0))
            self._builder.add_message("assistant", turn)
            await self._turn(session, turn)
            if self._end is None and number == self._settings.max_turns:
                self._end = RolloutEnd.MAX_TURNS
                print(f"--- environments.NAME.max_turns is {number}: the rollout ends")
            if self._end is not None:
                return
        print("--- no turns are left, but the task has not ended")
        self._problems += not sys.stdin.isatty()

    def _show_task(self, session: Session) -> None:
        print(f"--- prompt\n{session.prompt}\n--- tools")
        for tool in session.tools:
            print(f"{tool.name}: {tool.description or '(no description: a model sees only the name)'}")
            print(f"    {json.dumps(tool.schema, ensure_ascii=False)}")
        if session.terminal:
            print("A plain answer ends the task: it is passed to the environment.")
        else:
            print("A plain answer ends the rollout: the environment has no tool for it.")
        if not session.prompt.strip():
            print("!! the prompt is empty")
        if not session.tools and not session.terminal:
            print("!! there is neither a tool nor a terminal tool: the environment cannot give a reward")

    async def _turn(self, session: Session, text: str) -> None:
        call = read_call(text, [tool.name for tool in session.tools])
        if call is None and not session.terminal:
            print("--- a plain answer, but the environment has no tool for it: the rollout ends")
            self._end = RolloutEnd.ANSWERED
            return
        if isinstance(call, MalformedToolCall):
            name, result = "", ToolResult(f"Error: {call}", error="malformed")
        elif call is None:
            name, result = "answer", await session.answer(text)
        else:
            name, result = call[0], await session.call(*call)
        self._builder.add_tool_result(name, result, is_call=call is not None)
        self._show(result)
        if result.finished:
            self._end = RolloutEnd.TERMINAL
        elif call is None and result.error is None:
            print("!! the terminal tool did not return finished=True; the rollout ends anyway")
            self._end = RolloutEnd.TERMINAL

    def _show(self, result: ToolResult) -> None:
        print(result.text)
        if result.error is not None:
            if result.error == "tool_raised":
                self._problems += 1
                if self._own is not None:
                    print(self._own.last_traceback().rstrip())
            print(f"!! {result.error}: {ERROR_EXPLANATIONS.get(result.error, 'the call was refused')}")
            return
        reward = "none" if result.reward is None else f"{result.reward:g}"
        print(f"--- reward {reward}{', the task is finished' if result.finished else ''}")
        if result.metadata:
            print(
                f"--- metadata (recorded, not shown to a model): {json.dumps(result.metadata, default=str)}"
            )

    async def judge(self) -> int:
        """Show the rollout's reward as a run would compute it; returns the exit code."""
        settings, rewards = self._settings, self._builder.rewards
        end = self._end or RolloutEnd.MAX_TURNS
        reward = reduce_rewards(rewards, end, settings)
        parts = [f"{r:g}" for r in rewards]
        if end is not RolloutEnd.TERMINAL and settings.nonterminal_reward is not None:
            parts.append(f"{settings.nonterminal_reward:g} (nonterminal_reward)")
        print(f"--- end: {end}; {settings.reward_reduction} of [{', '.join(parts)}], clamped: {reward:g}")
        if end is RolloutEnd.TERMINAL and not rewards and self._config.rollout.custom_reward is None:
            print(
                "!! the task ended without a reward: the environment gave None, or NaN, which arrives as None"
            )
            self._problems += 1
        if self._config.rollout.custom_reward is not None:
            await self._show_custom_reward(self._config.rollout.custom_reward, end, reward)
        return EXIT_FAILED if self._problems else EXIT_OK

    async def _show_custom_reward(self, name: str, end: RolloutEnd, reward: float | None) -> None:
        if is_for_slime(name):
            print(f"--- {name}: not called here, because it judges tokens of a model")
            return
        function: Callable[..., object] = load_function(name, "rollout.custom_reward")
        request = RolloutRequest("0.0", 0, 0, Task(self._name, "", 0), 0)
        rollout = self._builder.rollout(request, end, reward=reward, error=None, seconds=0.0, limit=1)
        try:
            value = function(rollout)
            value = await value if inspect.isawaitable(value) else value
        except Exception as error:
            raise user_error(f"rollout.custom_reward: {name}", error) from error
        checked = check_custom_reward(value, name, self._settings)
        print(f"--- {name}: {checked:g} (without tokens: this rollout was not sampled by a model)")


def read_call(text: str, tools: Sequence[str]) -> tuple[str, dict[str, object]] | MalformedToolCall | None:
    """Read a typed turn: a call, a call that does not parse, or None for a plain answer.

    A turn is a call when its first word is a tool's name, or when JSON in braces follows one word.
    """
    name, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    if name not in tools and not (rest.startswith("{") and rest.endswith("}") and name.isidentifier()):
        return None
    try:
        arguments = load_json(rest or "{}")
    except MalformedToolCall as error:
        return error
    if not isinstance(arguments, dict):
        return MalformedToolCall("the arguments are not a JSON object")
    return name, arguments


if __name__ == "__main__":
    sys.exit(main())
