# Everything a newcomer needs: `make demo`, `make test`. Each target makes .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.sglite-setup
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
TOOLS := build/tools

.PHONY: help setup demo test kernels check format docs soak pins audit schemathesis sglang clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

setup: $(STAMP)  ## make .venv with pinned versions and the package in it

$(STAMP): pyproject.toml constraints.txt requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "sglite needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --require-hashes --requirement requirements.txt
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup  ## fetch the small model once and run the JSON extraction agent on it
	@$(BIN)/python examples/agents/json_extraction.py

test: setup  ## all tests
	$(BIN)/python -m pytest

kernels: setup  ## the whole matrix of Triton kernels: interpreted, and compiled for five cards
	SGLITE_KERNELS=all $(BIN)/python -m pytest tests/kernels/test_triton.py tests/kernels/test_triton_sampling.py tests/test_gpu_check.py

check: setup  ## format, lint, strict types, then all tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

format: setup  ## format and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## build the site into build/site; a broken link fails
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

soak: setup  ## hours of load, faults and random lives; docs/reliability.md has what came of it
	$(BIN)/python tests/faults/fuzz.py --steps 10000000 --minutes 60 --jobs 2
	$(BIN)/python tests/faults/soak.py requests --requests 1000000 --minutes 60
	$(BIN)/python tests/faults/soak.py requests --model smollm2-135m --minutes 60 --kill-every 600 --open 1000
	$(BIN)/python tests/faults/soak.py overload
	$(BIN)/python tests/faults/soak.py overload --model smollm2-135m --tokens 16
	$(BIN)/python tests/faults/soak.py aborts --model smollm2-135m --tokens 500
	$(BIN)/python tests/faults/soak.py drains --count 100

schemathesis: setup  ## hundreds of odd requests per route, made from our OpenAPI document
	$(BIN)/python tests/server/fuzz_openapi.py

sglang: setup  ## the published sglang frontend against our server; SGLITE_SGLANG_PYTHON names its interpreter
	$(BIN)/python -m pytest tests/server/test_sglang_frontend.py

$(TOOLS)/bin/uv:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check uv pip-audit

pins: $(TOOLS)/bin/uv  ## write requirements.txt: the pinned versions with the hashes of their files
	$(TOOLS)/bin/python tools/pins.py

audit: $(TOOLS)/bin/uv  ## look the pinned versions up in a database of known vulnerabilities
	$(TOOLS)/bin/python tools/audit.py

clean:  ## remove the environment and caches of tools
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
