# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs; a second run sets up nothing.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
export JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION := 20

.PHONY: help setup demo demo-rollout test test-all test-builds test-commands test-compiler test-fleets test-machine test-others test-security check audit cloud-up docs lock bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/.ready node_modules/.ready  ## install all that development needs, into .venv and node_modules

# Everything is pinned by hash but torch: its builds for CPU and CUDA share one version, so it is pinned by that.
$(VENV)/.ready: requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q nxpipe
	touch $@

node_modules/.ready: package.json package-lock.json
	npm ci --no-audit --no-fund --loglevel=error
	touch $@

demo: $(VENV)/.ready  ## build, verify and publish two models into a local store, and show them
	$(BIN)/nxpipe build
	$(BIN)/nxpipe store ls
	$(BIN)/nxpipe store show bert-base-uncased
	$(BIN)/nxpipe build

demo-rollout: setup  ## roll a good and a bad version out on a local AWS, from an empty account to their ends
	$(BIN)/python -m tests.localaws.rollout_demo

# The tests in seven parts, side by side; the account of each is printed whole when it ends. They often wait for servers
# and commands, so that it takes more than two of them to keep two cores busy. The longest begin first.
BUILDS := tests/build_report tests/building tests/executors tests/github tests/release $(wildcard tests/pipeline/test_build*.py)
COMMANDS := $(filter-out $(BUILDS),$(wildcard tests/pipeline/test_*.py))
COMPILER := tests/emulator tests/conformance
MACHINE := tests/core tests/executable tests/isa tests/lower tests/models_isa tests/mutation tests/runtime
FLEETS := tests/agent tests/localaws tests/stacks
SECURITY := tests/security
PARTS := test-security test-commands test-compiler test-others test-fleets test-machine test-builds
SIDE_BY_SIDE = $(MAKE) --no-print-directory --jobs 7 --keep-going --output-sync=target $(PARTS)

test: setup  ## run what CI runs
	+$(SIDE_BY_SIDE)

test-all: setup  ## the same with the slow sweeps, and more examples
	+$(SIDE_BY_SIDE) SWEEPS='-m "slow or not slow" --hypothesis-profile=thorough'

test-builds:
	$(BIN)/pytest $(SWEEPS) $(BUILDS)

test-commands:
	$(BIN)/pytest $(SWEEPS) $(COMMANDS)

test-compiler:
	$(BIN)/pytest $(SWEEPS) $(COMPILER)

test-machine:
	$(BIN)/pytest $(SWEEPS) $(MACHINE)

test-fleets:
	$(BIN)/pytest $(SWEEPS) $(FLEETS)

test-security:
	$(BIN)/pytest $(SWEEPS) $(SECURITY)

test-others:
	$(BIN)/pytest $(SWEEPS) $(patsubst %,--ignore=%,tests/pipeline $(BUILDS) $(COMPILER) $(FLEETS) $(MACHINE) $(SECURITY))

WORKFLOWS := $(wildcard .github/workflows/*.yml) pipeline/templates/nxpipe-release.yml
ACTIONS := $(wildcard .github/actions/*/action.yml) pipeline/templates/nxpipe/action.yml

check: setup  ## lint, types, import rules, generated pages, workflows; under 30 s
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m nxpipe.pipeline.cli.reference check
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows $(WORKFLOWS)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-actions $(ACTIONS)
	$(BIN)/zizmor --offline --no-progress --quiet --strict-collection --persona auditor $(WORKFLOWS) $(ACTIONS)

AUDIT := .audit

audit: setup $(AUDIT)/.ready  ## checkov over all stacks, in an environment of its own
	$(BIN)/python -m tests.stacks.audit $(AUDIT)/bin/checkov

$(AUDIT)/.ready: requirements/audit.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/audit.txt
	touch $@

cloud-up: setup  ## a local AWS until Ctrl-C; prints what another shell needs to use it
	$(BIN)/python -m tests.localaws.server 5599

docs: $(VENV)/.ready  ## write the generated pages anew
	$(BIN)/python -m nxpipe.pipeline.cli.reference write

lock: $(VENV)/.ready  ## resolve every dependency anew
	./requirements/lock $(BIN)

bench: $(VENV)/.ready  ## measure, beside bare Python
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/synth.py

clean:  ## remove what setup and the tools made
	rm -rf $(VENV) $(AUDIT) node_modules cdk.out .nxpipe .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
