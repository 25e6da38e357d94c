# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs; a second run sets up nothing.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
export JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION := 20

.PHONY: help setup demo demo-rollout demo-serve demo-hardware test test-samples test-nightly test-localaws check audit load cloud-up docs site lock bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

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

demo-rollout: setup  ## roll a wrong, a slow, a crashing and a good version out: real servers on the emulator, a local AWS
	$(BIN)/python -m tests.localaws.rollout_demo

demo-serve: $(VENV)/.ready  ## build a tiny Llama, serve it, chat with it, read its metrics
	$(BIN)/python -m tests.serving.demo

demo-hardware: $(VENV)/.ready  ## a rehearsal of the way to devices: compile, prove, promote, serve, roll back; with stand-ins
	$(BIN)/python -m tests.neuronx.demo

# docs/testing.md explains the tiers. Idle workers take tests from busy ones.
WORKERS ?= $(shell nproc)
PYTEST := $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal

test: setup  ## run the commit tier of the tests, which CI runs
	$(PYTEST)

test-samples: setup  ## run the commit tier with all cases of its samples: half an hour, before a large change lands
	$(PYTEST) --all-samples

test-nightly: setup  ## run all tests, with the slow sweeps and more examples; PART=3/8 runs the third of eight parts
	$(PYTEST) -m "" --hypothesis-profile=nightly $(if $(PART),--part=$(PART))

LOCALAWS := tests/localaws tests/faults/test_faults.py tests/faults/test_proxy.py tests/faults/test_truth.py

test-localaws: setup  ## run the tests of the local AWS and of the S3 with faults, which other tests use
	$(PYTEST) -m "" $(LOCALAWS)

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

LOAD := .load

load: setup $(LOAD)/.ready  ## AIPerf, a public load generator, against nxpipe serve
	$(BIN)/python -m tests.serving.load $(LOAD)/bin/aiperf

$(LOAD)/.ready: requirements/load.txt
	$(PYTHON) -m venv $(LOAD)
	$(LOAD)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/load.txt
	touch $@

cloud-up: setup  ## a local AWS until Ctrl-C; prints what another shell needs to use it
	$(BIN)/python -m tests.localaws.server 5599

docs: $(VENV)/.ready  ## write the generated pages anew
	$(BIN)/python -m nxpipe.pipeline.cli.reference write

SITE := .site

site: $(SITE)/.ready  ## the documentation as a searchable site in _site; a broken link or anchor is an error
	$(SITE)/bin/sphinx-build --fail-on-warning --keep-going --quiet --builder html --doctree-dir $(SITE)/doctrees docs _site

$(SITE)/.ready: requirements/site.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/site.txt
	touch $@

lock: $(VENV)/.ready  ## resolve every dependency anew
	./requirements/lock $(BIN)

bench: $(VENV)/.ready  ## measure, beside bare Python
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/synth.py

clean:  ## remove what setup and the tools made
	rm -rf $(VENV) $(AUDIT) $(LOAD) $(SITE) _site node_modules cdk.out .nxpipe .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
