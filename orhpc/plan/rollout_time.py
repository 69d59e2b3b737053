"""Seconds of a rollout phase: turns of shared GPUs, prefill and decoding steps; without torch.

A decoding step reads the weights and the KV cache of the requests that it serves from the GPU's memory; each
layer and each request adds a fixed time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orhpc.plan.run_plan import RunPlan
from orhpc.plan.speeds import Card, speed
from orhpc.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """Seconds of one step's rollout phase."""

    generate: float
    """From the first request to the end of the longest rollout."""
    sleep: float
    """Waiting for the trainers to leave shared GPUs."""
    wake: float
    switch: float
    """Engines taking and leaving shared GPUs."""
    rest: float
    concurrent: int
    """Requests that one engine decodes at once at most."""
    full: bool
    """Whether requests wait because the KV cache is full."""
    steps: float
    """Decoding steps."""
    token: float
    """Seconds of one of them."""

    @property
    def seconds(self) -> float:
        return self.generate + self.sleep + self.wake + self.switch + self.rest


def predict_rollout(run: RunPlan, card: Card, work: Workload, sync_s: float, update_s: float) -> RolloutTime:
    """Return the predicted times of a rollout phase.

    Args:
        run: the plan; it must have engines, and the device memory must be known.
        card: of engines and trainers.
        work: sizes of the step.
        sync_s: seconds of the weight sync, during which optimizer state is offloaded.
        update_s: seconds of the update, during which it is reloaded.
    """
    config, engines = run.config, len(run.placement.engines)
    own = work.rollouts / engines
    kept = run.rollouts_at_once(max(1.0, work.prompt + work.response / 2)) or 0
    at_once = max(1, min(config.engine.max_running, math.ceil(own), kept))
    steps = max(work.longest, own * work.response / at_once)
    busy = own * work.response / steps
    token = _decoding_step(run, card, work, busy)
    prefill = own * work.prompt * run.shape.linear_flops / (card.flops * speed("prefill_share") * run.tp)
    requests = own * speed("request_routes" if config.rollout.record_routes else "request")
    sleep, wake = turns(run, sync_s, update_s)
    shared = config.placement.shared_devices > 0
    return RolloutTime(
        generate=steps * token + prefill + requests,
        sleep=sleep,
        wake=wake,
        switch=speed("switch_group" if run.tp > 1 else "switch") if shared else 0.0,
        rest=speed("rollout"),
        concurrent=at_once,
        full=kept < min(config.engine.max_running, own),
        steps=steps,
        token=token,
    )


def _decoding_step(run: RunPlan, card: Card, work: Workload, requests: float) -> float:
    """Seconds in which ``requests`` requests get one token each."""
    shape = run.shape
    context = work.prompt + work.response / 2
    sparse = sum(bool(layer.experts) for layer in shape.layers)
    layers = sparse * speed("decode_experts") + (len(shape.layers) - sparse) * speed("decode_dense")
    read = _weights_read(run, requests) + requests * context * run.kv_token / run.config.engine.dp
    return speed("decode") + requests * speed("decode_request") + layers + read / card.bandwidth


def _weights_read(run: RunPlan, requests: float) -> float:
    """Bytes of weights on one device that a decoding step reads: experts only if a token chose them."""
    shape = run.shape
    embedding = 0 if shape.tied else shape.vocabulary * shape.hidden
    experts = sum(t.elements * t.copies for t in shape.tensors() if t.part == "expert")
    used = 1.0
    if shape.experts:
        used = 1 - (1 - shape.experts_per_token / shape.experts) ** max(1.0, requests)
    unread = embedding + experts * (1 - used)
    return run.engine_weights * (1 - unread / shape.parameters)


def record_s(run: RunPlan, work: Workload) -> float:
    """Return the seconds in which the workers write a step's rollouts, with their routes if recorded."""
    seconds = work.rollouts * speed("record")
    if run.config.rollout.record_routes:
        sparse = sum(bool(layer.experts) for layer in run.shape.layers)
        seconds += work.tokens * sparse * run.shape.experts_per_token * speed("record_routes")
    return seconds


def turns(run: RunPlan, sync_s: float, update_s: float) -> tuple[float, float]:
    """Return the seconds in which a step waits for trainers to leave shared GPUs and to come back.

    Weights and reference are moved then, unless they stay on the GPU; optimizer state during sync and update,
    as far as they last.
    """
    config = run.config
    if not (run.placement.engines and config.placement.shared_devices):
        return 0.0, 0.0
    if run.state_stays:
        return speed("stay_sleep"), speed("stay_wake")
    ranks = min(config.placement.devices_per_node, run.layout.ranks)
    late = run.trainer.optimizer + run.trainer.critic
    now = run.trainer.kept - late

    def waited(rate: float, hidden: float) -> float:
        return speed("turn") + now / rate + max(0.0, late / rate - hidden)

    down = min(speed("bus"), speed("bus_sleep") / ranks)
    up = min(speed("bus"), speed("bus_wake") / ranks)
    return waited(down, sync_s), waited(up, update_s)
