"""A draft model in a local folder is checked before the queue, and mounted in a container."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orhpc.config.files import load_config
from orhpc.errors import ConfigError, ModelError
from orhpc.launch import model
from orhpc.launch.checks import checklist
from tests.model_configs import TINY
from tests.model_folder import write_model_folder


def test_a_draft_model_that_is_not_there_is_refused_before_the_queue(tmp_path: Path) -> None:
    own, draft = write_model_folder(tmp_path / "own", TINY["llama"]), tmp_path / "draft"
    words = [
        f"model.path={own}",
        f"engine.speculative={json.dumps({'algorithm': 'EAGLE3', 'draft_model': str(draft)})}",
    ]
    config = load_config("gpu-smollm2.yaml", words)
    check = next(each for each in checklist.of_config(config) if each.name == "model")
    with pytest.raises(ModelError, match=f"^engine.speculative.draft_model: {draft}: no model folder"):
        check.run()
    write_model_folder(draft, TINY["llama"])
    assert "is complete" in check.run()
    assert set(model.where_models_are(config)) == {own, draft}


def test_a_draft_model_is_text() -> None:
    with pytest.raises(ConfigError, match=r"speculative_draft_model_path: 5 is no folder or hub name"):
        load_config("gpu-smollm2.yaml", ["engine.extra.speculative_draft_model_path=5"])
