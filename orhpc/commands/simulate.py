"""``orhpc simulate``: what failures would cost a run on more nodes, from what its own restarts have cost."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from orhpc.commands.drill_table import columns
from orhpc.commands.recovery_costs import Measured, measure
from orhpc.commands.run_state import RUN_HELP, existing_run
from orhpc.commands.simulate_check import check
from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import EXIT_OK, ConfigError
from orhpc.plan.failures import (
    DAY_S,
    LLAMA_3_NODE_SHARE,
    LLAMA_3_RATE,
    Cluster,
    Costs,
    Outcome,
    Recovery,
    simulate,
)

_NODES = "8,64,512,4096"
_TRIALS = 4
_FAILURES = 2000
"""A simulation lasts at least as long as the user says, and until this many failures are expected."""
_MOST_FAILURES = 100_000
"""Failures of one simulation: about half a second, of which there are about 130 for a number of nodes."""
_LEAST_GAIN = 0.005
"""Advice that gains a smaller share of the time is not given."""
_INTERVALS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 75, 100, 150, 200)
_SPARES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_COSTS = {f.name.removesuffix("_s").replace("_", "-"): f.name for f in fields(Costs)}
_ABOUT = {
    "step_s": "a step",
    "update_s": "of which the update",
    "commit_s": "training waits for a commit",
    "interval": "steps between commits",
    "notice_s": "until a failure is noticed",
    "engine_s": "restart of an engine",
    "trainers_s": "restart of the trainers",
    "in_place_s": "restart of everything within the job",
    "start_s": "start of a job",
    "queue_s": "wait in the queue",
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated."""

    measured: Measured
    per_node_day: float
    node_share: float
    engine_share: float
    engines_per_node: float
    engines_share_devices: bool
    spares: int
    days: float
    seed: int


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=f"{RUN_HELP}; best that of a drill")
    parser.add_argument(
        "--nodes", default=_NODES, metavar="A,B", help=f"numbers of nodes to simulate; default: {_NODES}"
    )
    parser.add_argument(
        "--failures", type=float, default=LLAMA_3_RATE, metavar="RATE",
        help=f"per 1,000 node-days; default: {LLAMA_3_RATE}, as in the training of Llama 3",
    )  # fmt: skip
    parser.add_argument(
        "--node-share", type=float, default=LLAMA_3_NODE_SHARE, metavar="SHARE",
        help=f"of failures that take a node, the others end a process; default: {LLAMA_3_NODE_SHARE}",
    )  # fmt: skip
    parser.add_argument("--spares", type=int, default=1, metavar="N", help="spare nodes; default: 1")
    parser.add_argument("--days", type=float, default=30.0, metavar="DAYS", help="of the run; default: 30")
    parser.add_argument(
        "--cost", action="append", default=[], metavar="NAME=VALUE",
        help=f"use this in place of what was measured; seconds, or steps of interval; of {', '.join(_COSTS)}",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the failures; default: 0")
    parser.add_argument(
        "--check", type=Path, metavar="RUN",
        help="compare with another run with injected faults: its time, and the time simulated for its faults",
    )  # fmt: skip
    parser.set_defaults(run=run_simulate)


def run_simulate(options: argparse.Namespace) -> int:
    """Print the costs, a table by number of nodes, and what to change."""
    run = existing_run(options.run_dir)
    config = load_config(run.config)
    measured = measure(run, config)
    for text in options.cost:
        measured = measured.with_cost(*parsed_cost(text))
    if measured.costs.update_s > measured.costs.step_s:
        raise ConfigError(
            f"--cost: an update of {measured.costs.update_s:g} s is longer than a step of "
            f"{measured.costs.step_s:g} s, of which it is a part; name both, such as step=60 and update=20"
        )
    scenario, numbers = _scenario(options, measured, config), nodes_of(options.nodes)
    _refuse_too_many(scenario, max(numbers))
    print(f"costs of {run.path}")
    for line in cost_lines(measured):
        print(line)
    if options.check is not None:
        return check(measured.costs, existing_run(options.check))
    print(
        f"\n{options.failures:g} failures per 1,000 node-days, {scenario.node_share:.0%} of them take a "
        f"node; share of the time that trains, over {scenario.days:g} days or more:"
    )
    rows = [table_row(scenario, nodes) for nodes in numbers]
    heads = ("nodes", "failures a day", *(str(recovery) for recovery in Recovery))
    print(columns(heads, rows))
    print(f"spare nodes: {scenario.spares}. They are paid for too; the shares do not count them.\n")
    print(columns(("nodes", "best setting", "gain"), [row for n in numbers for row in advice(scenario, n)]))
    return EXIT_OK


def parsed_cost(text: str) -> tuple[str, float]:
    """Read ``NAME=VALUE``; returns the field of :class:`Costs` and its value."""
    name, _, value = text.partition("=")
    if name not in _COSTS:
        raise ConfigError(f"--cost: {name!r} is none of {', '.join(_COSTS)}")
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    least = 0.0 if name not in ("step", "interval") else 1e-3
    if not least <= number < 1e9 or (name == "interval" and number != int(number)):
        raise ConfigError(f"--cost: {text!r} needs a number that is not negative, such as {name}=60")
    return _COSTS[name], int(number) if name == "interval" else number


def nodes_of(text: str) -> list[int]:
    """Read numbers of nodes, separated by commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= n <= 100_000 for n in numbers):
        raise ConfigError(f"--nodes: {text!r} is not a list such as {_NODES}")
    return numbers


def _scenario(options: argparse.Namespace, measured: Measured, config: Config) -> Scenario:
    for name, value, most in (
        ("--failures", options.failures, 1e5), ("--days", options.days, 3650.0),
        ("--node-share", options.node_share, 1.0), ("--spares", options.spares, 1000),
    ):  # fmt: skip
        if not 0 <= value <= most:
            raise ConfigError(f"{name}: {value:g} is not between 0 and {most:g}")
    if options.days == 0:
        raise ConfigError("--days: a run of 0 days trains nothing")
    placement = config.placement
    engines = placement.rollout_devices / config.engine.tp
    rollout, train = placement.rollout_devices, placement.trainer_ranks
    return Scenario(
        measured=measured,
        per_node_day=options.failures / 1000,
        node_share=options.node_share,
        engine_share=rollout / max(1, rollout + train),
        engines_per_node=engines / placement.nodes,
        engines_share_devices=placement.mode == "colocated",
        spares=options.spares,
        days=options.days,
        seed=options.seed,
    )


def _refuse_too_many(scenario: Scenario, nodes: int) -> None:
    """Raise ConfigError for failures whose simulation would take many minutes."""
    expected = nodes * scenario.per_node_day * scenario.days
    if expected > _MOST_FAILURES:
        raise ConfigError(
            f"--failures: {expected:.0f} failures of {nodes} nodes in {scenario.days:g} days are more than "
            f"the {_MOST_FAILURES} that are simulated; lower --failures, --nodes or --days"
        )


def cost_lines(measured: Measured) -> Iterator[str]:
    """One line a cost: its value and where it comes from."""
    for name, what in _ABOUT.items():
        value = getattr(measured.costs, name)
        text = f"{value}" if name == "interval" else f"{value:.{2 if value < 10 else 0}f} s"
        yield f"  {what:<38}{text:>10}   {measured.sources.get(name, 'checkpoint.save_interval')}"


def outcome_of(scenario: Scenario, nodes: int, recovery: Recovery, *, costs: Costs, spares: int) -> Outcome:
    """Simulate a number of nodes long enough for a steady share."""
    engines = max(1, round(nodes * scenario.engines_per_node))
    cluster = Cluster(
        nodes, scenario.per_node_day, scenario.node_share, scenario.engine_share, engines, spares,
        scenario.engines_share_devices,
    )  # fmt: skip
    rate = nodes * scenario.per_node_day
    days = max(scenario.days, min(_FAILURES / _TRIALS / rate, 1e5)) if rate else scenario.days
    total = Outcome()
    for trial in range(_TRIALS):
        generator = random.Random(scenario.seed * _TRIALS + trial)
        one = simulate(costs, cluster, recovery, days * DAY_S, generator)
        for part in fields(Outcome):
            setattr(total, part.name, getattr(total, part.name) + getattr(one, part.name))
    return total


def table_row(scenario: Scenario, nodes: int) -> tuple[str, ...]:
    """The shares of one number of nodes."""
    shares = [
        outcome_of(scenario, nodes, r, costs=scenario.measured.costs, spares=scenario.spares).goodput
        for r in Recovery
    ]
    return (str(nodes), f"{nodes * scenario.per_node_day:.2f}", *(f"{share:.1%}" for share in shares))


def advice(scenario: Scenario, nodes: int) -> Iterator[tuple[str, ...]]:
    """What would train for a larger share of the nodes' time, spares counted; a dash if nothing would."""
    costs, spares = scenario.measured.costs, scenario.spares

    def share(interval: int, number: int) -> float:
        found = outcome_of(
            scenario, nodes, Recovery.SPARES, costs=replace(costs, interval=interval), spares=number
        )
        return found.goodput * nodes / (nodes + number)

    now = share(costs.interval, spares)
    interval = _best(lambda i: share(i, spares), {costs.interval, *_INTERVALS})
    number = _best(lambda s: share(interval, s), {spares, *_SPARES})
    changes = [
        (f"checkpoint.save_interval={interval}", share(interval, spares) - now, interval != costs.interval),
        (f"--spares {number}", share(interval, number) - share(interval, spares), number != spares),
    ]
    useful = [(text, gain) for text, gain, differs in changes if differs and gain >= _LEAST_GAIN]
    for text, gain in useful:
        yield str(nodes), text, f"{gain:.1%} of all nodes' time"
    if not useful:
        yield str(nodes), "as it is", "-"


def _best(share: Callable[[int], float], values: set[int]) -> int:
    """The value of the largest share, the smallest such value."""
    return max(sorted(values), key=share)
