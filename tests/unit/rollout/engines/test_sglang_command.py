"""Options of an SGLang server, and errors that are raised before a GPU is used."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.config import Config
from orhpc.driver.fleet import engines
from orhpc.errors import EXIT_CONFIG, ConfigError
from orhpc.launch.__main__ import add_launch
from orhpc.launch.command_line import own_options, split_command_line, without_flags
from orhpc.process import secrets
from orhpc.process.secrets import read_engine_key
from orhpc.rollout.engines import sglang_server
from orhpc.rollout.engines.sglang_command import LOADER, SLEEPER, EnginePart, arguments, sglang_options

KNOWN = frozenset(
    [
        "model_path", "host", "port", "dtype", "tp_size", "mem_fraction_static",
        "max_running_requests", "context_length", "skip_tokenizer_init", "log_level_http",
        "random_seed", "trust_remote_code", "enable_return_routed_experts",
        "enable_deterministic_inference", "enable_memory_saver", "dp_size", "enable_dp_attention",
        "ep_size", "nnodes", "node_rank", "dist_init_addr", "load_format",
        "json_model_override_args", "speculative_algorithm", "speculative_num_steps",
        "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_draft_model_path",
        "enable_draft_weights_cpu_backup", "custom_weight_loader", "pp_max_micro_batch_size",
    ]
)  # fmt: skip
"""Fields of ServerArgs that we use and that exist in both 0.5.16 and 0.5.23, according to their sources."""


def config(*, precision: str = "bf16", **engine: Any) -> Config:
    split = {"mode": "split", "trainer_devices": 2} if engine.get("delta_sync") else {}
    return Config.model_validate(
        {
            "precision": precision,
            "engine": engine,
            "placement": {"devices_per_node": 4, **split},
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
        }
    )


def options(part: EnginePart | None = None, **engine: Any) -> dict[str, Any]:
    part = part or EnginePart(devices=(0, 1, 2, 3))
    return sglang_options(config(**engine), "/model", "127.0.0.1", 3000, 2, part)


def test_only_arguments_that_both_releases_have_are_used() -> None:
    everything = options(
        EnginePart(devices=(0, 1), node_rank=1, nnodes=2, rendezvous="10.0.0.1:5000", shares=True),
        tp=4, dp=2, ep=4, trusted_network=True, deterministic=True, direct_loading=True,
        speculative={"algorithm": "EAGLE", "draft_model": "/draft"},
    )  # fmt: skip
    everything |= options(precision="fp8-rollout", power_of_two_scales=True)
    assert set(everything) == KNOWN


@given(max_running=st.integers(1, 4096), dp=st.sampled_from([1, 2, 4]))
def test_every_scheduler_has_a_slot_to_spare_and_no_larger_batches(max_running: int, dp: int) -> None:
    """SGLang divides the slots among its schedulers, and takes the limit of a batch as it is."""
    given_dp = {"tp": 4, "dp": dp, "trusted_network": True} if dp > 1 else {}
    found = options(max_running=max_running, **given_dp)
    assert found["max_running_requests"] // dp == max_running // dp + 1
    assert found["pp_max_micro_batch_size"] == max(1, max_running // dp)


@pytest.mark.parametrize("setting", ["direct_loading", "delta_sync"])
def test_its_processes_record_how_it_loads_weights_where_that_is_needed(setting: str) -> None:
    assert options(**{setting: True})["custom_weight_loader"] == [LOADER]
    assert "custom_weight_loader" not in options()


def test_an_engine_that_shares_its_gpus_prepares_to_release_memory() -> None:
    assert options(EnginePart(shares=True))["custom_weight_loader"] == [SLEEPER]
    assert options(EnginePart(shares=True), direct_loading=True)["custom_weight_loader"] == [LOADER, SLEEPER]


def test_an_engine_of_several_nodes_has_one_rank_per_node_and_one_address() -> None:
    parts = [EnginePart(node_rank=rank, nnodes=2, rendezvous="10.0.0.1:5000") for rank in (0, 1)]
    made = [options(part) for part in parts]
    assert [m["node_rank"] for m in made] == [0, 1]
    assert {(m["nnodes"], m["dist_init_addr"]) for m in made} == {(2, "10.0.0.1:5000")}
    assert "nnodes" not in options()


def test_an_engine_of_one_node_uses_a_free_port() -> None:
    alone = options(EnginePart(devices=(0, 1), rendezvous="10.0.0.1:5000"))
    assert alone["nccl_port"] == 5000
    assert "dist_init_addr" not in alone  # otherwise DP attention would derive its ports from it


def test_speculative_settings_become_sglangs_arguments() -> None:
    eagle = {
        "algorithm": "EAGLE",
        "num_steps": 3,
        "eagle_topk": 1,
        "num_draft_tokens": 4,
        "draft_model": "/d",
    }
    alone = options(speculative=eagle)
    wanted = {
        "speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4, "speculative_draft_model_path": "/d",
    }  # fmt: skip
    assert wanted.items() <= alone.items()
    assert "enable_draft_weights_cpu_backup" not in alone
    mtp = options(EnginePart(shares=True), speculative={"algorithm": "NEXTN"})
    assert mtp["enable_draft_weights_cpu_backup"] is True
    assert "speculative_draft_model_path" not in mtp
    assert not any(name.startswith("speculative") for name in options())


DRAFTERS: list[dict[str, Any]] = [
    {"speculative": {"algorithm": "EAGLE", "draft_model": "/draft"}},
    {"extra": {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/draft"}},
    {"extra": {"speculative-algorithm": "EAGLE", "speculative-draft-model": "/draft"}},
]
every_way = pytest.mark.parametrize("drafter", DRAFTERS, ids=["setting", "option", "alias"])


@every_way
def test_a_draft_model_is_recognized_in_either_setting(drafter: dict[str, Any]) -> None:
    made = config(**drafter)
    assert made.engine.separate_drafter
    assert made.engine.draft_model == "/draft"
    shared = options(EnginePart(shares=True), **drafter)
    assert shared["enable_draft_weights_cpu_backup"] is True
    command_line = arguments(shared)
    assert command_line[command_line.index("--speculative-algorithm") + 1] == "EAGLE"
    assert "enable_draft_weights_cpu_backup" not in options(**drafter)


@every_way
def test_sent_weights_never_reach_a_draft_model(drafter: dict[str, Any], monkeypatch: Any) -> None:
    seen: list[bool] = []

    class Pool:
        def __init__(self, *_: Any, target_only: bool, **__: Any) -> None:
            seen.append(target_only)

    monkeypatch.setattr(engines, "EnginePool", Pool)
    monkeypatch.setattr(engines, "transports", lambda *_: ([], []))
    placement: Any = None
    for own, wanted in ((drafter, True), ({"extra": {"speculative_algorithm": "NGRAM"}}, False)):
        engines.Engines([], placement, config(**own), "key")
        assert seen.pop() is wanted


@every_way
@pytest.mark.parametrize(("more", "message"), [
    ({"sync": "disk"}, "sync: disk would load the policy into the draft model /draft"),
    ({"check_weights": True}, "check_weights would load the policy into the draft model /draft"),
    ({"precision": "fp8-rollout"}, "precision: fp8-rollout starts engines with dummy weights"),
])  # fmt: skip
def test_settings_that_give_a_draft_model_wrong_weights_are_refused(
    drafter: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(**drafter, **more)


def test_fp8_is_allowed_only_with_drafting_without_a_model() -> None:
    config(precision="fp8-rollout", speculative={"algorithm": "NGRAM"})
    for own in ({"speculative": {"algorithm": "NEXTN"}}, {"extra": {"speculative_algorithm": "NEXTN"}}):
        with pytest.raises(ValueError, match="precision: fp8-rollout starts engines with dummy"):
            config(precision="fp8-rollout", **own)


def test_a_draft_model_is_set_in_one_place() -> None:
    with pytest.raises(ValueError, match=r"extra\.speculative_draft_model_path and speculative: set one"):
        config(speculative={"algorithm": "EAGLE"}, extra={"speculative-draft-model-path": "/draft"})


def test_fp8_engines_start_without_the_models_weight_files() -> None:
    made = options(precision="fp8-rollout", power_of_two_scales=True)
    quantization = json.loads(made["json_model_override_args"])["quantization_config"]
    assert (quantization["quant_method"], quantization["weight_block_size"], quantization["scale_fmt"]) == (
        "fp8",
        [128, 128],
        "ue8m0",
    )
    assert made["load_format"] == "dummy"


def test_extra_arguments_come_last() -> None:
    made = options(extra={"attention-backend": "triton", "load_format": "auto"}, precision="fp8-rollout")
    assert (made["attention_backend"], made["load_format"]) == ("triton", "auto")


def test_extra_arguments_that_orhpc_sets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"extra\.tp-size is decided by engine\.tp"):
        config(extra={"tp-size": 2})


def test_options_become_command_line_arguments() -> None:
    made = arguments({"a_b": True, "c": False, "d": None, "e": [1, 2], "f": {"x": 1}, "g": 0.5, "h": 0})
    assert made == ["--a-b", "--e", "1", "2", "--f", '{"x": 1}', "--g", "0.5", "--h", "0"]


def test_options_are_spelled_as_the_installed_release_does() -> None:
    known = {"--tensor-parallel-size", "--attention-backend", "--port"}
    command_line = ["--tp-size", "4", "--attention-backend=triton", "--port", "1"]
    made = sglang_server.resolve_options(command_line, known, "SGLang 9")
    assert made == ["--tensor-parallel-size", "4", "--attention-backend=triton", "--port", "1"]
    with pytest.raises(ConfigError) as refused:
        sglang_server.resolve_options(["--atention-backend", "x"], known, "SGLang 9")
    assert "engine.extra.atention_backend: SGLang 9 has no option" in str(refused.value)
    assert "did you mean attention_backend?" in str(refused.value)


def test_the_key_is_read_from_a_file_that_only_its_owner_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "_known", set())
    monkeypatch.setattr(secrets, "_pattern", None)
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    command_line = ["--port", "1", "--api-key-file", str(key), "--tp-size", "2", "--listen-fd", "7"]
    own, rest = sglang_server.split_arguments(command_line)
    assert read_engine_key(own.api_key_file) == "secret" and own.listen_fd == 7
    assert secrets.redact("the key is secret") == f"the key is {secrets.REDACTED}"
    assert rest == ["--port", "1", "--tp-size", "2"]
    key.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_engine_key(key)
    key.chmod(0o600)
    key.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        read_engine_key(key)
    with pytest.raises(ConfigError, match="No such file"):
        read_engine_key(tmp_path / "none")
    assert read_engine_key(None) is None


def test_attention_parallelism_over_open_ports_needs_a_trusted_network() -> None:
    with pytest.raises(ValueError, match="trusted_network: true"):
        config(tp=4, dp=2)
    assert config(tp=4, dp=2, trusted_network=True).engine.dp == 2


def test_servers_that_do_not_check_the_key_are_refused() -> None:
    plain = {"tokenizer_worker_num": 1, "enable_http2": False}
    sglang_server.refuse_keyless(SimpleNamespace(**plain))
    sglang_server.refuse_keyless(SimpleNamespace())  # a release without these options
    for name, value in (("tokenizer_worker_num", 2), ("enable_http2", True)):
        with pytest.raises(ConfigError, match=f"engine.extra.{name}"):
            sglang_server.refuse_keyless(SimpleNamespace(**{**plain, name: value}))


def test_a_starlette_release_that_bypasses_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, refused in (("1.0.0", True), ("0.52.1", True), ("1.0.1", False), ("1.10.0", False)):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        with pytest.raises(ConfigError, match="starlette>=1") if refused else contextlib.nullcontext():
            sglang_server.refuse_old_starlette()


_DENSE: dict[str, Any] = {"mlp_only_layers": [0]}
_MINIMAX: dict[str, Any] = {"use_qk_norm": True, "use_routing_bias": True}
_PARTIAL: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(("family", "more", "refused"), [
    ("qwen3_moe", _DENSE, "mlp_only_layers"), ("qwen3_moe", {"mlp_only_layers": []}, ""),
    ("qwen2_moe", _DENSE, "mlp_only_layers"), ("llama", _DENSE, ""), ("unknown", _DENSE, ""),
    ("llama4_text", {}, "has experts, .*also see images"), ("llama4", {}, ""),
    ("minimax_m2", {}, "has no use_qk_norm, no use_routing_bias in its config.json"),
    ("minimax_m2", _MINIMAX, ""), ("minimax_m2", _MINIMAX | {"rotary_dim": 64}, ""),
    ("minimax_m2", _MINIMAX | _PARTIAL, "has no rotary_dim in its config.json"),
    ("minimax_m2", _MINIMAX | _PARTIAL | {"rotary_dim": 64}, ""),
])  # fmt: skip
def test_models_that_sglang_reads_incorrectly_are_refused(
    tmp_path: Path, family: str, more: dict[str, Any], refused: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **more}))
    if refused:
        with pytest.raises(ConfigError, match=refused):
            sglang_server.refuse_misread_models(tmp_path)
    else:
        sglang_server.refuse_misread_models(tmp_path)
    sglang_server.refuse_misread_models(tmp_path / "of the hub")


@pytest.mark.slow
def test_a_missing_sglang_is_reported_in_one_line() -> None:
    hide = "import sys; sys.modules['sglang'] = None; from orhpc.rollout.engines.sglang_server import main; "
    run = subprocess.run(
        [sys.executable, "-c", hide + "sys.exit(main(['--port', '1']))"], capture_output=True, text=True
    )
    assert run.returncode == EXIT_CONFIG
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith("orhpc: engine.backend: sglang cannot be imported here")


# --- on the command line ----------------------------------------------------------------------------


LAUNCH = own_options(add_launch)


def test_flags_become_overrides() -> None:
    command_line = [
        "--local", "--sglang-attention-backend", "triton", "--sglang-disable-radix-cache", "a.yaml",
        "--check-weights", "--sglang-cuda-graph-bs-decode=[1,8]", "x=1",
    ]  # fmt: skip
    assert without_flags(command_line, LAUNCH) == [
        "--local", "engine.extra.attention_backend=triton", "engine.extra.disable_radix_cache=true",
        "a.yaml", "engine.extra.cuda_graph_bs_decode=[1,8]", "x=1", "engine.check_weights=true",
    ]  # fmt: skip


@given(st.lists(st.sampled_from(["a.yaml", "k=v", "--local", "--dry-run", "--nodes=2", "--nodes 2"])))
def test_other_arguments_are_unchanged(given: list[str]) -> None:
    words = [word for argument in given for word in argument.split()]
    assert without_flags(words, LAUNCH) == [argument.replace(" ", "=") for argument in given]


def test_the_batch_script_accepts_flags() -> None:
    path, overrides = split_command_line(["c.yaml", "--sglang-attention-backend", "triton", "run.seed=3"])
    assert (path, overrides) == ("c.yaml", ["engine.extra.attention_backend=triton", "run.seed=3"])
