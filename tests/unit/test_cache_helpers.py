"""The contract's helpers on mlx-lm's caches: new layers, exact ones, and never a token of another request."""

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache
from mlx_lm.models.cache import RotatingKVCache as Window

from tests.models import bytes_of, same_state, tiny_llama, used_rows
from tiered_cache import memory_cache as named
from tiered_cache.layer_kinds import arrays_of
from tiered_cache.layer_tree import flat


def rows(n: int, d: int = 64, seed: int = 1) -> mx.array:
    return mx.random.normal((1, 2, n, d), key=mx.random.key(seed)).astype(mx.bfloat16)


def fed(c: Any, n: int, seed: int = 1, dv: int = 64) -> Any:
    """`n` tokens one by one, so that a longer one begins as a shorter one does."""
    for i in range(n):
        c.update_and_fetch(rows(1, 64, seed + i), rows(1, dv, 99 + seed + i))
    return c


def visible(layer: Any) -> Any:
    return [(type(c), c.offset, [bytes_of(a) for a in arrays_of(used_rows(c))]) for _, c in flat([layer])]


TRIMMABLE = {"dense": KVCache, "quantized": QuantizedKVCache, "quantized 32/4": lambda: QuantizedKVCache(32, 4),
    "growing": ConcatenateKVCache, "window": lambda: Window(64), "keeps": lambda: Window(31, 4), "list": None}


def made(kind: str, n: int) -> Any:
    return CacheList(fed(KVCache(), n), CacheList(fed(Window(64), n))) if kind == "list" else fed(TRIMMABLE[kind](), n)


@pytest.mark.parametrize("count", [0, 1, 13, 30])
@pytest.mark.parametrize("kind", TRIMMABLE)
def test_a_trimmed_layer_is_the_shorter_one_and_goes_on_as_it_does(kind, count):
    source, before = made(kind, 30), visible(made(kind, 30))
    assert named._is_cache_layer_trimmable(source)
    one, other = *named._trim_cache_offset([source], count), *named._trim_to_offset([source], 30 - count)
    expected = made(kind, 30 - count) if count < 30 else None
    for new in (one, other):
        for _, leaf in flat([new]):
            assert {a.shape[2] for a in arrays_of([leaf.keys, leaf.values])} == {30 - count} == {leaf.offset}
        assert not expected or visible(new) == visible(expected)
    assert visible(source) == before
    for (_, c), (_, e) in zip(flat([one]), flat([expected or one]), strict=True):
        assert c is e or visible(fed(c, 40, 500)) == visible(fed(e, 40, 500))


CANNOT = {
    "a ring that has wrapped": lambda: fed(Window(8), 21), "a ring that is full": lambda: fed(Window(8), 8),
    "a window prefilled past its size": lambda: fed_at_once(Window(8), 30), "a recurrent state": lambda: ArraysCache(2),
    "a chunk whose front is gone": lambda: fed_at_once(ChunkedKVCache(8), 20),
    "one of them in a list": lambda: CacheList(fed(KVCache(), 8), ArraysCache(1)),
    "one of them first in a list": lambda: CacheList(ArraysCache(1), fed(KVCache(), 8)),
    "a class that is not known": lambda: fed(type("Unknown", (KVCache,), {})(), 8)}


def fed_at_once(c: Any, n: int) -> Any:
    c.update_and_fetch(rows(n), rows(n))
    if isinstance(c, ChunkedKVCache):
        c.maybe_trim_front()
    return c


@pytest.mark.parametrize("what", CANNOT)
def test_what_cannot_be_taken_back_is_refused(what):
    layer = CANNOT[what]()
    assert not named._is_cache_layer_trimmable(layer)
    for trim, n in ((named._trim_cache_offset, 3), (named._trim_to_offset, 5)):
        with pytest.raises(ValueError, match="cannot be trimmed"):
            trim([layer], n)


def test_more_than_there_is_and_less_than_nothing_is_refused():
    for n in (-3, 11):
        with pytest.raises(ValueError, match="to trim from a layer of 10"):
            named._trim_cache_offset([fed(KVCache(), 10)], n)


def test_a_layer_that_the_model_does_not_use_is_no_hindrance():
    assert [c.offset for c in named._trim_cache_offset([fed(KVCache(), 10), KVCache()], 3)] == [7, 0]


def test_a_trimmed_layer_keeps_nothing_of_the_larger_one_alive():
    before = gc.collect() * 0 + mx.get_active_memory()
    new = named._trim_cache_offset([fed_at_once(made(), 4096) for made in (KVCache, ConcatenateKVCache)], 4095)
    mx.eval([[c.keys, c.values] for c in new])
    assert gc.collect() * 0 + mx.get_active_memory() - before < 20_000


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 32), (3, 64)])
def test_quantizing_and_back_gives_what_mlx_gives_and_leaves_the_source(bits, group):
    source = [fed(KVCache(), 9), CacheList(fed(KVCache(), 9), fed(Window(8), 9))]
    before = visible(source[0])
    packed = named._quantize_cache(source, bits, group)
    assert [type(c) for c in packed[1].caches] == [QuantizedKVCache, Window]
    assert (packed[0].bits, packed[0].group_size, packed[0].offset) == (bits, group, 9)
    dense, listed = named._dequantize_cache(packed)
    assert bytes_of(dense.keys[:, :, :1]) == bytes_of(mx.dequantize(*mx.quantize(rows(1), group, bits), group, bits))
    assert same_state([dense], [listed.caches[0]], 9)
    assert (type(dense), listed.caches[1], visible(source[0])) == (KVCache, source[1].caches[1], before)


def test_what_cannot_be_quantized_stays_as_it_is():
    odd = [fed(KVCache(), 9, dv=48), KVCache(), ArraysCache(1), fed(QuantizedKVCache(), 9)]
    assert all(a is b for a, b in zip(named._quantize_cache(odd), odd, strict=True))
    assert all(a is b for a, b in zip(named._dequantize_cache(odd[:3]), odd[:3], strict=True))
    assert type(named._dequantize_cache(odd)[3]) is KVCache


def test_a_fingerprint_is_the_same_for_the_same_model_alone():
    first, same, other = (named._compute_model_fingerprint(tiny_llama(seed)) for seed in (0, 0, 1))
    assert first == same != other
