# Everything starts here; `make` alone lists it. Only Python from 3.11 on, make and a package registry are needed.
#
#   make train ARGS="--steps 50"      options for the example
#   make test ARGS="-k pool -x"       options for pytest
#   make fuzz SECONDS=60 ARGS="--seed 2"
#   make PYTHON=/opt/py/bin/python3   another Python for the environment than the newest on the path
#
# Where pip should take torch's small CPU build (by default the registry's own, with CUDA on Linux):
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install

# The newest of those that run: a command may be there and stand for a Python that is not installed.
PYTHON ?= $(shell for each in python3.14 python3.13 python3.12 python3.11 python3; do \
	$$each -c "import sys; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1 && echo $$each && break; done)
ARGS ?=
SECONDS ?= 600

VENV := .venv
BIN := $(VENV)/bin
# Touched when an install is complete; older than one of its sources, or missing, means: install.
STAMP := $(VENV)/installed
BROWSER := $(VENV)/browser
# A folder in which this checkout, whatever its name, is visible as `triax`: mypy goes by folder names.
AS_TRIAX := $(VENV)/as-package
# What is type-checked: the folders that hold Python files.
CHECKED := __init__.pyi $(sort $(dir $(wildcard */*.py)))

# Quick tests: structure and names, schedules as values, grids, configurations, the numbers of a step.
QUICK := $(addprefix tests/,laws/test_imports.py laws/test_names.py laws/test_bugs.py grid/test_layout.py \
	grid/test_random.py grid/test_topology.py options grid/launcher/test_hosts.py engine/optim \
	pipe/test_partition.py pipe/test_schedules.py pipe/test_simulate.py pipe/test_verify.py pipe/test_executor.py \
	grid/test_regions.py context/test_order.py context/test_sparsity.py engine/test_pipeline_engine.py)

# Two processes of pytest, each with a pool of ranks: a rank that waits for others leaves its core to the other process's.
# A debugger needs one process: make test ARGS="-n 0 --pdb". `make test-all` has one: its sweeps take the whole machine.
WORKERS := -n 2 --dist worksteal

# In order even under `make -j`: these share one machine, and one of them makes what the others need.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help install train check test test-all test-versions test-device fuzz lint docs look release-check wheel

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## .venv with the versions of constraints.txt, and the command .venv/bin/triax
	@echo "installed: $(BIN)/triax, $$($(BIN)/python --version)"

$(STAMP): pyproject.toml constraints.txt Makefile
	@echo "== $(VENV) is missing or older than $(if $?,$(firstword $?),its sources): installing"
	@$(BIN)/python -c "" 2>/dev/null || { test -n "$(PYTHON)" && $(PYTHON) -m venv --clear $(VENV); } || \
		{ echo "no Python from 3.11 on could make $(VENV): install one, or type make PYTHON=/path/to/python3" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

train: $(STAMP) ## a small GPT learns to add on 8 processes: 2 stages x 2 replicas x 2 tensor shards; runs/ gets the pictures
	@echo "== training on a 2 x 2 x 2 grid"
	$(BIN)/python examples/gpt_3d.py --pipe 2 --data 2 --tensor 2 $(ARGS)

check: lint ## lint and the quick tests, in under two minutes
	@echo "== testing, the quick tests"
	$(BIN)/python -m pytest -q $(QUICK) $(ARGS)

test: $(STAMP) ## the tests, without the exhaustive sweeps
	@echo "== testing"
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-all: $(STAMP) ## every test, the exhaustive sweeps too
	@echo "== testing, exhaustive sweeps too"
	$(BIN)/python -m pytest -m "exhaustive or not exhaustive" $(ARGS)

# Python:torch, each in an environment of its own. "oldest" in place of torch's version: the oldest release of each package
# that pyproject.toml allows. The other packages are those of constraints.txt, save setuptools, which torch limits.
VERSIONS ?= 3.11:oldest 3.12:2.11.0 3.13:2.12.0 3.14:2.14.1
test-versions: ## the tests on other versions of Python and torch: make test-versions VERSIONS="3.13:2.12.0 3.14:2.14.1"
	@failed=0; for each in $(VERSIONS); do \
		echo "== testing, Python and torch $$each"; \
		$(PYTHON) tests/laws/run_versions.py $$each $(WORKERS) $(ARGS) || failed=1; \
	done; exit $$failed

# A machine with a GPU may have its own Python and torch, and no registry: then nothing is installed.
GIVEN := $(filter environment command,$(firstword $(origin PYTHON)))
test-device: $(if $(GIVEN),,$(STAMP)) ## the tests on a GPU; PYTHON=python3 make test-device installs nothing and runs with that Python
	@echo "== testing on a device"
	@mkdir -p $(AS_TRIAX) && ln -sfn "$(CURDIR)" $(AS_TRIAX)/triax
	PYTHONPATH="$(AS_TRIAX):$$PYTHONPATH" $(if $(GIVEN),$(PYTHON),$(BIN)/python) -m pytest -m device tests/device $(ARGS)

fuzz: $(STAMP) ## before a release: random compositions, configurations, training files and faults, a quarter of SECONDS each
	@failed=0; for program in fuzz fuzz_config fuzz_train_files faults; do \
		echo "== tests/laws/$$program.py"; \
		$(BIN)/python tests/laws/$$program.py --seconds $$(($(SECONDS) / 4)) $(ARGS) || failed=1; \
	done; exit $$failed

docs: $(STAMP) ## the documentation site, in build/docs/html; a warning is an error
	@echo "== building the documentation"
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -j auto -d build/docs/cache docs build/docs/html
	@echo "open build/docs/html/index.html"

$(BROWSER): $(STAMP)
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e ".[look]"
	@touch $@

# Outside of the tests: the browser is 500 MB.
look: docs $(BROWSER) ## the site, a report and a plan in a headless browser: text, pictures, links; make look ARGS=plan.html
	$(BIN)/python tests/laws/look.py $(ARGS)

release-check: $(STAMP) ## before a release: linters, every test, an hour of fuzzing, docs, and the wheel in an empty environment
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory test-all
	$(MAKE) --no-print-directory fuzz SECONDS=3600
	$(MAKE) --no-print-directory docs
	$(BIN)/python tests/laws/release.py

# From the last commit: a build in the checkout would take up what an earlier one left there.
wheel: $(STAMP) ## the wheel of the last commit, in dist; pip install dist/triax-*.whl
	@rm -rf build/wheel && mkdir -p build/wheel dist
	git archive HEAD | tar -x -C build/wheel
	$(BIN)/python -m pip wheel --no-deps --quiet --disable-pip-version-check --wheel-dir dist build/wheel
	@rm -rf build/wheel; ls dist/triax-*.whl

lint: $(STAMP) ## ruff (rules and format) and mypy
	@echo "== linting"
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ruff format --check --config pyproject.toml docs/conf.py docs/inside/structure.py
	@mkdir -p $(AS_TRIAX) && ln -sfn "$(CURDIR)" $(AS_TRIAX)/triax
	cd $(AS_TRIAX) && MYPYPATH=".:triax/tests:triax/examples:triax/benchmarks" "$(CURDIR)/$(BIN)/mypy" \
		--config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" $(addprefix triax/,$(CHECKED))
