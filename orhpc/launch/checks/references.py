"""Check that the functions and classes named in a config exist, without importing them.

A login node must not import a user's module, which may load torch or open connections, so the module's source
is parsed.  Modules are searched as in the job's processes: in the folder that the job is started from, then
among the installed packages.
"""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from orhpc.config import Config
from orhpc.config.algorithm import ADVANTAGES
from orhpc.config.environment import BUNDLED
from orhpc.config.rollout import GROUP_FILTERS
from orhpc.errors import ConfigError


def references(config: Config) -> Iterator[tuple[str, str]]:
    """(setting, ``package.module:name``) of every user function or class that the config names."""
    for setting in ("custom_agent", "custom_reward"):
        if (name := getattr(config.rollout, setting)) is not None:
            # A function written for slime has a prefix: slime:package.module:function.
            yield f"rollout.{setting}", re.sub(r"^slime(-group)?:(?=.*:)", "", name)
    if config.rollout.filter not in GROUP_FILTERS:
        yield "rollout.filter", config.rollout.filter
    if config.algorithm.advantage not in ADVANTAGES:
        yield "algorithm.advantage", config.algorithm.advantage
    for key, settings in config.environments.items():
        if settings.serve is not None and settings.serve not in BUNDLED:
            yield f"environments.{key}.serve", settings.serve
        if settings.data is not None and settings.data.is_function:
            yield f"environments.{key}.data.verifier", settings.data.verifier


def check(config: Config, folder: Path) -> str:
    """Check every reference; ``folder`` is the folder that the job is started from.

    Raises:
        ConfigError: names the setting, the module, and the closest name that it defines.
    """
    if config.slurm.container.kind != "none" or config.slurm.python is not None:
        return "not checked here: the job uses another interpreter"
    names = [check_reference(setting, name, folder) for setting, name in references(config)]
    return ", ".join(names) or "none is named"


def check_reference(setting: str, name: str, folder: Path) -> str:
    """Check one reference and return it.

    Raises:
        ConfigError: there is no such module or name, or the module's source cannot be parsed.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        bundled = f", nor bundled ({', '.join(sorted(BUNDLED))})" if setting.endswith(".serve") else ""
        raise ConfigError(f"{setting}: {name!r} is not package.module:name{bundled}")
    source = _source(setting, module, folder)
    if source is None:
        return name
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"), str(source))
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{setting}: {source}{line}: {getattr(error, 'msg', error)}") from None
    defined = set(_names(tree.body))
    wanted = attribute.partition(".")[0]
    if wanted not in defined and "*" not in defined:
        close = difflib.get_close_matches(wanted, defined, n=1)
        hint = f"; did you mean {module}:{close[0]}?" if close else ""
        raise ConfigError(f"{setting}: {source} defines no {wanted!r}{hint}")
    return name


def _source(setting: str, module: str, folder: Path) -> Path | None:
    """The module's source file; None if it has no Python source."""
    path: list[str] | None = [str(folder), *sys.path]
    parts = module.split(".")
    spec: importlib.machinery.ModuleSpec | None = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        # Search by the last part: for a full name the finder looks up the parent among the imported modules
        # when the folder has no __init__.py.
        spec = importlib.machinery.PathFinder.find_spec(parts[count - 1], path)
        if spec is None and count == 1:
            spec = _installed(name)
        if spec is None:
            raise ConfigError(
                f"{setting}: there is no module {name!r} in {folder} or among the installed packages"
            )
        if count < len(parts) and spec.submodule_search_locations is None:
            raise ConfigError(f"{setting}: {name!r} is a module, not a package")
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _installed(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec from other finders, for example those of editable installs."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements bind in a module; ``*`` if the source does not determine them."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
                if node.name == "__getattr__":
                    yield "*"
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name.partition(".")[0]) for alias in node.names)
            case ast.Assign():
                yield from (n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for field in ("body", "orelse", "finalbody"):
                    yield from _names(getattr(node, field, []))
                for handler in getattr(node, "handlers", []):
                    yield from _names(handler.body)
