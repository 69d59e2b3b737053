"""Write the task file of OpenReward's training examples: ``orhpc prepare-tasks CONFIG``.

    orhpc prepare-tasks CONFIG [key=value ...] [-o tasks.jsonl] [--max-tasks N] [--seed N]

Lists the tasks of the training splits of all environments, in random order, one per line
(:mod:`orhpc.data.prepared_tasks`).  ``rollout.task_file`` reads the file back, after lines have been removed,
for example; the lines contain the tasks' specifications, often with the gold answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence

from orhpc.config import Config
from orhpc.data.prepared_tasks import PreparedTask
from orhpc.errors import EXIT_OK, ConfigError
from orhpc.rollout.environment.descriptions import describe_tasks, prepared
from orhpc.rollout.opened import config_of, exit_code_of, opened
from orhpc.rollout.try_options import add_prepare_tasks
from orhpc.rundir import write_atomic


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="orhpc prepare-tasks", description=description)
    add_prepare_tasks(parser)
    options = parser.parse_intermixed_args(arguments)
    return exit_code_of(lambda: _main(options))


def _main(options: argparse.Namespace) -> int:
    if options.max_tasks is not None and options.max_tasks < 1:
        raise ConfigError(f"--max-tasks {options.max_tasks}: must be at least 1")
    tasks = asyncio.run(prepared_tasks(config_of(options.arguments), options.max_tasks, options.seed))
    try:
        write_atomic(options.output, "".join(f"{task.line()}\n" for task in tasks))
    except OSError as error:
        raise ConfigError(f"--output {options.output}: cannot be written: {error}") from None
    print(f"{len(tasks)} tasks: {options.output}")
    return EXIT_OK


async def prepared_tasks(config: Config, max_tasks: int | None, seed: int) -> list[PreparedTask]:
    """List the tasks of all training splits, in random order.

    Args:
        config: of the run; ``num_samples`` limits a split to its first tasks.
        max_tasks: of each split, chosen at random; None: all.
        seed: of the order and the choice.

    Raises:
        ConfigError: no environment is trained on, or one does not tell the specifications of its tasks.
        OrhpcError: an environment cannot be opened.
    """
    found: list[PreparedTask] = []
    generator = random.Random(seed)
    for name, settings in config.environments.items():
        if not settings.trains:
            continue
        async with opened(config, name) as (environment, _):
            for split in settings.splits:
                specifications = await describe_tasks(environment, split)
                generator.shuffle(specifications)
                found += [prepared(environment, split, each) for each in specifications[:max_tasks]]
    if not found:
        raise ConfigError("environments: none of them is trained on")
    generator.shuffle(found)
    return found


if __name__ == "__main__":
    sys.exit(main())
