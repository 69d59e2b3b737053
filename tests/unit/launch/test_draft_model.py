"""A draft model in a local folder is checked before the queue, and mounted in a container."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.config.files import load_config
from orhpc.errors import ConfigError, ModelError
from orhpc.launch import model
from orhpc.launch.checks import checklist
from orhpc.models import shape_of
from orhpc.plan.run_plan import RunPlan, make_plan
from tests.model_configs import REAL, TINY
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


def planned(own: Path, *words: str, tp: int = 1) -> RunPlan:
    """The plan of this model with further settings, on engines of ``tp`` GPUs."""
    every = [f"model.path={own}", f"placement.devices_per_node={tp}", f"engine.tp={tp}", *words]
    return make_plan(load_config("gpu-smollm2.yaml", every), 80)


@pytest.mark.parametrize("where", ["speculative", "extra"])
def test_the_plan_counts_the_weights_of_a_draft_model(where: str, tmp_path: Path) -> None:
    own = write_model_folder(tmp_path / "own", REAL["Qwen3-8B"][0])
    draft = write_model_folder(tmp_path / "draft", REAL["Qwen3-0.6B"][0])
    words = {
        "speculative": [
            f"engine.speculative={json.dumps({'algorithm': 'STANDALONE', 'draft_model': str(draft)})}"
        ],
        "extra": [
            "engine.extra.speculative_algorithm=STANDALONE",
            f"engine.extra.speculative_draft_model_path={draft}",
        ],
    }[where]
    for tp in (1, 2):
        without, run = planned(own, tp=tp), planned(own, *words, tp=tp)
        more = run.engine_weights - without.engine_weights
        assert more == run.drafting_weights == 2 * shape_of(REAL["Qwen3-0.6B"][0]).parameters // tp
        assert run.kv_tokens is not None and without.kv_tokens is not None
        assert (without.kv_tokens - run.kv_tokens) * run.kv_token == pytest.approx(more, abs=run.kv_token)


def test_the_size_of_a_draft_model_is_that_of_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files may lack what it shares with the policy, and its family may be unknown here."""
    own, draft = write_model_folder(tmp_path / "own", TINY["llama"]), tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text('{"model_type": "unknown"}')
    words = [
        f"model.path={own}", "engine.extra.speculative_algorithm=EAGLE3",
        f"engine.extra.speculative_draft_model_path={draft}",
    ]  # fmt: skip
    assert main(["plan", "gpu-smollm2.yaml", *words]) == 0
    assert f"without the draft model {draft}, which cannot be read here" in capsys.readouterr().out
    header = json.dumps({"fc.weight": {"dtype": "BF16", "shape": [3, 1 << 30], "data_offsets": [0, 0]}})
    (draft / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert main(["plan", "gpu-smollm2.yaml", *words]) == 0
    assert "of which 6.00 draft tokens" in capsys.readouterr().out


def test_only_what_drafts_with_the_model_s_own_layers_holds_them(tmp_path: Path) -> None:
    own = write_model_folder(tmp_path, REAL["GLM-4.5-Air"][0])
    layers = shape_of(REAL["GLM-4.5-Air"][0]).mtp_parameters
    assert layers > 0
    for algorithm, held in (("NEXTN", layers), ("NGRAM", 0)):
        named = planned(own, f"engine.speculative={json.dumps({'algorithm': algorithm})}")
        passed_on = planned(own, f"engine.extra.speculative_algorithm={algorithm}")
        assert named.drafting_weights == passed_on.drafting_weights == 2 * held
