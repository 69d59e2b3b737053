"""Functions written for slime make rollouts and rewards of orhpc: only of tokens that were sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orhpc.config import Config
from orhpc.errors import ConfigError, EngineUnavailable, UserCodeError
from orhpc.rollout.environment.tools import ToolResult
from orhpc.rollout.loaded_agent import Agent, load_agent
from orhpc.rollout.slime.arguments import Arguments
from orhpc.types import FinishReason, Generation, GroupRequest, Rollout, RolloutEnd, Sampling, Task
from tests.scripted import CHATML, Policy, Room, tokenizer

FUNCTIONS = "slime:tests.slime_functions"


class Described(Room):
    """A room that tells its task, as a server does."""

    async def describe_task(self, task: Task) -> dict[str, Any]:
        return {"question": "1+2", "label": "3", "index": task.index}


def agent_of(tmp_path: Path, **rollout: Any) -> Agent:
    tokenizer(CHATML).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    tree = {
        "environments": {"room": {"url": "http://127.0.0.1:1", "nonterminal_reward": -1.0}},
        "rollout": {"max_response_tokens": 50, "max_total_tokens": 2000, **rollout},
    }
    return load_agent(Config.model_validate(tree), str(tmp_path))


def run(agent: Agent, room: Room, lines: list[Any], *, evaluation: bool = False) -> tuple[Rollout, Policy]:
    policy = Policy(agent.chat, lines)
    request = GroupRequest(9, Task("room", "train", 4), 2, Sampling(max_new_tokens=50), 5, evaluation)
    running = agent.run(request, 1, environment=room, generate=policy)
    return asyncio.run(asyncio.wait_for(running, 30)), policy


def sampled(policy: Policy) -> list[int]:
    return [token for output in policy.outputs for token in output]


def test_a_generate_function_of_several_turns_trains_on_exactly_what_was_sampled(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, custom_agent=f"{FUNCTIONS}:generate")
    room = Described("What is 1+2?", terminal=[ToolResult("Right.", reward=0.75, finished=True)])
    rollout, policy = run(agent, room, ["<calc>1+2</calc>", "It is 3."])
    assert (rollout.end, rollout.reward, rollout.error) == (RolloutEnd.TERMINAL, 0.75, None)
    assert room.submitted == ["It is 3."] and room.open == 0
    assert rollout.tokens_T[rollout.loss_mask_T].tolist() == sampled(policy)
    expected = np.array([-0.001 * (i + 1) for i in sampled(policy)], np.float32)
    assert np.array_equal(rollout.logprobs_T[rollout.loss_mask_T], expected)
    second = policy.prompts[1]  # continues with the sampled ids, though the function sent text
    assert second[: len(policy.prompts[0]) + len(policy.outputs[0])] == policy.prompts[0] + policy.outputs[0]
    assert rollout.tokens_T.tolist() == second + policy.outputs[1]
    assert (rollout.versions_T[~rollout.loss_mask_T] == -1).all() and len(rollout.turns) == 2
    assert [m["role"] for m in rollout.messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert "<result>3</result>" in rollout.messages[2]["content"]


def test_a_generation_that_is_cut_off_ends_as_length(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, custom_agent=f"{FUNCTIONS}:generate")
    rollout, _ = run(agent, Described(terminal=[]), [("on and on", FinishReason.LENGTH)])
    assert (rollout.end, rollout.reward) == (RolloutEnd.LENGTH, -1.0)


def test_the_functions_own_reward_and_limits_are_used(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, custom_agent=f"{FUNCTIONS}:one_turn", custom_reward=f"{FUNCTIONS}:reward")
    rollout, policy = run(agent, Described(), ["A long answer that is cut."])
    assert (rollout.reward, rollout.end) == (0.5, RolloutEnd.LENGTH)
    assert policy.samplings[0].max_new_tokens == 5 == rollout.response_tokens


def test_a_reward_function_sees_the_answer_and_the_label(tmp_path: Path) -> None:
    for function in ("generate", None):
        own = {"custom_agent": f"{FUNCTIONS}:{function}"} if function else {}
        agent = agent_of(tmp_path, custom_reward=f"{FUNCTIONS}:reward", **own)
        assert run(agent, Described("What is 1+2?"), ["It is 3."])[0].reward == 1.0
        assert run(agent, Described("What is 1+2?"), ["It is 4."])[0].reward == 0.0
    agent = agent_of(tmp_path, custom_reward=f"{FUNCTIONS}:length")
    rollout, _ = run(agent, Described(), ["One."])
    assert rollout.reward == float(rollout.response_tokens + 16)


def test_a_reward_function_of_a_group_gets_all_its_samples(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, custom_reward="slime-group:tests.slime_functions:best_of_group")
    rollouts = [run(agent, Described(), [text])[0] for text in ("Short.", "Much longer.")]
    function = agent.group_reward
    assert function is not None
    settings = agent.config.environments["room"]
    assert asyncio.run(function.of_group(Described(), rollouts, settings)) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("careless", r"slime:tests\.slime_functions:careless: sample\.tokens\[\d+\] has loss mask 1, but no"),
        ("length", r"takes 2 positional arguments but 3 were given"),
    ],
)
def test_a_function_that_cannot_be_trained_on_is_named(tmp_path: Path, function: str, message: str) -> None:
    agent = agent_of(tmp_path, custom_agent=f"{FUNCTIONS}:{function}")
    with pytest.raises(UserCodeError, match=message):
        run(agent, Described(), ["It is 3."])


def test_a_failure_of_an_engine_counts_though_the_function_caught_it(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, custom_agent=f"{FUNCTIONS}:stubborn")
    with pytest.raises(EngineUnavailable, match="gone"):
        run(agent, Described(), [EngineUnavailable("gone")])


def test_an_aborted_turn_is_continued(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, custom_agent=f"{FUNCTIONS}:generate")
    room = Described(terminal=[ToolResult("Right.", reward=1.0, finished=True)])
    rollout, policy = run(agent, room, [("It ", FinishReason.ABORT, 1), ("is 3.", FinishReason.STOP, 2)])
    assert rollout.tokens_T[rollout.loss_mask_T].tolist() == sampled(policy)
    assert sorted(set(rollout.versions_T.tolist())) == [-1, 1, 2]


class Slow(Policy):
    """Answers after other tasks have run."""

    async def __call__(self, *args: Any, **options: Any) -> Generation:
        await asyncio.sleep(0)
        return await super().__call__(*args, **options)


def test_calls_at_the_same_time_have_their_own_ids_and_seeds(tmp_path: Path) -> None:
    """SGLang refuses a second request with the id of one that is running."""
    agent = agent_of(tmp_path, custom_agent=f"{FUNCTIONS}:two_drafts")
    policy = Slow(agent.chat, ["one", "two"])
    request = GroupRequest(9, Task("room", "train", 4), 2, Sampling(max_new_tokens=50), 5)
    asyncio.run(asyncio.wait_for(agent.run(request, 1, environment=Described(), generate=policy), 30))
    assert len(policy.rids) == len(set(policy.rids)) == 2
    assert len({sampling.seed for sampling in policy.samplings}) == 2


def test_args_show_the_config_under_slimes_names(tmp_path: Path) -> None:
    tree = {
        "environments": {"a": {"serve": "letters"}},
        "rollout": {"n_samples": 4, "batch_size": 8, "custom_reward": "slime-group:a:b"},
        "train": {"global_batch_size": 32},
        "engine": {"extra": {"attention-backend": "fa3"}},
    }
    args = Arguments(Config.model_validate(tree), "folder")
    assert (args.n_samples_per_prompt, args.rollout_batch_size, args.global_batch_size) == (4, 8, 32)
    assert (args.hf_checkpoint, args.group_rm, args.use_opd, args.reward_key) == ("folder", True, False, None)
    assert (args.sglang_attention_backend, args.sglang_speculative_algorithm) == ("fa3", None)
    args.my_own = 3
    assert args.my_own == 3
    with pytest.raises(AttributeError, match=r"did you mean args\.rollout_temperature"):
        _ = args.rollout_temperatur


def test_a_function_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.custom_agent: tests\.slime_functions has no function"):
        agent_of(tmp_path, custom_agent=f"{FUNCTIONS}:nothing")
