"""Servers under test: by default the cpu engine with two tiny random models, otherwise ``--engine-url``."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from orhpc.config import Config
from orhpc.rollout.client import EngineClient
from orhpc.rollout.client.wire import TokenIds
from orhpc.rollout.engines.process import EngineProcess
from orhpc.types import FinishReason, Generation, Sampling
from orhpc.wire.routes import RouteArray, RouteShape
from tests.trainer_kit import free_port

from .reference import Reference, Scored
from .tiny_models import VOCABULARY, dense_config, make_folder, moe_config

T = TypeVar("T")
KEY = "key-of-the-protocol-tests"
CONTEXT = 192
EXACT_MARGIN = 1e-5
"""Tolerance in logits for float32 rounding between the cpu engine's packed rows and one plain pass."""

_ELSEWHERE = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ELSEWHERE] = bool(config.getoption("--engine-url", None))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Report a failure immediately: a borrowed machine may be gone before the summary."""
    report = yield
    if report.failed and item.config.stash.get(_ELSEWHERE, False):
        print(f"\n{report.longreprtext}", flush=True)
    return report


@dataclass
class Answer:
    """The answer to a raw request."""

    status_code: int
    data: bytes

    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def text(self) -> str:
        return self.data.decode()


def send(url: str, data: bytes | None, key: str | None) -> Answer:
    """Send one raw request: POST with ``data``, otherwise GET."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return Answer(response.status, response.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read())


class RecordingClient(EngineClient):
    """Requests all expert routes if a test does not specify them; see :meth:`Server.assert_logprobs`."""

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: Sampling,
        *,
        rid: str,
        routes_start: int | None = 0,
        routing_key: str | None = None,
    ) -> Generation:
        return await super().generate(
            prompt_ids, sampling, rid=rid, routes_start=routes_start, routing_key=routing_key
        )


@dataclass
class Server:
    """A server under test and the known properties of its model."""

    url: str
    key: str | None
    folder: Path | None
    """Folder of its initial weights; None if unknown."""
    other: Path | None
    """Folder of other weights for the same model."""
    own: bool
    """Whether the tests started it, so that its state may be broken and repaired."""
    moe: bool
    context: int
    tolerance: float
    """Maximum difference between a log-probability and the reference's."""
    router_margin: float
    """Maximum margin, in router logits, of an expert that the engine did not choose."""
    device: str
    """Device of the reference."""
    references: dict[Path, Reference] = field(default_factory=dict, repr=False)

    def client(self, request_timeout_s: float = 60.0) -> EngineClient:
        shape = None
        if self.moe and self.folder:
            shape = RouteShape.of_config(json.loads((self.folder / "config.json").read_text()))
        kind = EngineClient if shape is None else RecordingClient
        return kind(
            self.url,
            key=self.key,
            request_timeout_s=request_timeout_s,
            transfer_timeout_s=60.0,
            control_timeout_s=60.0,
            route_shape=shape,
        )

    def use(self, work: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> T:
        """Run calls to the server in a new event loop."""

        async def run() -> T:
            client = self.client()
            try:
                return await work(client)
            finally:
                await client.close()

        return asyncio.run(run())

    def post(
        self, path: str, body: Any = None, *, key: str | None = "own", raw: bytes | None = None
    ) -> Answer:
        """Send a request that the client would never send."""
        data = raw if raw is not None else json.dumps({} if body is None else body).encode()
        return send(self.url + path, data, self.key if key == "own" else key)

    def get(self, path: str, *, key: str | None = "own") -> Answer:
        return send(self.url + path, None, self.key if key == "own" else key)

    def generate(self, prompt: list[int], sampling: Sampling, **options: Any) -> Generation:
        options.setdefault("rid", f"t{id(prompt)}")
        return self.use(lambda c: c.generate(prompt, sampling, **options))

    def reference(self, folder: Path | None = None) -> Reference:
        """Its model, or that of another folder, in transformers."""
        folder = folder or self.folder
        if folder is None:
            pytest.skip("needs --engine-model")
        if folder not in self.references:
            self.references[folder] = Reference(folder, self.device)
        return self.references[folder]

    def other_logprobs(
        self, prompt: list[int], got: Generation, folder: Path | None = None
    ) -> NDArray[np.float64]:
        """Log-probabilities of ``got`` from a model that did not sample it, with that model's experts."""
        return self.reference(folder).score(prompt, got.tokens_N.tolist(), 1.0).logprobs_N

    def assert_logprobs(
        self, got: Generation, prompt: list[int], temperature: float = 1.0, folder: Path | None = None
    ) -> Scored:
        """``got`` has the reference's log-probabilities after ``prompt``.

        All comparisons with the reference are made here.  For a mixture of experts, the reference uses the
        engine's experts, which must equal its own except for near ties; see :mod:`tests.protocol.reference`.
        """
        reference = self.reference(folder)
        if self.moe:
            assert got.routes is not None and got.routes_start == 0
        scored = reference.score(prompt, got.tokens_N.tolist(), temperature, got.routes)
        scored.routing.check(self.router_margin)
        np.testing.assert_allclose(got.logprobs_N, scored.logprobs_N, atol=self.tolerance, rtol=0)
        return scored

    def assert_routes(self, routes: RouteArray | None, tokens: list[int]) -> None:
        """``routes`` equal those of a forward pass over the first tokens, except for near ties."""
        assert routes is not None and len(routes)
        self.reference().routing(tokens[: len(routes)], routes).check(self.router_margin)

    def assert_sampled(self, got: Generation, prompt: list[int], limit: int) -> None:
        """``got`` is sampled from the model after ``prompt``, up to ``limit`` tokens or an end token."""
        self.assert_logprobs(got, prompt)
        at_limit = got.finish_reason is FinishReason.LENGTH
        assert at_limit or got.finish_reason is FinishReason.STOP
        assert len(got.tokens_N) == limit if at_limit else len(got.tokens_N) <= limit

    def assert_same(self, one: Generation, other: Generation, prompt: list[int], limit: int) -> None:
        """Both sampled the same tokens with the same seed.

        The cpu engine computes the same keys and values however a prompt is split; a GPU's kernels round
        differently for each split, which can change a near tie.  There, both are compared with the model.
        """
        if self.own:
            assert one.finish_reason is other.finish_reason
            assert one.tokens_N.tolist() == other.tokens_N.tolist()
            np.testing.assert_allclose(one.logprobs_N, other.logprobs_N, atol=self.tolerance, rtol=0)
        else:
            self.assert_sampled(one, prompt, limit)
            self.assert_sampled(other, prompt, limit)

    def repair(self) -> None:
        """Restore the server's initial weights, its memory and an empty cache."""
        if self.own:  # SGLang's scheduler exits when asked to resume memory that was not released
            self.post("/resume_memory_occupation")
        self.post("/pause_generation", {"mode": "abort"})
        answer = self.post(
            "/update_weights_from_disk", {"model_path": str(self.folder), "weight_version": "0"}
        )
        assert answer.status_code == 200, answer.text
        self.post("/continue_generation")


def engine_config(**engine: Any) -> Config:
    """A run's config with a cpu engine in float32."""
    return Config.model_validate(
        {
            "engine": {
                "backend": "cpu",
                "tp": 1,
                "dtype": "float32",
                "max_running": 8,
                "threads": 1,
                **engine,
            },
            "placement": {"device": "cpu", "devices_per_node": 1},
            "rollout": {"max_total_tokens": CONTEXT, "max_response_tokens": 64, "record_routes": False},
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
        }
    )


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Model folders: family to (first weights, other weights)."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: (make_folder(config, root / name, 0), make_folder(config, root / f"{name}2", 1))
        for name, config in (("dense", dense_config()), ("moe", moe_config()))
    }


@pytest.fixture(scope="session")
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """All servers under test; the cpu engines start together."""
    option = request.config.getoption
    if option("--engine-url"):
        yield {"dense": _external(option), "moe": _external(option)}
        return
    folders = request.getfixturevalue("folders")
    logs = tmp_path_factory.mktemp("logs")
    processes: list[EngineProcess] = []
    found: dict[str, Server] = {}
    for index, (name, (folder, other)) in enumerate(folders.items()):
        extra = {"enable_return_routed_experts": True} if name == "moe" else {}
        config = engine_config(extra={"dist_timeout": 8, **extra})
        port = free_port()
        process = EngineProcess(
            config, str(folder), "127.0.0.1", port, KEY, str(logs / f"{name}.log"), index, threads=1
        )
        processes.append(process)
        found[name] = Server(
            process.url, KEY, folder, other, own=True, moe=name == "moe", context=CONTEXT,
            tolerance=1e-4, router_margin=EXACT_MARGIN, device="cpu",
        )  # fmt: skip
        process.start()
    try:
        for process in processes:
            asyncio.run(process.wait_ready(240.0))
        yield found
    finally:
        for process in processes:
            process.stop()


def _external(option: Callable[[str], Any]) -> Server:
    key = Path(option("--engine-key-file")).read_text().strip() if option("--engine-key-file") else None
    folder = Path(option("--engine-model")) if option("--engine-model") else None
    url = option("--engine-url").rstrip("/")
    info = send(f"{url}/server_info", None, key).json()
    moe = bool(info.get("enable_return_routed_experts"))
    other = Path(option("--engine-other")) if option("--engine-other") else None
    context = int(info.get("context_length") or 2048)
    # Tests and servers share the cores: with one thread per core each, the SmolLM2 reference takes minutes.
    torch.set_num_threads(1)
    return Server(
        url, key, folder, other, own=False, moe=moe, context=context,
        tolerance=float(option("--engine-tolerance")),
        router_margin=float(option("--engine-router-margin")),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip


@pytest.fixture(params=["dense", "moe"])
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    """Each server in turn; an external server only once."""
    found = servers[request.param]
    if not found.own and request.param == "moe":
        pytest.skip("the same server from outside")
    return found


@pytest.fixture(autouse=True)
def _going_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Continue generation after a test that fails during a pause, for later tests on an external server."""
    yield
    if "servers" in request.fixturenames:
        found: dict[str, Server] = request.getfixturevalue("servers")
        if not found["dense"].own:
            found["dense"].post("/continue_generation")


@pytest.fixture
def dense(servers: dict[str, Server]) -> Server:
    """The server with the dense model, or the external one."""
    return servers["dense"]


@pytest.fixture
def moe(servers: dict[str, Server]) -> Server:
    """A server that records expert routes."""
    if not servers["moe"].moe:
        pytest.skip("the server does not return routed experts")
    return servers["moe"]


@pytest.fixture
def mutable(server: Server) -> Iterator[Server]:
    """A server whose weights a test may change."""
    if server.other is None:
        pytest.skip("changes weights, and there are no others (--engine-other)")
    yield server
    server.repair()


@pytest.fixture
def ours(mutable: Server) -> Server:
    """Our own engine, for behavior that SGLang lacks or implements differently; its state may be changed."""
    if not mutable.own:
        pytest.skip("about the cpu engine")
    return mutable


async def get_going(client: EngineClient, count: int) -> None:
    """Return once ``count`` long requests are running and have sampled some tokens."""
    for _ in range(2000):
        info = await client.server_info()
        if info["internal_states"][0].get("num_running_reqs", count) >= count:
            break
        await asyncio.sleep(0.002)
    # Decoded in the same batch, so the others have sampled too when it is done.
    await client.generate([3, 4], Sampling(max_new_tokens=3, seed=0), rid="pacemaker")


def prompt_of(length: int, seed: int) -> list[int]:
    """A random prompt without the end-of-sequence token."""
    return np.random.default_rng(seed).integers(2, VOCABULARY, length).tolist()
