"""``args`` of slime's functions: the run's config under slime's names."""

from __future__ import annotations

import difflib
from typing import Any

from orhpc.config import Config
from orhpc.config.flags import FLAGS

ENGINE_HOST = "engines.orhpc.invalid"
"""Host of ``args.sglang_router_ip``. It exists only for :func:`orhpc.rollout.slime.modules.post`."""
_BY_ATTRIBUTE = {flag.attribute: flag for flag in FLAGS.values()}
_ENGINE = "sglang_"


class Arguments:
    """Read from the table of flags; a feature that orhpc does not have is off (False or None).

    Attributes may be set, as on slime's ``args``; they then hold what was set.
    """

    def __init__(self, config: Config, model_dir: str) -> None:
        """``model_dir``: folder of the policy's tokenizer."""
        self._config = config
        self.hf_checkpoint = self.model = model_dir
        self.sglang_router_ip, self.sglang_router_port = ENGINE_HOST, 80
        self.ci_test = False

    def __getattr__(self, name: str) -> Any:
        """Called for what is not set; AttributeError if slime has no such argument either."""
        if name.startswith("__"):
            raise AttributeError(name)
        flag = _BY_ATTRIBUTE.get(name)
        if flag is not None:
            return flag.off() if flag.read is None else flag.read(self._config)
        if name.startswith(_ENGINE):
            return self._config.engine.option(name.removeprefix(_ENGINE))
        close = difflib.get_close_matches(name, _BY_ATTRIBUTE, n=1)
        hint = f"; did you mean args.{close[0]}?" if close else ""
        raise AttributeError(f"args.{name}: orhpc has no such argument of slime{hint}")
