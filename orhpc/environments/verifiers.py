"""Verifiers of ``environments.NAME.data``: each judges an answer by its label and returns a reward."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orhpc.errors import ConfigError
from orhpc.process.user_code import user_error

_PROCESSES = 2
"""Processes of a server that compare expressions."""
_LIMIT_S = 5.0
"""For one comparison: some expressions take for ever, in code that no signal interrupts."""


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
    pattern = re.compile(extract)

    async def extracted(answer: str, label: Any, row: Mapping[str, Any]) -> Verdict:
        matches = pattern.findall(answer)
        return await judge(matches[-1], label, row) if matches else Verdict(0.0, "nothing to extract")

    return extracted


def _exact() -> Verifier:
    def plain(value: Any) -> str:
        return " ".join(str(value).split()).casefold()

    async def judge(answer: str, label: Any, row: Mapping[str, Any]) -> Verdict:
        return Verdict(float(plain(answer) == plain(label)))

    return judge


def _regex() -> Verifier:
    async def judge(answer: str, label: Any, row: Mapping[str, Any]) -> Verdict:
        return Verdict(float(re.search(str(label), answer) is not None))

    return judge


def _function(name: str) -> Verifier:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"data.verifier: {name} cannot be loaded: {error}") from None

    async def judge(answer: str, label: Any, row: Mapping[str, Any]) -> Verdict:
        try:
            if inspect.iscoroutinefunction(function):
                reward = await function(answer, label, row)
            else:
                reward = await asyncio.to_thread(function, answer, label, row)
            if not isinstance(reward, (bool, int, float)) or not math.isfinite(reward):
                raise TypeError(f"it returned {reward!r}, not a finite number")
        except Exception as error:
            raise user_error(f"data.verifier: {name}", error) from error
        return Verdict(float(reward))

    return judge


def _math() -> Verifier:
    try:
        import math_verify  # noqa: F401 - only to see that it is installed
        from pebble import ProcessExpired
    except ImportError:
        raise ConfigError(
            "data.verifier: math needs the packages math-verify and pebble: pip install 'orhpc[data]'"
        ) from None

    async def judge(answer: str, label: Any, row: Mapping[str, Any]) -> Verdict:
        future = _pool().schedule(equal_expressions, args=(answer, str(label)), timeout=_LIMIT_S)
        try:
            return Verdict(float(await asyncio.wrap_future(future)))
        except TimeoutError:
            return Verdict(0.0, f"the comparison took more than {_LIMIT_S:g} s")
        except (ProcessExpired, MemoryError):
            return Verdict(0.0, "the comparison crashed")

    return judge


@functools.cache
def _pool() -> Any:
    """Processes whose work can be killed, which those of the standard library do not allow."""
    import multiprocessing

    from pebble import ProcessPool

    return ProcessPool(max_workers=_PROCESSES, context=multiprocessing.get_context("spawn"))


def equal_expressions(answer: str, label: str) -> bool:
    """Whether the answer's last expression, in ``\\boxed`` or as it stands, equals the label.

    Compared by math-verify (https://github.com/huggingface/Math-Verify), as in the evaluations of the field.

    Raises:
        ValueError: the label is no expression.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    latex = LatexExtractionConfig(boxed_match_priority=0)
    wrapped = label if "$" in label or "\\boxed" in label else f"${label}$"
    # Their own limits need signals; the process has one.
    gold = parse(wrapped, [latex, ExprExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        raise ValueError(f"the label {label[:80]!r} is no mathematical expression: use another data.verifier")
    # Several boxes would be taken for a set.
    last = answer[max(0, answer.rfind("\\boxed")) :]
    given = parse(last, [latex, ExprExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]
    return verify(gold, given, timeout_seconds=None)
