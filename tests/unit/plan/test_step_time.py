"""Predicted step times: against every measured row, and what follows from the arithmetic alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import step_times
from orhpc.config.files import load_config
from orhpc.plan.faster import advice, changed
from orhpc.plan.run_plan import RunPlan, host_parts, make_plan
from orhpc.plan.speeds import CARDS, SPEEDS
from orhpc.plan.step_errors import ERRORS
from orhpc.plan.step_time import predict
from orhpc.plan.sync_time import _exchanged, predict_sync
from orhpc.plan.update_time import micro_batches, predict_update
from orhpc.plan.workload import MEAN_LENGTH, Workload, assumed_workload
from tests.model_configs import REAL

ROOT = Path(__file__).parents[3]
RESULTS = " ".join((ROOT / "benchmarks/RESULTS.md").read_text().split())
TENSOR_PARALLEL = str(ROOT / "benchmarks/qwen3-30b-a3b-tensor-parallel.yaml")
OF_FOUR = ("engine.tp=4", "engine.ep=4", "megatron.ep=4")
ROWS = step_times.rows()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[step_times.Compared]:
    return list(step_times.compare(tmp_path_factory.mktemp("rows")))


def plan(folder: Path, model: str, config: str, *overrides: str, gib: float = 139.8) -> RunPlan:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(REAL[model][0]))
    return make_plan(load_config(config, [f"model.path={folder}", *overrides]), gib)


# --- against measurements -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_errors_that_are_shown_are_those_of_the_measured_rows(
    compared: list[step_times.Compared],
) -> None:
    assert step_times.errors(compared) == ERRORS


@pytest.mark.slow
def test_fitted_rows_are_close_and_every_phase_has_rows_that_were_held_out(
    compared: list[step_times.Compared],
) -> None:
    for each in compared:
        if each.fitted:
            assert abs(each.off) < 0.25, each
    held_out = {each.kind for each in compared if not each.fitted}
    needed = {"rollout, mixture", "rollout, dense", "update, mixture, megatron", "update, dense, megatron"}
    needed |= {"update, dense, fsdp", "sync, mixture", "sync, dense", "step, mixture", "step, dense"}
    assert needed <= held_out
    whole = {each.row["name"]: each.fitted for each in compared if each.phase == "step"}
    parts = {each.row["name"] for each in compared if each.phase in ("rollout", "update") and not each.fitted}
    assert all(fitted == (name not in parts) for name, fitted in whole.items())


def test_the_page_shows_every_row(compared: list[step_times.Compared]) -> None:
    page = (ROOT / "docs/guide/step-times.md").read_text()
    assert step_times.table(compared) in page
    text = " ".join(page.split())

    def close(those: list[step_times.Compared]) -> tuple[int, int]:
        return sum(abs(each.off) <= 0.15 for each in those), len(those)

    held_out = [each for each in compared if not each.fitted]
    whole = close([each for each in held_out if each.phase == "step"])
    syncs = close([each for each in held_out if each.phase == "sync"])
    (near, held), (also, fitted) = close(held_out), close([each for each in compared if each.fitted])
    assert f"Of {whole[1]} whole steps that were held out {whole[0]} are within 15 %" in text
    assert f"of all {held} held-out times {near} are, of the {fitted} fitted ones {also}" in text
    assert f"Syncs are worst ({syncs[0]} of {syncs[1]} held-out ones)" in text
    pairs = step_times.calibrated(compared)
    before, after = (sum(abs(pair[i]) <= 0.15 for pair in pairs) for i in (0, 1))
    assert f"Of {len(pairs)} pairs of rows that were measured on the same machine" in text
    assert f"is within 15 % in {after}, without it in {before}" in text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_row_names_what_results_md_has(row: dict[str, Any]) -> None:
    assert row["source"] in RESULTS
    assert f"`{row['commit']}`" in RESULTS
    assert str(row["date"]) in RESULTS
    assert set(row.get("fitted", [])) <= row["seconds"].keys()


@pytest.mark.parametrize("name", SPEEDS)
def test_a_speed_names_its_source(name: str) -> None:
    speed = SPEEDS[name]
    assert speed.source == "nominal" or speed.source in RESULTS
    assert speed.value > 0
    source = (ROOT / "orhpc/plan").glob("*_time.py")
    assert any(
        re.search(rf'speed\(\s*"{name}"|"{name}" if|else "{name}"|: "{name}"', path.read_text())
        for path in source
    )


@pytest.mark.parametrize(
    ("layers", "settings", "gigabytes"),
    [
        (48, [], 61.06),
        (48, ["precision=fp8-rollout"], 31.17),
        (24, [], 31.15),
        (20, [], 26.17),
        (2, [], 3.74),
    ],
)
def test_the_bytes_of_a_sync_are_those_that_runs_reported(
    tmp_path: Path, layers: int, settings: list[str], gigabytes: float
) -> None:
    content = REAL["Qwen3-30B-A3B"][0] | {"num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(content))
    run = make_plan(load_config(TENSOR_PARALLEL, [f"model.path={tmp_path}", *settings]), 139.8)
    assert predict_sync(run).sent / 1e9 == pytest.approx(gigabytes, abs=0.006)


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    return plan(tmp_path_factory.mktemp("mixture"), "Qwen3-30B-A3B", TENSOR_PARALLEL)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2048), st.floats(10, 4000), st.sampled_from(["h100", "h200"]))
def test_more_or_longer_rollouts_take_longer(
    mixture: RunPlan, rollouts: int, length: float, card: str
) -> None:
    def times(count: int, tokens: float) -> list[float]:
        found = predict(mixture, card, Workload(count, tokens / 10, tokens * 0.9, tokens, assumed=False))
        assert found.seconds is not None
        assert found.update is not None
        parts = found.update
        assert max(parts.host, parts.device + parts.exchange) <= parts.passes
        assert parts.passes <= parts.host + parts.device + parts.exchange
        return [found.seconds, *(phase.seconds or 0.0 for phase in found.phases)]

    one = times(rollouts, length)
    assert one[0] == pytest.approx(sum(one[1:]))
    for more in (times(2 * rollouts, length), times(rollouts, 1.5 * length)):
        assert all(b >= a * 0.999 for a, b in zip(one, more, strict=True))
        assert more[0] > one[0]


def test_micro_batches_fill_the_budget(mixture: RunPlan) -> None:
    train = mixture.config.train
    assert (train.max_tokens_per_gpu, mixture.config.data_ranks) == (32768, 2)
    full = Workload(512, 28, 100, 100)
    assert micro_batches(mixture.config, full) == 1
    assert micro_batches(mixture.config, Workload(1024, 28, 100, 100)) == 2
    longer = Workload(2, 0, 40000, 40000)  # a rollout over the budget has its own micro-batch
    assert micro_batches(mixture.config, longer) == 1


def test_recomputation_costs_a_third_of_the_layers_work(mixture: RunPlan, tmp_path: Path) -> None:
    work = assumed_workload(mixture.config)
    without = plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, "train.gradient_checkpointing=false")
    full, none = (predict_update(run.config, run.shape, CARDS["h200"], work) for run in (mixture, without))
    assert (full.recomputed, none.recomputed) == (1.0, 0.0)
    assert full.host == pytest.approx(none.host * 4 / 3)
    assert none.device * 1.25 < full.device < none.device * 4 / 3


def test_a_sync_on_one_gpu_gathers_nothing_and_broadcasts_nothing(tmp_path: Path) -> None:
    alone = predict_sync(plan(tmp_path, "Qwen3-0.6B", "qwen3-0.6b.yaml", gib=79.6))
    assert (alone.gathered, alone.receivers, alone.broadcast_s) == (0, 0, 0.0)
    assert alone.sent == 2 * 596049920
    assert not alone.nominal


def test_deepseek_on_64_engines(tmp_path: Path) -> None:
    """Rank 0 sends all weights in FP8 once; each rank gathers them in FP8, but for its own part."""
    split = ("placement.mode=split", "placement.trainer_devices=256", "engine.tp=16", "engine.ep=16")
    run = plan(tmp_path, "DeepSeek-V3", "deepseek-v3.yaml", "placement.nodes=160", *split, gib=79.6)
    assert len(run.placement.engines) == 64
    sync = predict_sync(run)
    bits16 = 2 * run.shape.parameters
    assert sync.receivers == 1024
    assert 0.5 * bits16 < sync.sent < 0.51 * bits16
    assert 0.99 * sync.sent < sync.gathered < sync.sent
    assert sync.buckets == 2544, "as plan_buckets divides Megatron's parameters"
    assert sync.nominal
    assert sync.bound == "the engines' loading"
    assert sync.gather_link == "the network"
    assert sync.gather_s >= sync.gathered / SPEEDS["network"].value
    in_bfloat16 = predict_sync(replace(run, config=run.config.model_copy(update={"precision": "bf16"})))
    assert 0.99 * bits16 < in_bfloat16.gathered < bits16
    times = predict(run, "h100", assumed_workload(run.config))
    assert {"160 nodes", "pipelines", "trainer TP 8", "engine TP 16"} <= set(times.outside)


FSDP_ON_TWO, IN_FP8 = ["placement.devices_per_node=2"], ["train.backend=megatron", "precision=fp8"]


@pytest.mark.parametrize(
    ("settings", "aspect"), [(FSDP_ON_TWO, "FSDP on several GPUs"), (IN_FP8, "FP8 updates")]
)
def test_settings_that_no_row_has_are_named(tmp_path: Path, settings: list[str], aspect: str) -> None:
    for changed_settings in (settings, ["placement.devices_per_node=1"]):
        run = plan(tmp_path, "Qwen3-1.7B", "qwen3-1.7b.yaml", *changed_settings, gib=139.8)
        named = aspect in predict(run, "h200", assumed_workload(run.config)).outside
        assert named == (changed_settings is settings)


def test_own_experts_of_equal_blocks_leave_no_device(tmp_path: Path) -> None:
    """Each of four ranks sends a quarter of the experts, which it holds, and the rest of the model."""
    blocks = (*OF_FOUR, "engine.sync_own_experts=true")
    run = plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, *blocks)
    own, whole = predict_sync(run), predict_sync(plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, *OF_FOUR))
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    assert whole.sent == 2 * run.shape.parameters
    assert own.sent == whole.sent - experts * 3 // 4
    dense = whole.gathered - experts * 3 // 4
    assert own.gathered == dense, "of tensor parallelism only"
    assert 3 * own.seconds < whole.seconds
    halves = predict_sync(plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, *blocks, "engine.ep=2"))
    assert halves.sent == whole.sent - experts // 2
    assert halves.gathered == dense + experts // 4, "it holds half of what it sends"
    other_ranks = predict_sync(plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, *blocks, "megatron.ep=2"))
    assert other_ranks.gathered == dense + experts // 4, "ranks 1 and 2 send what they do not hold"


@pytest.mark.parametrize(
    ("ranks", "layout", "share"),
    [
        (8, {"ep": 8}, 0.0),
        (8, {}, 0.0),
        (4, {"pp": 2, "ep": 2}, 0.375),
        (8, {"pp": 2, "ep": 2, "etp": 2}, 0.3125),
        (8, {"pp": 4, "ep": 2}, 0.4375),
        (8, {"etp": 8}, 0.875),
        (16, {"pp": 2, "ep": 8}, 0.125),
    ],
)
def test_the_share_of_experts_that_a_rank_gets(
    ranks: int, layout: dict[str, int], share: float, tmp_path: Path
) -> None:
    """One engine on all ranks; shares of a simulation of who sends what, made without this code."""
    settings = [f"megatron.{name}={layout.get(name, 1)}" for name in ("tp", "pp", "ep", "etp")]
    settings += [f"placement.devices_per_node={ranks}", f"engine.tp={ranks}", f"engine.ep={ranks}"]
    run = plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, *settings, "engine.sync_own_experts=true")
    assert sum(_exchanged(run)) == pytest.approx(share)


def test_rank_0_keeps_what_it_sends_in_host_memory(tmp_path: Path) -> None:
    split = ("placement.mode=split", "placement.trainer_devices=4", "placement.devices_per_node=8")
    split += ("checkpoint.spare_host_memory=false",)
    without = plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, *split)
    run = plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, *split, "engine.delta_sync=true")
    more = sum(host_parts(run).values()) - sum(host_parts(without).values())
    assert more == predict_sync(run).sent == 2 * run.shape.parameters


def test_optimizer_state_moves_while_sync_and_update_last(mixture: RunPlan) -> None:
    work = assumed_workload(mixture.config)
    times = predict(mixture, "h200", work)
    assert times.rollout is not None
    weights = mixture.trainer.weights / (SPEEDS["bus_sleep"].value / 4)
    assert times.rollout.sleep == pytest.approx(SPEEDS["turn"].value + weights)
    assert "optimizer state moves during sync and update" in times.overlap


def test_rollouts_on_separate_gpus_go_on_during_the_update(tmp_path: Path) -> None:
    found = []
    for index, staleness in enumerate((0, 1)):
        run = plan(
            tmp_path / str(index), "Qwen3-30B-A3B", "qwen3-30b-a3b-node-split.yaml",
            f"rollout.max_staleness={staleness}",
        )  # fmt: skip
        times = predict(run, "h200", assumed_workload(run.config))
        found.append((times.seconds or 0.0, {phase.name: phase.seconds or 0.0 for phase in times.phases}))
        assert ("rollouts go on during the update" in times.overlap) == bool(staleness)
    (one_by_one, phases), (together, _) = found
    hidden = min(phases["rollout"], phases["update"] + phases["record"])
    assert one_by_one - together == pytest.approx(hidden)


@pytest.mark.parametrize(
    ("settings", "card", "phase", "why"),
    [
        ([], None, "step", "the GPU is not known"),
        ([], "a100", "step", "nothing was measured on a100"),
        (["precision=fp8"], "h200", "update", "FP8 updates of dense models"),
        (["train.backend=fsdp", "model.dtype=float32"], "h200", "update", "updates in float32"),
        (["engine.deterministic=true"], "h200", "rollout", "batch-invariant"),
        (["engine.speculative={algorithm: NGRAM}"], "h200", "rollout", "speculative decoding"),
        (["engine.sync=disk"], "h200", "sync", "shared disk"),
    ],
)
def test_what_was_never_measured_is_not_predicted(
    tmp_path: Path, settings: list[str], card: str | None, phase: str, why: str
) -> None:
    run = plan(tmp_path, "Qwen3-1.7B", "qwen3-1.7b.yaml", *_megatron(settings), *settings, gib=139.8)
    times = predict(run, card, assumed_workload(run.config))
    assert times.seconds is None
    unknown = [each for each in times.phases if each.seconds is None]
    assert unknown
    assert phase == "step" or [each.name for each in unknown] == [phase]
    assert all(why in each.why for each in unknown)


def _megatron(settings: list[str]) -> list[str]:
    return ["train.backend=megatron"] if "precision=fp8" in settings else []


def test_devices_that_are_processes_have_no_times() -> None:
    run = make_plan(load_config("tiny.yaml"), 80)
    times = predict(run, "h100", assumed_workload(run.config))
    assert times.card is None
    assert {phase.seconds for phase in times.phases} == {None}
    assert all("CPU processes" in phase.why for phase in times.phases)


# --- advice ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_larger_micro_batches_are_advised_where_launches_decide(tmp_path: Path) -> None:
    run = plan(
        tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, "train.max_tokens_per_gpu=8192",
        "rollout.max_response_tokens=300",
    )  # fmt: skip
    times = predict(run, "h200", assumed_workload(run.config))
    assert times.longest({}) == "update"
    asked: list[RunPlan] = []

    def allowed(other: RunPlan) -> bool:
        asked.append(other)
        return True

    text = advice(run, times, "update", allowed)
    larger = re.match(r"update about [\d.]+ s with .*train\.max_tokens_per_gpu=(\d+)", text)
    assert larger is not None, text
    assert int(larger[1]) > 8192
    assert times.update is not None
    assert float(re.findall(r"[\d.]+", text)[0]) < 0.85 * times.update.seconds
    assert asked
    assert all(other.trainer.total <= 0.95 * 139.8 * 2**30 for other in asked)
    assert "larger micro-batches" in advice(run, times, "update", lambda _: False)
    assert advice(run, times, "record", allowed) == ""


def test_own_experts_are_advised_where_a_sync_sends_all(tmp_path: Path) -> None:
    def text(*settings: str, allowed: bool = True) -> str:
        run = plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, *settings)
        times = predict(run, "h200", assumed_workload(run.config))
        return advice(run, times, "sync", lambda _: allowed)

    found = re.match(r"sync about ([\d.]+) s with engine\.sync_own_experts=true; run on", text(*OF_FOUR))
    assert found is not None
    with_own = (*OF_FOUR, "engine.sync_own_experts=true")
    own = predict_sync(plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, *with_own))
    assert float(found[1]) == pytest.approx(own.seconds, abs=0.051)
    assert "with engine.ep=4 engine.sync_own_experts=true" in text("engine.tp=4", "engine.ep=1")
    assert text(*OF_FOUR, allowed=False) == ""
    assert text(*with_own) == ""
    assert text("engine.tp=1", "engine.ep=1") == ""
    split = ("placement.mode=split", "placement.trainer_devices=4", "placement.devices_per_node=8")
    split += ("checkpoint.spare_host_memory=false",)
    assert text(*OF_FOUR, *split) == "", "a broadcast is for all"


@pytest.mark.parametrize(
    ("settings", "work", "word"),
    [
        ([], Workload(256, 100, 400, 4000), "rollout.max_staleness"),
        ([], Workload(256, 1000, 4000, 4096), "engine.memory_fraction"),
        (["engine.max_running=16"], Workload(256, 10, 100, 100), "engine.max_running"),
        ([], Workload(256, 100, 400, 400), ""),
    ],
)
def test_what_limits_rollouts_is_named(
    tmp_path: Path, settings: list[str], work: Workload, word: str
) -> None:
    run = plan(tmp_path, "Qwen3-1.7B", "qwen3-1.7b.yaml", *settings, gib=79.6)
    text = advice(run, predict(run, "h100", work), "rollout", lambda _: True)
    assert word in text
    assert bool(word) == bool(text)


def test_a_candidate_changes_the_plan_as_its_overrides_would(tmp_path: Path, mixture: RunPlan) -> None:
    from orhpc.plan.candidates import Candidate

    settings = (("megatron.tp", 1), ("train.max_tokens_per_gpu", 16384))
    found = changed(mixture, Candidate(settings, 0, 0.0))
    loaded = plan(tmp_path, "Qwen3-30B-A3B", TENSOR_PARALLEL, *(f"{n}={v}" for n, v in settings))
    assert (found.layout, found.demand, found.trainer) == (loaded.layout, loaded.demand, loaded.trainer)


def test_assumed_lengths_follow_the_settings(mixture: RunPlan) -> None:
    rollout = mixture.config.rollout
    work = assumed_workload(mixture.config)
    assert work.length == pytest.approx(MEAN_LENGTH * rollout.max_total_tokens)
    assert work.rollouts == rollout.batch_size * rollout.n_samples
    assert work.response <= work.longest <= rollout.max_response_tokens
    given_ = assumed_workload(mixture.config, 100)
    assert (given_.length, given_.assumed) == (100, False)
