"""What is stored shares nothing with the arrays it came from, and no bit of it is converted."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from tests.models import bytes_of
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tests.zoo import build
from tiered_cache import TieredCache
from tiered_cache.layer_kinds import arrays_of

SMALL = {"cache": {"block_tokens": 16}, "ram": {"max_memory": "64MB", "min_prefix_tokens": 4}}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(1, 100, 45)]
N = 40


@pytest.fixture(autouse=True)
def interpreted():
    """Without mx.compile, which calls a C++ compiler for each model on the CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def run(model: Any, tokens: list[int], state: list[Any]) -> bytes:
    return bytes_of(model(mx.array([tokens]), cache=state))


def arrays(state: Any) -> list[mx.array]:
    """Every array of a cache, whatever its classes call them."""
    found: list[mx.array] = []
    for layer in state:
        for value in vars(layer).values():
            found += arrays_of(value) if not hasattr(layer, "caches") else arrays(layer.caches)
    return found


def bits(state: list[Any]) -> list[bytes]:
    return [bytes_of(a) for a in arrays(state)]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba", "llama4", "deepseek_v41"])
def test_writing_into_a_state_changes_nothing_that_is_stored(make_config, name):
    try:
        model = build(name)
    except ImportError:
        pytest.skip(f"this mlx-lm has no {name}")
    with TieredCache.open(make_config(**SMALL), model=model) as cache:
        state = make_prompt_cache(model)
        run(model, TOKENS[:N], state)
        assert cache.store(TOKENS[:N], state), cache.stats()["losses"]
        first = cache.fetch(TOKENS[:N], leave=0)[0]
        before = bits(first)
        logits = run(model, TOKENS[N:], first)  # continue what was fetched
        for array in arrays(cache.fetch(TOKENS[:N], leave=0)[0]):  # write over what was fetched
            array[...] = mx.zeros_like(array)
            mx.eval(array)
        assert run(model, TOKENS[N:], state) == logits  # continue what was stored
        for array in arrays(state):
            array[...] = mx.ones_like(array)
            mx.eval(array)
        assert bits(cache.fetch(TOKENS[:N], leave=0)[0]) == before
        assert run(model, TOKENS[N:], cache.fetch(TOKENS[:N], leave=0)[0]) == logits
    with TieredCache.open(make_config(**SMALL), model=model) as cache:
        restored = cache.promote(TOKENS[:N], leave=0).result(10)[0]
        assert bits(restored) == before
        assert run(model, TOKENS[N:], restored) == logits


def test_nothing_of_a_batch_stays_alive_with_what_was_stored_of_it(make_config):
    sequences = [[i] * 300 for i in range(1, 9)]
    with TieredCache.open(make_config(**SMALL), model=ShapeOnlyModel()) as cache:
        expected = [bits(cache_of(state_of(t))) for t in sequences]
        gc.collect()
        before = mx.get_active_memory()
        states = [state_of(t) for t in sequences]
        batch = [BatchKVCache.merge([s[i] for s in states]) for i in range(2)]
        for i, tokens in enumerate(sequences):
            assert cache.store(tokens, [layer.extract(i) for layer in batch])
        del batch, states
        gc.collect()
        assert mx.get_active_memory() - before < bytes_per_token() * 8
        for tokens, bit in zip(sequences, expected, strict=True):
            assert bits(cache_of(cache.fetch(tokens, leave=0)[0])) == bit


def cache_of(state: list[KVCache]) -> list[KVCache]:
    """The rows in use alone: what lies behind them is nobody's."""
    for layer in state:
        layer.keys, layer.values = layer.keys[..., : layer.offset, :], layer.values[..., : layer.offset, :]
    return state


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_values_that_a_conversion_would_destroy_survive_both_tiers(make_config, dtype):
    wide = dtype == mx.float32
    special = {mx.bfloat16: [0x7FC1, 0x7F81, 0xFFBF, 0x7F80, 0xFF80, 0x8000, 1, 0x47C3, 0x3089],  # 1e5, 1e-9 last
               mx.float16: [0x7E01, 0x7C01, 0xFDFF, 0x7C00, 0xFC00, 0x8000, 1, 0x03FF, 0x7BFF],
               mx.float32: [0x7FC00001, 0x7F800001, 0xFFBFFFFF, 0x7F800000, 0x80000000, 1, 0x3F800001]}  # fmt: skip
    raw = np.resize(np.array(special[dtype], np.uint32 if wide else np.uint16), (1, 2, 50, 16))
    state = [KVCache(), KVCache()]
    for layer in state:
        layer.keys = layer.values = mx.array(raw).view(dtype)
        layer.offset = 50
    tokens = list(range(50))
    with TieredCache.open(make_config(**SMALL), model=ShapeOnlyModel()) as cache:
        assert cache.store(tokens, state)
        assert bits(cache_of(cache.fetch(tokens, leave=0)[0])) == [raw.tobytes()] * 4
    with TieredCache.open(make_config(**SMALL), model=ShapeOnlyModel()) as cache:
        assert bits(cache_of(cache.promote(tokens, leave=0).result(10)[0])) == [raw.tobytes()] * 4


def test_extreme_token_ids_are_stored_and_never_taken_for_each_other(make_config):
    sequences = [[token] * 20 for token in (0, 2**31, 2**32, -(2**59), -1, 2**63 - 1, -(2**63), 2**31 - 1)]
    with TieredCache.open(make_config(**SMALL), model=ShapeOnlyModel()) as cache:
        for i, tokens in enumerate(sequences):
            assert cache.fetch(tokens) == (None, tokens), "matches another's ids"
            assert cache.store(tokens, state_of(tokens))
            assert [cache.ram.covered(t) for t in sequences] == [20] * (i + 1) + [0] * (len(sequences) - i - 1)
    with TieredCache.open(make_config(**SMALL), model=ShapeOnlyModel()) as cache:
        for tokens in sequences:
            state, remaining = cache.promote(tokens, leave=0).result(10)
            assert remaining == []
            assert bits(cache_of(state)) == bits(cache_of(state_of(tokens)))
