# orhpc: what a newcomer runs.  Everything goes into .venv; nothing else on the machine is touched,
# but for Debian packages that `make test` installs when it may.

PYTHON ?= python3
# The CPU build where the package index has one; any torch >= 2.11 will do:  make TORCH=torch==2.12.0 test
TORCH ?= torch==2.13.0
# For the tests of the Megatron trainer on a CPU; it asks for Python 3.12, and runs on 3.11 without its extras.
MEGATRON ?= megatron-core==0.19.2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OPENREWARD_DISABLE_UPDATE_CHECK = 1

.PHONY: help install demo test test-fast test-long soak lint docs format clean

help:            ## this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

install: $(STAMP)  ## make .venv and install everything that demo and test need

$(STAMP): pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit("orhpc needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable '.[run,gym,data,router,dev,docs]'
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python "$(MEGATRON)"
	touch $(STAMP)

demo: $(STAMP)   ## train SmolLM2-135M on this machine, about ten minutes on two cores
	$(BIN)/python -m orhpc.launch --local configs/local.yaml

test: $(STAMP)   ## lint, type check and the tests, an hour on two cores
	bash tests/run.sh all

test-fast: $(STAMP)  ## the quick ones, under a minute
	bash tests/run.sh fast

test-long: $(STAMP)  ## the long rehearsals that make test leaves out, half an hour
	bash tests/run.sh long

soak: $(STAMP)   ## 200 steps with 24 random faults at a fixed seed, about half an hour on two cores
	$(BIN)/python -m benchmarks.soak

lint: $(STAMP)   ## ruff, pyright, import contracts
	bash tests/run.sh lint

docs: $(STAMP)   ## the documentation as a site, in docs/_build/html
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build/html

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:           ## remove .venv and caches, keep runs
	rm -rf $(VENV) docs/_build docs/reference .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
