"""A run's agent, made from its config and its model folder."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from orhpc.config import Config
from orhpc.errors import ConfigError, ModelError, UserCodeError
from orhpc.rollout.agent import AgentContext, run_rollout
from orhpc.rollout.loaded_agent import load_agent
from orhpc.rollout.transcript import RolloutRequest
from orhpc.types import GroupRequest, Rollout, Sampling, Task
from tests.scripted import CHATML, Policy, Room, tokenizer


def config_of(**rollout: Any) -> Config:
    return Config.model_validate(
        {
            "environments": {"room": {"url": "http://127.0.0.1:1", "nonterminal_reward": 0.5}},
            "rollout": {"max_response_tokens": 50, **rollout},
        }
    )


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    tokenizer(CHATML).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    return str(tmp_path)


async def always_four(rollout: Rollout) -> float:
    """A reward function, named in a config."""
    return 4.0


async def own_agent(context: Any, request: Any) -> Rollout:
    """An agent function, named in a config."""
    rollout = await run_rollout(context, request)
    rollout.error = "made by own_agent"
    return rollout


def group(seed: int = 5) -> GroupRequest:
    return GroupRequest(9, Task("room", "train", 0), 2, Sampling(max_new_tokens=50), seed)


def test_each_sample_of_a_group_has_its_own_seed_in_every_attempt(model_dir: str) -> None:
    agent = load_agent(config_of(), model_dir)
    policy = Policy(agent.chat, ["One."] * 3)

    async def three() -> list[Rollout]:
        rooms = {"environment": Room(answers={"add": []}), "generate": policy}
        return [await agent.run(group(), sample, **rooms) for sample in (0, 1, 0)]

    first, second, again = asyncio.run(three())
    assert (first.id, second.id, again.id) == ("9.0", "9.1", "9.0")
    assert first.seed == again.seed != second.seed
    assert policy.samplings[0].seed == policy.samplings[2].seed != policy.samplings[1].seed
    assert len(set(policy.rids)) == 3
    assert first.reward == 0.5


def test_the_limits_of_an_environment_override_those_of_the_run(model_dir: str) -> None:
    config = config_of()
    own = {"max_total_tokens": 900, "max_response_tokens": 30, "system_prompt_template": "Be brief."}
    room = config.environments["room"].model_copy(update=own)
    config = config.model_copy(update={"environments": {"room": room}})
    agent = load_agent(config, model_dir)
    policy = Policy(agent.chat, ["One."])
    running = agent.run(group(), 0, environment=Room(answers={"add": []}), generate=policy)
    asyncio.run(running)  # type: ignore[arg-type]
    assert "Be brief." in agent.chat.codec.decode(policy.prompts[0])
    assert room.apply_to(config.rollout).max_total_tokens == 900
    assert room.apply_to(config.rollout).n_samples == config.rollout.n_samples


def test_custom_functions_are_called(model_dir: str) -> None:
    config = config_of(custom_reward=f"{__name__}:always_four", custom_agent=f"{__name__}:own_agent")
    agent = load_agent(config, model_dir)
    running = agent.run(
        group(), 0, environment=Room(answers={"add": []}), generate=Policy(agent.chat, ["One."])
    )
    rollout = asyncio.run(running)  # type: ignore[arg-type]
    assert (rollout.reward, rollout.error) == (4.0, "made by own_agent")


async def leaving_agent(context: AgentContext, request: RolloutRequest) -> Rollout:
    sys.exit("no judge")


def test_an_agent_that_exits_is_an_error_of_the_user(model_dir: str) -> None:
    agent = load_agent(config_of(custom_agent=f"{__name__}:leaving_agent"), model_dir)
    room, policy = Room(answers={"add": []}), Policy(agent.chat, ["One."])
    with pytest.raises(UserCodeError, match=r"leaving_agent raised SystemExit: no judge"):
        asyncio.run(agent.run(group(), 0, environment=room, generate=policy))  # type: ignore[arg-type]


def test_a_folder_without_a_tokenizer_gives_a_one_line_error(tmp_path: Path, model_dir: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"model\.path") as caught:
        load_agent(config_of(), str(empty))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="dense"):
        load_agent(config_of(record_routes=True), model_dir)
    with pytest.raises(ConfigError, match=r"rollout\.custom_agent"):
        load_agent(config_of(custom_agent="nothing"), model_dir)
