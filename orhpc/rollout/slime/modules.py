"""Modules under slime's and miles's names, for functions that import from there.

They hold what slime's documentation uses in a generate or reward function: ``Sample``, ``post``,
``GenerateState`` and ``generate``.  If slime is installed, its other modules remain importable.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import types
from typing import Any
from urllib.parse import urlsplit

from orhpc.errors import UserCodeError
from orhpc.rollout.slime.arguments import ENGINE_HOST, Arguments
from orhpc.rollout.slime.calls import Calls
from orhpc.rollout.slime.sample import Sample

_PACKAGES = ("slime", "miles")
_TIMEOUT_S = 600.0


class GenerateState:
    """The tokenizer and sampling parameters; ``slime.rollout.sglang_rollout.GenerateState``."""

    def __init__(self, args: Arguments) -> None:
        calls = Calls.current()
        self.args = args
        self.tokenizer = calls.context.tokenizer
        self.processor = None
        self.semaphore = asyncio.Semaphore(calls.context.rollout.max_concurrent)
        self.sampling_params = sampling_params(calls)
        self.aborted = calls.context.stopping()


def sampling_params(calls: Calls) -> dict[str, Any]:
    """Sampling parameters under SGLang's names."""
    sampling = calls.context.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


async def post(url: str, payload: Any, max_retries: int = 0, headers: Any = None, **_: Any) -> Any:
    """Ask the run's engines (``args.sglang_router_ip``, ``/generate``), or post JSON to another server."""
    parts = urlsplit(url)
    if parts.hostname != ENGINE_HOST:
        return await _post(url, payload, headers)
    if parts.path != "/generate":
        raise UserCodeError(f"{Calls.current().name}: engines answer /generate only, not {parts.path}")
    return await Calls.current().generate(payload)


async def _post(url: str, payload: Any, headers: Any) -> Any:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, json=payload, headers=headers) as response,
    ):
        response.raise_for_status()
        return await response.json(content_type=None)


async def generate(args: Arguments, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Sample one turn after the prompt; ``slime.rollout.sglang_rollout.generate``."""
    calls = Calls.current()
    if not sample.tokens:
        assert isinstance(sample.prompt, str)
        sample.tokens = calls.texts.get(sample.prompt) or calls.context.tokenizer.encode(
            sample.prompt, add_special_tokens=False
        )
    output = await calls.generate({"input_ids": sample.tokens, "sampling_params": sampling_params})
    logprobs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, _ in logprobs],
        log_probs=[logprob for logprob, _, _ in logprobs],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


_CONTENTS: dict[str, dict[str, Any]] = {
    "utils": {},
    "rollout": {},
    "utils.types": {"Sample": Sample},
    "utils.http_utils": {"post": post},
    "rollout.sglang_rollout": {"GenerateState": GenerateState, "generate": generate},
}


def install() -> None:
    """Make the modules importable in this process; a second call changes nothing."""
    for package in _PACKAGES:
        if isinstance(sys.modules.get(package), _Module):
            continue
        names = [package, *(f"{package}.{name}" for name in _CONTENTS)]
        folders = {name: _folder(name) for name in (package, f"{package}.utils", f"{package}.rollout")}
        for name in names:
            module = _Module(name)
            if name in folders:
                module.__path__ = folders[name]
            vars(module).update(_CONTENTS.get(name.partition(".")[2], {}))
            sys.modules[name] = module
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)


class _Module(types.ModuleType):
    """A module made here."""


def _folder(name: str) -> list[str]:
    """Folders of an installed package; found without importing it."""
    package, _, rest = name.partition(".")
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [f"{folder}/{rest}" if rest else folder for folder in folders]
