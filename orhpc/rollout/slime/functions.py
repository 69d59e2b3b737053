"""Loads functions written for slime and calls them: one makes a rollout, the other a reward."""

from __future__ import annotations

import functools
import inspect
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orhpc.config import Config
from orhpc.errors import BadTask, EnvironmentRaised, OrhpcError, PromptTooLong, UserCodeError
from orhpc.process.user_code import user_error
from orhpc.rollout.environment.answers import MAX_REWARD
from orhpc.rollout.environment.rewards import (
    call_custom_reward,
    check_custom_reward,
    clamp,
    is_reward,
    reduce_rewards,
)
from orhpc.rollout.functions import load_function
from orhpc.rollout.slime import modules, rebuilding
from orhpc.rollout.slime.arguments import Arguments
from orhpc.rollout.slime.calls import Calls
from orhpc.rollout.slime.sample import STATUS_OF, Sample, Status
from orhpc.rollout.transcript import RolloutBuilder, RolloutRequest
from orhpc.rollout.turn_sampling import open_prompt
from orhpc.rundir import RunDir
from orhpc.types import Rollout, RolloutEnd, Task

if TYPE_CHECKING:
    from orhpc.environments.prompts import TaskFile
    from orhpc.rollout.agent import AgentContext, AgentFunction, AgentSession

ONE, GROUP = "slime:", "slime-group:"
_ENDS = {
    Status.COMPLETED: RolloutEnd.ANSWERED,
    Status.TRUNCATED: RolloutEnd.LENGTH,
    Status.ABORTED: RolloutEnd.ABORTED,
    Status.FAILED: RolloutEnd.FAILED,
}


def is_for_slime(name: str | None) -> bool:
    """Whether a setting names a function with slime's signature."""
    return name is not None and name.startswith((ONE, GROUP))


def _load(name: str, setting: str) -> Callable[..., Any]:
    modules.install()
    return load_function(name.partition(":")[2], setting)


async def _task_of(environment: Any, task: Task, config: Config) -> Mapping[str, Any]:
    """The task: the line of its file, or what its server tells; empty if the server cannot be asked."""
    if config.environments[task.environment].data is not None:
        return _lines(config, task.environment, task.split)[task.index]
    ask = getattr(environment, "describe_task", None)
    return await ask(task) if ask is not None else {}


@functools.cache
def _task_file(path: Path) -> TaskFile:
    from orhpc.environments.prompts import TaskFile  # loads the SDK

    return TaskFile(path)


def _lines(config: Config, environment: str, split: str) -> TaskFile:
    folder = RunDir(Path(config.run.root) / str(config.run.name)).data_of(environment)
    return _task_file(folder / f"{split}.jsonl")


@dataclass(frozen=True, slots=True)
class SlimeReward:
    """``rm(args, sample)``, or with a group ``rm(args, samples)``, plain or ``async``."""

    name: str
    function: Callable[..., Any]
    args: Arguments
    tokenizer: Any
    config: Config

    @property
    def takes_group(self) -> bool:
        return self.name.startswith(GROUP)

    def of(self, environment: Any) -> Callable[[Rollout], Awaitable[float]]:
        """The function as a ``rollout.custom_reward`` for rollouts of an environment."""

        async def reward(rollout: Rollout) -> Any:
            task = await _task_of(environment, rollout.task, self.config)
            value = self.function(self.args, rebuilding.sample_of(rollout, self.tokenizer, task))
            return await value if inspect.isawaitable(value) else value

        return reward

    async def of_group(self, environment: Any, rollouts: Sequence[Rollout], settings: Any) -> list[float]:
        """Return the rewards of the finished rollouts of one group.

        Raises:
            UserCodeError: the function raised, or did not return a finite number for each.
        """
        task = await _task_of(environment, rollouts[0].task, self.config)
        samples = [rebuilding.sample_of(rollout, self.tokenizer, task) for rollout in rollouts]
        try:
            values = self.function(self.args, samples)
            values = list(await values if inspect.isawaitable(values) else values)
        except (Exception, SystemExit) as error:
            raise user_error(f"rollout.custom_reward: {self.name}", error) from error
        if len(values) != len(rollouts):
            raise UserCodeError(
                f"rollout.custom_reward: {self.name} returned {len(values)} rewards for "
                f"{len(rollouts)} samples"
            )
        return [check_custom_reward(value, self.name, settings) for value in values]


def load_reward(name: str, config: Config, model_dir: str, tokenizer: Any) -> SlimeReward:
    """Load a reward function; raises ConfigError or UserCodeError as :func:`load_function` does."""
    return SlimeReward(
        name, _load(name, "rollout.custom_reward"), Arguments(config, model_dir), tokenizer, config
    )


def load_generate(name: str, config: Config, model_dir: str) -> AgentFunction:
    """Load a generate function as an agent; raises ConfigError or UserCodeError."""
    function = _load(name, "rollout.custom_agent")
    args = Arguments(config, model_dir)

    async def agent(context: AgentContext, request: RolloutRequest) -> Rollout:
        return await _rollout(context, request, function, args, name, config)

    return agent


async def _rollout(
    context: AgentContext,
    request: RolloutRequest,
    function: Callable[..., Any],
    args: Arguments,
    name: str,
    config: Config,
) -> Rollout:
    began = time.monotonic()
    builder, trained, error = RolloutBuilder(), None, None
    own_reward: float | None = None
    try:
        async with AsyncExitStack() as stack:
            with builder.waiting("opening"):
                session = await stack.enter_async_context(context.environment.session(request.task))
                task = await _task_of(context.environment, request.task, config)
            await open_prompt(context, session, builder)
            calls, sample = _begin(context, request, builder, task, name)
            sample = await _call(function, args, sample, calls)
            builder.tokens = array("i")
            trained = rebuilding.fill(builder, sample, calls)
            builder.waits.engine = calls.engine_seconds
            _describe(builder, context)
            end, own_reward = await _end(context, session, builder, sample, calls)
            error = "the function set the status FAILED" if end is RolloutEnd.FAILED else None
    except PromptTooLong as failure:
        end, error = RolloutEnd.PROMPT_TOO_LONG, str(failure)
    except OrhpcError as failure:
        failure.transcript = builder.messages
        if not isinstance(failure, BadTask) or isinstance(failure, EnvironmentRaised):
            raise
        end, error = RolloutEnd.FAILED, f"{type(failure).__name__}: {failure}"
    reward = None
    if end.trainable:
        reward = reduce_rewards(builder.rewards, end, context.settings) if own_reward is None else own_reward
    rollout = builder.rollout(
        request,
        end,
        reward=reward,
        error=error,
        seconds=time.monotonic() - began,
        limit=context.rollout.max_total_tokens,
    )
    if trained is not None:
        rebuilding.without(rollout, trained)
    if context.reward is not None and end.trainable and own_reward is None:
        custom = str(context.rollout.custom_reward)
        rollout.reward = await call_custom_reward(context.reward, rollout, custom, context.settings)
    return rollout


def _begin(
    context: AgentContext,
    request: RolloutRequest,
    builder: RolloutBuilder,
    task: Mapping[str, Any],
    name: str,
) -> tuple[Calls, Sample]:
    text = context.tokenizer.decode(builder.tokens.tolist(), skip_special_tokens=False)
    calls = Calls(context, request, f"rollout.custom_agent: {name}", {text: list(builder.tokens)})
    sample = Sample(
        group_index=request.group_id,
        index=request.sample,
        prompt=text,
        label=rebuilding.label_of(task),
        metadata=dict(task),
        session_id=request.id,
    )
    return calls, sample


async def _call(function: Callable[..., Any], args: Arguments, sample: Sample, calls: Calls) -> Sample:
    """Call a generate function; a failure of an engine counts even if the function caught it."""
    more = {"evaluation": calls.context.evaluation} if _takes_evaluation(function) else {}
    try:
        with calls.active():
            produced = function(args, sample, modules.sampling_params(calls), **more)
            produced = await produced if inspect.isawaitable(produced) else produced
    except Exception:
        if calls.failure is not None:
            raise calls.failure from None
        raise
    if calls.failure is not None:
        raise calls.failure
    if not isinstance(produced, Sample):
        kind = "a list: one rollout is one sample here" if isinstance(produced, list) else repr(produced)[:40]
        raise UserCodeError(f"{calls.name} returned {kind}; it must return the sample")
    if produced.status is Status.PENDING and calls.made:
        produced.status = STATUS_OF[str(calls.made[-1].finish)]
    return produced


def _takes_evaluation(function: Callable[..., Any]) -> bool:
    return "evaluation" in inspect.signature(function).parameters


def _describe(builder: RolloutBuilder, context: AgentContext) -> None:
    """Write the turns, and what the function put between them, into the transcript."""
    before = 0
    for turn in builder.turns:
        if before:
            text = context.tokenizer.decode(
                builder.tokens[before : turn.start].tolist(), skip_special_tokens=False
            )
            builder.add_message("tool", text, name="function")
        message = context.chat.parse(builder.tokens[turn.start : turn.end], thinking=context.rollout.thinking)
        builder.add_assistant(message)
        before = turn.end


async def _end(
    context: AgentContext, session: AgentSession, builder: RolloutBuilder, sample: Sample, calls: Calls
) -> tuple[RolloutEnd, float | None]:
    """Why the rollout ended, and the reward that the function wrote into the sample.

    Without one, and without ``rollout.custom_reward``, the environment judges the last answer.
    """
    end = _ENDS.get(sample.status, RolloutEnd.FAILED)
    if end is RolloutEnd.ABORTED and not context.stopping():
        end = RolloutEnd.FAILED
    if end.trainable and not builder.turns:
        raise UserCodeError(f"{calls.name}: nothing in sample.tokens was sampled by an engine")
    if not end.trainable:
        return end, None
    if sample.reward is not None:
        return end, _number(sample.reward, calls.name, context.settings)
    if end is RolloutEnd.ANSWERED and session.terminal and context.reward is None:
        with builder.waiting("tools"):
            text = context.chat.parse(builder.sampled, thinking=context.rollout.thinking).text
            result = await session.answer(text)
        builder.add_tool_result("answer", result, is_call=False)
        end = RolloutEnd.TERMINAL if result.finished else end
    return end, None


def _number(reward: object, name: str, settings: Any) -> float:
    if not is_reward(reward):
        raise UserCodeError(
            f"{name}: sample.reward is {repr(reward)[:40]}, which is not a finite number of at most "
            f"{MAX_REWARD:g} in magnitude"
        )
    return clamp(float(reward), settings)
