# kvplan's habits. `make` lists them. Everything runs in .venv, set up on first use.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first Python that is 3.11 or later; say PYTHON=... to choose another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
DEMO_TRACE := traces/demo.jsonl
ARGS ?=

.PHONY: help demo test lint bench-sim bench-start fidelity gpu-check kernels-check clean

help:  ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

demo: $(READY)  ## Set up, then an estimate, a simulation and a small bench; Parquet in out/
	$(BIN)/kvplan estimate llama-3.3-70b-fp8 --gpu h100 -tp 2 --max-model-len 32768 -o out/estimate.parquet
	$(BIN)/kvplan simulate $(DEMO_TRACE) --model qwen3-14b --gpu h100 --block-size 16 -o out/simulate
	$(BIN)/kvplan bench --block-size 16 --block-size 64 --preset quick -o out/bench

test: $(READY)  ## Set up and run all tests (ARGS="-k name" for some)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)  ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-sim: $(READY)  ## Speed of the scheduler and simulator, as ratios
	$(BIN)/python tests/sim_speed.py $(ARGS)

bench-start: $(READY)  ## Time of `kvplan --help` and `estimate` beside a Typer program of three commands
	$(BIN)/python tests/start_time.py

fidelity: $(READY)  ## Simulated beside recorded serving (needs ../shared/evidence)
	mkdir -p out
	$(BIN)/python -m kvplan.bench.fidelity ../shared/evidence -o out/fidelity.md $(ARGS)

gpu-check:  ## Check and measure on this machine's GPU with its own Python (PYTHON=...); needs no network
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(PYTHON) -m kvplan.bench.gpu_check

kernels-check: $(READY)  ## Compile every kernel configuration, sm_80 to sm_100 and gfx942, without a GPU
	$(BIN)/python -m pytest tests/kernels --full-compile $(ARGS)

clean:  ## Remove .venv, out/ and caches
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .triton_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# CUDA builds of torch name the one triton they work with; where that is not the tested one, theirs is taken.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: kvplan needs Python 3.11 or later; say make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "setting up $(VENV) (once; a few minutes) ..." >&2
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint constraints.txt --editable '.[bench,plot,dev]' || { \
		echo "trying again with the triton that torch asks for ..." >&2; \
		grep -v '^triton' constraints.txt > $(VENV)/constraints.txt; \
		$(INSTALL) --constraint $(VENV)/constraints.txt --editable '.[bench,plot,dev]'; }
	touch $@
