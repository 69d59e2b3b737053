"""A run's agent, made from its config and its model folder."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orhpc.config import Config, EnvironmentSettings
from orhpc.errors import ConfigError, ModelError, UserCodeError
from orhpc.rollout import loaded_agent
from orhpc.rollout.agent import AgentContext, run_rollout
from orhpc.rollout.loaded_agent import load_agent
from orhpc.rollout.transcript import RolloutRequest
from orhpc.types import GroupRequest, Rollout, RolloutEnd, Sampling, Task
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


WRONG: dict[str, tuple[dict[str, Any] | None, str]] = {
    "nothing": (None, "returned None, which is not an orhpc.types.Rollout"),
    "of another": ({"id": "9.7"}, "a rollout of 9.7"),
    "a short mask": ({"loss_mask_T": np.zeros(3, np.bool_)}, "whose loss_mask_T has the shape (3,)"),
    "a mask of numbers": ({"loss_mask_T": np.zeros(3, np.int32)}, "whose loss_mask_T is no array"),
    "a list": ({"logprobs_T": [0.0]}, "whose logprobs_T is no array of such numbers: [0.0]"),
    "NaN": ({"reward": float("nan")}, "ended as answered with the reward nan, which is not a finite number"),
    "a text": ({"end": "answered"}, "whose end is 'answered', which is not an orhpc.types.RolloutEnd"),
    "no reward": ({"reward": None}, "ended as answered with the reward None"),
    "a failure with a reward": ({"end": RolloutEnd.FAILED}, "ended as failed and has a reward"),
}


async def wrong_agent(context: Any, request: Any) -> Any:
    """An agent function that returns what the environment's ``nudge`` names in :data:`WRONG`."""
    changes, _ = WRONG[context.settings.nudge]
    rollout = await run_rollout(replace(context, settings=EnvironmentSettings()), request)
    return None if changes is None else replace(rollout, **changes)


async def unlikely_agent(context: Any, request: Any) -> Rollout:
    """An agent function whose rollout has a token with an infinite log-probability."""
    rollout = await run_rollout(context, request)
    rollout.logprobs_T[-1] = -np.inf
    return rollout


async def promptless_agent(context: Any, request: Any) -> Rollout:
    """An agent function that takes the prompt for sampled."""
    rollout = await run_rollout(context, request)
    rollout.loss_mask_T[:] = True
    return rollout


async def cold_agent(context: AgentContext, request: RolloutRequest) -> Rollout:
    """An agent function that samples at a temperature that is not the run's."""
    colder = replace(context.sampling, temperature=0.6)
    return await run_rollout(replace(context, sampling=colder), request)


async def judged_agent(context: AgentContext, request: RolloutRequest) -> Rollout:
    """An agent function that asks for a greedy opinion, which is in no rollout, and samples less."""
    greedy = replace(context.sampling, temperature=0.0)
    await context.generate([1], greedy, rid="opinion", affinity=request.id, routes_start=None)
    brief = replace(context.sampling, max_new_tokens=40, stop_token_ids=(7,))
    return await run_rollout(replace(context, sampling=brief), request)


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


def _answer(model_dir: str, function: str, **room: Any) -> Rollout:
    config = config_of(custom_agent=f"{__name__}:{function}")
    rooms = {"room": config.environments["room"].model_copy(update=room)}
    agent = load_agent(config.model_copy(update={"environments": rooms}), model_dir)
    policy: Any = Policy(agent.chat, ["One."])
    environment: Any = Room(answers={"add": []})
    return asyncio.run(agent.run(group(), 0, environment=environment, generate=policy))


@pytest.mark.parametrize("wrong", WRONG)
def test_what_an_agent_function_must_not_return_is_the_users_error(model_dir: str, wrong: str) -> None:
    with pytest.raises(UserCodeError, match=rf"rollout\.custom_agent: .*{re.escape(WRONG[wrong][1])}"):
        _answer(model_dir, "wrong_agent", nudge=wrong)


def test_tokens_that_an_agent_function_did_not_sample_are_the_users_error(model_dir: str) -> None:
    with pytest.raises(UserCodeError, match="a log-probability that is not finite, of a sampled token"):
        _answer(model_dir, "unlikely_agent")
    with pytest.raises(UserCodeError, match="first token is sampled, without a prompt"):
        _answer(model_dir, "promptless_agent")
    assert _answer(model_dir, "own_agent").error == "made by own_agent"


def test_an_agent_function_cannot_train_on_tokens_of_another_temperature(model_dir: str) -> None:
    with pytest.raises(
        UserCodeError, match=r"0\.6, but rollouts are sampled with 1\.0 \(rollout\.temperature\)"
    ):
        _answer(model_dir, "cold_agent")

    async def answer(name: str, asked: GroupRequest) -> Rollout:
        agent = load_agent(config_of(custom_agent=f"{__name__}:{name}"), model_dir)
        policy: Any = Policy(agent.chat, ["One.", "Two."])
        return await agent.run(asked, 0, environment=Room(answers={"add": []}), generate=policy)  # type: ignore[arg-type]

    # An evaluation is not trained on, and neither is what is not added to the rollout.
    assert asyncio.run(answer("cold_agent", replace(group(), evaluation=True))).turns
    assert asyncio.run(answer("judged_agent", group())).turns


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


@pytest.mark.parametrize(
    ("settings", "lean"),
    [
        ({}, True),
        ({"filter": "equal_rewards"}, True),
        ({"filter": "user.module:keep"}, False),
        ({"custom_reward": "user.module:judge"}, False),
        ({"custom_agent": "user.module:agent"}, False),
    ],
)
def test_transformers_is_imported_whole_for_code_of_the_user(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], lean: bool
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(loaded_agent, "import_without_torch", lambda: calls.append(True))
    loaded_agent.import_transformers(config_of(**settings), model_dir)
    assert calls == [True] * lean


def test_transformers_is_imported_whole_for_a_model_that_sees_and_for_its_code(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(loaded_agent, "import_without_torch", lambda: calls.append(True))
    config = config_of()
    trusted = config.model.model_copy(update={"trust_remote_code": True})
    loaded_agent.import_transformers(config.model_copy(update={"model": trusted}), model_dir)
    Path(model_dir, "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    loaded_agent.import_transformers(config, model_dir)
    Path(model_dir, "config.json").unlink()
    loaded_agent.import_transformers(config, model_dir)  # load_agent reports it
    assert not calls
