"""Opening an environment: its URL, variant, splits and key, and servers that start late."""

from __future__ import annotations

import asyncio
import time

import pytest

from orhpc.config import EnvironmentSettings, RolloutSettings
from orhpc.errors import ConfigError, EnvironmentUnavailable, PreflightError
from orhpc.rollout.environment import environment as environment_module
from orhpc.rollout.environment import openreward_session as wire
from orhpc.rollout.environment.environment import Environment
from tests.served import Served, serve
from tests.unit.rollout.environment.kit import Plain, opened, task, within

pytestmark = pytest.mark.slow


def test_private_servers_are_reached_without_proxies(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def body(environment: Environment) -> None:
        assert await environment.num_tasks("train") == 7

    within(served.url, body)
    within(served.url, body, configured=True)


def test_the_error_for_a_missing_split_lists_the_existing_ones(served: Served) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(ConfigError, match="no split 'validation'; it has train, test, bad, empty"):
            await environment.num_tasks("validation")

    within(served.url, body)


@pytest.mark.parametrize("status", [200, 404])
def test_a_web_page_is_distinguished_from_a_server_that_is_starting(status: int) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            page = b"<html>hello</html>"
            head = f"HTTP/1.1 {status} X\r\nContent-Type: text/html\r\nContent-Length: {len(page)}\r\n\r\n"
            writer.write(head.encode() + page)

    async def ask(configured: bool) -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match="OpenReward server"):
            async with opened(f"http://127.0.0.1:{port}", configured=configured):
                pass
        server.close()

    for configured in (False, True):
        asyncio.run(asyncio.wait_for(ask(configured), 30))


def test_a_name_that_cannot_be_resolved_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.01)

    async def body(environment: Environment) -> None:
        raise AssertionError

    began = time.monotonic()
    with pytest.raises(PreflightError, match=r"'no-such-host\.invalid' cannot be resolved"):
        within("http://no-such-host.invalid:80", body, configured=True, environment_start_timeout_s=50)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("split", ["validation", "empty"])
def test_a_split_without_tasks_is_a_config_error(served: Served, split: str) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(ConfigError):
            await environment.num_tasks(split)

    within(served.url, body)


@pytest.mark.parametrize("variant", ["whodunit", "WhoDunit", "WhoDunIt", None])
def test_the_variant_is_found_in_any_spelling(served: Served, variant: str | None) -> None:
    async def body(environment: Environment) -> None:
        assert environment.path("/x") == "/whodunit/x"

    within(served.url, body, settings={"variant": variant})


def test_the_error_for_an_unknown_variant_lists_the_existing_ones(served: Served) -> None:
    async def body(environment: Environment) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match=r"did you mean 'whodunit'.*whodunit, plain, dialogue"):
        within(served.url, body, settings={"variant": "whodunnit"})


def test_a_server_that_starts_late_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.01)
    monkeypatch.setattr(environment_module, "RETRY_START_S", 0.1)
    with serve(Plain) as first:
        port = int(first.url.rsplit(":", 1)[1])

    async def late() -> None:
        opening = asyncio.ensure_future(
            Environment.open(
                "plain",
                EnvironmentSettings(),
                secrets={},
                rollout=RolloutSettings(environment_start_timeout_s=20),
                url=f"http://127.0.0.1:{port}",
            )
        )
        await asyncio.sleep(0.5)
        assert not opening.done()
        with serve(Plain, port=port):
            environment = await opening
            assert await environment.num_tasks("train") == 3
            await environment.close()

    asyncio.run(late())


def test_a_server_that_never_starts_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.01)
    monkeypatch.setattr(environment_module, "RETRY_START_S", 0.1)

    async def body(environment: Environment) -> None:
        raise AssertionError

    with pytest.raises(EnvironmentUnavailable, match=r"did not start within 0\.5 s"):
        within("http://127.0.0.1:9", body, environment_start_timeout_s=0.5)


@pytest.mark.parametrize(
    "url", ["not a url", "ftp://host", "http://", "http://host:port", "http://h/path", "http://u:p@h"]
)
def test_a_bad_url_is_a_config_error(url: str) -> None:
    async def body(environment: Environment) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match="url"):
        within(url, body)


def test_the_service_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    monkeypatch.delenv("OPENREWARD_SESSION_URL", raising=False)

    async def open_hosted() -> None:
        await Environment.open("Org/X", EnvironmentSettings(), secrets={}, rollout=RolloutSettings())

    with pytest.raises(PreflightError, match="OPENREWARD_API_KEY"):
        asyncio.run(open_hosted())


def test_the_service_receives_its_key_and_the_secrets_it_requires(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_module, "is_openreward", lambda host: True)
    monkeypatch.setenv("OPENREWARD_SESSION_URL", served.url)
    monkeypatch.setenv("OPENREWARD_API_URL", served.url)
    monkeypatch.setenv("OPENREWARD_API_KEY", "key-of-the-service")
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    served.documents["/v1/environments/Org/whodunit/required-secrets"] = {"secrets": ["tavily_api_key"]}

    async def hosted() -> str:
        async with opened(None) as environment, environment.session(task()) as session:
            return (await session.call("secret", {})).text

    with pytest.raises(PreflightError, match="TAVILY_API_KEY"):
        asyncio.run(hosted())
    monkeypatch.setenv("TAVILY_API_KEY", "needed")
    session_secrets = asyncio.run(hosted())
    # It is redacted, so the session had the secret's current value.
    assert "('tavily_api_key', '[secret]')" in session_secrets
    assert "('api_key', '[secret]')" in session_secrets
    assert served.requests[-1][1]["x-api-key"] == "key-of-the-service"
    assert {headers.get("x-deployment") for path, headers in served.requests if path == "/create"} == {
        "Org/whodunit"
    }


def test_a_refused_key_is_reported(served: Served) -> None:
    async def body(environment: Environment) -> None:
        raise AssertionError

    served.answers["/create_session"] = [(401, {})]
    with pytest.raises(PreflightError, match=r"HTTP 401: injected.*no key was sent"):
        within(served.url, body, configured=True)
