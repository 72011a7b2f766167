"""Keys and values that are stored quantized: what comes back is MLX's own quantization of them, once."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from tests.blocks import on_disk
from tests.models import bytes_of, prefill, random_tokens, same_state, tiny_llama, used_rows
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache
from tiered_cache.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig
from tiered_cache.metrics import MB

A, B, X = (random_tokens(n, seed) for n, seed in ((600, 1), (600, 2), (40, 3)))
PACKED = {(8, 64): 64 + 4, (4, 32): 32 + 8, (3, 64): 24 + 4}  # bytes of 64 values, with scales and biases of 16 bits
BITS = pytest.mark.parametrize(("bits", "group"), PACKED)


def make(bits: int = 8, group: int = 64, **config: Any) -> MemoryAwarePrefixCache:
    settings = {"max_memory_mb": 64, "kv_quantize": True, "kv_bits": bits, "kv_group_size": group, **config}
    return MemoryAwarePrefixCache(ShapeOnlyModel(), MemoryCacheConfig(**settings))


def dense(tokens: Any, dim: int = 64, dtype: Any = mx.bfloat16) -> list[Any]:
    return state_of(tokens, dim=dim, dtype=dtype)


def lossy(state: list[Any], bits: int = 8, group: int = 64) -> list[Any]:
    """What a quantized state is worth."""
    for new, old in zip(made := [KVCache() for _ in state], state, strict=True):
        new.update_and_fetch(*(mx.dequantize(*mx.quantize(a, group, bits), group, bits) for a in used_rows(old)))
    return made


@BITS
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("request_", [A, A[:400], A[:550] + X, A + X], ids=len)
def test_what_is_fetched_is_the_quantized_state_to_the_bit(request_, dtype, bits, group):
    cache, source = make(bits, group), dense(A, dtype=dtype)
    assert cache.store(A, source)
    state, remaining = cache.fetch(request_)
    covered = len(request_) - len(remaining)
    assert covered == {400: 400, 590: 550}.get(len(request_), 600)
    assert same_state(state, lossy(dense(A[:covered], dtype=dtype), bits, group))
    assert {(type(c), c.keys.dtype) for c in state} == {(KVCache, dtype)}
    assert not any(bytes_of(state[0].keys[:, :, covered:])), "there is more to be reached"
    assert same_state(source, dense(A, dtype=dtype)), "the source has changed"


@BITS
def test_bytes_in_ram_are_those_of_the_packed_bits(bits, group):
    assert (cache := make(bits, group)).store(A, dense(A))
    assert cache.memory_usage_mb * MB == 600 * 2 * 2 * 2 * PACKED[bits, group]


@BITS
def test_a_fetched_state_that_is_stored_again_loses_nothing_more(bits, group):
    cache = make(bits, group)
    assert cache.store(A, dense(A))
    state, _ = cache.fetch(A)
    for _ in range(3):
        assert cache.store(A, state)
        assert same_state(cache.fetch(A)[0], state)


@BITS
def test_a_fetched_state_that_is_continued_loses_nothing_more(bits, group):
    cache, longer = make(bits, group), A + X
    assert cache.store(A, dense(A))
    state, _ = cache.fetch(A)
    for new, whole in zip(state, dense(longer), strict=True):
        new.update_and_fetch(whole.keys[:, :, 600:640], whole.values[:, :, 600:640])
    assert cache.store(longer, state)
    assert same_state(cache.fetch(longer)[0], lossy(dense(longer), bits, group)), "rows were quantized twice"


def test_short_sequences_stay_dense_and_are_found_and_never_joined_with_quantized_blocks():
    cache, short = make(kv_min_quantize_tokens=300, min_prefix_tokens=16), A[:280]
    assert (cache.store(short, dense(short)), cache.store(A, dense(A))) == (True, True)
    assert cache.memory_usage_mb * MB == 280 * 2 * 2 * 2 * 128 + 600 * 2 * 2 * 2 * PACKED[8, 64]
    for n in (280, 256, 20, 281, 600):
        state, remaining = cache.fetch(A[:n])
        assert (remaining, same_state(state, dense(A[:n]) if n <= 280 else lossy(dense(A[:n])))) == ([], True), n
    assert (len(cache), short in cache, cache.remove(short), short in cache, A in cache) == (2, True, True, False, True)
    assert same_state(cache.fetch(short)[0], lossy(dense(short)))
    assert (cache.remove(A), cache.memory_usage_mb) == (True, 0.0)


def test_layers_whose_head_size_does_not_divide_stay_dense():
    cache, other, mixed = make(), make(), [dense(A)[0], dense(A, dim=48)[0], KVCache()]
    assert cache.store(A, mixed)
    *used, unused = cache.fetch(A)[0]
    assert (same_state(used, [*lossy(mixed[:1]), mixed[1]]), unused.keys) == (True, None)
    assert cache.memory_usage_mb * MB == 600 * 2 * 2 * (PACKED[8, 64] + 96)
    assert other.store(A, dense(A, dim=48))
    assert same_state(other.fetch(A)[0], dense(A, dim=48))


@pytest.mark.parametrize("quantize", [True, False])
def test_a_state_that_is_quantized_already_passes_through_unchanged(quantize):
    cache, own = make(kv_quantize=quantize), [QuantizedKVCache(32, 4), ArraysCache(1)]
    own[0].update_and_fetch(*used_rows(dense(A)[0]))
    own[1][0] = mx.ones((1, 3, 8), mx.bfloat16)
    assert cache.store(A, own)
    (state, arrays), _ = cache.fetch(A)
    assert (type(state), state.offset, state.group_size, state.bits) == (QuantizedKVCache, 600, 32, 4)
    both = zip((*state.keys, *state.values, arrays[0]), (*own[0].keys, *own[0].values, own[1][0]), strict=True)
    assert all(bytes_of(ours[:, :, :600]) == bytes_of(theirs[:, :, :600]) for ours, theirs in both)


def test_the_ssd_keeps_the_packed_bits_over_a_restart(make_config, tmp_path):
    model = tiny_llama(heads=2, dim=128)
    state, ram = prefill(model, A)[0], {"kv_quantize": True}
    config = make_config(ram=ram, ssd={"compression": "none"})
    with TieredCache.open(config, model=model) as cache:
        assert (cache.store(A, state), cache.flush(20)) == (True, True)
    packed = 600 * 2 * 2 * 2 * PACKED[8, 64]
    with TieredCache.open(config, model=model) as cache:
        assert packed <= on_disk(tmp_path / "cache" / "blobs") <= packed + 20_000
        for restored, remaining in (cache.promote(A).result(20), cache.fetch(A + X)):
            assert remaining in (A[-1:], X)
            assert same_state(restored, lossy(state), restored[0].offset)
        assert cache.stats()["ram"]["resident"] == packed
    with TieredCache.open(make_config(), model=model) as cache:  # no longer quantizing: not met, and not harmed
        assert (cache.promote(A), cache.fetch(A)[0], cache.store(A, state)) == (None, None, True)
        assert same_state(cache.fetch(A)[0], state, 599)
    with TieredCache.open(make_config(ram=ram | {"kv_bits": 4}), model=model) as cache:  # dense ones are still good
        assert same_state(cache.promote(A).result(20)[0], state, 599)
