"""Shell scripts that replace programs such as SLURM's commands."""

from __future__ import annotations

from pathlib import Path


def write_program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
