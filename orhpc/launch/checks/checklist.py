"""The ordered list of all checks that can refuse a run before it starts, one reason per check.

``orhpc check`` runs all of them and prints a line each; the launcher and the job's first node stop at the
first failure.  A check returns its finding as text for the user, and raises an
:class:`~orhpc.errors.OrhpcError` when the run cannot work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orhpc.config import Config
from orhpc.errors import EXIT_OK, EXIT_PREFLIGHT, ConfigError, ModelError, OrhpcError
from orhpc.launch import model, prepare
from orhpc.launch.checks import commit_space, fit, host_memory, internet, references, trackers
from orhpc.launch.slurm import holder, submission
from orhpc.models import chat_formats, image_limits
from orhpc.models.folders import is_hub_name, problem_of
from orhpc.plan.placement import Node, local_node, plan


@dataclass(frozen=True, slots=True)
class Check:
    """One reason to refuse a run."""

    name: str
    run: Callable[[], str]


def of_config(config: Config) -> list[Check]:
    """Checks of the config on this machine; they fetch at most the model's ``config.json``."""
    return [
        Check("placement", lambda: _placement(config)),
        Check("model", lambda: _model(config)),
        Check("chat format", lambda: chat_formats.check(config, model.ensure_config(config))),
        Check("fit", lambda: fit.check(config)),
        Check("memory of a node", lambda: host_memory.check_configured(config)),
        Check("your code", lambda: references.check(config, Path.cwd())),
        Check("data", lambda: prepare.check_paths(config)),
        Check("trackers", lambda: trackers.check(config)),
    ]


def before_the_queue(config: Config) -> list[Check]:
    """Checks of the launcher: those of the config, the keys and the run directory."""
    return [
        *of_config(config),
        Check("keys", lambda: prepare.check_keys(config)),
        Check("run directory", lambda: _directory(config)),
    ]


def on_the_login_node(config: Config) -> list[Check]:
    """Every check of ``orhpc check``."""
    return [
        *before_the_queue(config),
        Check("internet", lambda: internet.survey(config).line),
        Check("cluster", lambda: submission.test_submission(config)),
    ]


def require(checks: list[Check]) -> None:
    """Run checks in order and raise the first failure."""
    for check in checks:
        check.run()


def report(checks: list[Check]) -> int:
    """Run all checks, print a line each, and return the exit code."""
    code = EXIT_OK
    for check in checks:
        try:
            print(f"ok   {check.name}: {check.run()}", flush=True)
        except OrhpcError as error:
            code = EXIT_PREFLIGHT
            print(f"BAD  {check.name}: {' '.join(str(error).split())}", flush=True)
    return code


def _placement(config: Config) -> str:
    nodes = tuple(Node(f"node{i}", "", local_node().cpus) for i in range(config.placement.nodes))
    placed = plan(config, nodes)
    return (
        f"{len(nodes)} nodes, {len(placed.trainers)} trainers, {len(placed.engines)} engines, "
        f"{len(placed.workers)} workers"
    )


def _model(config: Config) -> str:
    folder = model.ensure_config(config)
    path = config.model.path
    draft = config.engine.draft_model
    if draft is not None and not is_hub_name(draft) and not (Path(draft) / "config.json").is_file():
        raise ModelError(f"engine.speculative.draft_model: {draft}: no model folder, and not a hub name")
    if folder is None:
        return f"{path} is not here; it is fetched or built before the run"
    if config.rollout.max_images and config.rollout.custom_agent is None:
        image_limits.check_max_pixels(folder, config.rollout.max_image_pixels)
    if (problem := problem_of(folder)) is None:
        return f"{path} is complete in {folder}"
    if model.is_fetched(config):
        return f"{path} exists; {problem} in {folder}: fetched before the run (now: orhpc fetch {path})"
    raise model.damaged(path, problem)


def _directory(config: Config) -> str:
    rundir = prepare.run_directory(config)
    try:
        holder.check_free(rundir)
        return commit_space.check(config, rundir)
    except PermissionError:
        raise ConfigError(
            f"run.root: {rundir.path} exists and is another user's: choose another run.name or run.root"
        ) from None
