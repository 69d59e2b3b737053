"""The tokens of a rollout as text, each with what engine and trainer computed for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orhpc.config.files import load_config
from orhpc.errors import OrhpcError
from orhpc.launch.model import model_folder
from orhpc.rundir import RunDir
from orhpc.rundir.trained import TrainedRollout
from orhpc.types import Float32Array, Rollout


class TokenTexts:
    """Decodes tokens one by one with the tokenizer of a model folder."""

    def __init__(self, folder: Path | None, problem: str = "") -> None:
        """``folder``: has ``tokenizer.json``; None: there is none, because of ``problem``."""
        self.problem = problem
        self._tokenizer: Any = None
        if folder is None:
            return
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises Exception itself
            self.problem = f"{path}: {' '.join(str(error).split())[:200]}"

    @classmethod
    def of(cls, run: RunDir) -> TokenTexts:
        """With the tokenizer of the run's model; without one, messages can still be read."""
        try:
            return cls(model_folder(load_config(run.config), run))
        except OrhpcError as error:
            return cls(None, str(error))

    def __bool__(self) -> bool:
        return self._tokenizer is not None

    def decode(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token.

        Tokens that are parts of one character have no text but the last, which has the character.
        """
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) or "" for token in tokens]


def segments(rollout: Rollout, trained: TrainedRollout | None, texts: TokenTexts) -> list[dict[str, Any]]:
    """Split a rollout into stretches that the policy sampled and stretches that it did not.

    Returns:
        ``{"text", "count"}`` for context, and ``{"tokens"}`` for sampled tokens, each ``[text, id, engine's
        log-probability, trainer's or None, policy version]``, and with a critic its advantage and value;
        empty without a tokenizer.
    """
    if not texts:
        return []
    ids = rollout.tokens_T.tolist()
    pieces = texts.decode(ids)
    changes = np.flatnonzero(np.diff(rollout.loss_mask_T.astype(np.int8))) + 1
    bounds = [0, *changes.tolist(), len(ids)]
    found: list[dict[str, Any]] = []
    for start, end in itertools.pairwise(bounds):
        if start == end:
            continue
        if not rollout.loss_mask_T[start]:
            found.append({"text": "".join(pieces[start:end]), "count": end - start})
            continue
        engine = _numbers(rollout.logprobs_T[start:end])
        trainer: list[Any] = [None] * (end - start)
        if trained is not None:
            trainer = _numbers(trained.logprobs_T[start:end])
        versions = rollout.versions_T[start:end].tolist()
        columns: list[list[Any]] = [pieces[start:end], ids[start:end], engine, trainer, versions]
        of_critic = () if trained is None else (trained.advantages_T, trained.values_T)
        columns += [_numbers(t[start:end]) for t in of_critic if t is not None]
        found.append({"tokens": [list(token) for token in zip(*columns, strict=True)]})
    return found


def _numbers(values_T: Float32Array) -> list[Any]:
    """The values, rounded for a small page; None for NaN and infinity, which JSON lacks."""
    rounded_T = values_T.astype(np.float64).round(5)
    if np.isfinite(rounded_T).all():
        return rounded_T.tolist()
    return [value if np.isfinite(value) else None for value in rounded_T.tolist()]
