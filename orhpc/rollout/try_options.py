"""The options of ``orhpc try-env`` and ``prepare-tasks``; the commands load OpenReward's SDK."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_try_env(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="+", metavar="CONFIG | key=value")
    parser.add_argument("--env", metavar="NAME", help="key in environments; required if there are several")
    parser.add_argument("--split", help="default: the first training split, or the first evaluation split")
    parser.add_argument("--task", type=int, default=0, metavar="N", help="index in the split (default: 0)")
    parser.add_argument("--script", type=Path, metavar="FILE", help="read turns from a file, one per line")


def add_prepare_tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="+", metavar="CONFIG | key=value")
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        default=Path("tasks.jsonl"),
        metavar="FILE",
        help="is replaced if it exists (default: tasks.jsonl)",
    )
    parser.add_argument("--max-tasks", type=int, metavar="N", help="at most N of each split, at random")
    parser.add_argument("--seed", type=int, default=42, help="of the order and the choice (default: 42)")
