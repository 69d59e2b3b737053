"""Encodes text such that untrusted text can never become a control token.

Control tokens are special tokens and also added tokens that are not marked special (Qwen's ``<tool_call>``,
DeepSeek's ``<｜User｜>``); the tokenizers' own option for splitting special tokens covers only the former.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from orhpc.errors import ModelError

_SPACE = "\u2581"
"""What SentencePiece writes for a space.  Gemma's runs of spaces are added tokens of it."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """Text from an environment or a task: content without structure."""

    text: str


class Codec:
    """Encodes and decodes with one transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        added = {str(token): int(index) for token, index in tokenizer.get_added_vocab().items()}
        for token in getattr(tokenizer, "all_special_tokens", ()):
            added.setdefault(str(token), int(tokenizer.convert_tokens_to_ids(token)))
        self.controls = {token: i for token, i in added.items() if token.replace(_SPACE, " ").strip()}
        """Control token to id.  White space, which some tokenizers add as tokens, is plain text."""
        self._control_ids = frozenset(self.controls.values())
        longest_first = sorted(self.controls, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._control = re.compile(f"({alternatives})")
        self._overlapping = re.compile(f"(?={alternatives})")
        # Template text around untrusted text repeats, so its encoding is cached.
        self._constant = lru_cache(maxsize=1024)(lambda text: tuple(self._content(text)))

    def token_id(self, token: str) -> int | None:
        """Id of a control token; None if the vocabulary has no such token."""
        return self.controls.get(token)

    def encode(self, parts: Sequence[str | Foreign]) -> list[int]:
        """Encode text; plain strings may contain control tokens, :class:`Foreign` text may not.

        Between two control tokens, plain and foreign text is encoded together, as it would be in the text of
        the whole conversation.  Only control text outside plain strings is split, after its first character,
        so that the model reads the same text.
        """
        ids: list[int] = []
        run, constant = "", True
        for part in parts:
            if isinstance(part, Foreign):
                run, constant = run + part.text, False
                continue
            for position, piece in enumerate(self._control.split(part)):
                if position % 2 == 0:
                    run += piece
                    continue
                ids += self._constant(run) if constant else self._content(run)
                ids.append(self.controls[piece])
                run, constant = "", True
        ids += self._constant(run) if constant else self._content(run)
        return ids

    def _content(self, text: str) -> list[int]:
        if not text:
            return []
        if self._control.search(text) is None:
            ids = self._plain(text)
        else:
            cuts = [match.start() + 1 for match in self._overlapping.finditer(text)]
            ends = zip([0, *cuts], [*cuts, len(text)], strict=True)
            ids = [i for start, end in ends for i in self._plain(text[start:end])]
        if self._control_ids.isdisjoint(ids):
            return ids
        # Normalization has produced control text from other text: encode each character separately.
        ids = [i for character in text for i in self._plain(character)]
        if self._control_ids.isdisjoint(ids):
            return ids
        raise ModelError("the tokenizer turns a single character of plain text into a control token")

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        # A lone surrogate, which JSON allows, cannot be encoded as UTF-8.
        text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        if self._backend is not None:
            # Without offsets it is faster, and unlike `encode` it lets other threads run.
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including control tokens; invalid UTF-8 becomes U+FFFD."""
        if self._backend is not None:
            return self._backend.decode(list(ids), skip_special_tokens=False)
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
