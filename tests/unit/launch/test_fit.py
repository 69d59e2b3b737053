"""Configs that cannot run are refused before the job is queued, with the nearest setting that would work."""

from __future__ import annotations

import itertools
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.commands.cli import main
from orhpc.commands.plan import lines as plan_lines
from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import EXIT_CONFIG, EXIT_OK, EXIT_PREFLIGHT, ConfigError
from orhpc.launch.checks import fit
from orhpc.models import shape_of
from orhpc.plan import run_plan
from orhpc.plan.run_plan import RunPlan, make_plan
from tests.model_configs import REAL
from tests.model_folder import write_model_folder
from tests.programs import write_program

QWEN_14_HEADS = {
    **REAL["Qwen2.5-7B"][0], "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "num_hidden_layers": 24,
}  # fmt: skip
"""The shape of Qwen2.5-0.5B, the README's example."""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has only the programs that a test creates."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def config_of(folder: Path, content: dict[str, Any], **sections: Any) -> Config:
    write_model_folder(folder / "model", content)
    tree: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "environments": {"e": {"serve": "letters"}},
    }
    return Config.model_validate(tree | sections)


def plan_of(name: str, tmp_path: Path, device_gib: float = 139.8, **sections: Any) -> RunPlan:
    return make_plan(config_of(tmp_path, REAL[name][0], **sections), device_gib)


def test_indivisible_attention_heads_are_refused_with_the_nearest_size(tmp_path: Path) -> None:
    config = config_of(tmp_path, QWEN_14_HEADS, engine={"tp": 4})
    with pytest.raises(ConfigError, match=r"4 does not divide 14 attention heads; engine\.tp=2 would do"):
        fit.check(config)
    assert "fits 80 GiB" in fit.check(config_of(tmp_path, QWEN_14_HEADS, engine={"tp": 2}))


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Mixtral-8x7B", "GLM-4.5", "DeepSeek-V3"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-rollout"])
def test_suggested_sizes_are_accepted(name: str, precision: str, tmp_path: Path) -> None:
    """For every size and division of an engine on two nodes of eight."""
    for tp, ep in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if tp % ep:
            continue
        settings = {"placement": {"nodes": 2, "devices_per_node": 8}, "precision": precision}
        run = plan_of(name, tmp_path, engine={"tp": tp, "ep": ep}, **settings)
        try:
            fit.check_engines(run)
        except ConfigError as error:
            suggested = re.search(r"engine\.tp=(\d+)(?: with engine\.ep=(\d+))? would do", str(error))
            assert suggested is not None
            sizes = {"tp": int(suggested[1]), "ep": int(suggested[2] or ep)}
            fit.check_engines(plan_of(name, tmp_path, engine=sizes, **settings))


def test_both_sizes_are_suggested_where_no_size_goes_with_the_experts_parallelism(tmp_path: Path) -> None:
    six = {"placement": {"devices_per_node": 6}, "engine": {"tp": 6, "ep": 3}}
    with pytest.raises(ConfigError, match=r"32 attention heads; engine\.tp=2 with engine\.ep=2 would do"):
        fit.check_engines(plan_of("Qwen3-30B-A3B", tmp_path, **six))


def test_experts_must_be_divisible_and_fp8_blocks_must_stay_whole(tmp_path: Path) -> None:
    place = {"placement": {"devices_per_node": 8}}
    quantized = {"precision": "fp8-rollout", **place}
    with pytest.raises(ConfigError, match=r"768 across FP8's blocks of 128; engine\.tp=2 would do"):
        fit.check_engines(plan_of("Qwen3-30B-A3B", tmp_path, engine={"tp": 4}, **quantized))
    fit.check_engines(plan_of("Qwen3-30B-A3B", tmp_path, engine={"tp": 4}, **place))
    with pytest.raises(ConfigError, match="ep = 2: the model has no experts"):
        fit.check_engines(plan_of("Llama-3.1-8B", tmp_path, engine={"tp": 4, "ep": 2}, **place))


@pytest.mark.parametrize(
    ("name", "tp", "extra", "problem"),
    [
        ("Qwen3-8B", 8, {}, None),
        ("Llama-3.2-1B", 8, {}, "64 of the keys and values"),
        ("DeepSeek-V3", 32, {}, "576 of the MLP's width"),
        ("DeepSeek-V3", 32, {"moe_dense_tp_size": 1}, None),
        ("DeepSeek-V3", 16, {}, None),
        ("GLM-4.5-Air", 4, {}, "2736 of the MLP's width"),
    ],
)
def test_fp8_blocks_of_dense_layers_and_of_attention_stay_whole(
    name: str, tp: int, extra: dict[str, int], problem: str | None, tmp_path: Path
) -> None:
    """SGLang refuses them at its start (its issue 3345)."""
    place = {"placement": {"nodes": 4, "devices_per_node": 8}}
    engine = {"tp": tp, "ep": tp if name == "DeepSeek-V3" else 1, "extra": extra}
    run = plan_of(name, tmp_path, engine=engine, precision="fp8-rollout", **place)
    if problem is None:
        fit.check_engines(run)
    else:
        with pytest.raises(ConfigError, match=f"FP8's blocks of 128 would be cut: a rank has {problem}"):
            fit.check_engines(run)
    fit.check_engines(plan_of(name, tmp_path, engine=engine, **place))


def test_engine_weights_follow_the_precision(tmp_path: Path) -> None:
    """DeepSeek-V3 is published in FP8: 671 billion weights on eight devices need 78 GiB each, not 156."""
    place = {"placement": {"nodes": 32, "devices_per_node": 8}, "engine": {"tp": 8}}
    half = plan_of("DeepSeek-V3", tmp_path, precision="fp8-rollout", **place).engine_weights
    whole = plan_of("DeepSeek-V3", tmp_path, **place).engine_weights
    assert half / 2**30 == pytest.approx(80, rel=0.04)
    assert whole / 2**30 == pytest.approx(158, rel=0.04)
    small = plan_of("Qwen3-30B-A3B", tmp_path, precision="fp8-rollout", engine={"tp": 4}).engine_weights
    assert small / 2**30 == pytest.approx(7.5, rel=0.05)


def test_every_engine_weight_is_counted_once_over_the_devices(tmp_path: Path) -> None:
    """The sum over the devices is the model's size, for a model without replicated parts."""
    shape = shape_of(REAL["Llama-3.1-8B"][0])
    norms = sum(t.elements for t in shape.tensors() if t.part == "norm")
    for tp in (1, 2, 4):
        run = plan_of("Llama-3.1-8B", tmp_path, engine={"tp": tp})
        assert run.engine_weights * tp == 2 * (shape.parameters + (tp - 1) * norms)


def test_key_value_heads_are_repeated_on_more_ranks_than_heads(tmp_path: Path) -> None:
    shape = shape_of(REAL["Llama-3.1-8B"][0])
    place = {"nodes": 1, "devices_per_node": 16}
    pairs = 2 * len(shape.layers) * shape.hidden * shape.kv_heads * shape.head_dim
    norms = sum(t.elements for t in shape.tensors() if t.part == "norm")
    run = plan_of("Llama-3.1-8B", tmp_path, engine={"tp": 16}, placement=place)
    assert run.engine_weights * 16 == 2 * (shape.parameters + 15 * norms + pairs)


def test_attention_and_embedding_are_whole_on_every_rank_with_data_parallel_attention(tmp_path: Path) -> None:
    """SGLang divides them over an attention group, here one rank, and the head and the experts over all."""
    shape = shape_of(REAL["Qwen3-30B-A3B"][0])
    place = {"nodes": 1, "devices_per_node": 4}
    divided = sum(t.elements * t.copies for t in shape.tensors() if t.part in ("head", "expert"))
    run = plan_of(
        "Qwen3-30B-A3B", tmp_path, engine={"tp": 4, "dp": 4, "trusted_network": True}, placement=place
    )
    assert run.engine_weights == 2 * (shape.parameters - divided + divided // 4)


def test_large_buckets_of_a_weight_sync_are_counted(tmp_path: Path) -> None:
    """A trainer rank holds two on its device; those of the default size are in what is reserved."""
    place = {"placement": {"devices_per_node": 1}}
    run = plan_of("Qwen3-0.6B", tmp_path, **place)
    assert run_plan.large_buckets(run) == 0
    for size, more in ((512, 0), (768, 0.5), (1 << 20, 2 * (2 * run.shape.parameters / 2**30 - 0.5))):
        other = plan_of("Qwen3-0.6B", tmp_path, engine={"sync_bucket_mb": size}, **place)
        assert run_plan.sync_bytes(other) - run_plan.sync_bytes(run) == pytest.approx(more * 2**30, abs=2)
    experts = {"train": {"backend": "megatron"}, "megatron": {"tp": 4, "ep": 4}}
    fit.check_fit(plan_of("Qwen3-30B-A3B", tmp_path, 175.0, **experts))
    large = plan_of("Qwen3-30B-A3B", tmp_path, 175.0, engine={"sync_bucket_mb": 8192}, **experts)
    with pytest.raises(
        ConfigError, match=r"15\.00 GiB more of buckets.*; lower engine\.sync_bucket_mb, raise"
    ):
        fit.check_fit(large)


@pytest.mark.parametrize(
    ("model", "settings", "largest"),
    [
        ("gemma-2-9b", {}, 2 * 256000 * 3584),
        ("Llama-4-Scout", {}, 2 * 16 * 5120 * 2 * 8192),
        ("Qwen3-30B-A3B", {"train": {"backend": "megatron"}}, 2 * 151936 * 2048),
        ("Qwen3-30B-A3B", {}, 2 * 128 * 2048 * 2 * 768),
        ("Qwen3-30B-A3B", {"precision": "fp8-rollout"}, 2 * 151936 * 2048),
        ("Mixtral-8x7B", {"train": {"backend": "megatron"}}, 0),
    ],
)
def test_both_buckets_have_the_size_of_the_largest_parameter(
    model: str, settings: dict[str, Any], largest: int, tmp_path: Path
) -> None:
    for size in (128, 512):
        run = plan_of(model, tmp_path, engine={"sync_bucket_mb": size}, **settings)
        assert run_plan.large_buckets(run) == 2 * max(0, largest - 2**29)


def test_smaller_buckets_are_advised_only_where_they_help(tmp_path: Path) -> None:
    experts = {"train": {"backend": "megatron"}, "megatron": {"tp": 4, "ep": 4}}
    run = plan_of("Qwen3-30B-A3B", tmp_path, **experts)
    too_small = replace(run, device_bytes=run_plan.sync_bytes(run) - 1)
    with pytest.raises(ConfigError, match=r"0\.16 GiB more of buckets.* GiB; raise engine\.tp"):
        fit.check_fit(too_small)


def test_mem_fraction_static_among_sglang_s_own_options_counts(tmp_path: Path) -> None:
    own = plan_of("Qwen3-8B", tmp_path, engine={"extra": {"mem-fraction-static": 0.5}})
    ours = plan_of("Qwen3-8B", tmp_path, engine={"memory_fraction": 0.5})
    assert own.kv_tokens == ours.kv_tokens != plan_of("Qwen3-8B", tmp_path).kv_tokens


@pytest.mark.slow
def test_only_megatron_is_suggested_if_whole_layers_do_not_fit(tmp_path: Path) -> None:
    run = plan_of(
        "DeepSeek-V3", tmp_path, 79.6, placement={"nodes": 32, "devices_per_node": 8}, engine={"tp": 8}
    )
    with pytest.raises(ConfigError) as caught:
        fit.check_fit(run)
    assert "whatever the number of ranks: train.backend=megatron divides them" in str(caught.value)
    assert "lower" not in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "advice"),
    [(10, "train.recompute_layers=null, or a lower"), (36, "a lower"), (100, "a lower"), (None, "a lower")],
)
def test_more_recomputation_is_suggested_only_where_there_is_more(
    tmp_path: Path, layers: int | None, advice: str
) -> None:
    train = {"backend": "fsdp", "recompute_layers": layers, "max_tokens_per_gpu": 200_000}
    run = plan_of("Qwen3-8B", tmp_path, 79.6, train=train)
    with pytest.raises(ConfigError) as caught:
        fit.check_fit(run)
    assert f"not divided by them: {advice}" in str(caught.value)
    shown = [line for line in plan_lines(run) if line.startswith("recomputation")]
    some = ", the first 10 of 36 layers" if layers == 10 else ""
    assert [line.partition(";")[0] for line in shown] == [f"recomputation: full{some}"]


@pytest.mark.parametrize(
    ("devices", "advice"),
    [
        (4, r"train\.gather_once=false would do$"),
        (1, r"train\.gather_once=false; then \d trainer ranks would do"),
    ],
)
def test_less_gathering_is_suggested_first(tmp_path: Path, devices: int, advice: str) -> None:
    train = {"backend": "fsdp", "gather_once": True, "gradient_checkpointing": True}
    place = {"devices_per_node": devices}
    run = plan_of("Qwen3-8B", tmp_path, 79.6, train=train, placement=place, engine={"tp": devices})
    with pytest.raises(ConfigError, match=advice):
        fit.check_fit(run)


def test_an_impossible_layout_is_refused_with_the_nearest_possible_one(tmp_path: Path) -> None:
    place = {"placement": {"nodes": 2, "devices_per_node": 8}, "train": {"backend": "megatron"}}
    with pytest.raises(ConfigError, match="ep = 16 does not divide 8 experts; ") as caught:
        plan_of("Mixtral-8x7B", tmp_path, megatron={"ep": 16}, **place)
    arguments = dict(re.findall(r"megatron\.(\w+)=(\d+)", str(caught.value)))
    assert arguments["ep"] == "8"
    plan_of("Mixtral-8x7B", tmp_path, megatron={k: int(v) for k, v in arguments.items()}, **place)


# --- device memory -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gres", "gib"),
    [
        ("gpu:h100:8(S:0-1)", 79.6),
        ("gpu:nvidia_h200:8", 139.8),
        ("gpu:NVIDIA-H100-80GB-HBM3:4", 79.6),
        ("gpu:gh200:1", 95.0),
        ("gpu:8", None),
        ("gpu:h100:8\ngpu:h200:8", None),
        ("gpu:v100:4", None),
        ("(null)", None),
    ],
)
def test_device_memory_is_derived_from_a_partition_s_gres(
    gres: str, gib: float | None, commands: Path, tmp_path: Path
) -> None:
    write_program(commands, "sinfo", f"printf '{gres}\\n'")
    memory = fit.device_memory(config_of(tmp_path, QWEN_14_HEADS))
    assert (memory.gib, memory.known) == ((gib, True) if gib else (80.0, False))


def test_the_driver_and_the_config_take_precedence_over_slurm(commands: Path, tmp_path: Path) -> None:
    write_program(commands, "sinfo", "echo gpu:h100:8")
    smallest, other = ("NVIDIA H200, 143771, 580.1, 9.0", "NVIDIA H200, 143780, 580.1, 9.0")
    write_program(commands, "nvidia-smi", f"echo '{other}'; echo '{smallest}'")
    assert fit.device_memory(config_of(tmp_path, QWEN_14_HEADS)).gib == pytest.approx(140.4, abs=0.1)
    own = config_of(tmp_path, QWEN_14_HEADS, placement={"device_memory_gib": 24})
    assert fit.device_memory(own) == fit.DeviceMemory(24, "placement.device_memory_gib", known=True)


def test_unknown_devices_are_checked_against_the_largest_device(commands: Path, tmp_path: Path) -> None:
    """A config is refused if and only if it does not fit an H200."""
    config = config_of(tmp_path, REAL["Qwen3-30B-A3B"][0], placement={"nodes": 2}, engine={"tp": 4})
    assert fit.check(config).startswith("fits devices of 140 GiB, not of 80")
    with pytest.raises(ConfigError, match="trainer ranks would do"):
        fit.check(config_of(tmp_path, REAL["Qwen3-30B-A3B"][0], engine={"tp": 4}))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.floats(10, 200), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_config_refused_at_one_memory_size_is_refused_below_it(gib: float, nodes: int) -> None:
    with tempfile.TemporaryDirectory() as where:
        config = config_of(
            Path(where), REAL["Qwen3-30B-A3B"][0], placement={"nodes": nodes}, engine={"tp": 4}
        )

        def fits(at: float) -> bool:
            try:
                fit.check_fit(make_plan(config, at))
            except ConfigError:
                return False
            return True

        assert fits(gib * 1.5) or not fits(gib)


# --- the commands ---------------------------------------------------------------------------------


def test_check_launch_and_plan_refuse_the_same_configs(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_program(commands, "sinfo", "echo gpu:h100:4")
    write_model_folder(tmp_path / "model", REAL["Qwen3-30B-A3B"][0])
    arguments = [f"model.path={tmp_path / 'model'}", "engine.tp=4", f"run.root={tmp_path / 'runs'}"]
    output = {}
    for command in ("plan", "launch", "launch --dry-run", "check"):
        name, *flags = command.split()
        code = main([name, *flags, "default.yaml", *arguments])
        answer = capsys.readouterr()
        assert code == (EXIT_PREFLIGHT if name == "check" else EXIT_CONFIG)
        line = next(x for x in (answer.err or answer.out).splitlines() if "a trainer device needs" in x)
        output[command] = line.split("a trainer device")[1]
    assert len(set(output.values())) == 1
    assert "trainer ranks would do" in output["plan"]
    assert not (tmp_path / "runs").exists()


def test_plan_and_check_accept_sglang_s_options(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model_folder(tmp_path / "model", QWEN_14_HEADS)
    arguments = ["default.yaml", f"model.path={tmp_path / 'model'}", f"run.root={tmp_path}"]
    arguments += ["--sglang-mem-fraction-static", "0.3", "--check-weights"]
    assert main(["plan", *arguments]) == EXIT_OK
    halved = re.search(r"a token, (\d+) tokens", capsys.readouterr().out)
    assert main(["check", *arguments]) == EXIT_OK
    assert main(["plan", *arguments[:3]]) == EXIT_OK
    whole = re.search(r"a token, (\d+) tokens", capsys.readouterr().out)
    assert halved is not None
    assert whole is not None
    assert int(halved[1]) < int(whole[1])


@pytest.mark.parametrize("config", ["default.yaml", "qwen3-30b-a3b.yaml", "gpu-smollm2.yaml", "exact.yaml"])
def test_configs_fit_their_devices(config: str, tmp_path: Path, commands: Path) -> None:
    """Configs without a size in their name are for 80 GB devices."""
    content = {
        **REAL["Qwen3-8B"][0],
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    }
    loaded = load_config(config)
    names = {"Qwen/Qwen3-4B": content, "Qwen/Qwen3-30B-A3B": REAL["Qwen3-30B-A3B"][0]}
    if loaded.model.path not in names:
        assert loaded.model.path == "bundled:smollm2-135m-instruct"
        return
    folder = write_model_folder(tmp_path / "model", names[loaded.model.path])
    run = make_plan(load_config(config, [f"model.path={folder}"]), 79.6)
    fit.check_engines(run)
    fit.check_fit(run)
    assert run_plan.state_bytes(run) > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_rollout_that_does_not_fit_alone_is_refused_with_the_longest_that_does(
    tmp_path: Path, backend: str
) -> None:
    """A lower token budget would not help it: a rollout is never divided over micro-batches."""

    def plan(longest: int, cp: int = 1, ranks: int = 4) -> RunPlan:
        return plan_of(
            "Qwen2.5-7B",
            tmp_path,
            79.6,
            placement={"nodes": ranks // 4},
            rollout={"max_total_tokens": longest, "max_response_tokens": 100},
            train={"backend": backend, "max_tokens_per_gpu": 1024},
            megatron={"cp": cp, "tp": 4 if backend == "megatron" else 1},
            engine={"tp": 4},
        )

    with pytest.raises(ConfigError) as refused:
        fit.check_fit(plan(2_000_000))
    text = str(refused.value)
    found = re.search(r"max_total_tokens=2000000 does not fit even alone, one of (\d+) would", text)
    assert found is not None, text
    longest = int(found[1])
    run = plan(longest)
    room = (run.device_bytes or 0) - run_plan.reserved_bytes(run.config)
    assert run.trainer.total <= room < plan(longest + 100).trainer.total
    if backend == "megatron":
        named = re.search(r"megatron\.cp=(\d+) with (\d+) trainer ranks", text)
        assert named is not None, text
        cp, ranks = map(int, named.groups())
        assert ranks == 4 * cp
        fit.check_fit(plan(2_000_000, cp, ranks))
        assert plan(2_000_000, cp // 2, ranks).trainer.total > room
    else:
        assert "megatron.cp" in text
