"""Weight updates from disk, tensors and process groups: exact, versioned, never served when incomplete."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from orhpc.errors import EngineUnavailable, WeightSyncFailed
from orhpc.rollout.client import EngineClient
from orhpc.types import Generation, Sampling
from orhpc.wire.weights import flatten_bucket, join_weight_group, leave_weight_group
from tests.serialized_weights import receive_broadcast, serialize_named_tensors
from tests.trainer_kit import free_port

from .conftest import Server, get_going, prompt_of

Named = list[tuple[str, torch.Tensor]]
SAMPLING = Sampling(max_new_tokens=10, seed=7)
PROMPT = prompt_of(24, 30)


def other_weights(server: Server) -> Named:
    """The other folder's weights by their checkpoint names."""
    assert server.other is not None
    return sorted(load_file(server.other / "model.safetensors").items())


def buckets(named: Named, count: int = 3) -> list[Named]:
    size = -(-len(named) // count)
    return [named[i : i + size] for i in range(0, len(named), size)]


def specs(named: Named) -> tuple[list[str], list[str], list[list[int]]]:
    names = [n for n, _ in named]
    dtypes = [str(t.dtype).removeprefix("torch.") for _, t in named]
    return names, dtypes, [list(t.shape) for _, t in named]


def assert_serves(server: Server, folder: Path | None, version: int) -> Generation:
    """Tokens sampled now have exactly the log-probabilities of that folder's model."""
    got = server.generate(PROMPT, SAMPLING)
    assert got.version == version
    server.assert_logprobs(got, PROMPT, folder=folder)
    other = server.other_logprobs(PROMPT, got, server.other if folder == server.folder else server.folder)
    assert np.abs(got.logprobs_N - other).max() > 0.05
    return got


def test_from_disk(mutable: Server) -> None:
    assert_serves(mutable, mutable.folder, 0)
    mutable.use(lambda c: c.update_weights_from_disk(str(mutable.other), weight_version="3"))
    got = assert_serves(mutable, mutable.other, 3)
    assert got.cached_tokens == 0, "the old weights' keys and values were reused"


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_from_tensors_in_buckets(mutable: Server, load_format: str | None) -> None:
    async def send(client: EngineClient) -> None:
        parts = buckets(other_weights(mutable))
        await client.begin_update()
        for i, part in enumerate(parts):
            await client.update_weights_from_tensor(
                [serialize_named_tensors(part, load_format)],
                load_format=load_format,
                weight_version="5" if i == len(parts) - 1 else None,
            )
        await client.end_update()

    mutable.use(send)
    assert_serves(mutable, mutable.other, 5)


def test_from_tensors_in_shared_memory(mutable: Server) -> None:
    """The format that SGLang's MultiprocessingSerializer produces for CPU tensors."""
    import io
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing as mp

    strategy = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        named = other_weights(mutable)
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(named)
        text = base64.b64encode(buffer.getvalue()).decode()

        async def send(client: EngineClient) -> None:
            await client.begin_update()
            await client.update_weights_from_tensor([text], weight_version="6")
            await client.end_update()

        mutable.use(send)
    finally:
        mp.set_sharing_strategy(strategy)
    assert_serves(mutable, mutable.other, 6)


def test_other_types_are_cast(ours: Server) -> None:
    named = [(n, t.to(torch.bfloat16)) for n, t in other_weights(ours)]
    text = serialize_named_tensors(named, "flattened_bucket")
    ours.use(
        lambda c: c.update_weights_from_tensor([text], load_format="flattened_bucket", weight_version="1")
    )
    name, tensor = named[0]
    held = ours.use(lambda c: c.get_weights_by_name(name, 2))
    assert held == tensor[:2].float().tolist()


class Sender:
    """Rank 0 of a gloo group, in a thread concurrent with the HTTP calls."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name
        self.group: dist.ProcessGroup | None = None

    def run_concurrently(self, work: Callable[[], Any], call: Callable[[EngineClient], Any]) -> None:
        """Run the sender and the call concurrently; the call's failure is raised first."""
        failures: list[Exception] = []

        def run() -> None:
            try:
                work()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            self.server.use(call)
        finally:
            thread.join(30)
        if failures:
            raise failures[0]

    def join(self) -> None:
        port = free_port()

        def ours() -> None:
            self.group = join_weight_group(
                address="127.0.0.1",
                port=port,
                rank=0,
                world_size=2,
                name=self.name,
                backend="gloo",
                timeout_s=20,
            )

        self.run_concurrently(
            ours,
            lambda c: c.init_weights_update_group(
                master_address="127.0.0.1",
                master_port=port,
                rank_offset=1,
                world_size=2,
                group_name=self.name,
                backend="gloo",
            ),
        )

    def send(self, named: Named, load_format: str | None, version: str | None) -> None:
        def ours() -> None:
            if load_format:
                dist.broadcast(flatten_bucket(named)[0], group_src=0, group=self.group)
                return
            for _, tensor in named:
                dist.broadcast(tensor.contiguous(), group_src=0, group=self.group)

        async def receive(client: EngineClient) -> None:
            await client.begin_update()
            await receive_broadcast(
                client, *specs(named), group_name=self.name, load_format=load_format, weight_version=version
            )
            await client.end_update()

        self.run_concurrently(ours, receive)

    def leave(self) -> None:
        if self.group is not None:
            leave_weight_group(self.group)


@pytest.fixture
def sender(mutable: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = Sender(mutable, f"weights-{os.urandom(4).hex()}")
    found.join()
    yield found
    mutable.post("/destroy_weights_update_group", {"group_name": found.name})
    found.leave()


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_from_a_process_group(sender: Sender, load_format: str | None) -> None:
    server = sender.server
    parts = buckets(other_weights(server))
    for i, part in enumerate(parts):
        sender.send(part, load_format, "8" if i == len(parts) - 1 else None)
    assert_serves(server, server.other, 8)


@pytest.mark.slow
def test_a_broadcast_that_never_comes_leaves_weights_partial(sender: Sender) -> None:
    server = sender.server
    if server.moe or not server.own:
        pytest.skip("one wait for the deadline is enough, and SGLang's is long")
    parts = buckets(other_weights(server))
    sender.send(parts[0], None, None)
    names, dtypes, shapes = specs(parts[1])
    with pytest.raises(WeightSyncFailed, match="partial"):
        server.use(lambda c: receive_broadcast(c, names, dtypes, shapes, group_name=sender.name))
    assert_partial(server)
    # Only a complete update helps; setting a version does not.
    server.use(lambda c: c.update_weight_version("9"))
    assert_partial(server)
    server.use(lambda c: c.update_weights_from_disk(str(server.other), weight_version="9"))
    assert_serves(server, server.other, 9)


def assert_partial(server: Server) -> None:
    with pytest.raises(EngineUnavailable, match="partial"):
        server.generate(PROMPT, SAMPLING)
    assert server.get("/health").status_code == 503
    assert server.get("/health_generate").status_code == 503


def test_an_open_update_is_not_served(ours: Server) -> None:
    first, *_ = buckets(other_weights(ours))
    ours.use(lambda c: c.update_weights_from_tensor([serialize_named_tensors(first)]))
    with pytest.raises(EngineUnavailable, match="open"):
        ours.generate(PROMPT, SAMPLING)
    ours.use(lambda c: c.update_weight_version("2"))
    assert ours.generate(PROMPT, SAMPLING).version == 2


def test_a_refused_part_makes_an_open_update_partial(ours: Server) -> None:
    first, *_ = buckets(other_weights(ours))
    ours.use(lambda c: c.update_weights_from_tensor([serialize_named_tensors(first)]))
    wrong = [("model.norm.weight", torch.zeros(3))]
    with pytest.raises(WeightSyncFailed, match="shape"):
        ours.use(lambda c: c.update_weights_from_tensor([serialize_named_tensors(wrong)]))
    assert_partial(ours)


@pytest.mark.parametrize(
    ("named", "output"),
    [
        ([("model.nonsense", torch.zeros(2))], "nonsense"),
        ([("model.norm.weight", torch.zeros(2))], "shape"),
    ],
    ids=["name", "shape"],
)
def test_what_does_not_fit_is_refused_and_whole_weights_stay_whole(
    ours: Server, named: Named, output: str
) -> None:
    with pytest.raises(WeightSyncFailed, match=output):
        ours.use(lambda c: c.update_weights_from_tensor([serialize_named_tensors(named)], weight_version="9"))
    assert_serves(ours, ours.folder, 0)


def test_bad_folders_are_refused_and_whole_weights_stay_whole(ours: Server, tmp_path: Path) -> None:
    def refused(folder: Path, output: str) -> None:
        with pytest.raises(WeightSyncFailed, match=output):
            ours.use(lambda c: c.update_weights_from_disk(str(folder), weight_version="9"))

    refused(tmp_path / "none", "no safetensors")
    partial = tmp_path / "partial"
    partial.mkdir()
    save_file(dict(other_weights(ours)[1:]), partial / "model.safetensors")
    refused(partial, "lacks 1 param")
    torn = tmp_path / "torn"
    torn.mkdir()
    assert ours.other is not None
    data = (ours.other / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(torn, "cannot read")
    assert_serves(ours, ours.folder, 0)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/orhpc-evil-was-here",)


def test_a_pickle_cannot_run_anything(dense: Server) -> None:
    if not dense.own:
        pytest.skip("hostile input only for our own engine")
    for payload in (Evil(), [("model.norm.weight", Evil())], {"flattened_tensor": Evil()}):
        text = base64.b64encode(pickle.dumps(payload)).decode()
        for load_format in (None, "flattened_bucket"):
            body = {"serialized_named_tensors": [text], "load_format": load_format}
            answer = dense.post("/update_weights_from_tensor", body)
            assert answer.status_code == 400
            assert "not allowed" in answer.json()["message"]
    assert not Path("/tmp/orhpc-evil-was-here").exists()


MALFORMED = [
    ("/update_weights_from_tensor", {}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["%%%"]}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": [""], "load_format": "direct"}),
    ("/update_weights_from_disk", {}),
    ("/update_weights_from_disk", {"model_path": 3}),
    ("/update_weights_from_distributed", {"group_name": "nobody"}),
    ("/init_weights_update_group", {}),
    ("/init_weights_update_group", {"backend": "nccl"}),
    ("/destroy_weights_update_group", {"group_name": "nobody"}),
    ("/update_weight_version", {}),
    ("/get_weights_by_name", {"name": "model.nonsense"}),
    ("/weights_checker", {"action": "dance"}),
]


@pytest.mark.parametrize(("path", "body"), MALFORMED, ids=[f"{i}{p}" for i, (p, _) in enumerate(MALFORMED)])
def test_malformed_updates_are_refused(dense: Server, path: str, body: dict[str, Any]) -> None:
    if not dense.own:
        pytest.skip("SGLang refuses some of these otherwise")
    assert dense.post(path, body).status_code == 400
    assert dense.get("/health").status_code == 200


@pytest.mark.slow
def test_a_group_without_a_sender_is_given_up(dense: Server) -> None:
    if not dense.own:
        pytest.skip("needs a short deadline")
    with pytest.raises(WeightSyncFailed, match="joining group"):
        dense.use(
            lambda c: c.init_weights_update_group(
                master_address="127.0.0.1",
                master_port=free_port(),
                rank_offset=1,
                world_size=2,
                group_name="alone",
                backend="gloo",
            )
        )
    assert dense.get("/health").status_code == 200


def test_checksums_and_values_follow_the_weights(ours: Server) -> None:
    async def sums(client: EngineClient) -> dict[str, str]:
        return await client.weight_checksums()

    first = ours.use(sums)
    ours.use(lambda c: c.update_weights_from_disk(str(ours.other), weight_version="1"))
    second = ours.use(sums)
    assert set(first) == set(second) == {f"0/{n}" for n, _ in other_weights(ours)}
    # Norms are initialized to ones in both models.
    assert {n for n in first if first[n] == second[n]} == {n for n in first if "norm" in n}
    for name, tensor in other_weights(ours):
        assert ours.use(lambda c, name=name: c.get_weights_by_name(name, 1)) == tensor[:1].tolist()


def test_an_update_under_running_requests_needs_a_pause_that_empties_the_batch(ours: Server) -> None:
    """In place, without a flush, requests continue with the new weights; with a flush it is refused."""

    async def run(client: EngineClient) -> Generation:
        job = asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=150, seed=1), rid="across"))
        await get_going(client, 1)
        await client.pause_generation("in_place")
        with pytest.raises(WeightSyncFailed, match="running"):
            await client.update_weights_from_disk(str(ours.other), weight_version="1")
        await client.update_weights_from_disk(str(ours.other), weight_version="1", flush_cache=False)
        await client.continue_generation()
        return await job

    got = ours.use(run)
    assert got.version == 1
    under_old = ours.other_logprobs(PROMPT, got)
    differs = np.abs(got.logprobs_N - under_old) > 1e-3
    assert not differs[0]
    assert differs[-1]
