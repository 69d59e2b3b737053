"""Text to token ids so that foreign text can never become a control token.

Special tokens, and added tokens that are not marked special (Qwen's ``<tool_call>``, DeepSeek's
``<｜User｜>``), all count as control: the tokenizers' own switch for splitting special tokens
covers only the first kind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from orhpc.errors import ModelError


@dataclass(frozen=True, slots=True)
class Foreign:
    """Text from an environment or a user's task: content, never structure."""

    text: str


class Codec:
    """Encodes and decodes with one tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        added = {str(token): int(index) for token, index in tokenizer.get_added_vocab().items()}
        for token in getattr(tokenizer, "all_special_tokens", ()):
            added.setdefault(str(token), int(tokenizer.convert_tokens_to_ids(token)))
        self.controls = {token: index for token, index in added.items() if token.strip()}
        """Control token to id.  Runs of white space, which some tokenizers add, are plain text."""
        self._control_ids = frozenset(self.controls.values())
        longest_first = sorted(self.controls, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._control = re.compile(f"({alternatives})")
        self._overlapping = re.compile(f"(?={alternatives})")
        # What a template writes around foreign text is the same every time.
        self._constant = lru_cache(maxsize=1024)(lambda text: tuple(self._content(text)))

    def token_id(self, token: str) -> int | None:
        """Id of a control token, None when the vocabulary has none of that name."""
        return self.controls.get(token)

    def encode(self, parts: Sequence[str | Foreign]) -> list[int]:
        """Encode text in which plain strings may hold control tokens and :class:`Foreign` may not.

        Between two control tokens, plain and foreign text is encoded as one, as it would be in the
        whole conversation's text; only where control text turns up outside plain strings is it cut
        apart, after the first character, so that what the model reads is the same text.
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
        cuts: list[int] = []
        if self._control.search(text):
            cuts = [match.start() + 1 for match in self._overlapping.finditer(text)]
        ids = [i for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for i in self._plain(text[a:b])]
        if self._control_ids.isdisjoint(ids):
            return ids
        # A normaliser has made control text out of something else: no two characters may meet.
        ids = [i for character in text for i in self._plain(character)]
        if self._control_ids.isdisjoint(ids):
            return ids
        raise ModelError("the tokenizer turns a single character of plain text into a control token")

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        # A lone surrogate, which JSON can carry, is no text that could be encoded.
        text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens included; broken UTF-8 becomes U+FFFD."""
        if self._backend is not None:
            return self._backend.decode(list(ids), skip_special_tokens=False)
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
