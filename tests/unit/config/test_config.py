"""Configs: defaults, merging, overrides, and one-line error messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.config import Config, EnvironmentSettings
from orhpc.config.files import changes_on_resume, dump_config, load_config, validate
from orhpc.config.reference import reference
from orhpc.errors import ConfigError
from tests.cpu_time import run_within

ROOT = Path(__file__).parents[3]
ENVIRONMENT = "environments:\n  org/env: {serve: letters}\n"


def write(tmp_path: Path, text: str, name: str = "c.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_match_common_training_examples() -> None:
    """The defaults are those of published training examples."""
    c = Config.model_construct()
    assert c.model.path == "Qwen/Qwen3-4B"
    assert (c.train.lr, c.train.weight_decay, c.train.lr_schedule) == (1e-5, 0.0, "constant")
    assert (c.train.adam_beta1, c.train.adam_beta2, c.train.adam_eps) == (0.9, 0.999, 1e-8)
    assert (c.rollout.n_samples, c.rollout.batch_size, c.train.global_batch_size) == (16, 32, 512)
    assert (c.rollout.max_response_tokens, c.train.max_tokens_per_gpu) == (4096, 8192)
    assert (c.rollout.temperature, c.algorithm.eps_clip, c.train.steps) == (1.0, 0.2, 3000)
    assert (c.engine.memory_fraction, c.engine.tp, c.placement.devices_per_node) == (0.7, 1, 4)
    assert (c.placement.mode, c.train.backend, c.checkpoint.save_interval) == ("colocated", "fsdp", 10)
    assert c.placement.device == "cuda"


@pytest.mark.parametrize(
    ("value", "shown"), [("off", "False"), ("12", "12"), ("1e3.5", None), ('"off"', None)]
)
def test_a_text_that_yaml_reads_otherwise_needs_quotes(tmp_path: Path, value: str, shown: str | None) -> None:
    if shown is None:
        assert load_config(write(tmp_path, ENVIRONMENT), [f"run.name={value}"]).run.name == value.strip('"')
        return
    message = refusal(tmp_path, ENVIRONMENT, f"run.name={value}")
    assert message.endswith(f", not {shown}, as YAML reads it: write the text in quotes")


def test_base_yaml_matches_the_schema() -> None:
    """It lists every setting with default and description, including those of an environment."""
    text = (ROOT / "configs/base.yaml").read_text()
    assert text == reference(), "python -m orhpc.config.reference > configs/base.yaml"
    assert yaml.safe_load(text) == Config.model_construct(environments={}).model_dump(mode="json")
    example = [line[1:] for line in text.splitlines() if line.startswith("#  ")]
    shown = yaml.safe_load("\n".join(example))["Organisation/Name"]
    assert shown == EnvironmentSettings().model_dump(mode="json")


@pytest.mark.parametrize(
    "path", sorted(p.name for p in (ROOT / "configs").glob("*.yaml") if p.name != "base.yaml")
)
def test_every_config_is_valid_and_equal_after_a_round_trip(path: str) -> None:
    config = load_config(ROOT / "configs" / path)
    assert config.run.name == Path(path).stem
    assert validate(yaml.safe_load(dump_config(config)), "dump") == config


def test_extends_merges_by_key_and_null_removes_an_environment(tmp_path: Path) -> None:
    write(tmp_path, ENVIRONMENT + "train: {lr: 1e-3, steps: 5}", "base.yaml")
    text = "extends: base.yaml\ntrain: {steps: 7}\nenvironments: {org/env: null, b/c: {serve: x}}"
    config = load_config(write(tmp_path, text))
    assert (config.train.lr, config.train.steps) == (1e-3, 7)
    assert list(config.environments) == ["b/c"]


def test_overrides_reach_environments_with_dots_in_their_names(tmp_path: Path) -> None:
    path = write(tmp_path, "environments:\n  org/env.v2: {serve: x}\n")
    config = load_config(path, ["environments.org/env.v2.max_turns=3", "train.lr=2e-6", "run.name=other"])
    assert config.environments["org/env.v2"].max_turns == 3
    assert (config.train.lr, config.run.name) == (2e-6, "other")


ONE_EACH = ["rollout.n_samples=1", "rollout.batch_size=512"]
OWN = "engine.sync_own_experts=true"
EP = ("engine.tp=2", "engine.ep=2")
ROUTES = "rollout.record_routes=true"
SPLIT = ("placement.mode=split", "placement.devices_per_node=2", "placement.trainer_devices=1")


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (ENVIRONMENT + "train: {lrr: 1}", [], "train.lrr: unknown setting; did you mean 'lr'?"),
        (ENVIRONMENT + "train: {n_samples: 1}", [], "did you mean 'rollout.n_samples'?"),
        (
            "environments:\n  a/b: {srve: x}",
            [],
            "environments.a/b.srve: unknown setting; did you mean 'serve'?",
        ),
        (ENVIRONMENT + "train: {lr: fast}", [], "train.lr: "),
        (ENVIRONMENT + "train: {lr: .nan}", [], "train.lr: "),
        (ENVIRONMENT + "train: {steps: 0}", [], "train.steps: 0 evaluates and trains nothing; it needs"),
        (ENVIRONMENT + "train: {steps: -1}", [], "train.steps: "),
        (ENVIRONMENT, ["environments.org/env.splits=[]"], "org/env: trains nothing (splits, weight), and"),
        (
            "environments: {a/b: {data: {path: x.jsonl}}, a_b: {data: {path: y.jsonl}}, c: {serve: letters}}",
            [],
            "environments.a_b: the tasks of a/b have the same folder; rename one of them",
        ),
        (ENVIRONMENT, ["environments.org/env.max_total_tokens=40000"], "is above rollout.max_total_tokens"),
        (ENVIRONMENT, ["environments.org/env.max_total_tokens=9"], "max_response_tokens must be below"),
        (ENVIRONMENT, ["environments.org/env.weight=-1"], "environments.org/env.weight"),
        (
            ENVIRONMENT,
            ["environments.org/env.weight=0", "evaluation.splits={org/env: [test]}", "evaluation.interval=1"],
            "all are for evaluation only",
        ),
        (ENVIRONMENT + "a: 1\na: 2", [], "'a' appears twice"),
        (ENVIRONMENT, ["rollout.batch_size=3"], "golden rule"),
        (ENVIRONMENT, ONE_EACH, "rollout.n_samples: 1 leaves a rollout no others of its group"),
        (ENVIRONMENT, [*ONE_EACH, "algorithm.advantage=leave_one_out"], "algorithm.advantage: leave_one_out"),
        (ENVIRONMENT, [*ONE_EACH, "algorithm.advantage=group_then_batch"], "batch and ppo need no groups"),
        (ENVIRONMENT, ["environments.org/env.n_samples=1"], "environments.org/env.n_samples: 1 leaves"),
        (
            ENVIRONMENT,
            [*ONE_EACH, "algorithm.advantage=ppo", "rollout.filter=equal_rewards"],
            "rollout.n_samples: 1 makes all rewards of a group equal, so rollout.filter would drop every",
        ),
        (
            ENVIRONMENT,
            ["algorithm.overlong.buffer_tokens=9", "algorithm.advantage=mine:function"],
            "algorithm: overlong: has settings, but advantage is the function mine:function",
        ),
        (
            ENVIRONMENT,
            ["algorithm.overlong.buffer_tokens=9", "algorithm.overlong.max_tokens=8"],
            "algorithm.overlong.buffer_tokens: 9 is above the 8 of algorithm.overlong.max_tokens",
        ),
        (
            ENVIRONMENT,
            ["algorithm.overlong.buffer_tokens=9", "environments.org/env.max_response_tokens=8"],
            "buffer_tokens: 9 is above the 8 of max_response_tokens of environment 'org/env'",
        ),
        (ENVIRONMENT, ["rollout.top_p=0.9"], "top_p=0.9 is refused for training rollouts"),
        (ENVIRONMENT, ["rollout.top_k=50"], "top_k=50 is refused"),
        (ENVIRONMENT, ["rollout.min_p=0.1"], "min_p=0.1 is refused"),
        (ENVIRONMENT, ["train"], "write section.key=value"),
        (ENVIRONMENT, ["train.lr.x=1"], "train.lr"),
        (ENVIRONMENT, ["run.name='a\nb'"], "is not a name"),
        (ENVIRONMENT, ["run.name=../x"], "is not a name"),
        (ENVIRONMENT, ["placement.mode=split"], "mode: split needs"),
        (ENVIRONMENT, ["engine.tp=3"], "engine.tp"),
        (ENVIRONMENT, ["engine.delta_sync=true"], "delta_sync: needs engines with dedicated devices"),
        (
            ENVIRONMENT,
            ["engine.delta_sync=true", *SPLIT, "model.dtype=float32", "engine.dtype=bfloat16"],
            "engine.dtype: bfloat16 rounds the weights",
        ),
        (ENVIRONMENT, ["engine.delta_sync=true", "engine.sync=disk"], "sync: disk broadcasts nothing"),
        (ENVIRONMENT, [OWN], "sync_own_experts: needs ep > 1"),
        (ENVIRONMENT, [OWN, *EP, "engine.sync=disk"], "sync: disk sends the same to all engine ranks"),
        (
            ENVIRONMENT,
            [OWN, *EP, "engine.extra.enable_eplb=true"],
            "extra.enable_eplb=True gives engine ranks other",
        ),
        (
            ENVIRONMENT,
            [*EP, "engine.direct_loading=true", "engine.extra.enable-eplb=true"],
            "direct_loading: extra.enable_eplb=True moves experts",
        ),
        (
            ENVIRONMENT,
            [*EP, *SPLIT, "engine.delta_sync=true", "engine.extra.elastic_ep_backend=mooncake"],
            "delta_sync: extra.elastic_ep_backend=mooncake moves experts",
        ),
        (
            ENVIRONMENT,
            [ROUTES, "engine.speculative={algorithm: ngram}"],
            "record_routes: with speculative decoding by algorithm NGRAM",
        ),
        (
            ENVIRONMENT,
            [ROUTES, "engine.speculative={algorithm: EAGLE, draft_model: x, eagle_topk: 4}"],
            "eagle_topk 4 instead of 1, SGLang returns routes of other tokens",
        ),
        (
            ENVIRONMENT,
            [ROUTES, "engine.extra.speculative-algorithm=NEXTN"],
            "eagle_topk not set instead of 1, SGLang returns",
        ),
        (
            ENVIRONMENT,
            [ROUTES, "engine.extra.enable-hierarchical-cache=true"],
            "with engine.extra.enable_hierarchical_cache=True SGLang returns routes of other tokens",
        ),
        (
            ENVIRONMENT,
            [ROUTES, "engine.extra.moe_a2a_backend=mooncake"],
            "with engine.extra.moe_a2a_backend=mooncake SGLang returns routes",
        ),
        (
            ENVIRONMENT,
            ["engine.extra.hicache-storage-backend=file"],
            "extra.hicache_storage_backend=file keeps entries of the KV cache",
        ),
        (
            ENVIRONMENT,
            [OWN, "engine.tp=4", "engine.ep=2", "engine.extra.moe-a2a-backend=deepep"],
            "SGLang sets ep to tp with the all-to-all backend deepep: set ep: 4",
        ),
        (
            ENVIRONMENT,
            [OWN, *EP, "engine.extra.moe-dp-size=2"],
            "extra.moe_dp_size=2 gives engine ranks other",
        ),
        (ENVIRONMENT, [OWN, *EP, "placement.devices_per_node=2"], "needs train.backend: megatron"),
        (
            ENVIRONMENT,
            [OWN, *EP, "placement.devices_per_node=4", "placement.mode=split", "placement.trainer_devices=2"],
            "needs every engine on the trainers' devices",
        ),
        (ENVIRONMENT, ["secrets.key=hunter2"], "never the value itself"),
        (ENVIRONMENT, ["environments.org/env.url=http://x"], "url, serve and data exclude each other"),
        (
            ENVIRONMENT,
            ["train.gradient_checkpointing=full"],
            "train.gradient_checkpointing: must be true, false or auto, not 'full'",
        ),
        (
            ENVIRONMENT,
            ["train.gradient_checkpointing=null"],
            "train.gradient_checkpointing: must be true, false or auto, not None",
        ),
        (ENVIRONMENT, ["evaluation.interval=3"], "evaluation needs evaluation.splits"),
        ("train: {steps: 3}", [], "environments: at least one is needed"),
        ("[1, 2]", [], "a config is a mapping"),
        ("a: [", [], "not YAML"),
        ("extends: missing.yaml", [], "missing.yaml: no such config file"),
        ("extends: c.yaml", [], "extends itself"),
        ("1: 2", [], "is not text"),
        ("!!python/object/apply:os.system ['true']", [], "not YAML"),
    ],
)
def test_invalid_configs_give_a_one_line_error_that_names_the_field(
    tmp_path: Path, text: str, overrides: list[str], expected: str
) -> None:
    assert expected in refusal(tmp_path, text, *overrides)


@pytest.mark.parametrize(
    "override",
    [
        "engine.speculative={algorithm: STANDALONE, draft_model: x}",
        "engine.extra={speculative_algorithm: nextn, speculative-eagle-topk: 1}",
        "engine.extra={moe-a2a-backend: deepep, enable_hierarchical_cache: false}",
        "engine.speculative=null",
    ],
)
def test_routes_are_recorded_where_sglang_returns_those_of_its_tokens(tmp_path: Path, override: str) -> None:
    (path := tmp_path / "run.yaml").write_text(ENVIRONMENT)
    assert load_config(path, [ROUTES, override]).engine.misplaces_routes is None


@pytest.mark.parametrize(
    "overrides",
    [
        [*ONE_EACH, "algorithm.advantage=batch"],
        [*ONE_EACH, "algorithm.advantage=ppo"],
        [*ONE_EACH, "algorithm.advantage=mine:function"],
        [*ONE_EACH, "train.steps=0", "evaluation.splits={org/env: [test]}"],
        [*ONE_EACH, "train.replay_rollouts=runs/other/rollouts"],
    ],
)
def test_one_rollout_for_each_prompt_is_enough_without_a_comparison(
    tmp_path: Path, overrides: list[str]
) -> None:
    assert load_config(write(tmp_path, ENVIRONMENT), overrides).rollout.n_samples == 1


@pytest.mark.parametrize("override", ["splits=[]", "weight=0"])
def test_an_environment_can_be_used_for_evaluation_only(tmp_path: Path, override: str) -> None:
    path = write(tmp_path, ENVIRONMENT + "  other: {serve: letters}\n")
    evaluated = ["evaluation.splits={other: [test]}", "evaluation.interval=5"]
    config = load_config(path, [f"environments.other.{override}", *evaluated])
    assert [name for name, e in config.environments.items() if e.trains] == ["org/env"]
    alone = load_config(path, [f"environments.other.{override}", "train.steps=0", evaluated[0]])
    assert alone.evaluates_after(0)
    assert not alone.evaluates_after(5)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_give_a_config_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "c.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError):  # an empty environments section is an error too
        load_config(path)


@pytest.mark.parametrize(
    ("precision", "others", "message"),
    [
        ("fp8", ["train.backend=fsdp"], "TransformerEngine: train.backend: megatron"),
        (
            "fp8",
            ["train.backend=megatron", "placement.device=cpu"],
            "TransformerEngine: placement.device: cuda",
        ),
        ("fp8-rollout", ["model.dtype=float32"], "model.dtype is float32"),
        ("fp8-rollout", ["engine.dtype=float32"], "engine.dtype is float32"),
        (
            "fp8-rollout",
            ["placement.device=cpu", "engine.backend=cpu", "engine.tp=1"],
            "engine.backend: sglang",
        ),
        ("bf16", ["engine.power_of_two_scales=true"], "needs precision: fp8-rollout or fp8"),
        ("bf16", ["engine.extra.quantization=fp8"], "extra.quantization is decided by precision"),
        ("fp16", [], "precision: .*'bf16', 'fp8-rollout' or 'fp8'"),
    ],
)
def test_settings_that_contradict_the_precision_are_refused(
    tmp_path: Path, precision: str, others: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, ENVIRONMENT), [f"precision={precision}", *others])


def test_every_precision_has_a_valid_config(tmp_path: Path) -> None:
    path = write(tmp_path, ENVIRONMENT)
    assert load_config(path).precision == "bf16"
    scaled = ["precision=fp8-rollout", "engine.power_of_two_scales=true"]
    assert load_config(path, scaled).engine.power_of_two_scales
    assert load_config(path, ["precision=fp8", "train.backend=megatron"]).precision == "fp8"


def test_a_resumed_run_lists_allowed_changes_and_refuses_others(tmp_path: Path) -> None:
    path = write(tmp_path, ENVIRONMENT)
    before = load_config(path)
    now = load_config(path, ["train.steps=4000", "engine.max_running=8", "placement.nodes=2"])
    assert changes_on_resume(before, before) == []
    assert "train.steps: 3000 -> 4000" in changes_on_resume(before, now)
    patient = load_config(path, ["run.storage_wait_s=5"])
    assert changes_on_resume(before, patient) == ["run.storage_wait_s: 900.0 -> 5.0"]
    with pytest.raises(ConfigError, match=r"run\.seed: the run was started with 0"):
        changes_on_resume(before, load_config(path, ["run.seed=1"]))
    with pytest.raises(ConfigError, match=r"environments\.new\.serve"):
        changes_on_resume(before, load_config(path, ["environments.new.serve=letters"]))


@pytest.mark.slow
def test_an_invalid_config_exits_with_2_and_starts_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, ENVIRONMENT + f"run: {{root: {tmp_path / 'runs'}}}\ntrain: {{lrr: 1}}")
    command = [sys.executable, "-m", "orhpc.launch", "--local", str(path)]
    result = run_within(command, 4, cwd=ROOT)  # about twice
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "train.lrr" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_launch_imports_neither_torch_nor_ray() -> None:
    heavy = "{'torch', 'ray', 'transformers', 'openreward'}"
    code = f"import sys, orhpc.launch.__main__; print({heavy} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.strip() == "set()"


def test_configs_of_the_package_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("configs/tiny.yaml", "tiny.yaml"):
        assert load_config(name).run.name == "tiny"
    (tmp_path / "mine.yaml").write_text("extends: tiny.yaml\ntrain: {steps: 7}\n")
    assert load_config("mine.yaml").train.steps == 7
    # A file of the user takes precedence.
    (tmp_path / "tiny.yaml").write_text("extends: local.yaml\n")
    assert load_config("tiny.yaml").train.steps == 30
    with pytest.raises(ConfigError, match=r"tine\.yaml: no such config file, nor one .* mean tiny\.yaml\?"):
        load_config("tine.yaml")
    with pytest.raises(ConfigError, match=r"/other/tiny\.yaml: no such config file"):
        load_config("other/tiny.yaml")
