# make demo   see real weights packed, run and verified        make test   run the tests
# Both make a virtual environment of their own (.venv) if none is active, and install what is missing.
SHELL := /bin/bash
VENV := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
PYTHON ?= python3
TORCH_INDEX ?=
export PYTHON TORCH_INDEX

# Says which environment this checkout was installed into; gone when that has changed.
INSTALLED := .installed
$(shell [ -x "$(VENV)/bin/qcs4w" ] && [ "$$(cat $(INSTALLED) 2>/dev/null)" = "$(VENV)" ] || rm -f $(INSTALLED))

.PHONY: help demo test browser test-all lint types format build install adapter clean

help:
	@echo "make demo      pack, run and verify the weights of a real model"
	@echo "make test      the tests, on any adapter or Mesa's software driver"
	@echo "make browser   the tests of examples/browser in a headless Chromium"
	@echo "make test-all  all of them"
	@echo "make lint      ruff     make types   mypy     make format   ruff format"
	@echo "make build     wheel and sdist, their content checked"
	@echo "make clean     what the others made in this folder"
	@echo "TORCH_INDEX=URL takes torch from another index; PYTHON=python3.12 another Python"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml .ci/constraints.txt .ci/ensure-venv
	@.ci/ensure-venv "$(VENV)"
	@echo "$(VENV)" > $@

adapter: install
	@.ci/ensure-adapter "$(VENV)"

demo: adapter
	@PATH="$$(cd "$(VENV)" && pwd)/bin:$$PATH" examples/demo/demo

test: adapter
	QCS4W_REQUIRE_ADAPTER=1 "$(VENV)/bin/python" -m pytest

browser: adapter
	@.ci/ensure-chromium
	QCS4W_REQUIRE_ADAPTER=1 "$(VENV)/bin/python" -m pytest tests/browser

test-all: test browser

lint: install
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .

types: install
	"$(VENV)/bin/mypy"

format: install
	"$(VENV)/bin/ruff" format .
	"$(VENV)/bin/ruff" check --fix .

build: install
	rm -rf dist
	"$(VENV)/bin/python" -m build -q
	"$(VENV)/bin/python" .ci/check_dist.py dist

clean:
	rm -rf .venv .installed build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
