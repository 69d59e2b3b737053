"""Check that a config fits the devices that it requests, before the job enters the queue.

``orhpc plan``, ``orhpc check``, the launcher and the job's first node run the same check; each error gives
the arithmetic and the nearest setting that would work.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from dataclasses import dataclass, replace
from functools import cache

from orhpc.config import Config
from orhpc.errors import ConfigError, ModelError, PreflightError
from orhpc.launch.slurm import scheduler
from orhpc.models import ModelShape
from orhpc.plan.layout import Layout, check_layout
from orhpc.plan.limits import not_built, undivided_attention
from orhpc.plan.memory import FP8_BLOCK, reserved_bytes, trainer_memory
from orhpc.plan.run_plan import (
    DEFAULT_DEVICE_GIB,
    MOST_RANKS,
    RunPlan,
    candidate_layouts,
    gib,
    large_buckets,
    make_plan,
    sync_bytes,
)
from orhpc.process.driver_gpus import driver_gpus

KNOWN_DEVICES = {
    "gh200": 95.0,
    "h100": 79.6,
    "h200": 139.8,
    "h800": 79.6,
    "h20": 95.6,
    "a100": 79.2,
    "b200": 178.0,
}
"""Device memory in GiB as reported by nvidia-smi, by the GPU's name in SLURM's GRES types."""
LARGEST_GIB = KNOWN_DEVICES["h200"]
_LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
"""Environment variable with which SGLang accepts longer contexts than a model's config has."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one GPU of the job."""

    gib: float
    source: str
    known: bool
    """False if the devices are unknown and 80 GiB are assumed."""


def device_memory(config: Config) -> DeviceMemory:
    """Memory of a device, from the config, else this machine's driver, else the partition's GRES type."""
    if config.placement.device_memory_gib is not None:
        return DeviceMemory(config.placement.device_memory_gib, "placement.device_memory_gib", known=True)
    if (here := _driver_gib()) is not None:
        return DeviceMemory(here, "nvidia-smi", known=True)
    if (kind := gres_type(config.slurm.partition)) is not None:
        return DeviceMemory(KNOWN_DEVICES[kind], f"SLURM's GRES type {kind}", known=True)
    return DeviceMemory(DEFAULT_DEVICE_GIB, "assumed", known=False)


def _driver_gib() -> float | None:
    """Memory in GiB of this machine's smallest GPU, from its driver; None without a GPU."""
    found = driver_gpus()
    return min(gpu.memory_mib for gpu in found) / 1024 if found else None


def gres_type(partition: str | None) -> str | None:
    """The known GPU type of a partition's nodes; None if there is none or several."""
    if shutil.which("sinfo") is None:
        return None
    command = ["sinfo", "--noheader", "--format", "%G", *(["--partition", partition] if partition else [])]
    try:
        answer = scheduler.query(*command)
    except PreflightError:
        return None
    names = {m.lower() for m in re.findall(r"gpu:([\w.-]+):\d", answer.stdout)}
    kinds = {max(known, key=len) for n in names if (known := [k for k in KNOWN_DEVICES if k in n])}
    return kinds.pop() if len(kinds) == 1 and len(names) == 1 else None


def check(config: Config) -> str:
    """Check a config with what is known here about the model and the devices; return a line for the user.

    Raises:
        ConfigError: the model does not fit, or cannot be divided as configured.
    """
    memory = device_memory(config)
    try:
        run = make_plan(config, memory.gib)
    except ModelError as error:
        if config.model.path.startswith("bundled:"):
            return "a bundled model fits"
        return f"not known: {error}"
    check_engines(run)
    if run.device_bytes is None:
        return "devices are processes"
    if memory.known:
        check_fit(run)
        return f"{_used(run)} of {memory.gib:.0f} GiB a device ({memory.source})"
    check_fit(make_plan(config, LARGEST_GIB))
    try:
        check_fit(run)
    except ConfigError:
        return (
            f"fits devices of {LARGEST_GIB:.0f} GiB, not of {memory.gib:.0f}; set placement.device_memory_gib"
        )
    return f"{_used(run)} a device; fits {memory.gib:.0f} GiB"


def _used(run: RunPlan) -> str:
    return f"trainer {gib(run.trainer.total)} GiB" + (
        f", engine weights {gib(run.engine_weights)} GiB" if run.placement.engines else ""
    )


def check_engines(run: RunPlan) -> None:
    """Raise ConfigError if SGLang cannot divide the model, or its experts, as the settings say."""
    if not run.placement.engines or run.config.engine.backend != "sglang":
        return
    engine, quantized = run.config.engine, run.config.precision != "bf16"
    _check_context(run)
    dense_tp = engine.extra.get("moe_dense_tp_size")  # SGLang takes 1, or what it divides everything over

    def problem_with(tp: int, ep: int) -> str | None:
        return _engine_problem(run.shape, tp, engine.dp, ep, quantized, 1 if dense_tp == 1 else tp)

    if (problem := problem_with(engine.tp, engine.ep)) is None:
        return
    per_node, devices = run.config.placement.devices_per_node, run.config.placement.rollout_devices
    sizes = [
        tp
        for tp in range(1, devices + 1)
        if devices % tp == 0 and (per_node % tp == 0 or tp % per_node == 0) and tp % engine.dp == 0
    ]
    others = [
        (tp, ep) for tp in sizes for ep in range(1, tp + 1) if tp % ep == 0 and problem_with(tp, ep) is None
    ]

    def distance(sizes: tuple[int, int]) -> tuple[bool, float, int]:
        tp, ep = sizes
        return ep != engine.ep, abs(math.log(tp / engine.tp)) + abs(math.log(ep / engine.ep)), tp

    if not others:
        raise ConfigError(f"engine: {problem}; no engine.tp would do with dp={engine.dp}")
    tp, ep = min(others, key=distance)
    also = "" if ep == engine.ep else f" with engine.ep={ep}"
    raise ConfigError(f"engine: {problem}; engine.tp={tp}{also} would do")


def _check_context(run: RunPlan) -> None:
    """Raise ConfigError for contexts with which SGLang does not start, unless its own options allow them."""
    engine = run.config.engine
    longest = engine.context_length or run.config.rollout.max_total_tokens
    overridden = os.environ.get(_LONGER_CONTEXT, "").lower() in ("1", "true")
    overridden = overridden or engine.option("json_model_override_args") is not None
    if run.context is None or longest <= run.context or overridden:
        return
    setting = "engine.context_length" if engine.context_length else "rollout.max_total_tokens"
    raise ConfigError(
        f"{setting}: SGLang serves at most {run.context} tokens of this model (max_position_embeddings in "
        f"its config.json), not {longest}: lower it, or set rope_scaling and the length there as "
        f"the model's page says; {_LONGER_CONTEXT}=1 goes beyond what the model was made for"
    )


def _engine_problem(
    shape: ModelShape, tp: int, dp: int, ep: int, quantized: bool, dense_tp: int
) -> str | None:
    """Why SGLang cannot divide a model with these sizes; None if it can.

    ``dense_tp``: over how many ranks it divides the MLPs of layers without experts.
    """
    heads, experts = tp // dp, max(1, tp // ep)
    problems = {
        f"tp / dp = {heads} does not divide {shape.heads} attention heads": shape.heads % heads,
        f"tp / dp = {heads} is neither multiple nor divisor of {shape.kv_heads} key-value heads": (
            shape.kv_rank is None and shape.kv_heads % heads and heads % shape.kv_heads
        ),
        f"tp = {dense_tp} does not divide the MLP's width {shape.ffn}": (
            any(not layer.experts for layer in shape.layers) and shape.ffn % dense_tp
        ),
    }
    if quantized:
        problems |= _cut_blocks(shape, dense_tp, heads)
    if shape.experts:
        problems |= {
            f"ep = {ep} does not divide {shape.experts} experts": shape.experts % ep,
            f"tp / ep = {experts} does not divide an expert's width {shape.expert_ffn}": (
                shape.expert_ffn % experts
            ),
            f"tp / ep = {experts} cuts an expert's width {shape.expert_ffn} across FP8's blocks of "
            f"{FP8_BLOCK}": quantized and shape.expert_ffn // experts % FP8_BLOCK,
        }
    elif ep > 1:
        problems[f"ep = {ep}: the model has no experts"] = True
    return next((problem for problem, wrong in problems.items() if wrong), None)


def _cut_blocks(shape: ModelShape, dense_tp: int, heads_tp: int) -> dict[str, bool]:
    """Matrices of a rank that are no multiple of FP8's blocks: SGLang refuses them (its issue 3345).

    Shared experts are left out: SGLang does not divide them with some of its kernels.
    """
    rows = {
        "the MLP's width": shape.ffn // dense_tp if any(not layer.experts for layer in shape.layers) else 0
    }
    if shape.kv_rank is None:  # latent attention has other matrices
        rows["the queries"] = shape.heads // heads_tp * shape.head_dim
        rows["the keys and values"] = max(1, shape.kv_heads // heads_tp) * shape.head_dim
    return {
        f"FP8's blocks of {FP8_BLOCK} would be cut: a rank has {size} of {name}": size % FP8_BLOCK > 0
        for name, size in rows.items()
    }


def check_fit(run: RunPlan) -> None:
    """Raise ConfigError, with the arithmetic, if the trainers or engines do not fit their devices."""
    if run.device_bytes is None:
        return
    reserved = reserved_bytes(run.config)
    room = run.device_bytes - reserved
    if run.trainer.total > room:
        parts = " + ".join(f"{n} {gib(b)}" for n, b in run.trainer.parts().items() if b)
        raise ConfigError(
            f"placement: a trainer device needs {parts} = {gib(run.trainer.total)} GiB and has "
            f"{gib(run.device_bytes)} - {gib(reserved)} reserved = {gib(room)} GiB; " + _ways_out(run, room)
        )
    if not run.placement.engines:
        return
    if run.config.placement.shared_devices and (both := sync_bytes(run)) > run.device_bytes:
        large = large_buckets(run)
        buckets = f" and {gib(large)} GiB more of buckets" if large else ""
        less = "lower engine.sync_bucket_mb, " if large > large_buckets(run, limit=0) else ""
        raise ConfigError(
            f"placement: during weight sync, a shared device holds {gib(run.trainer.kept)} GiB of the "
            f"trainer's and {gib(run.engine_weights)} GiB of the engine's{buckets}, {gib(both)} with "
            f"{gib(reserved)} reserved, and has {gib(run.device_bytes)} GiB; {less}raise engine.tp, or "
            "train on more devices"
        )
    tokens, longest = run.kv_tokens or 0, run.config.rollout.max_total_tokens
    if tokens < longest:
        fraction = run.memory_fraction
        raise ConfigError(
            f"engine.tp: {fraction} x {gib(run.device_bytes)} GiB of a device less "
            f"{gib(run.engine_weights)} GiB of weights leaves {tokens} tokens of KV cache at "
            f"{run.kv_token} bytes each, and one rollout may have {longest}; "
            "raise engine.tp or engine.memory_fraction, or lower rollout.max_total_tokens"
        )


def _ways_out(run: RunPlan, room: int) -> str:
    too_long, more_ranks = _too_long(run, room), _way_out(run, room)
    if not too_long:
        return more_ranks
    if "trainer ranks " in more_ranks:
        return f"{too_long}; or {more_ranks}"
    same = "" if run.layout.sharded else f" with megatron.cp={run.layout.cp}"
    return f"no number of ranks helps{same}: {too_long}"


def _too_long(run: RunPlan, room: int) -> str:
    """What to change if only the longest rollout does not fit; empty if less would not help.

    A rollout is a micro-batch of its own, whatever the token budget, and is divided only by ``megatron.cp``.
    """
    config, longest = run.config, run.config.rollout.max_total_tokens
    budget = config.train.max_tokens_per_gpu * config.ranks_per_sequence
    if not config.train.dynamic_batch or longest <= budget or not _fits(run, room, budget):
        return ""
    low, high = budget, longest  # the first fits, the second does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(run, room, middle) else (low, middle)
    ways = [setting] if (setting := _recompute_more(run)) else []
    undivided = bool(not_built(run.shape) or undivided_attention(run.shape, longest))
    if run.layout.sharded and not undivided:
        ways.append("train.backend=megatron, which divides a rollout over megatron.cp devices")
    elif not undivided and (setting := _divided_more(run, room)):
        ways.append(setting)
    others = f", or set {', or '.join(ways)}" if ways else ""
    return (
        f"a rollout of rollout.max_total_tokens={longest} does not fit even alone, one of {low} would: lower "
        f"it{others}"
    )


def _divided_more(run: RunPlan, room: int) -> str:
    """Return the smallest ``megatron.cp`` with which the longest rollout fits, and the ranks that it needs.

    Empty: there is none.
    """
    per_node, layout = run.config.placement.devices_per_node, run.layout
    while (layout := replace(layout, cp=2 * layout.cp)).cp <= MOST_RANKS:
        whole = math.lcm(layout.tp * layout.cp * layout.pp, layout.pp * layout.ep * layout.etp)
        step = run.layout.ranks if run.layout.ranks % whole == 0 else math.lcm(whole, per_node)
        layout = replace(layout, ranks=-(-run.layout.ranks // step) * step)
        budget = run.config.train.max_tokens_per_gpu * layout.cp
        demand = replace(run.demand, tokens=max(budget, run.config.rollout.max_total_tokens))
        if trainer_memory(run.shape, layout, demand).total <= room:
            more = "" if layout.ranks == run.layout.ranks else f" with {layout.ranks} trainer ranks"
            return f"megatron.cp={layout.cp}{more}"
    return ""


def _recompute_more(run: RunPlan) -> str:
    """Return the setting that recomputes whole layers; empty if all are, or if they must not be."""
    if run.demand.recompute == "none":
        return "train.gradient_checkpointing=true"
    if run.layout.sharded and (run.demand.layers or math.inf) < len(run.shape.layers):
        return "train.recompute_layers=null"
    if run.demand.gathers_once:
        return "train.gather_once=false"
    can = run.demand.recompute == "selective" and not run.demand.overlapped
    return "megatron.recompute=full" if can else ""


def _fits(run: RunPlan, room: int, tokens: int) -> bool:
    return trainer_memory(run.shape, run.layout, replace(run.demand, tokens=tokens)).total <= room


def _way_out(run: RunPlan, room: int) -> str:
    per_node = run.config.placement.devices_per_node
    if not run.layout.sharded:
        return _way_out_divided(run, room)
    if run.demand.gathers_once:
        demand = replace(run.demand, gathers_once=False)
        less = replace(run, demand=demand, trainer=trainer_memory(run.shape, run.layout, demand))
        enough = less.trainer.total <= room
        return f"train.gather_once=false{' would do' if enough else f'; then {_way_out(less, room)}'}"
    # What two ranks gather is not padded, as it is for more ranks than a tensor has rows.
    gathered = trainer_memory(run.shape, Layout(2, sharded=True), run.demand).gathered
    fixed = gathered + run.trainer.activations + run.trainer.head
    if gathered > room:  # fewer tokens would not help either
        whole = f"fsdp gathers whole layers, {gib(gathered)} GiB whatever the number of ranks"
        if problem := not_built(run.shape):
            return f"{whole}, and megatron {problem}: it needs devices with more memory"
        return f"{whole}: train.backend=megatron divides them; {_way_out_divided(run, room)}"
    if fixed > room:
        what = f"{setting}, or " if (setting := _recompute_more(run)) else ""
        return (
            f"no number of ranks helps, since {gib(fixed)} GiB are not divided by them: {what}"
            "a lower rollout.max_total_tokens or train.max_tokens_per_gpu"
        )
    for ranks in range(per_node, MOST_RANKS + 1, per_node):
        if trainer_memory(run.shape, Layout(ranks, sharded=True), run.demand).total <= room:
            return f"{ranks} trainer ranks would do ({ranks // per_node} nodes of {per_node})"
    return f"{MOST_RANKS} ranks would not do either"


def _way_out_divided(run: RunPlan, room: int) -> str:
    """The smallest number of ranks, and the layout with least communication, that would hold the model."""
    per_node, longest_copy = run.config.placement.devices_per_node, run.layout.cp

    @cache
    def ever_fits(divided: Layout) -> bool:
        """Whether any number of ranks would do: more ranks divide only the optimizer's state."""
        return trainer_memory(run.shape, divided, run.demand).total <= room

    for ranks in range(per_node, MOST_RANKS + 1, per_node):
        for layout in candidate_layouts(run.shape, ranks, per_node, longest_copy):
            if not ever_fits(replace(layout, ranks=MOST_RANKS**3)):  # as good as unlimited
                continue
            try:
                check_layout(run.shape, layout, per_node)
            except ConfigError:
                continue
            if trainer_memory(run.shape, layout, run.demand).total <= room:
                sizes = ", ".join(f"{n} {getattr(layout, n)}" for n in ("tp", "pp", "ep"))
                return (
                    f"{ranks} trainer ranks with {sizes} would do ({ranks // per_node} nodes of {per_node})"
                )
    return f"no layout of up to {MOST_RANKS} ranks would do: lower the token budget or the longest rollout"
