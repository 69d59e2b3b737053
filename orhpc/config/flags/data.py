"""Conversion of the flags that name files of prompts into environments with ``data``."""

from __future__ import annotations

from typing import Any

from orhpc.config.flags.flag import Given, Settings
from orhpc.errors import ConfigError

TRAINING = "prompts"
"""Name of the environment of ``--prompt-data``."""
_VERIFIERS = {"math": "math", "deepscaler": "math", "dapo": "math"}
"""Their reward types that compare mathematical answers."""


def prompts(given: Given) -> Settings:
    """The environments of ``--prompt-data`` and ``--eval-prompt-data``, which replace those of the config.

    The keys of columns and the reward type apply to all of them.
    """
    training, evaluation = given.text("--prompt-data"), given.texts("--eval-prompt-data")
    if training is None:
        first = next(name for name in given.values if name in NAMES)
        raise ConfigError(f"{first} needs --prompt-data")
    if given.current("environments"):
        raise ConfigError(
            "--prompt-data: the config file has environments; remove them, or leave the flag out"
        )
    if len(evaluation) % 2:
        raise ConfigError("--eval-prompt-data: give pairs, NAME PATH")
    shown: dict[str, dict[str, Any]] = {TRAINING: {"data": _data(given, training, "")}}
    names = evaluation[::2]
    for name, path in zip(names, evaluation[1::2], strict=True):
        if name == TRAINING:
            raise ConfigError(f"--eval-prompt-data: {name} is the name of the training data; choose another")
        if name in shown:
            raise ConfigError(f"--eval-prompt-data: {name} is named twice; give each file its own name")
        shown[name] = {"data": _data(given, path, "eval-"), "splits": []}
    found: dict[str, Any] = {"environments": shown}
    if names:
        found["evaluation.splits"] = {name: ["train"] for name in names}
    return found


def _data(given: Given, path: str, prefix: str) -> dict[str, str]:
    def column(kind: str) -> str | None:
        own = given.text(f"--{prefix}{kind}-key") if prefix else None
        return own or given.text(f"--{kind}-key")

    label, kind = column("label"), given.text("--rm-type")
    if label is None:
        raise ConfigError("--prompt-data needs --label-key, the column of the correct answer")
    if kind is None and given.text("--custom-rm-path") is None:
        raise ConfigError("--prompt-data needs --rm-type math or --custom-rm-path")
    if kind is not None and kind not in _VERIFIERS:
        raise ConfigError(
            f"--rm-type: {kind!r} is not one of {', '.join(_VERIFIERS)}; for others write --custom-rm-path "
            "or environments.NAME.data.verifier=package.module:function"
        )
    # With a reward function of the user the verifier's reward is not used; "exact" needs no package.
    verifier = "exact" if kind is None else _VERIFIERS[kind]
    return {"path": path, "prompt": column("input") or "input", "label": label, "verifier": verifier}


NAMES = (
    *("--prompt-data", "--input-key", "--label-key", "--rm-type"),
    *("--eval-prompt-data", "--eval-input-key", "--eval-label-key"),
)
"""The flags that are converted here."""
