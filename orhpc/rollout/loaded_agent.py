"""The agent of a run: tokenizer, chat format and the user's functions, loaded once by each rollout worker."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orhpc.config import Config
from orhpc.config.rollout import GROUP_FILTERS
from orhpc.errors import ConfigError, ModelError, OrhpcError
from orhpc.models import vocabulary_of
from orhpc.models.images import processor_template, sees_images
from orhpc.process.lean_transformers import import_without_torch
from orhpc.process.user_code import user_error
from orhpc.rollout.agent import (
    AgentContext,
    AgentEnvironment,
    AgentFunction,
    Generate,
    never,
    run_rollout,
)
from orhpc.rollout.agent_result import checked_rollout
from orhpc.rollout.chat import ChatFormat, chat_format
from orhpc.rollout.functions import load_function
from orhpc.rollout.images import ImageReader
from orhpc.rollout.sampling_policy import noting_differences
from orhpc.rollout.slime import SlimeReward, is_for_slime, load_generate, load_reward
from orhpc.rollout.transcript import RolloutRequest
from orhpc.rollout.turn_sampling import turn_seed
from orhpc.types import GroupRequest, Rollout
from orhpc.wire.routes import RouteShape


@dataclass(frozen=True, slots=True)
class Agent:
    """Everything shared by the rollouts of a run; created by :func:`load_agent`."""

    config: Config
    chat: ChatFormat
    route_shape: RouteShape | None
    """Shape of the model's expert routes; None for a dense model."""
    vocabulary: int | None
    """Number of token ids that the model has; None: its config does not say."""
    function: AgentFunction
    reward: Callable[[Rollout], float | Awaitable[float]] | SlimeReward | None
    _attempts: Iterator[int]
    tokenizer: Any = None
    images: ImageReader | None = None

    async def run(
        self,
        request: GroupRequest,
        sample: int,
        *,
        environment: AgentEnvironment,
        generate: Generate,
        stopping: Callable[[], bool] = never,
        begun: Rollout | None = None,
    ) -> Rollout:
        """Generate one rollout of a group, or continue one that a stop has aborted (``begun``).

        Raises the same errors as :func:`run_rollout`, and UserCodeError for what a user's function returns.
        """
        settings = self.config.environments[request.task.environment]
        if self.function is not run_rollout and not request.evaluation:
            generate = noting_differences(generate, request.sampling)
        context = AgentContext(
            environment=environment,
            settings=settings,
            rollout=settings.apply_to(self.config.rollout),
            chat=self.chat,
            generate=generate,
            sampling=request.sampling,
            stopping=stopping,
            record_routes=self.config.rollout.record_routes and not request.evaluation,
            reward=self._reward_in(environment),
            tokenizer=self.tokenizer,
            evaluation=request.evaluation,
            images=self.images,
        )
        which = RolloutRequest(
            id=f"{request.id}.{sample}",
            group_id=request.id,
            sample=sample,
            task=request.task,
            seed=turn_seed(turn_seed(request.seed, request.id), sample),
            attempt=next(self._attempts),
            begun=begun,
        )
        what = f"rollout.custom_agent: {self.config.rollout.custom_agent}"
        try:
            found = await self.function(context, which)
        except OrhpcError:
            raise
        except (Exception, SystemExit) as error:
            if self.config.rollout.custom_agent is None:
                raise
            raise user_error(what, error) from error
        return found if self.function is run_rollout else checked_rollout(found, which, what)

    @property
    def group_reward(self) -> SlimeReward | None:
        """The reward function, if it takes the rollouts of a whole group."""
        return self.reward if isinstance(self.reward, SlimeReward) and self.reward.takes_group else None

    def _reward_in(
        self, environment: AgentEnvironment
    ) -> Callable[[Rollout], float | Awaitable[float]] | None:
        """The reward function of one rollout."""
        if not isinstance(self.reward, SlimeReward):
            return self.reward
        return zero if self.reward.takes_group else self.reward.of(environment)


def zero(rollout: Rollout) -> float:
    """The reward of a rollout until ``rollout.custom_reward`` has judged its group."""
    return 0.0


def import_transformers(config: Config, model_dir: str) -> None:
    """Import transformers in the process of a worker, without torch if its tokenizers are all that it needs.

    Code of the user or of the model's folder may need torch, and so do processors of images.
    """
    settings = config.rollout
    runs_code = (
        settings.custom_agent is not None
        or settings.custom_reward is not None
        or settings.filter not in GROUP_FILTERS
        or config.model.trust_remote_code
    )
    try:
        reads_images = settings.max_images > 0 and sees_images(_model_config(model_dir))
    except (OSError, ValueError):
        return  # load_agent reports it
    if not runs_code and not reads_images:
        import_without_torch()


def _model_config(model_dir: str) -> dict[str, Any]:
    return json.loads(Path(model_dir, "config.json").read_text(encoding="utf-8"))


def load_agent(config: Config, model_dir: str) -> Agent:
    """Load tokenizer, chat format and the user's functions.

    Args:
        config: of the run.
        model_dir: Hugging Face folder of the policy model.

    Raises:
        ModelError: the folder has no tokenizer, or no chat format and there is no ``rollout.custom_agent``.
        ConfigError: a function named in the config cannot be loaded, or ``rollout.record_routes`` is set
            for a dense model.
    """
    from transformers import AutoTokenizer

    settings, trusted = config.rollout, config.model.trust_remote_code
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trusted)
        model = _model_config(model_dir)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"model.path: {model_dir}: no tokenizer or no config.json: {reason}") from None
    routes = RouteShape.of_config(model)
    if settings.record_routes and routes is None:
        raise ConfigError("rollout.record_routes: the model is dense, it has no expert routes")
    custom, reward = settings.custom_agent, settings.custom_reward
    function: AgentFunction = run_rollout
    if custom is not None:
        function = (
            load_generate(custom, config, model_dir)
            if is_for_slime(custom)
            else load_function(custom, "rollout.custom_agent")
        )
    judge = None
    if reward is not None:
        judge = (
            load_reward(reward, config, model_dir, tokenizer)
            if is_for_slime(reward)
            else load_function(reward, "rollout.custom_reward")
        )
    images = None
    if custom is None and settings.max_images and sees_images(model):
        images = ImageReader.of(model_dir, settings)
        tokenizer.chat_template = processor_template(model_dir) or tokenizer.chat_template
    chat = chat_format(config.model, tokenizer, required=custom is None or is_for_slime(custom))
    if images is not None:
        chat.image_text = images.text
    return Agent(
        config=config,
        chat=chat,
        images=images,
        route_shape=routes,
        vocabulary=vocabulary_of(model),
        function=function,
        reward=judge,
        _attempts=itertools.count(),
        tokenizer=tokenizer,
    )
