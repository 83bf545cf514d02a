# Every target works from a fresh checkout: it makes .venv and installs what it needs, again only when that changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test
# Two workers: a quiet core is a wasted one.
PYTEST_ARGS ?= -n 2 --dist worksteal
# Outside the checkout: it is large, and it outlives `make clean`.
VLLM_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lull/vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-vllm check types mypy pyright format clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

demo: $(STAMP)  ## Run the main job on this machine, without a GPU
	$(BIN)/lull demo

test: $(TEST_STAMP)  ## Run all checks and all tests
	./.ci/system-packages gcc postgres haproxy
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(TEST_STAMP)  ## Run the tests that take minutes
	./.ci/system-packages gcc postgres haproxy
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m long

test-vllm: $(TEST_STAMP) $(VLLM_STAMP)  ## Run a real vLLM on the CPU through whole loans (first: 4 GB in 6 minutes)
	LULL_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -m vllm tests/vllm

check: $(TEST_STAMP)  ## Lint, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types
	$(BIN)/lint-imports

types: $(TEST_STAMP)  ## mypy and pyright: strict, tests as `basic` does
	$(MAKE) --no-print-directory --jobs 2 --output-sync mypy pyright

mypy: $(TEST_STAMP)
	$(BIN)/mypy

pyright: $(TEST_STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(TEST_STAMP)  ## Format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the virtual environment and what tools have left
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	./.ci/system-packages venv
	$(PYTHON) -m venv $(VENV)

# torch first and with pip: only pip knows where CPU builds lie.
$(STAMP): pyproject.toml requirements/torch.txt vmm/_torch_allocator.c | $(BIN)/python
	$(PIP) -r requirements/torch.txt
	$(PIP) -e '.[all]'
	touch $@

# The package installs without a compiler, less its C part; the tests want it whole.
$(TEST_STAMP): requirements/test.txt $(STAMP)
	$(PIP) -r requirements/test.txt
	./.ci/system-packages gcc
	ls vmm/_torch_allocator*.so >/dev/null 2>&1 || $(PIP) --no-deps -e .
	touch $@

# lull.vmm goes in without what it needs elsewhere: it needs nothing there.
$(VLLM_STAMP): requirements/vllm.txt requirements/torch.txt pyproject.toml
	./.ci/system-packages venv gcc
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) -r requirements/torch.txt
	$(VLLM_PIP) --no-deps -r requirements/vllm.txt
	$(VLLM_PIP) --no-deps -e .
	touch $@
