"""The cpu engine in a thread, with float16 experts as in SGLang, and with injected routing faults."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from torch import Tensor, nn
from torch.nn import functional

from orhpc.rollout.engines.cpu.batcher import Batcher
from orhpc.rollout.engines.cpu.control import WeightControl
from orhpc.rollout.engines.cpu.model import SlotModel, load_model
from orhpc.rollout.engines.cpu.protocol import EngineRequest
from orhpc.rollout.engines.cpu.scheduler import Scheduler
from orhpc.rollout.engines.cpu.server import EngineServer, ServerInfo
from orhpc.rollout.engines.cpu.weights import WeightStore
from orhpc.wire.routes import RouteArray
from tests.trainer_kit import free_port

Report = Callable[[RouteArray], RouteArray]
"""Maps the recorded routes to the routes in the answer."""
Routed = tuple[Tensor, Tensor, Tensor]
"""Output of a router: its scores, the experts' weights and the experts."""
RouterFault = Callable[[int, Routed], Routed]
"""Maps a router's layer and output to the modified output."""


def half_experts(experts: Any, hidden_TH: Tensor, taken_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Round the experts of a float32 model as SGLang's Triton kernel does: both products are stored as
    float16, the second one weighted (``fused_moe.py`` of 0.5.16, ``compute_type``)."""
    total_TH = torch.zeros_like(hidden_TH)
    for expert in range(experts.num_experts):
        token, place = torch.where(taken_TK == expert)
        both = functional.linear(hidden_TH[token], experts.gate_up_proj[expert]).half().float()
        gate, up = both.chunk(2, dim=-1)
        out = functional.linear(experts.act_fn(gate) * up, experts.down_proj[expert])
        total_TH.index_add_(0, token, (out * weights_TK[token, place, None]).half().float())
    return total_TH


class FaultyEngine(Batcher):
    """Set a fault between two requests."""

    def __init__(self, folder: Path, context: int) -> None:
        model = load_model(str(folder), dtype="float32", load_format="auto", seed=0, trust_remote_code=False)
        for index, layer in enumerate(model.model.layers):
            # Registered before the recorder's hook, so that the modified choice is recorded.
            layer.mlp.gate.register_forward_hook(partial(self._router, index))
            layer.mlp.experts.forward = partial(half_experts, layer.mlp.experts)
        self.report: Report | None = None
        self.router: RouterFault | None = None
        super().__init__(SlotModel(model, 8, context, record_routes=True))

    def _router(self, layer: int, _gate: nn.Module, _inputs: object, found: Routed) -> Routed | None:
        return None if self.router is None else self.router(layer, found)

    def _routes(self, request: EngineRequest) -> RouteArray | None:
        routes = super()._routes(request)
        return routes if routes is None or self.report is None else self.report(routes)


@contextmanager
def serving(engine: FaultyEngine) -> Iterator[str]:
    """Serve it on loopback; yields its address."""
    threads = torch.get_num_threads()
    port = free_port()
    ready: threading.Event = threading.Event()
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        weights = WeightStore(engine.model.model)
        scheduler = Scheduler(engine, weights, version="0", threads=1, loop=loop)
        info = ServerInfo("faulty", "float32", engine.model.slots, engine.model.context, "qwen3_moe")
        control = WeightControl(scheduler, deadline_s=10)
        scheduler.start()
        runner = web.AppRunner(EngineServer(scheduler, control, info, key=None, seed=0).app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        stop.append(partial(loop.call_soon_threadsafe, ended.set))
        ready.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(120), "the faulty engine did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        for end in stop:
            end()
        thread.join(30)
        torch.set_num_threads(threads)
