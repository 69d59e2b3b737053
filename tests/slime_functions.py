"""Functions as slime's documentation shows them, which know nothing of orhpc."""

from __future__ import annotations

import asyncio
import re

MAX_TURNS = 3


async def generate(args, sample, sampling_params):
    """Calculate with a calculator: text goes to the engine, tokens come back, results have loss mask 0."""
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post
    from slime.utils.types import Sample

    assert not args.partial_rollout, "Partial rollout is not supported for this function."
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, mask, logprobs = "", [], [], []
    for _ in range(MAX_TURNS):
        payload = {
            "text": sample.prompt + response,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        pairs = output["meta_info"]["output_token_logprobs"]
        response += output["text"]
        response_ids += [pair[1] for pair in pairs]
        logprobs += [pair[0] for pair in pairs]
        mask += [1] * len(pairs)
        if output["meta_info"]["finish_reason"]["type"] == "length":
            break
        found = re.search(r"<calc>(\d+)\+(\d+)</calc>", output["text"])
        if found is None:
            break
        result = f"\n<result>{int(found[1]) + int(found[2])}</result>\n"
        result_ids = state.tokenizer(result, add_special_tokens=False)["input_ids"]
        response += result
        response_ids += result_ids
        logprobs += [0.0] * len(result_ids)
        mask += [0] * len(result_ids)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = mask
    sample.rollout_log_probs = logprobs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def one_turn(args, sample, sampling_params):
    """The plain generation of slime, with fewer tokens."""
    from slime.rollout.sglang_rollout import generate

    sample = await generate(args, sample, {**sampling_params, "max_new_tokens": 5})
    sample.reward = 0.5
    return sample


async def two_drafts(args, sample, sampling_params):
    """Asks for two answers at the same time, and keeps the first."""
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post
    from slime.utils.types import Sample

    payload = {"text": sample.prompt, "sampling_params": sampling_params, "return_logprob": True}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output, _ = await asyncio.gather(post(url, payload), post(url, payload))
    pairs = output["meta_info"]["output_token_logprobs"]
    prompt_ids = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = prompt_ids + [pair[1] for pair in pairs]
    sample.response, sample.response_length = output["text"], len(pairs)
    sample.status, sample.reward = Sample.Status.COMPLETED, 0.5
    return sample


async def reward(args, sample, **kwargs):
    """1 if the label is in the answer."""
    assert args.rollout_temperature > 0
    return 1.0 if str(sample.label) in sample.response else 0.0


def length(args, sample):
    return float(sample.response_length + args.n_samples_per_prompt)


async def best_of_group(args, samples, **kwargs):
    """1 for the longest of a group."""
    longest = max(sample.response_length for sample in samples)
    return [float(sample.response_length == longest) for sample in samples]


async def careless(args, sample, sampling_params):
    """Tokenizes the answer again and calls that sampled."""
    from slime.rollout.sglang_rollout import GenerateState, generate

    sample = await generate(args, sample, sampling_params)
    made_up = GenerateState(args).tokenizer("</answer>", add_special_tokens=False)["input_ids"]
    sample.tokens = sample.tokens + made_up
    sample.response_length += len(made_up)
    sample.loss_mask = [1] * sample.response_length
    return sample


async def stubborn(args, sample, sampling_params):
    """Takes every failure for an answer."""
    from slime.rollout.sglang_rollout import generate

    try:
        return await generate(args, sample, sampling_params)
    except Exception:
        sample.reward = 0.0
        sample.status = sample.Status.COMPLETED
        return sample
