"""``orhpc plan CONFIG``: print ranks, memory by part, what limits, and step times; start nothing."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orhpc.commands.plan_calibration import Calibration, calibration
from orhpc.commands.plan_measured import MeasuredTimes, measured_times
from orhpc.commands.plan_times import time_lines
from orhpc.commands.run_state import existing_run
from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import EXIT_OK, ConfigError, ModelError, OrhpcError, policy_of
from orhpc.launch import model
from orhpc.launch.checks import fit
from orhpc.launch.checks.card import FoundCard, card_of
from orhpc.launch.command_line import (
    HELP,
    add_nodes,
    node_overrides,
    own_options,
    split_command_line,
    without_flags,
)
from orhpc.launch.prepare import run_directory
from orhpc.launch.slurm import submission
from orhpc.plan.layout import group_spans, stages
from orhpc.plan.memory import GIB, reserved_bytes
from orhpc.plan.placement import Placement
from orhpc.plan.recompute import totals
from orhpc.plan.run_plan import (
    RunPlan,
    asleep_bytes,
    check_host,
    commits_on_disk,
    copies_bytes,
    gib,
    host_parts,
    make_plan,
    peer_copies_bytes,
    state_bytes,
)
from orhpc.plan.workload import Workload, assumed_workload
from orhpc.rundir import RunDir


def lines(run: RunPlan) -> Iterator[str]:
    """The plan as text."""
    shape, p = run.shape, run.config.placement
    active = f", {_count(shape.active_parameters)} active" if shape.experts else ""
    yield f"model     {run.config.model.path}: {_count(shape.parameters)} parameters{active}"
    yield f"nodes     {p.nodes} of {p.devices_per_node} devices ({p.device}), {p.mode}"
    if spares := run.config.slurm.spares:
        requested = submission.nodes_to_request(run.config)
        yield (
            f"spares    {spares}, which wait for a node to be lost: the job requests {requested} nodes, "
            f"{requested * p.devices_per_node} devices"
        )
    if groups := run.config.slurm.node_groups:
        submission.nodes_to_request(run.config)
        kinds = [p.nodes - sum(group.nodes for group in groups), *(group.nodes for group in groups)]
        yield f"groups    of {', '.join(map(str, kinds))} nodes, in this order: a heterogeneous job"
    yield f"trainers  {run.layout.ranks} ranks, {run.config.train.backend}, {_shared(run)}"
    if run.placement.engines:
        yield f"engines   {len(run.placement.engines)} of {run.tp} devices"
    yield from _places(run.placement)
    yield f"micro-batch of up to {run.demand.tokens} tokens"
    yield ""
    yield "trainer device, GiB at the peak of a step"
    for name, size in run.trainer.parts().items():
        yield f"  {name:<12}{gib(size):>9}"
    has = "" if run.device_bytes is None else f" of {gib(run.device_bytes - reserved_bytes(run.config))}"
    yield f"  {'total':<12}{gib(run.trainer.total):>9}{has}"
    if shape.vision:
        yield "  what the vision tower computes of images is not counted: leave it some GiB"
    yield _recompute_line(run)
    yield from _engine_lines(run)
    yield from _state_lines(run)
    yield _lead_line(run.config)
    for what, size in host_parts(run).items():
        yield f"host memory a node {what}: {gib(size)} GiB"
    if size := copies_bytes(run):
        yield f"host memory a node for copies of the trainers' state, if it is free: {gib(size)} GiB"
    if size := peer_copies_bytes(run):
        yield f"host memory a node for copies of another node's trainers, if it is free: {gib(size)} GiB"
    yield from _commit_lines(run)
    yield f"limit: {limit(run)}"


def _recompute_line(run: RunPlan) -> str:
    """The total by what the backward pass recomputes, and which of them the config has, or its ``auto``."""
    needed = ", ".join(f"{mode} {gib(total)}" for mode, total in totals(run.config, run.shape).items())
    some, layers = "", run.demand.layers
    if run.demand.recompute == "full" and layers is not None:
        most = max(len(stage) for stage in stages(run.shape, run.layout.pp))
        of = "" if run.layout.sharded else " of a stage"
        some = f", the first {layers} of {most} layers{of}" if layers < most else ""
    once = "; weights gathered once an update" if run.demand.gathers_once else ""
    return f"recomputation: {run.demand.recompute}{some}; total of {needed}{once}"


def _commit_lines(run: RunPlan) -> Iterator[str]:
    checkpoint, one = run.config.checkpoint, state_bytes(run)
    if checkpoint.save_interval is None:
        return
    number = commits_on_disk(run.config)
    yield f"commits   {one / 1e9:.2f} GB each, {number} on disk at once: {number * one / 1e9:.2f} GB"
    if checkpoint.keep_every:
        kept = run.config.train.steps // checkpoint.keep_every
        yield f"          and up to {kept} kept for good: {kept * one / 1e9:.2f} GB"


def _lead_line(config: Config) -> str:
    rundir = None if config.run.name is None else run_directory(config)
    lead_s, why = submission.lead_and_why(config, rundir)
    return f"lead: signaled {lead_s} s before the time limit to commit ({why})"


def _shared(run: RunPlan) -> str:
    """How the ranks divide the model, and how many nodes each parallel group spans."""
    if run.layout.sharded:
        return "weights sharded over all of them"
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
    drafting = f"  of which {gib(run.drafting_weights)} draft tokens" if run.drafting_weights else ""
    yield f"  {'weights':<12}{gib(run.engine_weights):>9}{drafting}"
    if run.draft_parameters is None:
        yield f"  without the draft model {run.config.engine.draft_model}, which cannot be read here"
    tokens = run.kv_tokens
    if tokens is None:
        yield f"  KV cache    {run.kv_token} bytes a token"
        return
    groups = run.config.engine.dp
    where = f" in each of {groups} attention groups" if groups > 1 else ""
    cache = f"{run.kv_token} bytes a token, {tokens} tokens{where}"
    yield f"  {'KV cache':<12}{gib(tokens * run.kv_token):>9}  {cache}"


def _state_lines(run: RunPlan) -> Iterator[str]:
    """Where the trainers' state is while engines serve from the same devices, and what would let it stay."""
    if not asleep_bytes(run):
        return
    state = f"trainer state while engines serve: {gib(run.trainer.kept)} GiB a device"
    fraction = run.largest_fraction
    if run.state_stays:
        yield f"{state}, stays there"
        return
    other = ""
    if fraction is not None:
        fraction = math.floor(100 * fraction) / 100
        tokens = run.kv_tokens_with(fraction) or 0
        other = f"; stays there with engine.memory_fraction={fraction:g}, {tokens} tokens of KV cache"
    yield f"{state}, moves to the host{other}"


def limit(run: RunPlan) -> str:
    """One line: the resource that is closest to its limit."""
    parts = run.trainer.parts()
    largest = max(parts, key=lambda name: parts[name])
    if run.device_bytes is None:
        return f"host memory: {gib(run.trainer.total)} GiB a trainer rank, most of it {largest}"
    room = run.device_bytes - reserved_bytes(run.config)
    trainer = run.trainer.total / room
    rollouts = run.rollouts_at_once(run.config.rollout.max_total_tokens)
    few = rollouts is not None and rollouts < run.config.engine.max_running
    if few and run.placement.engines and trainer < 0.9:
        return (
            f"KV cache: {rollouts} rollouts of full length at once an engine, "
            f"engine.max_running is {run.config.engine.max_running}"
        )
    return f"trainer memory, {trainer:.0%} used, most of it {largest}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.epilog = HELP
    parser.add_argument(
        "arguments", nargs="*", metavar="CONFIG | key=value", help="a YAML file, then overrides"
    )
    add_nodes(parser)
    parser.add_argument(
        "--device-memory",
        type=float,
        metavar="GIB",
        help="memory of one GPU; default: as orhpc check detects it, or 80",
    )
    parser.add_argument(
        "--card",
        metavar="NAME",
        help="GPU for whose speed times are predicted: h100 or h200; default: detected",
    )
    parser.add_argument(
        "--rollout-tokens", type=float, metavar="N",
        help="mean tokens of a rollout, prompt included; default: those of an earlier run of the config, or "
        "0.3 of rollout.max_total_tokens",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate", type=Path, metavar="RUN",
        help="multiply predicted times by what this run of other settings took over what is predicted for "
        "it; default: the config's own run directory, if its run had other settings",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """What is planned."""

    config: Config
    device_gib: float
    card: FoundCard
    rollout_tokens: float | None
    """Mean tokens of a rollout; null: of an earlier run, or assumed."""
    calibrate: RunDir | None
    """Run that predicted times are compared with; null: that of the config, if there is one."""


def parse(arguments: Sequence[str]) -> Request:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="orhpc plan", description="Compute ranks, memory and step times of a config; start nothing."
    )
    add_plan(parser)
    options = parser.parse_intermixed_args(without_flags(arguments, own_options(add_plan)))
    path, overrides = split_command_line(options.arguments)
    config = load_config(path, [*overrides, *node_overrides(options)])
    memory = fit.device_memory(config).gib if options.device_memory is None else options.device_memory
    reserved = reserved_bytes(config)
    if not math.isfinite(memory):
        raise ConfigError(f"--device-memory: {memory} is not a number of GiB")
    if memory * GIB <= reserved:
        source = "placement.device_memory_gib" if options.device_memory is None else "--device-memory"
        raise ConfigError(f"{source}: {memory} GiB is not more than the reserved {gib(reserved)} GiB")
    mean = options.rollout_tokens
    if mean is not None and not 1 <= mean <= config.rollout.max_total_tokens:
        raise ConfigError(f"--rollout-tokens: {mean:g} is not between 1 and rollout.max_total_tokens")
    if options.card is not None:
        card = FoundCard(options.card.lower(), "--card")
    else:
        card = card_of(config, memory, given=options.device_memory is not None)
    earlier = None if options.calibrate is None else existing_run(options.calibrate)
    return Request(config, memory, card, mean, earlier)


def _times(request: Request, run: RunPlan) -> Iterator[str]:
    """The lines about times, for lengths that the user named, an earlier run had, or that are assumed."""
    try:
        measured = measured_times(request.config)
    except ConfigError as error:  # of an earlier release, perhaps
        print(f"orhpc: {' '.join(str(error).split())}; its times are not used", file=sys.stderr)
        measured = None
    work: Workload | None = None
    if request.rollout_tokens is None and measured is not None:
        work = measured.work
    work = work or assumed_workload(run.config, request.rollout_tokens)
    yield from time_lines(run, request.card, work, measured, _calibration(request, run, measured))


def _calibration(request: Request, run: RunPlan, measured: MeasuredTimes | None) -> Calibration | None:
    """Compare the run that the user names, or the config's own one, with what is predicted for it."""
    gib, card = request.device_gib, request.card.name
    if request.calibrate is not None:
        return calibration(request.calibrate, run, gib, card)
    if measured is not None or request.config.run.name is None:
        return None
    own = run_directory(request.config)
    try:
        return calibration(own, run, gib, card) if own.config.is_file() else None
    except (ConfigError, ModelError):  # a run that was not meant for it
        return None


def main(arguments: Sequence[str]) -> int:
    """Print the plan, then fail if it cannot fit; return the exit code."""
    try:
        request = parse(arguments)
        config = request.config
        model.ensure_config(config)
        run = make_plan(config, request.device_gib)
        print("\n".join(lines(run)))
        print("\n".join(_times(request, run)))
        fit.check_engines(run)
        fit.check_fit(run)
        if host_gib := config.placement.host_memory_gib:
            check_host(run, int(host_gib * GIB))
    except OrhpcError as error:
        print(f"orhpc: {' '.join(str(error).split())}", file=sys.stderr)
        return policy_of(error).exit_code
    return EXIT_OK
