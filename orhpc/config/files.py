"""Read a :class:`~orhpc.config.Config` from YAML files and dotted overrides, and write it back.

    config = load_config("configs/local.yaml", ["train.lr=1e-6", "run.name=try2"])

A file can extend another with ``extends: other.yaml`` (relative to itself): mappings are merged key by
key, all other values are replaced, and null removes an environment.  The ``train_config.yaml`` of
OpenReward's training examples is read as it is (:mod:`orhpc.config.openreward`).
"""

from __future__ import annotations

import difflib
import errno
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from orhpc.config import Config, openreward
from orhpc.config.safe_yaml import DEEPEST, read_yaml
from orhpc.errors import ConfigError, StorageRefused
from orhpc.rundir.storage import is_refusal

MAY_CHANGE_ON_RESUME = (
    "run.root",
    "run.access",
    "run.storage_wait_s",
    "model.check",
    "placement.*",
    "engine.*",
    "checkpoint.*",
    "evaluation.*",
    "tracking.*",
    "wandb.*",
    "tensorboard.*",
    "mlflow.*",
    "notify.*",
    "alarms.*",
    "slurm.*",
    "faults.*",
    "tuning.*",
    "environments.*.url",
    "environments.*.replicas",
    "environments.*.max_opening",
    "environments.*.max_answer_mb",
    "environments.*.parallel_calls",
    "environments.*.tool_timeout_s",
    "environments.*.replay_calls",
    "rollout.max_concurrent",
    "rollout.workers_per_node",
    "rollout.retries",
    "rollout.max_failing_rollouts",
    "rollout.max_user_errors",
    "rollout.failing_environment*",
    "rollout.*_timeout_s",
    "rollout.openreward_upload",
    "rollout.max_refills",
    "train.steps",
    "train.lr",
    "train.lr_min",
    "train.threads",
    "train.update_timeout_s",
    "train.max_tokens_per_gpu",
    "train.gradient_checkpointing",
    "train.recompute_layers",
    "train.gather_once",
    "train.compile",
    "train.logprob_chunk_tokens",
    "train.replay_rollouts",
    "train.profile_*",
    *(f"megatron.{n}" for n in ("tp", "pp", "vpp", "cp", "ep", "etp", "overlap*", "offload_optimizer")),
    "megatron.counts_from_routes",
    "megatron.gradients_dtype",
    "megatron.moments_dtype",
    "megatron.recompute*",
)
"""Settings that may change when a run is resumed."""


PACKAGED = Path(__file__).parents[1] / "configs"
"""The configs that come with the package."""


def is_override(word: str) -> bool:
    """Whether an argument is ``section.key=value``; a config's folder may be named ``lr=1e-5``."""
    is_file = word.endswith((".yaml", ".yml")) and os.path.isfile(word)  # noqa: PTH113 - raises for long words
    return "=" in word and not is_file


def find_config(path: Path) -> Path:
    """Return the config file at this path, or the packaged config of that name.

    Raises:
        ConfigError: neither exists; the message names the path and a similar file.
    """
    try:
        if path.exists():
            return path
    except OSError as error:
        raise ConfigError(f"{str(path)[:100]}: {error.strerror}") from None
    named = path.parent in (Path(), Path("configs")) and not path.is_absolute()
    if named and (packaged := PACKAGED / path.name).is_file():
        return packaged
    packaged = sorted(p.name for p in PACKAGED.glob("*.yaml"))
    near = [str(p) for p in sorted(path.parent.glob("*.y*ml"))]
    close = difflib.get_close_matches(str(path), near, n=1) or difflib.get_close_matches(
        path.name, packaged, n=1
    )
    hint = f"; did you mean {close[0]}?" if close else f" ({', '.join(packaged)})"
    raise ConfigError(f"{path.absolute()}: no such config file, nor one of the package's{hint}")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config with its bases, apply the overrides and validate it.

    Raises:
        ConfigError: one line that names the file or the field.
    """
    path = find_config(Path(path))
    tree = _read_with_bases(path, ())
    for override in overrides:
        _apply_override(tree, override)
    evaluation = tree.get("evaluation")
    _remove_nulls(tree, "environments")
    _remove_nulls(evaluation if isinstance(evaluation, dict) else {}, "splits")
    run = tree.setdefault("run", {})
    if isinstance(run, dict) and run.get("name") is None:
        run["name"] = path.stem
    return validate(tree, str(path))


def setting_of(path: str | Path, overrides: Sequence[str], setting: str) -> Any:
    """Return one setting of a config file with overrides, or its default; nothing else is validated.

    Args:
        path: as for :func:`load_config`.
        overrides: as for :func:`load_config`.
        setting: its name with dots, for example ``rollout.batch_size``.

    Raises:
        ConfigError: a file or an override cannot be read.
    """
    tree = _read_with_bases(find_config(Path(path)), ())
    for override in overrides:
        _apply_override(tree, override)
    value: Any = tree
    for key in setting.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return default_setting(setting) if value is None else value


def default_setting(setting: str) -> Any:
    """Return the schema's default of a setting; raises KeyError if there is no such setting."""
    if setting == "environments":
        return {}
    value: Any = Config.model_construct()
    for key in setting.split("."):
        if not isinstance(value, BaseModel) or key not in type(value).model_fields:
            raise KeyError(setting)
        value = getattr(value, key)
    return value


def validate(tree: Mapping[str, Any], source: str) -> Config:
    """Check a plain tree against the schema; ``source`` names it in errors.

    Raises:
        ConfigError: names the first invalid field, and for an unknown one a similar field.
    """
    try:
        return Config.model_validate(tree)
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_problem(error)}") from None


def dump_config(config: Config) -> str:
    """Return the whole config, with defaults, as YAML that :func:`load_config` can read."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def changes_on_resume(before: Config, now: Config) -> list[str]:
    """List the settings that changed since the run started, as ``field: old -> new``.

    Raises:
        ConfigError: a setting changed that may not change on a resume.
    """
    old, new = dict(leaves(before.model_dump())), dict(leaves(now.model_dump()))
    changed = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    refused = [k for k in changed if not any(fnmatchcase(k, p) for p in MAY_CHANGE_ON_RESUME)]
    if refused:
        key = refused[0]
        raise ConfigError(
            f"{key}: the run was started with {old.get(key)!r}, now it is {new.get(key)!r}; "
            "it may not change on a resume: set another run.name to start a new run"
            + (f" (also changed: {', '.join(refused[1:])})" if refused[1:] else "")
        )
    return differences(before, now)


def differences(before: Config, now: Config) -> list[str]:
    """List all differences between two configs, as ``field: old -> new``."""
    old, new = dict(leaves(before.model_dump())), dict(leaves(now.model_dump()))
    changed = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    return [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in changed]


def _read_with_bases(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in below:
        raise ConfigError(f"{path}: extends itself")
    tree = _read_yaml(path)
    if openreward.is_train_config(tree):
        return openreward.converted(tree, str(path))
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends: must be the name of one file")
    parent = _read_with_bases(_base_of(path, base), (*below, path.resolve()))
    return _merge(parent, tree)


def _base_of(path: Path, base: str) -> Path:
    """The file that ``extends`` names: relative to the config, else one of the package's."""
    near = path.parent / base
    if near.exists():
        return near
    if "/" not in base and (PACKAGED / base).is_file():
        return PACKAGED / base
    raise ConfigError(f"{path}: extends: {near.absolute()}: no such config file, nor one of the package's")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as stream:
            tree = read_yaml(stream, str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, ValueError) as error:
        away = isinstance(error, OSError) and error.errno != errno.EACCES and is_refusal(error)
        kind = StorageRefused if away else ConfigError
        raise kind(f"{path}: cannot be read: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, not a {type(tree).__name__}")
    return tree


def _merge(base: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in above.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _remove_nulls(tree: dict[str, Any], name: str) -> None:
    """Remove the entries of a mapping that a config has set to null: those of its base."""
    entries = tree.get(name)
    if isinstance(entries, dict):
        tree[name] = {key: value for key, value in entries.items() if value is not None}


def _apply_override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"override {override[:200]!r}: write section.key=value")
    where = f"override {dotted[:100]}"
    value = read_yaml(text, where, or_text=True)
    if dotted.count(".") > DEEPEST:
        raise ConfigError(f"{where}: more than {DEEPEST} levels")
    keys = _split_key(tree, dotted)
    node = tree
    for i, key in enumerate(keys[:-1]):
        inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(keys[: i + 1])} is not a section")
        node = inner
    node[keys[-1]] = value


def _split_key(tree: Mapping[str, Any], dotted: str) -> list[str]:
    """Split at dots, but keep together a key of the file that has dots itself (environments may)."""
    keys: list[str] = []
    node: Any = tree
    rest = dotted
    while rest:
        known = (
            [k for k in node if rest == k or rest.startswith(k + ".")] if isinstance(node, Mapping) else []
        )
        key = max(known, key=len) if known else rest.partition(".")[0]
        keys.append(key)
        node = node.get(key) if isinstance(node, Mapping) else None
        rest = rest[len(key) + 1 :]
    if not all(keys):
        raise ConfigError(f"override {dotted!r}: an empty key")
    return keys


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    loc = [str(part) for part in problem["loc"]]
    where = ".".join(loc)
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown setting{_suggestion(loc)}"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    simple = isinstance(given, (str, int, float, bool, date, type(None)))
    shown = f", not {_shortened(given)}" if simple and where and problem["type"] != "value_error" else ""
    if problem["type"] == "string_type" and isinstance(given, bool | int | float | date):
        shown += ", as YAML reads it: write the text in quotes"
    return f"{where}: {message}{shown}" if where else message


def _shortened(value: str | int | float | bool | date | None) -> str:
    if isinstance(value, date):
        return str(value)
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number with too many digits"
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."


def _suggestion(loc: Sequence[str]) -> str:
    model: type[BaseModel] | None = Config
    for part in loc[:-1]:
        model = _section_below(model, part)
    if model is None:
        return ""
    elsewhere = [k for k, _ in leaves(Config.model_construct().model_dump()) if k.split(".")[-1] == loc[-1]]
    close = elsewhere[:1] or difflib.get_close_matches(loc[-1], model.model_fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _section_below(model: type[BaseModel] | None, part: str) -> type[BaseModel] | None:
    """The section under a field, also through ``dict[str, Section]`` (whose keys name no field)."""
    if model is None:
        return None
    field = model.model_fields.get(part)
    if field is None:
        return model  # a key of a dict[str, Section]
    return _section_in(field.annotation)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (dict, Union, types.UnionType):
        for inner in get_args(annotation):
            if (section := _section_in(inner)) is not None:
                return section
    return None


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its dotted name."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
