"""Memory by part for any layout, and ``orhpc plan``: its output and its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.commands.cli import main
from orhpc.commands.plan import lines
from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import EXIT_CONFIG, EXIT_OK, EXIT_PREFLIGHT, ConfigError, ModelError
from orhpc.models import shape_of
from orhpc.models.folders import find_model
from orhpc.plan.activations import layer_activations
from orhpc.plan.layout import Layout, check_layout, stages
from orhpc.plan.memory import GIB, Demand, trainer_memory
from orhpc.plan.run_plan import make_plan
from tests.model_configs import REAL, SEEING, TINY
from tests.model_folder import write_model_folder

QWEN = shape_of(REAL["Qwen3-30B-A3B"][0])
LLAMA = shape_of(REAL["Llama-3.1-8B"][0])
DEEPSEEK = shape_of(REAL["DeepSeek-V3"][0])
DEMAND = Demand(tokens=8192, element_bytes=2, recompute="full", logits_rows=1024, reference=False)


@given(st.sampled_from([1 << n for n in range(8)]))
def test_fsdp_shards_sixteen_bytes_per_parameter(ranks: int) -> None:
    """Over numbers of ranks that divide the rows of every tensor."""
    memory = trainer_memory(QWEN, Layout(ranks, sharded=True), DEMAND)
    divided = memory.weights + memory.gradients + memory.optimizer
    assert divided * ranks == 16 * QWEN.parameters
    one = trainer_memory(QWEN, Layout(1, sharded=True), DEMAND)
    assert (memory.gathered, memory.activations, memory.head) == (one.gathered, one.activations, one.head)


def test_one_float32_rank_gathers_nothing_and_a_reference_has_its_own_type() -> None:
    plain = Demand(8192, 4, "full", 1024, reference=True)
    memory = trainer_memory(LLAMA, Layout(1, sharded=True), plain)
    assert memory.gathered == 0
    assert memory.reference == memory.weights == 4 * LLAMA.parameters
    assert memory.kept == 4 * memory.weights
    assert trainer_memory(LLAMA, Layout(2, sharded=True), plain).gathered > 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["Qwen3-30B-A3B", "DeepSeek-V3"]),
)
def test_no_layout_loses_a_weight(tp: int, pp: int, ep: int, etp: int, name: str) -> None:
    """Weights that are not replicated over a group are stored once, so the parts add up to the model."""
    shape = shape_of(REAL[name][0])
    layout = Layout(ranks=tp * pp * ep * etp, tp=tp, pp=pp, ep=ep, etp=etp)
    check_layout(shape, layout, devices_per_node=8)
    total = 0
    for stage, layers in enumerate(stages(shape, pp)):
        held = [t for i in layers for t in shape.layer_tensors(i)]
        outer = shape.outer_tensors()
        held += [outer[0]] if stage == 0 else []
        held += outer[1:] if stage == pp - 1 else []
        for tensor in held:
            assert tensor.elements * tensor.copies % layout.share(tensor) == 0 or tensor.part == "bias"
            total += tensor.elements * tensor.copies if tensor.part != "bias" else 0
    assert total == shape.parameters
    fullest = trainer_memory(shape, layout, DEMAND)
    assert fullest.gradients == 2 * fullest.weights
    whole = trainer_memory(shape, Layout(1), DEMAND)
    assert whole.weights == 2 * shape.parameters
    # The fullest stage holds at least its equal share, and less than the model.
    assert whole.weights / layout.ranks <= fullest.weights <= whole.weights
    # Master weights and moments are 12 bytes per element, divided equally over the ranks.
    assert whole.optimizer / layout.ranks <= fullest.optimizer <= whole.optimizer


def test_tied_embeddings_are_held_by_both_ends_of_a_pipeline() -> None:
    tied = shape_of(REAL["Llama-3.2-1B"][0])
    ends = trainer_memory(tied, Layout(2, pp=2), DEMAND)
    matrix = tied.vocabulary * tied.hidden
    half = 2 * (tied.parameters - matrix - tied.hidden) // 2
    assert ends.weights == half + 2 * matrix + 2 * tied.hidden


@given(st.integers(1, 61))
def test_pipeline_stages_divide_the_layers_evenly(pp: int) -> None:
    cut = stages(DEEPSEEK, pp)
    assert [i for layers in cut for i in layers] == list(range(61))
    assert {len(layers) for layers in cut} <= {61 // pp, 61 // pp + 1}


def test_interleaved_chunks_keep_more_micro_batches() -> None:
    """On the first of p stages 1 + (p - 1) / (p v) times as many (arXiv:2205.05198)."""
    kept = Demand(8192, 2, "none", 1024, False, micro_batches=8)
    once = trainer_memory(LLAMA, Layout(8, pp=4), kept).activations
    for vpp in (2, 4):
        several = trainer_memory(LLAMA, Layout(8, pp=4), replace(kept, vpp=vpp)).activations
        assert several / once == pytest.approx(1 + 3 / (4 * vpp))
    few = replace(kept, vpp=2, micro_batches=4)
    assert trainer_memory(LLAMA, Layout(8, pp=4), few).activations == once  # all four of them


def test_activations_shrink_with_recomputation_context_and_tensor_parallelism() -> None:
    kept = Demand(8192, 2, "none", 1024, False, micro_batches=8)
    recomputed = Demand(8192, 2, "full", 1024, False, micro_batches=8)
    base = trainer_memory(LLAMA, Layout(8), kept).activations
    per_layer = layer_activations(LLAMA, 0, 2, "fused")
    assert base == 8192 * 32 * per_layer
    assert trainer_memory(LLAMA, Layout(8), recomputed).activations == 8192 * (32 * 2 * 4096 + per_layer)
    assert trainer_memory(LLAMA, Layout(8, tp=4), kept).activations * 4 == base
    assert trainer_memory(LLAMA, Layout(8, cp=2), kept).activations * 2 == base
    # The first of four stages holds a quarter of the layers for four micro-batches at once.
    assert trainer_memory(LLAMA, Layout(8, pp=4), kept).activations == base
    assert trainer_memory(LLAMA, Layout(8, pp=4), DEMAND).activations < base / 4


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(12, tp=8), "8 x 1 x 1 = 8 does not divide 12 ranks"),
        (Layout(8, ep=16), "1 x 16 x 1 = 16 does not divide 8 ranks"),
        (Layout(16, tp=16), "tp = 16 does not divide a node's 8 devices"),
        (Layout(98, pp=49), "49 stages are more than 48 layers"),
        (Layout(6, ep=3), "ep = 3 does not divide 128 experts"),
        (Layout(9, etp=9), "etp = 9 does not divide an expert's width 768"),
    ],
)
def test_impossible_layouts_are_refused_with_the_arithmetic(layout: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_layout(QWEN, layout, devices_per_node=8)


def test_layouts_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="the model has no experts"):
        check_layout(LLAMA, Layout(2, ep=2), 8)
    with pytest.raises(ConfigError, match="tp = 3 does not divide 32 attention heads"):
        check_layout(LLAMA, Layout(3, tp=3), 6)
    odd = shape_of({**TINY["llama"], "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8})
    with pytest.raises(ConfigError, match="neither multiple nor divisor of 3 key-value heads"):
        check_layout(odd, Layout(2, tp=2), 8)
    check_layout(QWEN, Layout(8, tp=8), 8)  # 4 key-value heads, each cut in two
    check_layout(DEEPSEEK, Layout(64, tp=8, pp=2, ep=32), 8)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(REAL["Qwen3-30B-A3B"][0]))
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> str:
    path = tmp_path / "run.yaml"
    text = f"model: {{path: {model}}}\nengine: {{tp: 4}}\nenvironments: {{a/b: {{serve: letters}}}}\n"
    path.write_text(text)
    return str(path)


def test_plan_prints_ranks_memory_and_the_limit(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--nodes", "8"]) == EXIT_OK
    out = capsys.readouterr().out
    assert "30.53 B parameters, 3.35 B active" in out
    assert "node 7: ranks 28-31, engines 7" in out
    rows = dict(re.findall(r"^  (\w+) +([\d.]+)", out, re.MULTILINE))
    parts = [
        float(rows[n]) for n in ("gradients", "optimizer", "gathered", "reference", "activations", "head")
    ]
    weights = 4 * QWEN.parameters / 32 / 2**30
    assert sum(parts) + weights == pytest.approx(float(rows["total"]), abs=0.03)
    assert "24576 bytes a token" in out
    assert re.search(r"^limit: KV cache: \d+ rollouts", out, re.MULTILINE)
    assert "\nlead: signaled 300 s before the time limit to commit (the run has made no commit yet)\n" in out
    assert main(["plan", config, "--nodes", "8", "rollout.max_total_tokens=200000"]) == EXIT_CONFIG
    capsys.readouterr()
    assert main(["plan", config, "--nodes", "8", "--spares", "2"]) == EXIT_OK
    with_spares = capsys.readouterr().out
    assert (
        "\nspares    2, which wait for a node to be lost: the job requests 10 nodes, 40 devices\n"
        in with_spares
    )
    assert [line for line in with_spares.splitlines() if not line.startswith("spares ")] == out.splitlines()


def test_plan_refuses_a_config_that_does_not_fit_and_suggests_one_that_does(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config]) == EXIT_CONFIG
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    numbers = [
        float(x)
        for x in re.findall(r"(?:weights|gradients|optimizer|gathered|activations|head) ([\d.]+)", message)
    ]
    total = float(re.search(r"= ([\d.]+) GiB and has 80.00 - 10.00 reserved = 70.00", message)[1])  # type: ignore[index]
    assert sum(numbers) == pytest.approx(total, abs=0.05)
    ranks, nodes = re.search(r"(\d+) trainer ranks would do \((\d+) nodes of 4\)", message).groups()  # type: ignore[union-attr]
    assert main(["plan", config, "--nodes", nodes]) == EXIT_OK
    assert f"{ranks} ranks, fsdp" in capsys.readouterr().out
    assert main(["plan", config, "--nodes", str(int(nodes) - 1)]) == EXIT_CONFIG


def test_plan_says_when_more_ranks_would_not_help(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", config, "--device-memory", "20", "--nodes", "64"]
    assert main(command) == EXIT_CONFIG
    assert "no number of ranks helps" in capsys.readouterr().err
    assert main([*command, "train.gradient_checkpointing=false"]) == EXIT_CONFIG
    assert "train.gradient_checkpointing=true" in capsys.readouterr().err


def test_plan_refuses_a_kv_cache_smaller_than_one_rollout(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, "--nodes", "8", "engine.tp=1"]) == EXIT_CONFIG
    assert "0.7 x 80.00 GiB of a device less 56.87 GiB of weights leaves 0 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["a.yaml", "b.yaml"], ["--device-memory", "2"]])
def test_wrong_arguments_give_a_one_line_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == EXIT_CONFIG
    assert capsys.readouterr().err.count("\n") == 1


def test_models_are_found_in_every_location(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_model(str(model)) == model
    monkeypatch.setenv("ORHPC_CACHE", str(tmp_path / "made"))
    with pytest.raises(ModelError, match=r"python -m orhpc\.models\.bundled tiny"):
        find_model("bundled:tiny")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match=r"orhpc fetch Some/Model$"):
        find_model("Some/Model")
    repository, commit = tmp_path / "hub" / "models--Some--Model", "0" * 40
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    model.rename(repository / "snapshots" / commit)
    assert find_model("Some/Model") == find_model("Some/Model", commit) == repository / "snapshots" / commit
    with pytest.raises(ModelError, match=r"Some/Model \(v2\)"):
        find_model("Some/Model", "v2")
    with pytest.raises(ModelError, match="no such folder, and not a hub name"):
        find_model("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find_model(str(tmp_path / "empty"))


@pytest.mark.slow
def test_plan_imports_neither_torch_nor_ray(config: str) -> None:
    code = (
        "import sys; from orhpc.commands.cli import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    subprocess.run(
        [sys.executable, "-c", code, "plan", config, "--nodes", "8"], check=True, capture_output=True
    )


@pytest.mark.parametrize("nodes", [1, 8])
def test_each_node_copies_its_share_for_a_commit(
    nodes: int, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Master weights and two moments: 12 bytes per parameter over all nodes."""
    arguments = ["plan", config, "--nodes", str(nodes), "placement.devices_per_node=8"]
    assert main([*arguments, "--device-memory", "500"]) == EXIT_OK
    found = re.search(r"being committed: ([\d.]+) GiB", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) == pytest.approx(QWEN.parameters * 12 / nodes / 2**30, rel=0.001)


def test_trainer_and_engine_weights_must_fit_a_shared_device_together(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gradients do not count, because they are released before weights are sent."""
    arguments = ["plan", config, "placement.devices_per_node=4", "train.backend=megatron", "megatron.ep=4"]
    # Experts, most of the model, are divided by four; the rest is replicated on every rank.
    dense = QWEN.parameters - sum(t.elements * t.copies for t in QWEN.tensors() if t.part == "expert")
    held = dense + (QWEN.parameters - dense) / 4
    both = (2 * held + 12 / 4 * QWEN.parameters + 2 * QWEN.parameters) / 2**30 + 10
    assert main([*arguments, "engine.tp=1", "--device-memory", str(both + 1)]) == EXIT_OK
    assert main([*arguments, "engine.tp=2", "--device-memory", str(both - 1)]) == EXIT_OK
    capsys.readouterr()
    assert main([*arguments, "engine.tp=1", "--device-memory", str(both - 1)]) == EXIT_CONFIG
    assert "during weight sync, a shared device holds" in capsys.readouterr().err


@pytest.mark.parametrize("offload", ["auto", "always"])
def test_plan_names_the_memory_fraction_with_which_the_state_stays(
    offload: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["placement.devices_per_node=8", "train.backend=megatron", "megatron.ep=8"]
    settings += ["rollout.max_response_tokens=2048", "rollout.max_total_tokens=4096"]
    settings += [f"placement.offload={offload}"]

    def line(fraction: float) -> str:
        of_engines = f"engine.memory_fraction={fraction}"
        assert main(["plan", config, *settings, of_engines, "--device-memory", "139"]) == EXIT_OK
        shown = capsys.readouterr().out.splitlines()
        return next(line for line in shown if line.startswith("trainer state while engines serve"))

    moves = line(0.9)
    assert "moves to the host" in moves
    if offload == "always":
        assert "memory_fraction" not in moves
        return
    named = re.search(r"stays there with engine.memory_fraction=(0\.\d+), (\d+) tokens", moves)
    assert named is not None
    largest = float(named[1])
    assert line(largest).endswith("stays there")
    assert "moves to the host" in line(largest + 0.01)
    # Both fit by the arithmetic that the page of placements shows.
    run = make_plan(load_config(config, [*settings, f"engine.memory_fraction={largest}"]), 139)
    used = run.trainer.kept + largest * 139 * GIB + (3 + 7 + 4 + 4) * GIB
    assert used <= 139 * GIB < used + 0.01 * 139 * GIB
    assert run.kv_tokens == int(named[2])


def test_host_memory_must_hold_offloaded_and_committed_state(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exact bytes; commits need no further memory when they are written from the offloaded state."""
    arguments = ["plan", config, "--device-memory", "500", "placement.devices_per_node=8"]
    state = QWEN.parameters * 12 / 2**30  # FSDP's float32 shares; a commit copies as much
    wants = {
        "": 2 * state,
        "checkpoint.spare_host_memory=true": state,
        "checkpoint.save_interval=null": state,
    }
    for setting, gib in wants.items():
        more = [setting] if setting else []
        assert main([*arguments, *more, f"placement.host_memory_gib={gib * 1.00001}"]) == EXIT_OK
        capsys.readouterr()
        assert main([*arguments, *more, f"placement.host_memory_gib={gib * 0.99999}"]) == EXIT_PREFLIGHT
        captured = capsys.readouterr()
        assert f"{gib:.2f} GiB in addition to what processes take" in captured.err
        assert ("being committed" in captured.out) == (not setting)
        assert captured.err.strip().endswith(
            "; more nodes" if setting else "spare_host_memory=true, or more nodes"
        )


def test_copies_in_memory_are_counted_on_each_node(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of the node's own state; with several nodes, as much for another node's."""
    arguments = ["plan", config, "--device-memory", "500", "placement.devices_per_node=8"]
    state = QWEN.parameters * 12 / 2**30
    own, peer = "copies of the trainers' state", "copies of another node's trainers"
    for nodes, more, wanted in (
        (1, "checkpoint.keep=2", {own: 2 * state}),
        (2, "checkpoint.keep=2", {own: state, peer: state}),
        (2, "checkpoint.peer_copies=false", {own: state}),
        (2, "checkpoint.keep_in_memory=false", {}),
    ):
        assert main([*arguments, f"placement.nodes={nodes}", more]) == EXIT_OK
        found = re.findall(r"node for (copies of .*), if it is free: ([\d.]+) GiB", capsys.readouterr().out)
        assert {what: float(gib) for what, gib in found} == pytest.approx(wanted, abs=0.01)


@pytest.mark.slow
def test_an_offloaded_optimizer_moves_from_the_device_to_the_host(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the 12 bytes per element is offloaded; in host memory 16, with the gradient's copy."""
    arguments = ["plan", config, "--device-memory", "139", "train.backend=megatron", "megatron.ep=4"]
    split = ["placement.devices_per_node=8", "placement.mode=split", "placement.trainer_devices=4"]
    assert main([*arguments, *split, "megatron.offload_optimizer=0.5"]) == EXIT_OK
    out = capsys.readouterr().out
    found = re.search(r"for the offloaded optimizer, at least: ([\d.]+) GiB", out)
    assert found is not None
    assert float(found[1]) == pytest.approx(QWEN.parameters * 16 / 2 / 2**30, rel=0.01)
    rows = dict(re.findall(r"^  (\w+) +([\d.]+)", out, re.MULTILINE))
    assert float(rows["optimizer"]) == pytest.approx(QWEN.parameters * 12 / 2 / 4 / 2**30, rel=0.02)
    assert main([*arguments, *split]) == EXIT_CONFIG
    assert "offloaded optimizer" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-30b-a3b-node", "while engines have the devices: 406.94 GiB"),
        ("qwen3-30b-a3b-node", "being committed: 341.22 GiB"),
        ("qwen3-30b-a3b-node-of-four", "while engines have the devices: 292.96 GiB"),
        ("qwen3-30b-a3b-node-of-four checkpoint.spare_host_memory=false", "being committed: 227.48 GiB"),
        ("qwen3-30b-a3b-node-split", "for the offloaded optimizer, at least: 227.58 GiB"),
    ],
)
def test_one_node_of_h200_holds_qwen3_30b(
    model: Path, name: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are those in the files' comments."""
    name, *overrides = name.split()
    path = Path(__file__).parents[3] / "configs" / f"{name}.yaml"
    arguments = ["plan", str(path), "--device-memory", "139", f"model.path={model}", *overrides]
    assert main(arguments) == EXIT_OK
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ({"train": {"backend": "megatron"}}, "cannot train a model that sees images; set it to fsdp"),
        ({"precision": "fp8-rollout"}, "is not for models that see images; set it to bf16"),
    ],
)
def test_models_that_see_images_are_for_fsdp_without_fp8(
    tmp_path: Path, override: dict[str, Any], problem: str
) -> None:
    folder = write_model_folder(tmp_path, SEEING["qwen3-vl"])
    content = {"model": {"path": str(folder)}, "environments": {"local": {"serve": "package.module:Class"}}}
    with pytest.raises(ConfigError, match=problem):
        make_plan(Config.model_validate({**content, **override}), 80)
    seen = make_plan(Config.model_validate(content), 80)
    assert "the vision tower computes of images is not counted" in "\n".join(lines(seen))
    assert seen.trainer.weights * 8 >= 4 * seen.shape.parameters
