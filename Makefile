# Every target sets up what it needs; the machine has to have python3 >= 3.11 with venv, and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SCHEDULES ?= 10000

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-s3 demo-gcs test test-long sim interleave mutants lint types bench wheel clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## make .venv with the pinned dependencies and this project (editable)

# The stamp comes last, so that an interrupted installation is done again.
$(READY): pyproject.toml runtime/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: python 3.11 or newer is needed, " \
	    "$(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv ## train three islands on real text, kill one, see it come back, sample from the result
	$(BIN)/python examples/shakespeare/demo.py

demo-s3: venv ## the same with the blackboard in a bucket of an S3 server (SeaweedFS) on this machine
	$(BIN)/python -m tests.support.demo s3

demo-gcs: venv ## the same with a server of Google Cloud Storage's interface (fake-gcs-server)
	$(BIN)/python -m tests.support.demo gcs

test: venv ## run the tests (but for the long ones)
	$(BIN)/python -m pytest -m 'not long'

test-long: venv ## run the long tests: many kills
	$(BIN)/python -m pytest -m long

sim: venv ## explore simulated runs with faults; SCHEDULES=100 for fewer
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sim.explore --schedules $(SCHEDULES)

interleave: venv ## run every interleaving of two syncers and a learner over three commits
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sim.interleave

mutants: venv ## put sixteen bugs into copies of the source, see exploring find each
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sim.mutants

lint: venv ## check style, formatting, import and clock bans
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: venv ## check types; islands may have an older Python than the command line needs
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 runtime/diloco_runtime

bench: venv ## run the benches; their numbers are in the README
	@set -e; for script in bench/[!_]*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

wheel: venv ## build the wheels of the command line and of the runtime into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist . ./runtime

clean: ## remove everything that these targets made
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
