# make demo   see real weights packed, run and verified        make test   run the tests
# Both make a virtual environment of their own (.venv) if none is active, and install what is missing.
SHELL := /bin/bash
VENV := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
PYTHON ?= python3
TORCH_INDEX ?=
export PYTHON TORCH_INDEX

KERNEL_TESTS := $(addprefix tests/test_,linear.py dispatcher.py conformance.py engines.py)

# Says which environment this checkout was installed into; gone when that has changed.
INSTALLED := .installed
$(shell [ -x "$(VENV)/bin/qcs4w" ] && [ "$$(cat $(INSTALLED) 2>/dev/null)" = "$(VENV)" ] || rm -f $(INSTALLED))

.PHONY: help demo test test-kernels test-all witness browser conformance mutants faults lint types format build install adapter chromium clean bench-find bench-kernels bench-pack bench-verify

help:
	@echo "make demo      pack, run and verify the weights of a real model"
	@echo "make test      the tests, on any adapter or Mesa's software driver"
	@echo "make test-kernels  what runs on a GPU; QCS4W_LIMITS=default: on a device with WebGPU's default limits only"
	@echo "make witness   compare with the real ExecuTorch and other packages (installs 800 MB of them)"
	@echo "make browser   the tests of examples/browser in a headless Chromium"
	@echo "make conformance   every kernel on wgpu, Dawn and Chromium, on two software drivers; CHECK=1 changes no file"
	@echo "make mutants   sweep every seeded fault of the kernels and the packer, and print the score (minutes)"
	@echo "make faults    name every usual fault, and every pair of them, on 100 random trials each"
	@echo "make bench-kernels  the kernels' speed on this adapter, beside its ceilings; ENGINE=dawn, SHAPES=1x4096x4096"
	@echo "make bench-verify  how long a batch of verify takes beside a bare loop; TENSORS=2000"
	@echo "make test-all  all of these"
	@echo "make lint      ruff     make types   mypy     make format   ruff format"
	@echo "make build     wheel and sdist, their content checked"
	@echo "make bench-pack  pack against cp (in /dev/shm); CHECKPOINT=FOLDER: 20 GB of shards in that folder"
	@echo "make bench-find  the search of a 4 GiB file, against cat (in /dev/shm)"
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

chromium:
	@.ci/ensure-chromium

test: adapter
	QCS4W_REQUIRE_ADAPTER=1 "$(VENV)/bin/python" -m pytest

witness: adapter
	@.ci/ensure-witness "$(VENV)"
	QCS4W_REQUIRE_ADAPTER=1 "$(VENV)/bin/python" -m pytest tests/witness

mutants: adapter
	PYTHONPATH=cli:gpu:packer:tests "$(VENV)/bin/python" tests/mutants.py

faults: install
	QCS4W_TRIALS=100 "$(VENV)/bin/python" -m pytest tests/test_causes.py

test-all: test witness browser conformance mutants faults

test-kernels: adapter
	QCS4W_REQUIRE_ADAPTER=1 "$(VENV)/bin/python" -m pytest $(KERNEL_TESTS)

browser: adapter chromium
	QCS4W_REQUIRE_ADAPTER=1 "$(VENV)/bin/python" -m pytest tests/browser

conformance: adapter chromium
	"$(VENV)/bin/python" tests/matrix.py $(if $(CHECK),--check)

bench-kernels: adapter
	@"$(VENV)/bin/python" tests/bench_kernels.py $(if $(ENGINE),--engine $(ENGINE)) $(if $(SHAPES),--shapes $(SHAPES))

bench-verify: adapter
	@"$(VENV)/bin/python" tests/bench_verify.py $(if $(TENSORS),--tensors $(TENSORS))

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

bench-find: install
	"$(VENV)/bin/python" .ci/bench_find.py

bench-pack: install
	"$(VENV)/bin/python" .ci/bench_pack.py $(if $(CHECKPOINT),--checkpoint "$(CHECKPOINT)")

clean:
	rm -rf .venv .venv-witness .installed build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
