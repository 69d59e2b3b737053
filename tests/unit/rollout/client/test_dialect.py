"""Weight updates with a draft model, for releases with and without update sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from orhpc.config.engine import EngineSettings
from orhpc.rollout.client import EngineClient
from tests.serialized_weights import receive_broadcast

UPDATES = ("/update_weights_from_tensor", "/update_weights_from_distributed")


def bodies_of_a_sync(*, sessions: bool, target_only: bool) -> dict[str, Any]:
    """The request bodies that each kind of server receives during an update, by path."""
    got: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith("_weight_update") and not sessions:
            return web.json_response({"detail": "Not Found"}, status=404)
        got[request.path] = await request.json()
        return web.json_response({"success": True, "message": "ok"})

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = EngineClient(url, key=None, request_timeout_s=10.0, target_only=target_only)
        try:
            await client.begin_update()
            await client.update_weights_from_tensor(["x"], load_format="flattened_bucket")
            await receive_broadcast(client, ("a",), ("bfloat16",), ((2,),), group_name="g")
            await client.end_update()
        finally:
            await client.close()
            await runner.cleanup()

    asyncio.run(run())
    return got


@pytest.mark.parametrize("target_only", [True, False])
@pytest.mark.parametrize("sessions", [True, False])
def test_a_draft_model_keeps_its_weights(sessions: bool, target_only: bool) -> None:
    got = bodies_of_a_sync(sessions=sessions, target_only=target_only)
    wanted = {"selector": "target"} if sessions else {"disable_draft_model": True}
    for path in UPDATES:
        sent = {k: v for k, v in got[path].items() if k in ("selector", "disable_draft_model")}
        understood = sessions or path == "/update_weights_from_tensor"
        assert sent == (wanted if target_only and understood else {})
    if sessions:
        assert got["/begin_weight_update"] == (wanted if target_only else {})
        assert got["/end_weight_update"] == {}
    else:
        assert set(got) == set(UPDATES)


@pytest.mark.parametrize("setting", [{"sync": "disk"}, {"check_weights": True}])
def test_settings_that_read_from_disk_are_refused_with_a_draft_model(setting: dict[str, Any]) -> None:
    eagle = {"algorithm": "EAGLE", "draft_model": "/draft"}
    with pytest.raises(ValueError, match=r"into the draft model /draft"):
        EngineSettings.model_validate({"speculative": eagle, **setting})
    assert EngineSettings.model_validate({"speculative": eagle}).separate_drafter
    own = {"speculative": {"algorithm": "NEXTN"}, **setting}
    assert not EngineSettings.model_validate(own).separate_drafter
