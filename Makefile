# Every target first sets up .venv: once, and again when the dependencies change.
PYTHON ?= python3
BIN := .venv/bin
.PHONY: demo test test-cpus test-kernels lint protos bench clean
.DEFAULT_GOAL := demo

demo: .venv/ready
	$(BIN)/specpool demo

test: .venv/ready
	$(BIN)/pytest -n 2 --dist worksteal

# Bitwise equality on every CPU that this one can imitate: code paths of torch and oneDNN, compiled passes, threads.
test-cpus: .venv/ready
	$(BIN)/pytest -m all_cpus tests/engine/probes/test_cpus.py

# Compiles every kernel of a GPU's pass, for three architectures; needs no GPU.
test-kernels: .venv/ready
	$(BIN)/pytest -m all_kernels tests/benchmarks/test_compiled_kernels.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint

protos: .venv/ready
	$(BIN)/python .ci/generate_stubs.py

bench: .venv/ready
	$(BIN)/python -m benchmarks.coordinator_cost

# torch is installed first and pinned: a range would bring gigabytes of CUDA libraries to machines without a GPU.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[worker,dev,bench]'
	touch $@

clean:
	rm -rf .venv
