"""If an engine fails while the state of all is changed, it is stopped and the others continue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from orhpc.config import Config
from orhpc.driver.fleet.engine_places import Engine, start_servers
from orhpc.driver.fleet.engines import Engines
from orhpc.errors import EngineUnavailable, RayLost
from orhpc.plan.placement import Node, plan


class Server(ThreadingHTTPServer):
    """Answers every call like SGLang's control calls; at ``fails_at`` it closes the connection."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails_at = ""
        self.refuses_at = ""
        """Answered with 400, as by SGLang's cache that is not idle."""
        self.answers = Event()
        """Not set while health checks are not answered."""
        self.answers.set()
        super().__init__(("127.0.0.1", 0), Handler)
        Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        server.answers.wait()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        server: Any = self.server
        path = self.path.partition("?")[0]
        server.calls.append(path)
        self.rfile.read(int(self.headers["Content-Length"]))
        if path == server.fails_at:
            self.close_connection = True
            return
        body = json.dumps({"success": True}).encode()
        self.send_response(400 if path == server.refuses_at else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    found = [Server(), Server()]
    yield found
    for server in found:
        server.shutdown()
        server.server_close()


class Watched(Engines):
    """Records which engines were stopped; they have no processes."""

    async def _stop(self, engine: Engine, within_s: float = 10.0) -> None:
        self.ended.append(engine.url)

    ended: list[str]


def engines_at(servers: list[Server], mode: dict[str, Any]) -> Watched:
    mode = dict(mode)
    engine = {"backend": "cpu", "tp": 1, "health_timeout_s": mode.pop("health_timeout_s", 60.0)}
    placement = {"device": "cpu", "devices_per_node": 2, **mode}
    environments = {"a/b": {"serve": "letters"}}
    config = Config.model_validate({"placement": placement, "engine": engine, "environments": environments})
    placed = plan(config, (Node("n0", "127.0.0.1", 2),))
    engines = [Engine(place, s.url, []) for place, s in zip(placed.engines, servers, strict=True)]
    found = Watched(engines, placed, config, "key")
    found.ended = []
    return found


CALLS = {
    "release": ["/pause_generation", "/flush_cache", "/release_memory_occupation"],
    "resume_weights": ["/resume_memory_occupation"],
    "resume_serving": ["/resume_memory_occupation", "/continue_generation"],
}


@pytest.mark.parametrize(("method", "path"), [(m, path) for m, paths in CALLS.items() for path in paths])
def test_the_other_engines_continue_and_the_failed_one_is_stopped(
    servers: list[Server], method: str, path: str
) -> None:
    async def run() -> None:
        engines = engines_at(servers, {})
        assert engines.shared == [s.url for s in servers]
        if method == "resume_weights":
            await engines.resume_weights()  # they hold their weights: a repeated sync asks for nothing
            assert servers[0].calls == []
            await engines.release()
            servers[0].calls.clear()
        servers[1].fails_at = path
        await getattr(engines, method)()
        assert engines.ended == [servers[1].url]
        assert list(engines.pool.down()) == [servers[1].url]
        assert servers[0].calls == CALLS[method]
        # It takes no part in later calls.
        servers[1].calls.clear()
        await engines.resume_weights()
        assert engines.ended == [servers[1].url]
        assert [c for c in servers[1].calls if "memory" in c] == []
        await engines.close()

    asyncio.run(run())


def test_an_engine_that_refuses_a_control_call_is_restarted_like_one_that_fails(
    servers: list[Server],
) -> None:
    """Its refusal is not an error of the user's settings, which would end the run for good."""

    async def run() -> None:
        engines = engines_at(servers, {})
        servers[1].refuses_at = "/flush_cache"
        await engines.release()
        assert engines.ended == [servers[1].url]
        assert "400" in engines.pool.down()[servers[1].url]
        await engines.close()

    asyncio.run(run())


def test_engines_that_all_fail_are_stopped_and_wait_for_their_restart(servers: list[Server]) -> None:
    async def run() -> None:
        engines = engines_at(servers, {})
        for server in servers:
            server.fails_at = "/resume_memory_occupation"
        assert not (engines.none_serves or engines.needs_shared_devices)
        await engines.resume_serving()
        assert sorted(engines.ended) == sorted(engines.urls)
        assert engines.none_serves and engines.needs_shared_devices
        for server in servers:
            server.calls.clear()
        await engines.release()
        assert [call for server in servers for call in server.calls] == []
        await engines.close()

    asyncio.run(run())


def test_an_engine_with_dedicated_devices_may_be_lost_after_a_sync(servers: list[Server]) -> None:
    async def run() -> None:
        engines = engines_at(servers, {"mode": "mixed", "trainer_devices": 1, "engine_devices": 2})
        assert (engines.shared, engines.dedicated) == ([servers[0].url], [servers[1].url])
        servers[1].fails_at = "/continue_generation"
        await engines.continue_generation()
        assert engines.ended == [servers[1].url]
        await engines.pause()  # no dedicated engine is left to be paused, and one shared engine serves
        assert servers[0].calls == []
        await engines.close()

    asyncio.run(run())


class Host:
    """An engine's actor that records its calls; its ``stop`` may fail."""

    def __init__(self, reports: list[str], *, lost: bool = False) -> None:
        self.reports, self.lost = reports, lost

    def __getattr__(self, name: str) -> Any:
        async def answer(*_: Any) -> Any:
            self.reports.append(name)
            if self.lost:
                raise RayLost("the actor is gone")

        return SimpleNamespace(remote=answer)


class LivingHost(Host):
    """An actor whose processes are alive."""

    def __getattr__(self, name: str) -> Any:
        async def answer(*_: Any) -> bool:
            self.reports.append(name)
            return name != "ran_out_of_memory"

        return SimpleNamespace(remote=answer)


def test_only_engines_on_trainers_devices_wait_for_their_memory(servers: list[Server]) -> None:
    async def work() -> None:
        mixed = {"mode": "mixed", "trainer_devices": 1, "engine_devices": 2}
        engines, reports = engines_at(servers, mixed), list[list[str]]()
        for engine in engines._engines:
            reports.append([])
            engine.hosts = [Host(reports[-1])]  # type: ignore[list-item]
        assert [engine.place.shared for engine in engines._engines] == [True, False]
        asleep = asyncio.Event()
        starting = asyncio.ensure_future(start_servers(engines._engines, 10.0, asleep))
        await asyncio.sleep(0.05)
        assert reports == [["start_waiting", "wait_ready"], ["start", "wait_ready"]]
        assert not starting.done()
        asleep.set()
        await starting
        assert reports == [["start_waiting", "wait_ready", "let_load"], ["start", "wait_ready"]]
        await engines.pool.close()

    asyncio.run(work())


def test_an_engine_that_is_down_is_restarted_even_if_its_process_is_alive(servers: list[Server]) -> None:
    """It has missed calls, so the next weight broadcast would wait for it until its deadline."""

    async def work() -> None:
        engines = engines_at(servers, {})
        hosts = [LivingHost([]), LivingHost([])]
        for engine, host in zip(engines._engines, hosts, strict=True):
            engine.hosts = [host]  # type: ignore[list-item]
        assert await engines.restart_failed() == []
        assert engines.ended == []
        engines.pool.mark_down(servers[1].url, "it did not answer in time")
        assert await engines.restart_failed() == [1]
        assert engines.ended == [servers[1].url]
        assert hosts[1].reports == ["ran_out_of_memory", "start", "wait_ready"]
        assert hosts[0].reports == []
        assert not engines.pool.down()
        assert servers[1].calls == ["/pause_generation", "/release_memory_occupation"]
        await engines.pool.close()

    asyncio.run(work())


class SlowHost(LivingHost):
    """An actor whose processes end, and are ready again once ``ready`` is set; some starts fail."""

    def __init__(self, reports: list[str], *, failures: int = 0) -> None:
        super().__init__(reports)
        self.ready, self.failures, self.living = asyncio.Event(), failures, True

    def __getattr__(self, name: str) -> Any:
        async def answer(*_: Any) -> bool:
            self.reports.append(name)
            if name == "wait_ready":
                await self.ready.wait()
                if self.failures:
                    self.failures -= 1
                    raise EngineUnavailable("it does not start")
                self.living = True
            return self.living and name != "ran_out_of_memory"

        return SimpleNamespace(remote=answer)


SPLIT = {"mode": "split", "devices_per_node": 3, "trainer_devices": 1, "engine_devices": 2}


def with_hosts(
    servers: list[Server], mode: dict[str, Any], host: SlowHost, work: Callable[[Watched], Awaitable[None]]
) -> None:
    """Do work with two engines, of which the second has just ended."""

    async def run() -> None:
        engines = engines_at(servers, mode)
        engines._engines[0].hosts = [LivingHost([])]  # type: ignore[list-item]
        engines._engines[1].hosts = [host]  # type: ignore[list-item]
        host.living = False
        assert await engines.watch() == [1]
        await asyncio.wait_for(work(engines), 20)
        await engines.pool.close()

    asyncio.run(run())


def test_nothing_waits_for_an_engine_with_dedicated_devices_while_another_is_up(
    servers: list[Server],
) -> None:
    host = SlowHost([])

    async def work(engines: Watched) -> None:
        engines._group_members, engines.group_name = set(engines.urls), "group"
        first, second = engines.urls
        assert await engines.restart_failed() == []
        assert engines.ended == [second]
        assert (engines.by_broadcast, engines.receivers) == ({first: 1}, 1)
        assert engines.group_name is None, "a broadcast in the old group would wait for the lost engine"
        assert await engines.restart_failed() == []
        host.ready.set()
        await asyncio.sleep(0.05)
        assert await engines.restart_failed() == [1]
        assert not engines.pool.down()
        assert engines.by_broadcast == {first: 1, second: 2}
        assert host.reports.count("start") == 1
        assert "/destroy_weights_update_group" in servers[0].calls

    with_hosts(servers, SPLIT, host, work)


@pytest.mark.slow
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_an_engine_may_fail_to_start_twice_while_another_is_up(servers: list[Server], failures: int) -> None:
    host = SlowHost([], failures=failures)
    host.ready.set()

    async def work(engines: Watched) -> None:
        engines.begin_restarts()
        for _ in range(min(failures, 2)):
            await asyncio.sleep(0.05)
            assert await engines.restart_failed() == []
        await asyncio.sleep(0.05)
        if failures == 3:
            with pytest.raises(EngineUnavailable, match="does not start"):
                await engines.restart_failed()
        else:
            assert await engines.restart_failed() == [1]
            assert engines._failed_starts == {}

    with_hosts(servers, SPLIT, host, work)


def test_a_restarted_engine_that_refuses_to_sleep_is_restarted_again(servers: list[Server]) -> None:
    """A worker takes an engine with the base model for current at version 0, and may have sent a request."""
    host = SlowHost([])
    host.ready.set()
    servers[1].refuses_at = "/release_memory_occupation"

    async def work(engines: Watched) -> None:
        engines.begin_restarts()
        await engines.await_starts(shared=True)
        servers[1].refuses_at = ""
        assert await engines.restart_failed() == [1]
        assert host.reports.count("start") == 2

    with_hosts(servers, {}, host, work)


def test_an_engine_that_ends_again_is_restarted_again(servers: list[Server]) -> None:
    host = SlowHost([])
    host.ready.set()

    async def work(engines: Watched) -> None:
        engines.begin_restarts()
        await asyncio.sleep(0.05)
        host.living = False
        host.ready.clear()
        assert await engines.restart_failed() == []
        host.ready.set()
        await asyncio.sleep(0.05)
        assert await engines.restart_failed() == [1]
        assert host.reports.count("start") == 2

    with_hosts(servers, SPLIT, host, work)


@pytest.mark.slow
@pytest.mark.parametrize("checks", [1, 2])
def test_an_engine_that_answers_no_health_check_is_killed(servers: list[Server], checks: int) -> None:
    """One that missed a single check is not: every timeout is over at once after a job was suspended."""

    async def run() -> None:
        engines = engines_at(servers, {"health_timeout_s": 0.4})
        for engine in engines._engines:
            engine.hosts = [LivingHost([])]  # type: ignore[list-item]
        servers[1].answers.clear()
        for _ in range(checks):
            await engines._probe(1)
            await asyncio.sleep(0.01)
        assert engines.down == ([1] if checks > 1 else [])
        assert engines.ended == ([servers[1].url] if checks > 1 else [])
        servers[1].answers.set()
        if checks == 1:
            await engines._probe(1)
            servers[1].answers.clear()
            await engines._probe(1)
            assert engines.down == []
            servers[1].answers.set()
        await engines.pool.close()

    asyncio.run(run())


def test_an_engine_on_shared_devices_frees_their_memory_before_the_trainers_wake(
    servers: list[Server],
) -> None:
    host = SlowHost([], failures=1)

    async def work(engines: Watched) -> None:
        engines.begin_restarts()
        waiting = asyncio.ensure_future(engines.await_starts(shared=True))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        host.ready.set()
        await waiting  # the start has failed, and is tried again when the weights follow
        assert await engines.restart_failed() == [1]
        assert servers[1].calls == ["/pause_generation", "/release_memory_occupation"]
        await engines.resume_weights()
        assert servers[1].calls[2:] == ["/resume_memory_occupation"]
        assert host.reports.count("start") == 2

    with_hosts(servers, {}, host, work)


@pytest.mark.parametrize("lost", [False, True])
def test_a_server_is_restarted_by_the_actor_that_holds_its_port(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """With a new actor, any process could bind the port, to which workers still send the key."""
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    reports: list[str] = []

    async def work() -> None:
        engines = engines_at(servers, {})
        engine = engines._engines[0]
        first, second = Host(reports, lost=lost), Host(reports)
        engine.hosts, engine.starters = [first], [lambda: second]  # type: ignore[list-item]
        await Engines._stop(engines, engine)
        await start_servers([engine], 10.0)
        assert engine.hosts == ([second] if lost else [first])
        assert killed == ([first] if lost else [])
        await engines.pool.close()

    asyncio.run(work())
    assert reports == ["stop", "start", "wait_ready"]


def test_every_started_engine_is_prepared_once(servers: list[Server]) -> None:
    """SGLang's processes forget it when they restart; an engine that is down is prepared later."""
    update = "/update_weights_from_tensor"

    async def run() -> None:
        engines = engines_at(servers, {})
        assert engines.shared == engines.urls

        def use(**settings: Any) -> None:
            engine = engines.config.engine.model_copy(update={"backend": "sglang", **settings})
            engines.config = engines.config.model_copy(update={"engine": engine})

        async def restart(chosen: Sequence[Engine]) -> None:
            for engine in chosen:
                await engines._restart(engine)

        def prepared() -> list[int]:
            return [server.calls.count(update) for server in servers[:2]]

        use(direct_loading=True)
        engines.pool.mark_down(servers[1].url, "restarting")
        await engines.prepare_started()
        await engines.prepare_started()
        assert prepared() == [2, 0]  # to load, and to release memory
        await engines.pool.readmit(servers[1].url)
        await engines.prepare_started()
        assert prepared() == [2, 2]
        await restart(engines._engines[:1])
        await engines.prepare_started()
        assert prepared() == [4, 2]
        use(direct_loading=False)
        await restart(engines._engines)
        await engines.prepare_started()
        assert prepared() == [5, 3]
        engines.shared.clear()
        await restart(engines._engines)
        await engines.prepare_started()
        assert prepared() == [5, 3]
        await engines.close()

    asyncio.run(run())
