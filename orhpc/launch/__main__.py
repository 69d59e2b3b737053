"""``python -m orhpc.launch [CONFIG] [key=value ...] [--local | --dry-run]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from orhpc.config_files import dump_config, load_config
from orhpc.errors import EXIT_OK, ConfigError, OrhpcError, policy_of
from orhpc.launch.local import local_node, run_local
from orhpc.launch.placement import plan

DEFAULT_CONFIG = "configs/default.yaml"


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, str, list[str]]:
    """Split the command line into options, the config's path and its overrides."""
    parser = argparse.ArgumentParser(prog="orhpc launch", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="CONFIG | key=value", help="a YAML file, then overrides")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--local", action="store_true", help="run here, in the foreground")
    how.add_argument("--dry-run", action="store_true", help="print the resolved config and the placement")
    options = parser.parse_args(arguments)
    files = [w for w in options.words if "=" not in w]
    if len(files) > 1:
        raise ConfigError(f"one config file at a time, not {' and '.join(files)}")
    return options, files[0] if files else DEFAULT_CONFIG, [w for w in options.words if "=" in w]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; every failure is one line on standard error."""
    try:
        options, path, overrides = parse(arguments)
        config = load_config(path, overrides)
        if options.dry_run:
            print("# resolved config\n" + dump_config(config))
            nodes = (local_node(),) * config.placement.nodes
            print("# placement\n" + plan(config, nodes).to_yaml())
            return EXIT_OK
        return run_local(config)
    except OrhpcError as error:
        print(f"orhpc: {' '.join(str(error).split())}", file=sys.stderr)
        return policy_of(error).exit_code


if __name__ == "__main__":
    sys.exit(main())
