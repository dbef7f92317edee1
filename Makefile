# Every target sets up .venv by itself; once that is done the check costs a few hundredths of a second.
#   make test PYTEST_ARGS="-k ladder"     make demo ARGS="--help"     make setup PYTHON=python3.12
.DEFAULT_GOAL := help
.PHONY: help setup test test-slow test-hf lint gate demo bench ablate corpora clean

PY := .venv/bin/python
PYTEST_ARGS ?=
ARGS ?=

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## */  \1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup:  ## create or refresh .venv (PYTHON= names an interpreter)
	@bash scripts/setup_venv.sh

# Half of the time was LLVM's, optimising tiny programs. XLA's own passes stay, so the programs are the same HLO (compared);
# the slow tests and test-hf run them optimised, and so does `make test JAX_DISABLE_MOST_OPTIMIZATIONS=0`.
test: export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1
test: setup  ## the tests, but for the slow ones (PYTEST_ARGS= adds arguments)
	$(PY) -m pytest -q -n 2 -m "not slow" $(PYTEST_ARGS)

test-slow: setup  ## the slow ones: meshes, several processes, whole scripts, kernels interpreted inside decode
	$(PY) -m pytest -q -n 2 -m slow $(PYTEST_ARGS)

test-hf:  ## parity with transformers, in an environment of its own (torch, and the oldest jax that this supports)
	@bash scripts/setup_hf.sh
	.cache/hf/bin/python -m pytest -q tests/hf/parity.py $(PYTEST_ARGS)

lint: setup  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

gate: setup  ## compile every kernel and the decode steps for GPUs that need not be there (ARGS= adds arguments)
	@bash scripts/setup_gate.sh
	$(PY) scripts/compile_gate.py $(ARGS)

demo: setup  ## train nothing, show everything: the shipped model, plain against speculative (ARGS= adds arguments)
	$(PY) scripts/demo.py $(ARGS)

bench: setup  ## speculative against plain decode on this machine (ARGS= adds arguments)
	$(PY) scripts/bench_decode.py $(ARGS)

ablate: setup  ## the best ladder for this machine, measured (ARGS= adds arguments)
	$(PY) scripts/ablate_ladder.py --decode --out experiments/cpu-ladder $(ARGS)

corpora: setup  ## fetch and measure the training texts (ARGS= adds arguments)
	$(PY) scripts/fetch_corpora.py $(ARGS)

clean:  ## remove tool caches and build leftovers; .venv, .cache/, data/ and runs/ stay
	rm -rf .pytest_cache .ruff_cache .mypy_cache build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
