# Every target first makes .venv (a no-op when nothing changed). Needs Python 3.11+ and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of torch keeps the set-up small; on a GPU host install the extras yourself (README, "On GPUs").
TORCH ?= torch==2.13.0

.PHONY: setup
setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]" "$(TORCH)"
	touch $@
