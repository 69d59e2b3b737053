"""A sweep's folder and its elements: which exist, which are unfinished, and how they are submitted."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from orhpc.config import Config
from orhpc.config.files import dump_config, load_config
from orhpc.errors import ConfigError, OrhpcError
from orhpc.launch import prepare
from orhpc.launch.slurm import features, holder, submission
from orhpc.launch.sweep.values import Values, name_of
from orhpc.rundir import RunDir
from orhpc.rundir.sealed import Damaged, read_sealed, write_sealed

_INDEX = "sweep.json"
_KEYS = ("config", "elements")


@dataclass(frozen=True)
class Element:
    """One run of a sweep."""

    index: int
    """Its index in the sweep, and in the job array."""
    name: str
    values: Values
    """The settings in which it differs from the others."""
    arguments: tuple[str, ...] = ()
    """Config file and overrides, for the launcher; empty if the sweep was read from its folder."""

    @cached_property
    def config(self) -> Config:
        """Raises ConfigError, which names the element."""
        with naming(self):
            return load_config(self.arguments[0], self.arguments[1:])


@contextmanager
def naming(element: Element) -> Iterator[None]:
    """Say in a failure which element it is about."""
    try:
        yield
    except OrhpcError as error:
        if not str(error).startswith(f"element {element.name}: "):
            error.args = (f"element {element.name}: {error}",)
        raise


def refuse_equal(elements: Sequence[Element]) -> None:
    """Raise ConfigError if two elements are the same run, as with 1e-4 and 0.0001."""
    seen: dict[str, str] = {}
    for element in elements:
        settings = dump_config(element.config).replace(f"name: {element.name}\n", "", 1)
        if (other := seen.setdefault(settings, element.name)) != element.name:
            raise ConfigError(f"elements {other} and {element.name} are equal: their values mean the same")


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (folder / _INDEX).is_file()


def folder_of(config_path: str, overrides: Sequence[str]) -> Path:
    """The sweep's folder: ``run.root`` / ``run.name``, by default the config's own name and ``-sweep``.

    ``overrides``: those of one element.

    Raises:
        ConfigError: the config is wrong, or the folder is a run directory.
    """
    run = load_config(config_path, overrides).run
    named = any(word.startswith("run.name=") for word in overrides)
    folder = Path(run.root) / (f"{run.name}" if named else f"{run.name}-sweep")
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"run.name: {folder} is a run directory; a sweep needs a folder of its own")
    return folder


def elements_in(folder: Path) -> list[Element]:
    """The elements that a sweep's folder lists, in order; empty if it is not a sweep yet.

    Raises:
        ConfigError: the list is damaged.
    """
    try:
        listed = read_sealed(folder / _INDEX, _KEYS)["elements"]
        return [Element(i, str(e["name"]), dict(e["values"])) for i, e in enumerate(listed)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (Damaged, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / _INDEX}: {error}; move it away, and the same command writes it again"
        ) from None


def elements_of(
    folder: Path, config_path: str, fixed: Sequence[str], rows: Sequence[Values]
) -> list[Element]:
    """The elements with these values; those that the folder lists already keep their name and index.

    Args:
        folder: the sweep's.
        config_path: the config file that they share.
        fixed: overrides that they share.
        rows: the values of each.
    """
    known = elements_in(folder)
    by_values = {tuple(sorted(e.values.items())): e for e in known}
    names = {e.name for e in known}
    found: list[Element] = []
    shared = [word for word in fixed if word.partition("=")[0] not in ("run.name", "run.root")]
    for values in rows:
        before = by_values.get(tuple(sorted(values.items())))
        name = before.name if before is not None else name_of(values, names)
        index = before.index if before is not None else len(names)
        names.add(name)
        own = overrides_of(values)
        where = [f"run.root={json.dumps(str(folder))}", f"run.name={name}"]
        found.append(Element(index, name, values, (config_path, *shared, *own, *where)))
    return found


def overrides_of(values: Values) -> list[str]:
    """An element's values as overrides."""
    return [f"{key}={value}" for key, value in values.items()]


def write_index(folder: Path, config_path: str, elements: Sequence[Element]) -> None:
    """List elements in the sweep's folder, in addition to those that it lists already.

    Raises:
        ConfigError: the folder cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.root: {folder} cannot be created: {error.strerror}") from None
    listed = {e.index: e for e in [*elements_in(folder), *elements]}
    entries = [{"name": e.name, "values": e.values} for _, e in sorted(listed.items())]
    write_sealed(folder / _INDEX, {"config": config_path, "elements": entries})


def is_finished(element: Element) -> bool:
    """Whether the element's run has made all the steps that its config asks for now."""
    config = element.config
    rundir = prepare.run_directory(config)
    return rundir.config.is_file() and prepare.is_finished(rundir, config)


def script(elements: Sequence[Element]) -> str:
    """The batch script of the array.

    Raises:
        ConfigError: an element would need another script, because it differs in the job's resources, or a
            heterogeneous job.
    """
    configs = [e.config for e in elements]
    if any(config.slurm.node_groups for config in configs):
        raise ConfigError("slurm.node_groups: a sweep is a job array, which SLURM cannot make heterogeneous")
    directories = [prepare.run_directory(config) for config in configs]
    lead_s = max(submission.signal_lead(c, r) for c, r in zip(configs, directories, strict=True))
    python = submission.own_python()
    first = submission.render(configs[0], lead_s, python)
    for element, config in zip(elements[1:], configs[1:], strict=True):
        own = submission.render(config, lead_s, python)
        if own != first:
            lines = zip(own.splitlines(), first.splitlines(), strict=False)
            differs = next(((a, b) for a, b in lines if a != b), ("a longer script", "a shorter one"))
            raise ConfigError(
                f"element {element.name}: it needs {differs[0]!r}, {elements[0].name} {differs[1]!r}; all "
                "elements are one job array with the same resources: use one sweep for each"
            )
    arguments = {e.index: e.arguments for e in elements}
    return submission.render(configs[0], lead_s, python, arguments)


def array_options(
    folder: Path, elements: Sequence[Element], parallel: int | None, say: Callable[[str], object]
) -> list[str]:
    """sbatch's options.

    Args:
        folder: the sweep's.
        elements: of the array; the first one's settings are those of all.
        parallel: how many run at the same time at most; null: all.
        say: receives a line for each setting that this cluster's SLURM does not support.
    """
    indices = _ranges([e.index for e in elements])
    limit = f"%{parallel}" if parallel is not None else ""
    output = str(folder.absolute() / "slurm-%A_%a.out")
    options = [f"--array={indices}{limit}", "--output", output, "--job-name", f"orhpc-{folder.name}"]
    return [*options, *features.requeue_options(elements[0].config, say)]


def _ranges(indices: Sequence[int]) -> str:
    """Indices as sbatch takes them: ``0-3,7``."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def submit(
    folder: Path,
    elements: Sequence[Element],
    text: str,
    parallel: int | None,
    say: Callable[[str], object],
) -> str:
    """Submit elements as one job array; return its id.

    Args:
        folder: the sweep's.
        elements: their run directories must exist, with their configs.
        text: their :func:`script`.
        parallel, say: as of :func:`array_options`.

    Raises:
        PreflightError: sbatch refuses.
    """
    options = array_options(folder, elements, parallel, say)
    array = submission.sbatch(text, options, [], folder / "submitted")
    for element in elements:
        rundir = RunDir(folder / element.name)
        job = f"{array}_{element.index}"
        holder.note_submission(rundir, job)
        # The array has one pattern for all outputs; the link lets `orhpc logs` find it before an attempt.
        link = rundir.path / f"slurm-{job}.out"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(os.pardir) / f"slurm-{job}.out")
    return array


def described(element: Element) -> str:
    """The element's values, as they were given."""
    return " ".join(f"{key}={shlex.quote(value)}" for key, value in element.values.items())
