# Every target does its own set-up: a Python >= 3.11 is all that must be there.
#   make demo      compile a mask, say what it means, run it forward and backward, compare with dense fp64
#   make test      linters, types, import layers, the whole test-suite (what CI runs)
#   make kernels   compile every covering kernel variant with NVRTC and read its SASS
#   make fuzz      long randomised comparisons with the oracle
#   make dist      many-process runs
#   make browser   use the pages in headless Chromium, which must be installed (apt-get install chromium)
#   make bench     the compiler's speed table
#   make format    let ruff format and mend the sources
#   make clean     remove what the targets above made, but for the virtual environment

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
WORKERS ?= auto
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# the first Python on the path that is new enough
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11 python,\
  $(shell $(p) -c 'import sys; print(sys.executable if sys.version_info >= (3, 11) else "")' 2>/dev/null)))

.PHONY: demo test lint kernels fuzz dist browser bench format clean
.DEFAULT_GOAL := test

demo: $(VENV)/installed-cuda
	@$(BIN)/python examples/demo.py

test: lint
	$(PYTEST) -n $(WORKERS) --maxprocesses 8

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

kernels dist: $(VENV)/installed-dev
	$(PYTEST) -n $(WORKERS) --maxprocesses 8 -m $@

fuzz: $(VENV)/installed-dev
	$(PYTEST) -n $(WORKERS) --maxprocesses 8 -m fuzz --hypothesis-profile fuzz

browser: $(VENV)/installed-dev
	@$(PIP) --editable '.[browser]'
	$(PYTEST) -m browser

bench: $(VENV)/installed-dev
	@$(BIN)/python -m benchmarks.compiler

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# `dev` contains `cuda`, so it marks both; each is installed again only when pyproject.toml has changed.
$(VENV)/installed-cuda: pyproject.toml | $(BIN)/python
	@echo "installing maskc[cuda] into $(VENV) (the first time takes a minute or more) ..."
	@$(PIP) --editable '.[cuda]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing maskc[dev] into $(VENV) (the first time takes a minute or more) ..."
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/installed-cuda $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "maskc needs Python >= 3.11; none is on the path (name one: make PYTHON=/path/to/python3)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
