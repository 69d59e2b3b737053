"""Mathematical expressions, compared by math-verify; needs ``orhpc[data]``."""

from __future__ import annotations

import re
from collections.abc import Iterator


def prepare() -> None:
    """Import what a comparison needs, which takes seconds."""
    equal("1", "1")


def equal(answer: str, label: str) -> bool:
    """Whether the answer is the label, or its last expression, in ``\\boxed`` or as it stands, equals it.

    Compared by math-verify (https://github.com/huggingface/Math-Verify), as in the evaluations of the field.

    Raises:
        ValueError: the label is no expression.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    latex = LatexExtractionConfig(boxed_match_priority=0)
    is_wrapped = re.search(r"(?<!\\)\$|\\boxed", label)  # an escaped dollar is one of money
    # Their own limits need signals; the process has one.
    gold = parse(label if is_wrapped else f"${label}$", [latex, ExprExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        raise ValueError(f"the label {label[:80]!r} is no mathematical expression: use another data.verifier")
    if answer.split() == label.split():  # outside of a box, math-verify reads no choice ("B") or "Yes"
        return True
    for text in _candidates(answer):
        given = parse(text, [latex, ExprExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]
        if given:
            return verify(gold, given, timeout_seconds=None)
    return False


def _candidates(answer: str) -> Iterator[str]:
    """Parts of an answer that may be its result: from the last box to the first, then all of it."""
    end = len(answer)  # several boxes would be taken for a set
    while (start := answer.rfind("\\boxed", 0, end)) >= 0:
        yield answer[start:end]
        end = start
    yield answer
