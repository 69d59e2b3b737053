"""``orhpc tune``: measure layouts and micro-batches on the run's nodes, and write the best config."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from orhpc.commands.attended import (
    QUIET,
    add_arguments,
    attend,
    check_arguments,
    refuse_finished,
    write_table,
)
from orhpc.commands.drill_table import columns
from orhpc.commands.packages import need
from orhpc.commands.run_state import existing_run
from orhpc.config import Config
from orhpc.config.files import PACKAGED, find_config, load_config
from orhpc.errors import EXIT_FAILED, EXIT_OK, ConfigError
from orhpc.launch import model, prepare
from orhpc.launch.checks import fit
from orhpc.launch.checks.card import card_of
from orhpc.launch.command_line import node_overrides, split_command_line
from orhpc.models import ModelShape
from orhpc.plan.candidates import Candidate, candidates
from orhpc.plan.memory import GIB, reserved_bytes
from orhpc.plan.recompute import SPARE
from orhpc.plan.run_plan import make_plan
from orhpc.plan.speeds import CARDS, Card
from orhpc.plan.workload import MEAN_LENGTH
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import read_events

_MICRO_BATCHES = 2
"""Micro-batches of the largest size, of each rank and pipeline stage, in a measured update."""
_WRITTEN = "# Chosen by orhpc tune"
"""How a config that a tuning has written begins."""
HEAD = ("settings", "tokens/s a rank", "a whole step, s", "peak, GB", "micro-batches", "start, s", "note")


def add_tune(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "tuning")
    parser.add_argument(
        "--candidates", type=int, default=12, metavar="N", help="settings to measure at most; default: 12"
    )
    parser.add_argument("--updates", type=int, default=3, metavar="N", help="timed updates each; default: 3")
    parser.add_argument(
        "--rollouts", type=Path, metavar="RUN",
        help="train on the recorded rollouts of this run; default: made-up ones",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: CONFIG-tuned.yaml, here")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured; start nothing")
    parser.set_defaults(run=tune)


def tune(options: argparse.Namespace) -> int:
    """Measure the updates of several settings; returns 0 if the best of them is written."""
    check_arguments(options)
    if options.table:
        return show(existing_run(Path(options.arguments[0])), options.output)
    _check_options(options)
    path, overrides = split_command_line(options.arguments)
    overrides += node_overrides(options)
    config = load_config(path, overrides)
    model.ensure_config(config)
    planned = make_plan(config, fit.device_memory(config).gib)
    fit.check_engines(planned)
    shape, device_bytes = planned.shape, _device_bytes(config)
    chosen = candidates(config, shape, device_bytes, options.candidates, _fits, _card(config))
    print(_listed(chosen))
    if options.dry_run:
        return EXIT_OK
    _refuse_other(options.output or _tuned(path))
    run = prepare.run_directory(load_config(path, [*overrides, _name(config)]))
    if any(event["event"] == "finished" for event in read_events(run.events)):
        refuse_finished(run, "tuning", "tune")
    words = [*overrides, *tuning_overrides(config, run, chosen, options)]
    prepare.create_directory(load_config(path, words))
    if options.rollouts is None:
        _write_rollouts(config, shape, run, chosen)
    _remember(run, path, overrides, config, device_bytes)
    return attend("tune", options, path, words, run, lambda ended: show(ended, options.output))


def _check_options(options: argparse.Namespace) -> None:
    for name in ("candidates", "updates"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name}: {getattr(options, name)} is not a positive number")
    if options.rollouts is not None:
        existing_run(options.rollouts)
    if options.output is not None and not options.output.parent.is_dir():
        raise ConfigError(f"-o: {options.output.parent} is not a folder")
    if options.output is not None and options.output.is_dir():
        raise ConfigError(f"-o: {options.output} is a folder; name a file")


def _device_bytes(config: Config) -> int | None:
    """Memory of a device; None if devices are processes."""
    return int(fit.device_memory(config).gib * GIB) if config.placement.device == "cuda" else None


def _card(config: Config) -> Card | None:
    """The card of the devices; None if no speeds are known for it."""
    if config.placement.device != "cuda":
        return None
    return CARDS.get(card_of(config, fit.device_memory(config).gib, given=False).name or "")


def _fits(config: Config) -> bool:
    """Whether the run itself could start with these settings, its engines included."""
    try:
        fit.check_fit(make_plan(config, fit.device_memory(config).gib))
    except ConfigError:
        return False
    return True


def _name(config: Config) -> str:
    return f"run.name={config.run.name}-tune"


def tuning_overrides(
    config: Config, run: RunDir, chosen: Sequence[Candidate], options: argparse.Namespace
) -> list[str]:
    """Return the overrides that turn a run into the measurement of candidates.

    It learns nothing (a learning rate of 0) and keeps no state.
    """
    recorded = run.path / "made-up" if options.rollouts is None else RunDir(options.rollouts).rollouts
    words = [
        *QUIET, _name(config), "train.steps=1", "train.lr=0", "train.lr_min=0",
        f"train.replay_rollouts={recorded}", "checkpoint.save_interval=null",
        "checkpoint.keep_in_memory=false", "faults.inject=[]",
        f"tuning.candidates={json.dumps([each.overrides for each in chosen])}",
        f"tuning.steps={options.updates}",
    ]  # fmt: skip
    return words + (["algorithm.critic.warmup_steps=0"] if config.algorithm.critic.warmup_steps else [])


def _write_rollouts(config: Config, shape: ModelShape, run: RunDir, chosen: Sequence[Candidate]) -> None:
    """Write as many rollouts as give each rank some of the largest micro-batches, a whole step at most."""
    need("h5py", "numpy")
    from orhpc.commands.made_up_rollouts import write_made_up  # login nodes do without numpy

    settings = [dict(each.settings) for each in chosen]
    own, samples = config.train, config.rollout.n_samples
    tokens = max(each.get("train.max_tokens_per_gpu", own.max_tokens_per_gpu) for each in settings)
    if not own.dynamic_batch:
        size = max(each.get("train.micro_batch_size", own.micro_batch_size) for each in settings)
        tokens = size * config.rollout.max_total_tokens
    stages = max(each.get("megatron.pp", config.megatron.pp) for each in settings)
    wanted = _MICRO_BATCHES * stages * tokens * config.placement.trainer_ranks
    groups = math.ceil(wanted / (MEAN_LENGTH * config.rollout.max_total_tokens * samples))
    write_made_up(run.path / "made-up", config, shape, samples * min(groups, config.rollout.batch_size))


def _remember(
    run: RunDir, path: str, overrides: Sequence[str], config: Config, device_bytes: int | None
) -> None:
    """Write what the table needs later."""
    found = find_config(Path(path))
    room = None if device_bytes is None else (1 - SPARE) * device_bytes - reserved_bytes(config)
    told = {
        "config": found.name if found.parent == PACKAGED else str(found.absolute()),
        "overrides": list(overrides),
        "samples": config.rollout.batch_size * config.rollout.n_samples,
        "room_gb": None if room is None else room / 1e9,
    }
    write_atomic(run.path / "tuning.json", json.dumps(told))


def _listed(chosen: Sequence[Candidate]) -> str:
    head = ("settings", "planned GiB a device")
    rows = [(" ".join(each.overrides) or "the config as it is", f"{each.bytes / GIB:.1f}") for each in chosen]
    return columns(head, rows)


def show(run: RunDir, output: Path | None) -> int:
    """Print and write the table of a tuning, and write the config with the best settings.

    Returns 0 only if a candidate could be measured.
    """
    told = _told(run)
    measured = [event for event in read_events(run.events) if event["event"] == "candidate"]
    ranked = sorted(measured, key=lambda event: _rank(event, told))
    text = columns(HEAD, [_cells(event, told) for event in ranked])
    print(text)
    write_table(run, "tuning.md", text)
    if not ranked or _problem(ranked[0], told):
        print("nothing could be measured; orhpc logs has the reasons")
        return EXIT_FAILED
    best, own = ranked[0], next((e for e in measured if not e["settings"]), None)
    gain = ""
    if own is not None and not _problem(own, told):
        gain = f", {_step_s(own, told) / _step_s(best, told):.2f}x of before"
    file = output or _tuned(told["config"])
    _refuse_other(file)
    write_atomic(file, _best_config(told, best, file, gain))
    print(f"{file}: {' '.join(best['settings']) or 'the config as it is'}{gain}")
    return EXIT_OK


def own_update_s(run: RunDir) -> float | None:
    """Return the seconds of a whole step's update that a tuning measured for its config as it is, if it did.

    Raises ConfigError if the run is not a tuning.
    """
    told = _told(run)
    measured = [e for e in read_events(run.events) if e["event"] == "candidate" and not e["settings"]]
    seconds = [_step_s(event, told) for event in measured]
    return next((each for each in seconds if math.isfinite(each)), None)


def _told(run: RunDir) -> Mapping[str, Any]:
    try:
        return json.loads((run.path / "tuning.json").read_text())
    except (OSError, ValueError):
        raise ConfigError(f"{run.path}: is no directory of orhpc tune") from None


def _tuned(config: str) -> Path:
    """The config that is written if no file is named."""
    return Path(f"{Path(config).stem}-tuned.yaml")


def _refuse_other(file: Path) -> None:
    """Raise ConfigError for a file that is there and that no tuning has written."""
    if file.exists() and not file.read_text(errors="replace").startswith(_WRITTEN):
        raise ConfigError(f"{file} is there, and not written by orhpc tune; name another file with -o FILE")


def _problem(event: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    """Why a candidate must not be chosen; empty: it may."""
    if "error" in event:
        return str(event["error"])
    peak, room = event.get("memory_peak_gb"), told["room_gb"]
    too_much = peak is not None and room is not None and peak > room
    return f"leaves too little of a device's memory (more than {room:.1f} GB)" if too_much else ""


def _rank(event: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[bool, float, int]:
    return bool(_problem(event, told)), _step_s(event, told), event["index"]


def _step_s(event: Mapping[str, Any], told: Mapping[str, Any]) -> float:
    """Seconds of the trainers' part of a whole step: its optimizer steps do not grow with the samples."""
    if "error" in event:
        return math.inf
    optimizer = event["optimizer_seconds"]
    return (event["seconds"] - optimizer) * max(1.0, told["samples"] / event["samples"]) + optimizer


def _cells(event: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[str, ...]:
    name, problem = " ".join(event["settings"]) or "the config as it is", _problem(event, told)
    if "error" in event:
        return name, "-", "-", "-", "-", "-", problem
    peak = event.get("memory_peak_gb")
    return (
        name,
        f"{event['tokens_per_s_per_rank']:.0f}",
        f"{_step_s(event, told):.2f}",
        "-" if peak is None else f"{peak:.1f}",
        str(event["micro_batches"]),
        f"{event['start_seconds']:.0f}",
        problem,
    )


def _best_config(told: Mapping[str, Any], best: Mapping[str, Any], file: Path, gain: str) -> str:
    """The text of a config that extends the tuned one by the overrides and the best settings."""
    base = told["config"]
    before = load_config(base).model_dump(mode="json")
    after = load_config(base, [*told["overrides"], *best["settings"]]).model_dump(mode="json")
    near = os.path.relpath(base, file.absolute().parent) if Path(base).is_absolute() else base
    changes = {"extends": near, **_changed(before, after)}
    tokens = f"{best['tokens_per_s_per_rank']:.0f} tokens/s a rank in updates{gain}"
    return f"{_WRITTEN}: {tokens}.\n" + yaml.safe_dump(changes, sort_keys=False, allow_unicode=True)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a tree that differs; what is gone becomes null."""
    found: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := _changed(old, value):
                found[key] = inner
        elif key not in before or value != old:
            found[key] = value
    return found
