"""Models that a trainer or the cpu engine computes incorrectly are refused at startup, and no others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from orhpc.config import Config
from orhpc.errors import ModelError
from orhpc.models.forward_check import BEYOND, SHORT, Difference, fixed_positions, samples_for
from orhpc.rollout.engines.cpu import __main__ as cpu_engine
from orhpc.rollout.engines.cpu.model import SlotModel, load_model
from orhpc.train import model_check
from orhpc.train.actor import TrainerRank
from orhpc.train.attention import packed as packed_attention
from orhpc.train.attention.packing import Packing
from orhpc.train.backend import Role
from orhpc.train.batch import pack
from orhpc.train.loss.head import LogitScaling
from orhpc.types import Location, Sample
from tests.earlier_blocks import with_earlier_blocks
from tests.trainer_kit import free_port, logprobs_of, make_config, run_ranks, save_tiny_model

_SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 16,
    },
}
_DYNAMIC = {
    "max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
}


def saved(folder: Path, family: str, **changes: Any) -> str:
    """Save a random model in which attention and routers affect the results."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **(_SHAPE | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)
    return str(folder)


def config_of(*, longest: int = 64, check: bool = True, **options: Any) -> Config:
    raw = make_config(**options).model_dump(mode="json")
    raw["rollout"] |= {"max_total_tokens": longest, "max_response_tokens": longest // 2}
    raw["model"]["check"] = check
    return Config.model_validate(raw)


@contextlib.contextmanager
def trainer(config: Config, folder: str) -> Iterator[tuple[TrainerRank, dict[str, Any]]]:
    """Connect and build one rank; return it and the result of building."""
    rank = TrainerRank(config, folder, 0, 1, 1)
    rank.connect("127.0.0.1", free_port(), 30)
    try:
        yield rank, rank.build()
    finally:
        rank.close()


def random_samples(lengths: list[int], vocabulary: int = 61) -> list[Sample]:
    rng = np.random.default_rng(3)
    samples = []
    for index, length in enumerate(lengths):
        mask_T = np.arange(length) > 0
        arrays = {
            "tokens_T": rng.integers(0, vocabulary, length).astype(np.int32),
            "loss_mask_T": mask_T,
            "logprobs_T": np.zeros(length, np.float32),
        }
        samples.append(Sample(str(index), length, length - 1, 1.0, Location(arrays=arrays)))
    return samples


def transformers_logprobs(folder: str, sample: Sample) -> torch.Tensor:
    """Return log-probabilities of the model with its config unchanged, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(sample.location.arrays["tokens_T"].astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def assert_packed_samples_are_transformers(rank: TrainerRank, folder: str, lengths: list[int]) -> None:
    samples = random_samples(lengths)
    ours = logprobs_of(rank.backend, pack(samples, [s.location.arrays for s in samples]), Role.POLICY)
    for sample, part in zip(samples, ours.split(lengths), strict=True):
        torch.testing.assert_close(part[:-1], transformers_logprobs(folder, sample), rtol=1e-4, atol=1e-4)


# --- what is compared -----------------------------------------------------------------------------


def config(**values: Any) -> Any:
    return AutoConfig.for_model("mistral", **(_SHAPE | {"sliding_window": None} | values))


@pytest.mark.parametrize(
    ("window", "longest", "parameters", "length", "beyond"),
    [
        (None, 64, 1000, BEYOND, None),
        (None, 8, 1000, 8, None),
        (30, 64, 1000, 30 + BEYOND, None),
        (30, 40, 1000, 40, None),
        (30, 20, 1000, 20, None),  # samples cannot be longer than the window
        (4096, 10_000, 1000, 4096 + BEYOND, None),
        (8000, 10_000, 1000, 4352, 8000),
        (4096, 10_000, 10**9, BEYOND, 4096),  # longer samples would take too long
    ],
)
def test_samples_are_longer_than_the_window_if_that_is_cheap(
    window: int | None, longest: int, parameters: int, length: int, beyond: int | None
) -> None:
    samples = samples_for(config(sliding_window=window), longest=longest, parameters=parameters, threads=1)
    assert [len(tokens) for tokens in samples.tokens] == [length, min(SHORT, longest)]
    assert samples.beyond == beyond
    assert ("none beyond" in samples.described) == (beyond is not None)


def test_the_length_from_which_positions_change_is_read_from_the_config() -> None:
    assert fixed_positions(config()) is None
    assert fixed_positions(AutoConfig.for_model("phi3", **(_SHAPE | _LONGROPE))) == ("longrope", 16)
    assert fixed_positions(AutoConfig.for_model("llama", **(_SHAPE | _DYNAMIC))) == ("dynamic", 16)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    assert fixed_positions(AutoConfig.for_model("llama", **_SHAPE, rope_parameters=yarn)) is None
    assert fixed_positions(AutoConfig.for_model("gemma3_text", **_SHAPE)) is None  # set per kind of layer


def test_late_errors_and_nan_are_detected() -> None:
    plain = [torch.zeros(4000), torch.zeros(5)]
    late = [torch.cat([torch.zeros(3990), torch.full((10,), 0.8)]), torch.zeros(5)]
    assert Difference.of(late, plain) == Difference(mean=pytest.approx(0.5), largest=pytest.approx(0.8))
    broken = [plain[0], torch.tensor([0, 0, float("nan"), 0, 0])]
    assert Difference.of(broken, plain).mean == float("inf")


# --- the trainer ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "gemma2", "llama4"])
def test_correctly_computed_families_are_accepted(family: str, dtype: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / family, family)
    with trainer(config_of(dtype=dtype, temperature=0.7), folder) as (_, info):
        assert "of transformers on samples of" in info["model_check"], info


def _no_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "orhpc.train.fsdp.model.logit_scaling_of", lambda config, t: LogitScaling(temperature=t)
    )


def _no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = packed_attention._stacked_attention
    monkeypatch.setattr(
        packed_attention,
        "_stacked_attention",
        lambda q, k, v, scale, window, p: plain(q, k, v, scale, None, p),
    )


def _no_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = packed_attention._stacked_attention

    def attend(q: Any, k: Any, v: Any, scale: Any, window: Any, packing: Packing) -> Any:
        return plain(q, k, v, scale, window, Packing([0, packing.bounds[-1]], packing.device))

    monkeypatch.setattr(packed_attention, "_stacked_attention", attend)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [_no_softcap, _no_window, _no_boundaries])
def test_a_trainer_that_computes_another_model_is_refused(
    fault: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faults omit the family's logit soft cap, its sliding window, or boundaries of packed samples."""
    folder = save_tiny_model(tmp_path / "gemma3", "gemma3")
    fault(monkeypatch)
    message = (
        r"gemma3_text: .* train.backend=fsdp for packed samples differ by .*; train.backend: megatron may"
    )
    with pytest.raises(ModelError, match=message), trainer(config_of(dtype=dtype), folder):
        pass
    with trainer(config_of(dtype=dtype, check=False), folder) as (_, info):
        assert "model.check is false" in info["model_check"]


def _refused_by_all(rank: int, world: int, port: int, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        _no_softcap(patch)
        made = TrainerRank(config_of(ranks=world), folder, rank, world, 1)
        made.connect("127.0.0.1", port, 60)
        with pytest.raises(ModelError) as caught:
            made.build()
        made.close()
        return str(caught.value)


@pytest.mark.slow
def test_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "gemma3", "gemma3")
    first, second = run_ranks(_refused_by_all, 2, folder)
    assert first == second
    assert first.startswith("gemma3_text: log-probabilities")


@pytest.mark.slow
def test_a_model_that_is_too_large_is_not_compared_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "llama", "llama")
    monkeypatch.setattr(model_check, "MOST_PARAMETERS", 1000)
    with trainer(config_of(), folder) as (_, info):
        assert info["model_check"].startswith("not compared with transformers: it has more than")
    monkeypatch.undo()
    monkeypatch.setattr(model_check, "MEMORY_SHARE", 1e-12)
    with trainer(config_of(), folder) as (_, info):
        assert "GB of host memory free" in info["model_check"]


def test_free_memory_respects_the_limit_of_the_jobs_control_group(tmp_path: Path) -> None:
    groups = tmp_path / "root"
    job, step = groups / "job_1", groups / "job_1" / "step_0"
    step.mkdir(parents=True)
    for group, limit in ((job, "5000000"), (step, "max")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("4000000\n")
        (group / "memory.stat").write_text("anon 3000000\ninactive_file 700000\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/job_1/step_0\n")
    assert model_check.free_host_bytes(own, groups) == 1_700_000
    own.write_text("4:memory:/job_1\n")  # control groups of version 1 keep their limits elsewhere
    assert model_check.free_host_bytes(own, groups) > 10_000_000
    assert model_check.free_host_bytes(tmp_path / "none", groups) > 10_000_000


@pytest.mark.slow
@pytest.mark.parametrize(("family", "values"), [("phi3", _LONGROPE), ("llama", _DYNAMIC)])
def test_length_dependent_positions_are_correct_within_the_limit_and_refused_beyond(
    family: str, values: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(tmp_path / family, family, **values)
    message = f"{family}: beyond 16 tokens .*set rollout.max_total_tokens to 16 or less, not 17"
    with pytest.raises(ModelError, match=message), trainer(config_of(longest=17, check=False), folder):
        pass
    with trainer(config_of(longest=16), folder) as (rank, _):
        assert_packed_samples_are_transformers(rank, folder, [16, 5, 9])


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"router_jitter_noise": 0.3}, {"sliding_window": 6}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_phimoe_equals_transformers_in_evaluation_mode(
    values: dict[str, Any], checkpointing: bool, tmp_path: Path
) -> None:
    """The router uses ``router_jitter_noise`` in its comparison and samples experts in training mode."""
    folder = saved(tmp_path / "phimoe", "phimoe", num_local_experts=4, num_experts_per_tok=2, **values)
    train = {"gradient_checkpointing": checkpointing}
    with trainer(config_of(train=train, check=False), folder) as (rank, _):
        assert_packed_samples_are_transformers(rank, folder, [20, 5, 13])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
        ("falcon", {}),
        ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    ],
)
def test_families_that_cannot_be_packed_are_refused_by_name(
    family: str, values: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(tmp_path / family, family, **values)
    with pytest.raises(ModelError) as caught, trainer(config_of(), folder):
        pass
    text = str(caught.value)
    assert family in text.lower() and "cannot be packed" in text
    assert "orhpc_packed" not in text and "\n" not in text


@pytest.mark.parametrize("rope", [{"type": "su", "factor": 2.0}, [1, 2]])
def test_rotary_positions_that_transformers_does_not_know_are_named(rope: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    path = tmp_path / "model/config.json"
    path.write_text(path.read_text().replace('"rope_parameters"', f'"rope_scaling": {json.dumps(rope)}, "_"'))
    said = "not know rotary positions of kind 'su'" if isinstance(rope, dict) else "rope_parameters"
    for loaded in (lambda: trainer(config_of(), folder).__enter__(), lambda: engine(folder)):
        with pytest.raises(ModelError, match=said):
            loaded()


# --- the engine -----------------------------------------------------------------------------------


def engine(folder: str, slots: int = 2, dtype: str = "float32") -> SlotModel:
    return SlotModel(
        load_model(folder, dtype=dtype, load_format="auto", seed=0, trust_remote_code=False), slots, 64
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
@pytest.mark.parametrize("slots", [1, 3])
def test_the_engine_accepts_families_that_it_computes_correctly(
    family: str, values: dict[str, Any], dtype: str, slots: int, tmp_path: Path
) -> None:
    made = engine(saved(tmp_path / family, family, **values), slots, dtype)
    assert made.forward([1, 2], [], [(0, 0, 2)]).shape == (0, 61)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("diffllama", {"head_dim": 8}),
        ("jetmoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}),
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    ],
)
def test_the_engine_refuses_families_that_it_computes_incorrectly(
    family: str, values: dict[str, Any], tmp_path: Path
) -> None:
    """Two change keys after caching them; one has a window that is not passed to its attention."""
    message = f"{family}: log-probabilities of the cpu engine differ .*engine.backend: sglang may"
    with pytest.raises(ModelError, match=message):
        engine(saved(tmp_path / family, family, **values))


@pytest.mark.parametrize("family", ["xglm", "falcon"])
def test_the_engine_refuses_families_that_it_cannot_run_by_name(family: str, tmp_path: Path) -> None:
    shape = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4} if family == "xglm" else {}
    with pytest.raises(ModelError) as caught:
        engine(saved(tmp_path / family, family, **shape))
    assert f"the cpu engine cannot run {family}" in str(caught.value).lower()
    assert "\n" not in str(caught.value)


def test_the_engine_refuses_contexts_with_length_dependent_positions(tmp_path: Path) -> None:
    folder = saved(tmp_path / "phi3", "phi3", **_LONGROPE)
    line = ["--model-path", folder, "--port", "1", "--max-running-requests", "2", "--context-length"]
    message = "phi3: beyond 16 tokens .*set engine.context_length or rollout.max_total_tokens to 16 or less"
    with pytest.raises(ModelError, match=message):
        cpu_engine._load(cpu_engine.parse_arguments([*line, "17"]))
    assert cpu_engine._load(cpu_engine.parse_arguments([*line, "16"])).context == 16


def test_routes_are_refused_for_routers_that_return_only_logits(tmp_path: Path) -> None:
    """Some releases of transformers choose the experts in the block around the router."""
    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    folder = saved(tmp_path / "glm4_moe", "glm4_moe", first_k_dense_replace=1, n_group=1, topk_group=1, **moe)
    model = load_model(folder, dtype="float32", load_format="auto", seed=0, trust_remote_code=False)
    SlotModel(model, 2, 64, record_routes=True)
    model.set_attn_implementation("sdpa")
    with_earlier_blocks(model)
    with pytest.raises(ModelError, match="LogitsTopkRouter does not return which 2 experts it chooses"):
        SlotModel(model, 2, 64, record_routes=True)
