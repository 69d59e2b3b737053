"""Write the reference from the code: settings, flags, commands, failures with exit codes, and metrics.

python docs/generate.py FOLDER
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from orhpc import errors
from orhpc.commands.cli import main
from orhpc.config import Config, EnvironmentSettings
from orhpc.config.data import DataSettings
from orhpc.config.flags import SECTIONS, Flag, Kind
from orhpc.config.reference import default_of, descriptions
from orhpc.rundir.metrics import METRICS

COMMANDS = (
    *("launch", "check", "plan", "try-env", "prepare-tasks", "init", "doctor", "fetch", "files"),
    *("tune", "sweep", "drill", "simulate"),
    *("runs", "status", "report", "view", "logs", "sync", "cancel", "export", "chat", "serve"),
    *("completion", "clean"),
)
"""In the order in which they are met."""
_SECTIONS = {
    "reward": "Rewards", "rollout": "Rollouts", "train": "The update", "mismatch": "Engine against trainer",
    "perf": "Speed", "memory": "Memory",
}  # fmt: skip
_TYPES = {
    int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", type(None): "null",
}  # fmt: skip
_ACTIONS = {
    errors.Action.END: "commits what the trainers hold, if it can, and ends",
    errors.Action.RESTART: (
        "restarts in place from the newest commit, at most {budget} times without a new step"
    ),
    errors.Action.RESTART_SMALLER: "the same with half the token budget of a micro-batch",
}
_EXIT_CODES = {
    errors.EXIT_OK: "the run is finished, or the command has done its work",
    errors.EXIT_FAILED: "an unexpected failure: a bug in orhpc or in a library",
    errors.EXIT_CONFIG: "a setting, a file name or an argument is wrong, or your own code raised",
    errors.EXIT_PREFLIGHT: "something that the run needs is missing on this machine",
    errors.EXIT_CRASH_LOOP: "attempts repeatedly ended without a new step; the job is not requeued",
    errors.EXIT_BUSY: "another job or process uses the run directory",
    errors.EXIT_REQUEUE: "stopped with everything committed that could be; the batch script requeues the job",
}


def write(folder: Path) -> None:
    """Write all pages into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "settings": settings,
        "flags": flags,
        "commands": commands,
        "failures": failures,
        "metrics": metrics,
    }
    for name, page in pages.items():
        path, text = folder / f"{name}.md", page()
        # Sphinx reads a page again when its file is newer.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


# --- settings -------------------------------------------------------------------------------------


def settings() -> str:
    """Every setting with its type, default and description."""
    parts = [
        "# Settings\n",
        "Every setting with its type, its default and what it does. A config file sets only what differs and "
        "begins with `extends: base.yaml`; on the command line a setting is `section.name=value`. Unknown "
        "names and values that do not fit are refused.\n",
    ]
    top = [(n, f) for n, f in Config.model_fields.items() if not isinstance(default_of(f), BaseModel)]
    plain, about = [(name, field) for name, field in top if name != "environments"], descriptions(Config)
    parts.append("## Outside sections\n")
    parts += [_setting(name, field, about.get(name)) for name, field in plain]
    for name, field in Config.model_fields.items():
        default = default_of(field)
        if isinstance(default, BaseModel):
            parts.append(f"## {name}\n\n{_text(type(default).__doc__)}\n")
            parts += _fields(type(default), f"{name}.")
    parts.append("## environments\n\nEnvironments by name; at least one is required.\n")
    parts += _fields(EnvironmentSettings, "environments.NAME.")
    parts += _fields(DataSettings, "environments.NAME.data.")
    return "\n".join(parts)


def _fields(section: type[BaseModel], prefix: str) -> Iterator[str]:
    about = descriptions(section)
    for name, field in section.model_fields.items():
        default = default_of(field)
        if isinstance(default, BaseModel):
            yield f"### {prefix}{name}\n\n{_text(about.get(name) or type(default).__doc__)}\n"
            yield from _fields(type(default), f"{prefix}{name}.")
        else:
            yield _setting(f"{prefix}{name}", field, about.get(name))


def _setting(name: str, field: Any, description: str | None) -> str:
    default = yaml.safe_dump(default_of(field), default_flow_style=True, width=1000).strip()
    default = default.removesuffix("\n...").strip()
    about = _text(description)
    if not about:
        raise SystemExit(f"{name} has no docstring, which is its description here and in configs/base.yaml")
    return f"`{name}`\n: {_type(field.annotation)}; default `{default}`. {about}\n"


def _type(annotation: Any) -> str:
    """A type as a reader of YAML says it."""
    names = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true or false",
        Path: "path",
        type(None): "null",
    }
    if annotation in names:
        return names[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return "one of " + ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(one) for one in arguments))
    if origin in (list, tuple):
        inner = [one for one in arguments if one is not Ellipsis]
        return f"list of {_type(inner[0])}" if inner else "list"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return "value"


def _text(description: str | None) -> str:
    """A description as Markdown: double back quotes of docstrings become single ones."""
    return " ".join((description or "").split()).replace("``", "`")


# --- flags ----------------------------------------------------------------------------------------


def flags() -> str:
    """Every flag of slime, miles and OpenReward's run.sh, and the settings that it sets."""
    parts = [
        "# Flags of slime, miles and OpenReward\n",
        "`orhpc launch`, `check`, `plan` and `sweep` read these flags, as `--flag value` and "
        "`--flag=value`, together with a config file and `section.key=value`. A flag that is "
        "not given leaves the setting of the config, not the default that slime has. Any other "
        "`--sglang-NAME VALUE` sets `engine.extra.NAME`, and `--config FILE` names the config file. "
        "[Coming from another project](../guide/coming-from.md) shows how they are used.\n",
    ]
    for title, rows in SECTIONS.items():
        set_here = any(flag.kind is Kind.SETS for flag in rows)
        parts.append(f"## {title}\n")
        head = "| flag | settings | remarks |\n|---|---|---|"
        parts.append(head if set_here else _OTHER_FLAGS[rows[0].kind])
        parts += [_flag(flag, with_settings=set_here) for flag in rows]
        parts.append("")
    return "\n".join(parts)


_OTHER_FLAGS = {
    Kind.NO_EFFECT: "They are accepted, and change nothing.\n\n| flag | why |\n|---|---|",
    Kind.REFUSED: "They end the command with exit code 2.\n\n| flag | instead |\n|---|---|",
}


def _flag(flag: Flag, *, with_settings: bool) -> str:
    note = flag.note[:1].upper() + flag.note[1:]
    names = " ".join(f"`{setting}`" for setting in flag.settings)
    return f"| `{flag.name}` | {f'{names} | ' if with_settings else ''}{note} |"


# --- commands -------------------------------------------------------------------------------------


def commands() -> str:
    """The help of every command."""
    parts = ["# Commands\n", "What `orhpc COMMAND --help` prints.\n"]
    parts += [f"## orhpc {command}\n\n```text\n{_help(command)}\n```\n" for command in COMMANDS]
    return "\n".join(parts)


def _help(command: str) -> str:
    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        if command in ("try-env", "prepare-tasks"):  # separate processes, whose output is not redirected
            from orhpc.rollout import prepare_tasks, try_environment

            {"try-env": try_environment, "prepare-tasks": prepare_tasks}[command].main(["--help"])
        else:
            main([command, "--help"])
    text = printed.getvalue().strip()
    if not text:
        raise SystemExit(f"orhpc {command} --help printed nothing")
    return text


# --- failures -------------------------------------------------------------------------------------


def failures() -> str:
    """Exit codes, and what is done about each class of failure."""
    parts = [
        "# Failures and exit codes\n",
        "The batch script requeues a job on exit code 75, and on 1 until too many attempts in a row made "
        "no new step; on every other code the job ends.\n",
        "| exit code | meaning |\n|---|---|",
        *(f"| {code} | {meaning} |" for code, meaning in sorted(_EXIT_CODES.items())),
        "\nWhat the supervisor of an attempt does about a failure depends on its class; the exit code is "
        "that of the process once it ends because of it.\n",
        "| class | what it is | what the supervisor does | exit code |\n|---|---|---|---|",
    ]
    for kind in _classes(errors.OrhpcError):
        policy = errors.policy_of(kind)
        action = _ACTIONS[policy.action].format(budget=policy.budget)
        about = _text((kind.__doc__ or "").split("\n\n")[0])
        parts.append(f"| `{kind.__name__}` | {about} | {action} | {policy.exit_code} |")
    return "\n".join(parts) + "\n"


def _classes(base: type[errors.OrhpcError]) -> Iterator[type[errors.OrhpcError]]:
    for kind in base.__subclasses__():
        if kind.__module__ == "orhpc.errors":
            yield kind
            yield from _classes(kind)


# --- metrics --------------------------------------------------------------------------------------


def metrics() -> str:
    """Every metric with its meaning, unit and names elsewhere."""
    parts = [
        "# Metrics\n",
        "The numbers of a step in `events.jsonl`, in the report and, with the section before the name "
        "(`reward/reward_mean`), in trackers. `NAME/ENVIRONMENT` is the same for one environment. The last "
        "columns are the names of the same number in verl, in TRL's GRPOTrainer, and in slime and miles.\n",
    ]
    for section, title in _SECTIONS.items():
        parts.append(
            f"## {title} (`{section}/`)\n\n| metric | unit | meaning | verl | TRL | slime |\n"
            "|---|---|---|---|---|---|"
        )
        for name, metric in METRICS.items():
            if metric.section == section:
                others = (metric.verl, metric.trl, metric.slime)
                known = " | ".join(f"`{other}`" if other else "" for other in others)
                parts.append(f"| `{name}` | {metric.unit} | {metric.meaning} | {known} |")
        parts.append("")
    parts.append(
        "An evaluation has `reward_mean/SPLIT`, `success_rate/SPLIT`, `rollouts/SPLIT` and `failed/SPLIT`, "
        "in trackers below `eval/`. `phase/NAME` there is the duration of a phase of the step in seconds.\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
