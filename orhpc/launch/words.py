"""The command line that launcher, batch script and checks share: ``[CONFIG] [key=value ...]``."""

from __future__ import annotations

from collections.abc import Sequence

from orhpc.errors import ConfigError

DEFAULT_CONFIG = "configs/default.yaml"


def split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """From words to the config's path and the overrides.

    Raises:
        ConfigError: more than one config file.
    """
    files = [w for w in words if "=" not in w]
    if len(files) > 1:
        raise ConfigError(f"one config file at a time, not {' and '.join(files)}")
    return files[0] if files else DEFAULT_CONFIG, [w for w in words if "=" in w]
