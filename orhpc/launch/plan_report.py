"""``orhpc plan CONFIG``: ranks, memory of each device by part, and what limits; nothing is touched."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orhpc.config import Config
from orhpc.config_files import load_config
from orhpc.errors import EXIT_OK, ConfigError, OrhpcError, PreflightError, policy_of
from orhpc.launch.placement import Node, Placement, plan
from orhpc.launch.prepare import run_directory
from orhpc.launch.slurm import lead_and_why
from orhpc.megatron_config import group_spans
from orhpc.memory import (
    ELEMENT_BYTES,
    GIB,
    MASTER_BYTES,
    RESERVED_BYTES,
    Demand,
    Layout,
    TrainerMemory,
    check_layout,
    trainer_memory,
)
from orhpc.model_folders import find_model
from orhpc.models import ModelShape, read_shape

DEFAULT_CONFIG = "configs/default.yaml"
DEFAULT_DEVICE_GIB = 80.0
MOST_RANKS = 16384
"""Where the search for enough ranks ends."""


@dataclass(frozen=True)
class RunPlan:
    """What a config needs, worked out."""

    config: Config
    shape: ModelShape
    layout: Layout
    demand: Demand
    trainer: TrainerMemory
    device_bytes: int | None
    """Memory of one device; null where the devices are processes."""
    placement: Placement

    @property
    def engine_weights(self) -> int:
        """Bytes of the model's weights on one device of an engine."""
        return -(-self.shape.parameters * ELEMENT_BYTES[self.config.engine.dtype or self._dtype] // self.tp)

    @property
    def _dtype(self) -> str:
        return self.config.model.dtype

    @property
    def tp(self) -> int:
        return self.config.engine.tp

    @property
    def kv_token(self) -> int:
        return self.shape.kv_cache_bytes(ELEMENT_BYTES[self.config.engine.dtype or self._dtype], self.tp)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that one engine's cache holds; null where the device's memory is not known."""
        if self.device_bytes is None:
            return None
        pool = int(self.device_bytes * self.config.engine.memory_fraction) - self.engine_weights
        return max(0, pool) // self.kv_token


def make_plan(config: Config, device_gib: float) -> RunPlan:
    """Work out a config's layout and memory; see :func:`check_fit` for whether it can run.

    Raises:
        ConfigError: a placement or a model that cannot be.
    """
    p = config.placement
    shape = read_shape(find_model(config.model.path, config.model.revision))
    layout = config.trainer_layout
    check_layout(shape, layout, p.devices_per_node)
    demand = config.trainer_demand
    nodes = tuple(Node(f"node {i}", "", 1) for i in range(p.nodes))
    return RunPlan(
        config=config,
        shape=shape,
        layout=layout,
        demand=demand,
        trainer=trainer_memory(shape, layout, demand),
        device_bytes=int(device_gib * GIB) if p.device == "cuda" else None,
        placement=plan(config, nodes),
    )


def check_fit(run: RunPlan) -> None:
    """Raises ConfigError, with the arithmetic, when trainers or engines cannot hold what they must."""
    if run.device_bytes is None:
        return
    room = run.device_bytes - RESERVED_BYTES
    if run.trainer.total > room:
        parts = " + ".join(f"{n} {_gib(b)}" for n, b in run.trainer.parts().items() if b)
        raise ConfigError(
            f"placement: a trainer device needs {parts} = {_gib(run.trainer.total)} GiB and has "
            f"{_gib(run.device_bytes)} - {_gib(RESERVED_BYTES)} reserved = {_gib(room)} GiB; "
            + _way_out(run, room)
        )
    if not run.placement.engines:
        return
    if run.config.placement.shared_devices and (both := sync_bytes(run)) > run.device_bytes:
        raise ConfigError(
            f"placement: while weights go over, a shared device holds {_gib(run.trainer.kept)} GiB of the "
            f"trainer's and {_gib(run.engine_weights)} GiB of the engine's, {_gib(both)} with "
            f"{_gib(2 * RESERVED_BYTES)} reserved, and has {_gib(run.device_bytes)} GiB; raise engine.tp, or "
            "train on more devices"
        )
    tokens, longest = run.kv_tokens or 0, run.config.rollout.max_total_tokens
    if tokens < longest:
        fraction = run.config.engine.memory_fraction
        raise ConfigError(
            f"engine.tp: {fraction} x {_gib(run.device_bytes)} GiB of a device less "
            f"{_gib(run.engine_weights)} GiB of weights leaves {tokens} tokens of KV cache at "
            f"{run.kv_token} bytes each, and one rollout may have {longest}; "
            "raise engine.tp or engine.memory_fraction, or lower rollout.max_total_tokens"
        )


def _way_out(run: RunPlan, room: int) -> str:
    per_node = run.config.placement.devices_per_node
    if not run.layout.sharded:
        return _way_out_divided(run, room)
    fixed = run.trainer.gathered + run.trainer.activations + run.trainer.head
    if fixed > room:
        what = "" if run.demand.recompute else "train.gradient_checkpointing=true, or "
        return (
            f"no number of ranks helps, since {_gib(fixed)} GiB are not divided by them: {what}"
            "a lower rollout.max_total_tokens or train.max_tokens_per_gpu"
        )
    for ranks in range(per_node, MOST_RANKS + 1, per_node):
        if trainer_memory(run.shape, Layout(ranks, sharded=True), run.demand).total <= room:
            return f"{ranks} trainer ranks would do ({ranks // per_node} nodes of {per_node})"
    return f"{MOST_RANKS} ranks would not do either"


def _way_out_divided(run: RunPlan, room: int) -> str:
    """The smallest number of ranks, and the layout with least communication, that would hold the model."""
    per_node, longest_copy = run.config.placement.devices_per_node, run.layout.cp
    for ranks in range(per_node, MOST_RANKS + 1, per_node):
        for layout in _layouts(run.shape, ranks, per_node, longest_copy):
            try:
                check_layout(run.shape, layout, per_node)
            except ConfigError:
                continue
            if trainer_memory(run.shape, layout, run.demand).total <= room:
                words = ", ".join(f"{n} {getattr(layout, n)}" for n in ("tp", "pp", "ep"))
                return (
                    f"{ranks} trainer ranks with {words} would do ({ranks // per_node} nodes of {per_node})"
                )
    return f"no layout of up to {MOST_RANKS} ranks would do: lower the token budget or the longest rollout"


def _layouts(shape: ModelShape, ranks: int, per_node: int, cp: int) -> Iterator[Layout]:
    """Candidates in the order of what they cost: experts, then tensors inside a node, then stages."""
    powers = [1 << i for i in range(MOST_RANKS.bit_length())]
    for pp in (n for n in powers if n <= min(ranks, len(shape.layers))):
        for tp in (n for n in powers if n <= per_node):
            for ep in (n for n in powers if n <= max(1, shape.experts)):
                if ranks % (tp * cp * pp) == 0 and ranks % (pp * ep) == 0:
                    yield Layout(ranks, tp=tp, pp=pp, cp=cp, ep=ep)


# --- printing -----------------------------------------------------------------------------------


def lines(run: RunPlan) -> Iterator[str]:
    """The plan as text."""
    shape, p = run.shape, run.config.placement
    active = f", {_count(shape.active_parameters)} active" if shape.experts else ""
    yield f"model     {run.config.model.path}: {_count(shape.parameters)} parameters{active}"
    yield f"nodes     {p.nodes} of {p.devices_per_node} devices ({p.device}), {p.mode}"
    yield f"trainers  {run.layout.ranks} ranks, {run.config.train.backend}, {_shared(run)}"
    if run.placement.engines:
        yield f"engines   {len(run.placement.engines)} of {run.tp} devices"
    yield from _places(run.placement)
    yield f"micro-batch of up to {run.demand.tokens} tokens"
    yield ""
    yield "trainer device, GiB at the peak of a step"
    for name, size in run.trainer.parts().items():
        yield f"  {name:<12}{_gib(size):>9}"
    has = "" if run.device_bytes is None else f" of {_gib(run.device_bytes - RESERVED_BYTES)}"
    yield f"  {'total':<12}{_gib(run.trainer.total):>9}{has}"
    yield from _engine_lines(run)
    yield _lead_line(run.config)
    for what, size in host_parts(run).items():
        yield f"host memory a node {what}: {_gib(size)} GiB"
    yield from _commit_lines(run)
    yield f"limit: {limit(run)}"


def _commit_lines(run: RunPlan) -> Iterator[str]:
    checkpoint, one = run.config.checkpoint, state_bytes(run)
    if checkpoint.save_interval is None:
        return
    number = at_once(run.config)
    yield f"commits   {one / 1e9:.2f} GB each, {number} on disk at once: {number * one / 1e9:.2f} GB"
    if checkpoint.keep_every:
        kept = run.config.train.steps // checkpoint.keep_every
        yield f"          and up to {kept} kept for good: {kept * one / 1e9:.2f} GB"


def sync_bytes(run: RunPlan) -> int:
    """Memory of a shared device while weights go over: both sides' and the optimiser, no gradients."""
    return run.trainer.kept + run.engine_weights + 2 * RESERVED_BYTES


def host_parts(run: RunPlan) -> dict[str, int]:
    """Host memory of one node, by what it is for; what processes take for themselves is not in it."""
    parts = {
        "while engines have the devices": asleep_bytes(run),
        "for the copy that is being committed": 0 if _commits_share(run) else commit_bytes(run),
        "for the offloaded optimiser, at least": offloaded_bytes(run),
    }
    return {what: size for what, size in parts.items() if size}


def _commits_share(run: RunPlan) -> bool:
    """Whether no memory is needed for commits, which then are written from a sleeping trainer's, or never."""
    checkpoint = run.config.checkpoint
    return checkpoint.save_interval is None or (checkpoint.spare_host_memory and asleep_bytes(run) > 0)


def check_host(run: RunPlan, there: int) -> None:
    """Raises PreflightError, with the arithmetic, when so many bytes of a node do not hold what it must."""
    parts = host_parts(run)
    if (wanted := sum(parts.values())) <= there:
        return
    other = "" if _commits_share(run) or not asleep_bytes(run) else "checkpoint.spare_host_memory=true, or "
    raise PreflightError(
        f"host memory: a node needs {' + '.join(f'{_gib(size)} ({what})' for what, size in parts.items())} = "
        f"{_gib(wanted)} GiB beside what processes take, and has {_gib(there)} GiB; {other}more nodes"
    )


def asleep_bytes(run: RunPlan) -> int:
    """Host memory of one node for what its trainers hold while engines have their devices."""
    p = run.config.placement
    turns = run.placement.engines and p.shared_devices and p.device == "cuda"
    return run.trainer.kept * _ranks_of_a_node(run) if turns else 0


def offloaded_bytes(run: RunPlan) -> int:
    """Host memory of one node for the share of the optimiser that is offloaded, without its rounding."""
    return run.trainer.offloaded * _ranks_of_a_node(run)


def state_bytes(run: RunPlan) -> int:
    """A whole commit: master weights and moments, of all ranks."""
    return run.shape.parameters * (MASTER_BYTES + run.demand.moment_bytes)


def at_once(config: Config) -> int:
    """Commits that lie on the disk while one is being written; those of ``keep_every`` come on top."""
    return config.checkpoint.keep + 1


def commit_bytes(run: RunPlan) -> int:
    """One node's part of a commit, and host memory for the copy that it is written from."""
    return -(-state_bytes(run) * _ranks_of_a_node(run) // run.layout.ranks)


def _ranks_of_a_node(run: RunPlan) -> int:
    return min(run.config.placement.devices_per_node, run.layout.ranks)


def _lead_line(config: Config) -> str:
    rundir = None if config.run.name is None else run_directory(config)
    lead_s, why = lead_and_why(config, rundir)
    return f"lead: told {lead_s} s before a time limit to commit ({why})"


def _shared(run: RunPlan) -> str:
    """How the ranks share the model, and over how many nodes their groups reach."""
    if run.layout.sharded:
        return "weights in rows over all of them"
    m, per_node = run.config.megatron, run.config.placement.devices_per_node
    spans = group_spans(m, run.layout.ranks, per_node)
    parts = [f"{name} {getattr(m, name)}{_reach(spans[name])}" for name in spans]
    copies = m.data_ranks(run.layout.ranks)
    return ", ".join([*parts, f"{copies} copies" if copies > 1 else "one copy"])


def _reach(nodes: int) -> str:
    return " (inside a node)" if nodes == 1 else f" (over {nodes} nodes)"


def _places(placement: Placement) -> Iterator[str]:
    shown: list[tuple[str, str]] = []
    for index, node in enumerate(placement.nodes):
        ranks = [t.rank for t in placement.trainers if t.node == index]
        engines = [e.index for e in placement.engines if e.node == index]
        text = ", ".join(f"{what} {_range(n)}" for what, n in (("ranks", ranks), ("engines", engines)) if n)
        shown.append((node.name, text or "part of an engine"))
    for name, text in shown[:4]:
        yield f"  {name}: {text}"
    if len(shown) > 5:
        yield "  ..."
    if len(shown) > 4:
        yield f"  {shown[-1][0]}: {shown[-1][1]}"


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _engine_lines(run: RunPlan) -> Iterator[str]:
    if not run.placement.engines:
        return
    yield "engine device, GiB"
    yield f"  {'weights':<12}{_gib(run.engine_weights):>9}"
    tokens = run.kv_tokens
    if tokens is None:
        yield f"  KV cache    {run.kv_token} bytes a token"
        return
    yield f"  {'KV cache':<12}{_gib(tokens * run.kv_token):>9}  {run.kv_token} bytes a token, {tokens} tokens"


def limit(run: RunPlan) -> str:
    """What is nearest to its bound, in words."""
    parts = run.trainer.parts()
    largest = max(parts, key=lambda name: parts[name])
    if run.device_bytes is None:
        return f"host memory: {_gib(run.trainer.total)} GiB a trainer rank, most of it {largest}"
    room = run.device_bytes - RESERVED_BYTES
    trainer = run.trainer.total / room
    if run.kv_tokens is not None and run.placement.engines:
        at_once = run.kv_tokens // run.config.rollout.max_total_tokens
        if at_once < run.config.engine.max_running and trainer < 0.9:
            return (
                f"KV cache: {at_once} rollouts of full length at once an engine, "
                f"engine.max_running is {run.config.engine.max_running}"
            )
    return f"trainer memory, {trainer:.0%} used, most of it {largest}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def parse(arguments: Sequence[str]) -> tuple[Config, float]:
    """Config and memory of a device in GiB, from the command line."""
    parser = argparse.ArgumentParser(prog="orhpc plan", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="CONFIG | key=value", help="a YAML file, then overrides")
    parser.add_argument("--nodes", type=int, help="plan for this many nodes")
    parser.add_argument(
        "--device-memory", type=float, default=DEFAULT_DEVICE_GIB, metavar="GIB", help="of one GPU (80)"
    )
    options = parser.parse_intermixed_args(arguments)
    files = [w for w in options.words if "=" not in w]
    if len(files) > 1:
        raise ConfigError(f"one config file at a time, not {' and '.join(files)}")
    if options.device_memory * GIB <= RESERVED_BYTES:
        raise ConfigError(
            f"--device-memory: {options.device_memory} GiB leave nothing beside what is reserved"
        )
    overrides = [w for w in options.words if "=" in w]
    overrides += [] if options.nodes is None else [f"placement.nodes={options.nodes}"]
    return load_config(files[0] if files else DEFAULT_CONFIG, overrides), options.device_memory


def main(arguments: Sequence[str]) -> int:
    """Print the plan, then refuse it if it cannot fit; returns the exit code."""
    try:
        config, device_gib = parse(arguments)
        run = make_plan(config, device_gib)
        print("\n".join(lines(run)))
        check_fit(run)
        if there := config.placement.host_memory_gib:
            check_host(run, int(there * GIB))
    except OrhpcError as error:
        print(f"orhpc: {' '.join(str(error).split())}", file=sys.stderr)
        return policy_of(error).exit_code
    return EXIT_OK
