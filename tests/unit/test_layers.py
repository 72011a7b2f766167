"""mlx-lm's cache layers to bytes and back, bit for bit; what is refused, and why; what a cache weighs."""

import gc
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from tests.models import bytes_of, same_state, used_rows
from tiered_cache import layer_tree, layers
from tiered_cache.layers import Piece, Refused
from tiered_cache.pricing import price

SHAPE = (1, 2, 300, 8)
BITS: dict[Any, Any] = {mx.bfloat16: np.uint16, mx.float16: np.uint16, mx.float32: np.uint32}
DTYPES = pytest.mark.parametrize("dtype", list(BITS), ids=["bfloat16", "float16", "float32"])


def array(shape: Any, dtype: Any = mx.bfloat16, seed: int = 0) -> mx.array:
    """Any bit pattern there is: infinities, denormals and NaNs with their payloads among them."""
    bits = np.random.default_rng(seed).integers(0, np.iinfo(BITS[dtype]).max, shape, BITS[dtype], endpoint=True)
    return mx.array(bits).view(dtype)


def layer(n: int, heads=2, dk=8, dv=8, dtype: Any = mx.bfloat16, seed=0, cls: Any = KVCache, batch=1) -> Any:
    made = cls()
    made.update_and_fetch(array((batch, heads, n, dk), dtype, seed), array((batch, heads, n, dv), dtype, seed + 1))
    return made


QUANTIZED: Any = layer(300, 2, 64, 64, cls=QuantizedKVCache)


def pieces(state: layers.State) -> list[Piece]:
    """The state's blocks, as the cache keeps them."""
    ends = [*range(256, state.tokens, 256), state.tokens]
    return [Piece(layers.cut(state, s, e), e - s, e - s) for s, e in pairwise([0, *ends])]


def round_trip(cache: Any, tokens: int) -> Any:
    state = layers.read_state(cache, tokens)
    return layers.join(state.layout, pieces(state))


@DTYPES
@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 300, 512, 700])
def test_a_state_cut_into_blocks_and_joined_again_has_the_same_bits(tokens, dtype):
    # Grouped heads, keys and values of different sizes, layers that differ from each other.
    cache = [layer(tokens, 1, 16, 4, dtype), layer(tokens, 8, 6, 6, dtype, 2), layer(tokens, 3, 2, 10, dtype, 4)]
    joined = round_trip(cache, tokens)
    assert same_state(cache, joined)
    assert {type(c) for c in joined} == {KVCache}
    for old, new in zip(cache, joined, strict=True):
        assert [(a.dtype, a.shape) for a in used_rows(new)] == [(dtype, a.shape) for a in used_rows(old)]


@DTYPES
def test_large_small_infinite_and_undefined_values_come_back(dtype):
    values = mx.array([1e5, -1e5, 1e-9, 0.0, -0.0, float("inf"), float("-inf"), float("nan")]).astype(dtype)
    same = mx.broadcast_to(values, SHAPE)
    (joined,) = round_trip([with_fields(KVCache(), keys=same, values=same, offset=300)], 300)
    assert bytes_of(joined.keys[0, 1, 299]) == bytes_of(joined.values[0, 0, 0]) == bytes_of(values)
    assert dtype == mx.float16 or float(joined.keys[0, 0, 0, 0]) == pytest.approx(1e5, rel=0.01)


@pytest.mark.parametrize("take", [1, 43, 188])
def test_of_the_last_block_only_the_first_tokens_may_be_used(take):
    cache = [layer(700, 2, 8, 4), layer(700, 1, 8, 4, seed=7)]
    *head, last = pieces(state := layers.read_state(cache, 700))
    joined = layers.join(state.layout, [*head, last._replace(take=take)])
    assert same_state(cache, joined, 512 + take)
    assert [c.offset for c in joined] == [512 + take] * 2
    for new in joined:  # what another request computed is not there, not even out of sight
        assert not any(bytes_of(new.keys[:, :, 512 + take :]) + bytes_of(new.values[:, :, 512 + take :]))


@pytest.mark.parametrize("tokens", [1, 255, 256, 300, 512])
def test_the_next_token_finds_room_without_a_copy_of_the_layer(tokens):
    joined = round_trip(cache := [layer(tokens)], tokens)
    room = joined[0].keys.shape[2]
    for c in (*cache, *joined):
        c.update_and_fetch(*2 * [array((1, 2, 1, 8), seed=5)])
    assert joined[0].keys.shape[2] == room
    assert same_state(cache, joined)


def test_what_was_joined_shares_nothing_with_the_blocks():
    blocks = pieces(state := layers.read_state(cache := [layer(300)], 300))
    joined, other = layers.join(state.layout, blocks), layers.join(state.layout, blocks)
    joined[0].keys[:, :, :300] = 0
    assert not any(bytes_of(joined[0].keys))
    assert same_state(layers.join(state.layout, blocks), cache)
    for p in blocks:
        p.data[:] = 255
    assert same_state(other, cache)


INPUTS = {
    "transposed": lambda a: mx.contiguous(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "strided": lambda a: mx.repeat(a, 2, axis=2)[:, :, ::2],
    "a part": lambda a: mx.concatenate([a, a, a], axis=2)[:, :, 300:600],
    "broadcast": lambda a: mx.broadcast_to(a[:, :1], SHAPE),
    "lazy": lambda a: mx.concatenate([a[:, :, :100], a[:, :, 100:]], axis=2)}


def with_fields(c: Any, **fields: Any) -> Any:
    vars(c).update(fields)
    return c


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("how", INPUTS)
def test_arrays_that_are_views_or_not_computed_yet_are_read_right(how, evaluated):
    made, same = ([INPUTS[how](array(SHAPE, seed=seed)) for seed in (0, 1)] for _ in range(2))
    mx.eval(made if evaluated else [])
    (joined,) = round_trip([with_fields(KVCache(), keys=made[0], values=made[1], offset=300)], 300)
    for new, old in zip(used_rows(joined), same, strict=True):
        assert (np.array(new.view(mx.uint16)) == np.array(old.view(mx.uint16))).all()


DERIVED, BATCHED = type("Derived", (KVCache,), {}), BatchKVCache.merge([layer(300), layer(300)])
REFUSED = {
    "a subclass": ("unsupported_layer", [layer(300, cls=DERIVED)]), "nothing": ("unsupported_layer", [None]),
    "an unknown attribute": ("unsupported_layer", [layer(300), with_fields(ArraysCache(1), extra={"a": 1})]),
    "no layers": ("empty", []), "a batch": ("batch", [layer(300, batch=2)]),
    "two sequences": ("batch", [BATCHED]), "and in a list": ("batch", [CacheList(layer(300), BATCHED)]),
    **{f"a layer of {n}": ("coverage", [layer(300), layer(n)]) for n in (1, 299, 301, 512)},
    "a window of 299": ("coverage", [layer(300), layer(299, cls=lambda: RotatingKVCache(512))]),
    "only untouched ones": ("coverage", [KVCache()]), "claimed": ("coverage", [with_fields(layer(200), offset=300)]),
    **{f"no {n}": ("coverage", [with_fields(layer(300), **{n: None})]) for n in ("keys", "values")},
    "flat": ("coverage", [with_fields(layer(300), keys=mx.zeros((2, 300, 8)))]),
    "float64": ("unsupported_dtype", [with_fields(layer(300), keys=mx.zeros(SHAPE, mx.float64))]),
    "float64, whole": ("unsupported_dtype", [with_fields(ArraysCache(1), cache=[mx.zeros(1, mx.float64)])])}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_restored_exactly_is_refused_with_its_reason(what):
    reason, cache = REFUSED[what]
    with pytest.raises(Refused) as refused:
        layers.read_state(cache, 300)
    assert refused.value.reason == reason


def test_the_classes_that_cannot_be_stored_are_named_once_each_and_in_order():
    other = type("Other", (ArraysCache,), {})
    cache = [layer(8), DERIVED(), CacheList(other(2), CacheList(DERIVED())), RotatingKVCache(8), other(2)]
    assert layer_tree.unsupported(cache) == [f"{__name__}.{name}" for name in ("Derived", "Other")]


def test_a_layout_from_a_file_is_taken_only_where_it_can_be_restored():
    layout = layers.read_state([layer(300)], 300).layout
    specs, good = layout.sized(44), layout.classes
    assert layers.layout_of(good, specs, 44) == layout
    other_names = ("not JSON", '{"a": 1}', "[7]", '[{"caches": []}]', good.replace("KVCache", "NoCache"))
    assert not any(layers.layout_of(names, specs, 44) for names in other_names)
    for change in ({"shape": (2, 44, 8)}, {"shape": (1, 2, 45, 8)}, {"dtype": "F64"}):
        assert not layers.layout_of(good, [specs[0]._replace(**change), specs[1]], 44)


@pytest.mark.parametrize(("what", "nbytes"), [
    ([], 0), (None, 0), ([None, KVCache(), {"state": (None, None)}], 0), ([QUANTIZED], None),
    ([layer(300), layer(700, 1, 4, 16, mx.float32), layer(64, cls=lambda: RotatingKVCache(512))], None),
    ([CacheList(layer(300), layer(256))], (512 + 256) * 2 * 8 * 2 * 2), ((mx.zeros(4), [None, (mx.zeros(1),)]), 20),
    ([{"state": (QUANTIZED.keys, QUANTIZED.values), "meta": "x"}, {"state": [(mx.zeros(2, mx.int8), 7, "x")]}],
     QUANTIZED.nbytes + 2)])
def test_a_cache_is_priced_by_what_its_arrays_take(what, nbytes):
    assert price(what) == (sum(c.nbytes for c in what) if nbytes is None else nbytes)


def memory() -> Any:
    gc.collect()
    mx.synchronize()
    return pytest.approx(mx.get_active_memory(), abs=40_000)  # MLX frees small temporaries when it sees fit


def test_pricing_computes_nothing():
    keys = mx.random.normal((1, 8, 4096, 64))
    lazy = [with_fields(KVCache(), keys=keys + 1, values=keys.astype(mx.bfloat16), offset=4096)]
    before = mx.get_active_memory()
    assert price([lazy, {"state": (keys * 2, None)}]) == 8 * 4096 * 64 * (4 + 2 + 4)
    assert before == memory()
    mx.eval(keys)
    assert before + 8 * 4096 * 64 * 4 == memory(), "the measure sees what is computed"


def test_blocks_keep_nothing_of_the_state_alive_and_a_joined_state_takes_its_own_size():
    memory()
    before, cache = mx.get_active_memory(), [layer(4000), layer(4000, seed=2)]
    mx.eval([c.state[:2] for c in cache])
    assert before + sum(c.nbytes for c in cache) == memory()
    layout, blocks = (state := layers.read_state(cache, 4000)).layout, pieces(state)
    del cache, state
    assert before == memory()
    assert sum(len(p.data) for p in blocks) == 4000 * layout.token_bytes == 4000 * 2 * (8 + 8) * 2 * 2
    joined = layers.join(layout, blocks)
    assert before + sum(c.nbytes for c in joined) == before + 4096 * layout.token_bytes == memory()
    del joined
    assert before == memory()
