"""Scores of reasoning-gym's tasks; needs ``orhpc[gym]``.

Some of its scorers evaluate the answer as Python, so a policy could run code, or give itself a reward.  Here
they read literals and arithmetic only, and the process can be killed while it computes ``9**9**9**9``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
from typing import Any

_EVALUATE = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
"""Modules whose scorers call ``eval`` with the answer."""
_PARSE = ("games.countdown", "games.puzzle24")
"""Modules that have imported ``sympy``'s ``parse_expr``; others call it through ``sympy``."""
_ARITHMETIC = re.compile(r"[\w\s+\-*/^().,]*")
_ATTRIBUTE = re.compile(r"__|\.\s*[^\W\d]")
_NAMES = (
    *("Symbol", "Integer", "Float", "Rational", "Function", "Integral", "pi", "E", "I", "oo", "Max", "Min"),
    *(
        "Abs",
        "sqrt",
        "exp",
        "log",
        "ln",
        "factorial",
        "binomial",
        "erf",
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
    ),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)
"""What an expression may call or name, in addition to its variables."""


def score(task: str, settings: str, entry: dict[str, Any], answer: str) -> float:
    """Return the score of an answer, 0 to 1.

    Args:
        task: name of the dataset.
        settings: of the dataset, as JSON.
        entry: the dataset's entry.
        answer: of the model.

    Raises:
        Exception: what the scorer raises.
    """
    return float(_dataset(task, settings).score_answer(answer=answer, entry=entry))


@functools.lru_cache(maxsize=8)
def _dataset(task: str, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, **json.loads(settings))


@functools.cache
def prepare() -> None:
    """Import reasoning-gym, and have its scorers evaluate nothing."""
    import sympy

    for name in _EVALUATE:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval
    parse = functools.partial(_parsed, sympy.parse_expr)
    sympy.parse_expr = parse
    for name in _PARSE:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["parse_expr"] = parse


def _parsed(parse_expr: Any, text: str, local_dict: dict[str, Any] | None = None) -> Any:
    """As ``sympy.parse_expr``, which evaluates Python code, but for arithmetic only.

    Raises:
        ValueError: the text is more than arithmetic.
    """
    import sympy

    if not _ARITHMETIC.fullmatch(text) or _ATTRIBUTE.search(text):
        raise ValueError("not an arithmetic expression")
    known: dict[str, Any] = {name: getattr(sympy, name) for name in _NAMES}
    return parse_expr(text, local_dict=local_dict, global_dict={**known, "__builtins__": {}})
