#!/usr/bin/env bash
# tests/run.sh all | fast | lint
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
export PYTHONDONTWRITEBYTECODE=1

lint() {
  $bin/ruff check .
  $bin/ruff format --check --quiet .
  $bin/lint-imports --no-cache
  $bin/pyright
}

case "${1:-all}" in
  lint) lint ;;
  fast) $bin/ruff check --quiet . ; $bin/python -m pytest -m "not slow" -n 2 --dist loadfile tests/unit tests/faults ;;
  all)  lint ; $bin/python -m pytest --durations=15 ;;
  *) echo "usage: tests/run.sh all | fast | lint" >&2; exit 2 ;;
esac
