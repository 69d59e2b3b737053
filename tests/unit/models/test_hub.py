"""Models are downloaded with the real client from a hub on loopback; every error is one line."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from orhpc.commands.cli import main
from orhpc.config import Config
from orhpc.errors import (
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_PREFLIGHT,
    HubUnreachable,
    ModelError,
    PreflightError,
    StopRequested,
)
from orhpc.launch import model
from orhpc.launch.node.rendezvous import announce, await_announcement, preparing
from orhpc.launch.slurm.job import Job
from orhpc.models.folders import find_model, has_hub_token, hub_cache, problem_of
from orhpc.models.hub import chosen_files, fetch
from orhpc.rundir import RunDir
from tests.hub import Hub, commit_of
from tests.model_configs import REAL, TINY
from tests.model_folder import write_model_folder

NAME = "Acme/Tiny-1B"
VARIABLES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"),
)
"""Variables of the hub's client."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model of two shards, and an empty cache."""
    folder = write_model_folder(tmp_path / "served" / NAME, TINY["llama"])
    weights = folder / "model.safetensors"
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for shard in shards:
        write_shard(folder / shard, 300_000)
    weights.unlink()
    index = {"weight_map": {f"w{i}": shard for i, shard in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").write_text("the same weights once more")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with Hub(tmp_path / "served") as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield served


def write_shard(path: Path, size: int) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "x")
    run.create()
    return run


def config_of(**settings: object) -> Config:
    tree = {"model": {"path": NAME, **settings}, "environments": {"a/b": {"serve": "letters"}}}
    return Config.model_validate(tree)


@pytest.mark.slow
def test_a_run_downloads_its_files_once_and_keeps_the_commit(hub: Hub, rundir: RunDir) -> None:
    config = config_of()
    assert model.ensure_config(config) is not None
    assert hub.downloads(NAME) == ["config.json"]
    model.ensure_models(config, rundir)
    folder = model.model_folder(config, rundir)
    assert problem_of(folder) is None
    assert folder.name == commit_of(hub.root / NAME)
    wanted = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    wanted |= {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert {p.name for p in folder.iterdir()} == wanted == set(hub.downloads(NAME))
    asked = len(hub.requests)
    model.ensure_models(config, rundir)
    assert len(hub.requests) == asked

    # The branch moves: this run keeps its first commit, even after the cache is updated.
    (hub.root / NAME / "tokenizer.json").write_text('{"new": 1}')
    shutil.rmtree(folder)
    other = RunDir(rundir.path.parent / "y")
    other.create()
    model.ensure_models(config, other)
    assert model.model_folder(config, other).name == commit_of(hub.root / NAME) != folder.name
    with pytest.raises(ModelError, match="is not in the hub's cache"):
        model.model_folder(config, rundir)


@pytest.mark.slow
def test_the_weights_are_downloaded_last(hub: Hub, rundir: RunDir) -> None:
    """A snapshot with all weights counts as whole: an interrupted download must not lack small files only."""
    model.ensure_models(config_of(), rundir)
    downloads = hub.downloads(NAME)
    first = next(i for i, name in enumerate(downloads) if name.endswith(".safetensors"))
    assert all(name.endswith(".safetensors") for name in downloads[first:])
    assert {"config.json", "tokenizer.json"} <= set(downloads[:first])


@pytest.mark.slow
def test_plan_downloads_only_the_config(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    real = write_model_folder(hub.root / "Acme" / "Real-30B", REAL["Qwen3-30B-A3B"][0])
    overrides = ["model.path=Acme/Real-30B", "placement.nodes=8", "engine.tp=4"]
    assert main(["plan", *overrides]) == EXIT_OK
    assert "Acme/Real-30B: 30.53 B parameters" in capsys.readouterr().out
    assert hub.downloads("Acme/Real-30B") == ["config.json"]
    assert (real / "model.safetensors").exists()


@pytest.mark.slow
def test_a_dropped_connection_resumes_the_download_of_the_file(hub: Hub, rundir: RunDir) -> None:
    """The connection is dropped once in the middle of every file."""
    hub.cut_after = 100_000
    model.ensure_models(config_of(), rundir)
    folder = model.model_folder(config_of(), rundir)
    assert problem_of(folder) is None
    for file in (hub.root / NAME).glob("*.safetensors"):
        assert (folder / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_a_stop_ends_a_slow_download_and_the_next_start_completes_it(hub: Hub, rundir: RunDir) -> None:
    hub.bytes_per_s = 200_000
    polls = iter(range(1000))
    with pytest.raises(StopRequested, match="partial files are kept"):
        model.ensure_models(config_of(), rundir, lambda: next(polls) > 10)
    hub.bytes_per_s = 0
    model.ensure_models(config_of(), rundir)
    assert problem_of(model.model_folder(config_of(), rundir)) is None


@pytest.mark.slow
def test_an_incomplete_snapshot_is_not_used(hub: Hub, rundir: RunDir) -> None:
    model.ensure_models(config_of(), rundir)
    folder = model.model_folder(config_of(), rundir)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.resolve().unlink()
    shard.unlink()
    assert problem_of(folder) == f"1 of 2 weight files are missing ({shard.name})"
    model.ensure_models(config_of(), rundir)
    assert problem_of(folder) is None


def refusals(hub: Hub) -> list[tuple[str, type[Exception], str]]:
    return [
        ("missing", ModelError, f"no such folder here, and no such model at {hub.url}; if it is private"),
        ("revision", ModelError, "has no revision 'v9'"),
        ("gated", ModelError, f"is gated: accept its terms at {hub.url}/{NAME}, then set HF_TOKEN"),
        ("wrong token", ModelError, "then use a token of the account that did"),
        ("500", PreflightError, "answers 500; run the same command later, it resumes"),
        ("401", ModelError, "no such model at"),
        ("away", HubUnreachable, "cannot be reached from here"),
        ("offline", PreflightError, "HF_HUB_OFFLINE forbids downloads"),
        ("no weights", ModelError, "has no weights in safetensors on the hub"),
        ("no model", ModelError, "has no config.json: it is not a transformers model"),
    ]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "~/h"},
        {"HF_HOME": "$HOME/h", "XDG_CACHE_HOME": "/x"},
        {"HUGGINGFACE_HUB_CACHE": "/shared"},
        {"HF_HUB_CACHE": "${HOME}/c", "HUGGINGFACE_HUB_CACHE": "/shared"},
        {"HF_HUB_CACHE": "~/c"},
    ],
)
def test_the_cache_is_where_the_client_has_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    client = importlib.reload(constants)
    try:
        assert hub_cache() == Path(client.HF_HUB_CACHE)
    finally:
        monkeypatch.undo()
        importlib.reload(constants)


def test_a_login_in_a_file_counts_as_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert not has_hub_token()
    (tmp_path / "token").write_text("hf_x")
    assert has_hub_token()


def test_either_variable_of_offline_mode_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    with pytest.raises(PreflightError, match="TRANSFORMERS_OFFLINE forbids downloads"):
        fetch(NAME)
    assert hub.downloads(NAME) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", range(10))
def test_every_hub_error_is_one_line(
    case: int, hub: Hub, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, kind, message = refusals(hub)[case]
    name, settings = NAME, {}
    if what == "missing":
        name = "Acme/Other"
    elif what == "revision":
        settings = {"revision": "v9"}
    elif what in ("gated", "wrong token"):
        hub.token = "right"
        if what == "wrong token":
            monkeypatch.setenv("HF_TOKEN", "wrong")
    elif what in ("500", "401"):
        hub.fail_with = int(what)
    elif what == "away":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    elif what == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elif what == "no weights":
        for file in (hub.root / NAME).glob("*model*"):
            file.unlink()
    elif what == "no model":
        (hub.root / NAME / "config.json").unlink()
    config = Config.model_validate(
        {"model": {"path": name, **settings}, "environments": {"e": {"serve": "x"}}}
    )
    with pytest.raises(kind) as caught:
        model.ensure_models(config, rundir)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"model.path: {name}")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_download_continues_after_the_hub_recovers(hub: Hub, rundir: RunDir) -> None:
    hub.fail_with, hub.failures = 503, 2
    model.ensure_models(config_of(), rundir)
    assert problem_of(model.model_folder(config_of(), rundir)) is None


@pytest.mark.slow
def test_a_gated_model_is_downloaded_with_the_right_token(
    hub: Hub, rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "right"
    monkeypatch.setenv("HF_TOKEN", "right")
    model.ensure_models(config_of(), rundir)


@pytest.mark.slow
def test_a_full_cache_disk_is_reported_before_the_download(hub: Hub) -> None:
    code = (
        "import shutil, sys; real = shutil.disk_usage('/'); "
        "shutil.disk_usage = lambda _: real._replace(free=1000); "
        "from orhpc.models.hub import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, NAME], capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_PREFLIGHT, done.stderr
    assert "GB are free: free some space, or set HF_HOME" in json.loads(done.stdout)["error"]
    assert hub.downloads(NAME) == []


@pytest.mark.slow
def test_fetch_accepts_a_name_or_a_config_and_prints_the_folder(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", NAME]) == EXIT_OK
    folder = capfd.readouterr().out.strip().removeprefix(f"{NAME}: ")
    assert problem_of(Path(folder)) is None
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {{path: {NAME}}}\nenvironments: {{e: {{serve: letters}}}}\n")
    assert main(["fetch", str(path)]) == EXIT_OK
    assert capfd.readouterr().out.strip() == f"{NAME}: {folder}"
    assert main(["fetch", "Acme/Nothing"]) == EXIT_CONFIG
    assert main(["fetch", "tiny.yaml"]) == EXIT_OK


@pytest.mark.slow
def test_other_nodes_wait_while_the_first_one_downloads(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat comes 40 times within the timeout: on a busy machine it may be late by seconds."""
    monkeypatch.setattr("orhpc.launch.node.rendezvous._BEAT_S", 0.1)
    job = Job("7", 0, 1, 2, "n1", "7", rundir.path)
    done = threading.Event()

    def first() -> None:
        with preparing(rundir, job):
            done.wait(5.0)
        announce(rundir, job, attempt=1)

    thread = threading.Thread(target=first)
    thread.start()
    assert await_announcement(rundir, job, timeout_s=4.0) == {"attempt": 1}
    thread.join()
    with pytest.raises(PreflightError, match="did not appear"):
        await_announcement(rundir, Job("8", 0, 1, 2, "n1", "8", rundir.path), timeout_s=0.3)


@pytest.mark.slow
def test_the_error_of_a_node_without_the_shared_cache_names_the_setting(
    hub: Hub, rundir: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model.ensure_models(config_of(), rundir)
    model.check_seen(config_of(), rundir)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "of this node"))
    with pytest.raises(PreflightError, match="set HF_HOME to a folder that all nodes share"):
        model.check_seen(config_of(), rundir)


@pytest.mark.slow
def test_a_draft_model_is_downloaded_too(hub: Hub, rundir: RunDir) -> None:
    write_model_folder(hub.root / "Acme" / "Drafter", TINY["llama"])
    config = Config.model_validate(
        {
            "model": {"path": NAME},
            "environments": {"e": {"serve": "letters"}},
            "engine": {"speculative": {"algorithm": "EAGLE3", "draft_model": "Acme/Drafter"}},
        }
    )
    model.ensure_models(config, rundir)
    assert problem_of(find_model("Acme/Drafter")) is None
    assert len(json.loads((rundir.path / "model.json").read_text())) == 2


@given(st.binary(max_size=200))
def test_a_damaged_weights_file_is_detected(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = write_model_folder(Path(where) / "m", TINY["llama"])
        assert problem_of(folder) is None
        write_shard(folder / "model.safetensors", 64)
        whole = (folder / "model.safetensors").read_bytes()
        assert problem_of(folder) is None
        (folder / "model.safetensors").write_bytes(whole[:-1])
        assert problem_of(folder) == "model.safetensors is truncated or damaged"
        (folder / "model.safetensors").write_bytes(content)
        assert problem_of(folder) == "model.safetensors is truncated or damaged"


def test_only_one_format_of_the_weights_is_downloaded() -> None:
    files = ["config.json", "tokenizer.json", "pytorch_model.bin", "README.md", "chat_template.jinja"]
    assert chosen_files("x", files) == [
        "chat_template.jinja", "config.json", "pytorch_model.bin", "tokenizer.json"
    ]  # fmt: skip
    files += ["model.safetensors", "consolidated.safetensors", "model.onnx", "original/model.safetensors"]
    assert "pytorch_model.bin" not in chosen_files("x", files)
    assert [f for f in chosen_files("x", files) if f.endswith("safetensors")] == ["model.safetensors"]
