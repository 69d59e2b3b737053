"""Verifiers of ``environments.NAME.data``: each judges an answer by its label and returns a reward."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from orhpc.errors import ConfigError, UserCodeError
from orhpc.judging import expressions, killable, texts
from orhpc.process.user_code import user_error


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says about an answer."""

    reward: float
    note: str = ""
    """Why the answer could not be judged, for the record; empty: it was."""


Verifier = Callable[[str, Any, Mapping[str, Any]], Awaitable[Verdict]]
"""Called with the answer, the label and the whole row."""


def verifier_of(name: str, extract: str | None) -> Verifier:
    """Return the verifier of this name (``data.verifier``), after the extraction of ``data.extract``.

    Raises:
        ConfigError: a package or the user's function is missing.
    """
    known = {"math": _math, "exact": _exact, "regex": _regex}
    judge = known[name]() if name in known else _function(name)
    if extract is None:
        return judge

    async def extracted(answer: str, label: Any, row: Mapping[str, Any]) -> Verdict:
        try:
            match = await killable.call(texts.last_match, extract, answer, prepare=texts.prepare)
        except killable.NoResult as why:
            return Verdict(0.0, f"data.extract {why}")
        return Verdict(0.0, "nothing to extract") if match is None else await judge(match, label, row)

    return extracted


def _exact() -> Verifier:
    def plain(value: Any) -> str:
        return " ".join(str(value).split()).casefold()

    async def judge(answer: str, label: Any, row: Mapping[str, Any]) -> Verdict:
        return Verdict(float(plain(answer) == plain(label)))

    return judge


def _regex() -> Verifier:
    async def judge(answer: str, label: Any, row: Mapping[str, Any]) -> Verdict:
        try:
            return Verdict(
                float(await killable.call(texts.is_match, str(label), answer, prepare=texts.prepare))
            )
        except killable.NoResult as why:
            return Verdict(0.0, f"the search {why}")

    return judge


def _function(name: str) -> Verifier:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"data.verifier: {name} cannot be loaded: {error}") from None

    what = f"data.verifier: {name}"

    def call(*given: Any) -> Any:
        # Wrapped in the thread: asyncio.to_thread would wait for ever for a StopIteration, as ``next`` raises
        # it where an answer has no match, and a SystemExit would end the server's event loop.
        try:
            return function(*given)
        except (Exception, SystemExit) as error:
            raise user_error(what, error) from error

    async def judge(answer: str, label: Any, row: Mapping[str, Any]) -> Verdict:
        try:
            if inspect.iscoroutinefunction(function):
                reward = await function(answer, label, row)
            else:
                reward = await asyncio.to_thread(call, answer, label, row)
            if inspect.isawaitable(reward):  # of a decorated function, or of an object with ``__call__``
                reward = await reward
            if getattr(reward, "ndim", None) == 0:  # a number of numpy or torch
                reward = reward.item()
            if not isinstance(reward, Real) or not math.isfinite(reward):
                raise TypeError(f"it returned {reward!r}, not a finite number")
        except UserCodeError:
            raise
        except (Exception, SystemExit) as error:
            raise user_error(what, error) from error
        return Verdict(float(reward))

    return judge


def _math() -> Verifier:
    try:
        import math_verify  # noqa: F401 - only to see that it is installed
    except ImportError:
        raise ConfigError(
            "data.verifier: math needs the package math-verify: pip install 'orhpc[data]'"
        ) from None

    async def judge(answer: str, label: Any, row: Mapping[str, Any]) -> Verdict:
        try:
            equal = await killable.call(expressions.equal, answer, str(label), prepare=expressions.prepare)
        except killable.NoResult as why:
            return Verdict(0.0, f"the comparison {why}")
        return Verdict(float(equal))

    return judge
