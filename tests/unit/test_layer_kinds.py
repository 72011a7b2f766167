"""Every class of layers that mlx-lm has, and two of this file's own: to bytes, back, and on, without a changed bit."""

import gc
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache
from mlx_lm.models.cache import RotatingKVCache as Window

from tests.blocks import block
from tests.models import bytes_of
from tiered_cache import layer_kinds, layer_tree, layers
from tiered_cache.layer_kinds import LayerKind, arrays_of

try:
    from mlx_lm.models.deepseek_v41 import LayerCache
except ImportError:  # an older mlx-lm does not have that model: its rows are left out below
    LayerCache = None

BF16, F32 = mx.bfloat16, mx.float32


class Opaque:
    """Says nothing of the tokens that it covers."""

    def __init__(self) -> None:
        self.total, self.masks = mx.array(2.5), mx.array([[True, False, True]])
        self.parts: Any = [(mx.ones((1, 3)), None), [], (), True, 2.5, "text", 2**60]


class Indexed:
    """Rows under names of its own, one of which ends in a digit."""

    def __init__(self, tag: str = "a") -> None:
        self.tag, self.offset, self.row1, self.row2 = tag, 0, mx.zeros((1, 1, 0, 4)), mx.zeros((1, 1, 0, 6), mx.int8)


@pytest.fixture(autouse=True)
def own_classes(monkeypatch):
    monkeypatch.setattr(layer_kinds, "_KINDS", dict(layer_kinds._KINDS))
    layer_kinds.register(LayerKind(Opaque))
    layer_kinds.register(LayerKind(Indexed, rows=("row1", "row2"), fields=("tag",)))


def normal(shape: Any, dtype: Any = BF16, seed: int = 1) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def arrays_in(c: Any) -> list[mx.array]:
    return arrays_of([value for _, value in sorted(vars(c).items())])


def go_on(c: Any, n: int, seed: int = 5, dk: int = 64, dv: int = 64) -> list[mx.array]:
    """Feed `n` more tokens, in place wherever the class does so; all that the model would see."""
    if isinstance(c, CacheList):
        return [a for i, child in enumerate(c.caches) for a in go_on(child, n, seed + i, dk, dv)]
    if isinstance(c, ArraysCache):
        for a in arrays_of(c.cache):
            a[..., :1] = a[..., :1] * 2 + n
        c.advance(n)
        return arrays_in(c)
    if LayerCache and isinstance(c, LayerCache):
        grown, old = c.update_window(normal((1, n, 16), seed=seed)), arrays_of([c.pending_kv])
        pending = mx.concatenate([*old, normal((1, n, 4), F32, seed)], axis=1)
        full = pending.shape[1] // 4 * 4
        c.pending_kv, c.pending_gate = pending[:, full:], pending[:, full:] + 1
        c.compress_kv = mx.concatenate([*arrays_of([c.compress_kv]), pending[:, :full:4]], axis=1)
        return [grown, *arrays_in(c)]
    if isinstance(c, Opaque):
        c.total, c.masks[0, 0] = c.total + n, False
        return arrays_in(c)
    if isinstance(c, Indexed):
        more = [mx.full((1, 1, n, a.shape[3]), seed, a.dtype) for a in (c.row1, c.row2)]
        c.row1, c.row2 = (mx.concatenate(pair, axis=2) for pair in zip((c.row1, c.row2), more, strict=True))
        c.offset += n
        return [c.row1, c.row2]
    getattr(c, "maybe_trim_front", list)()
    return arrays_of(c.update_and_fetch(*(normal((1, 2, n, d), seed=seed + d) for d in (dk, dv))))


def fed(c: Any, *counts: int, trim: int = 0, **sizes: Any) -> Any:
    for i, n in enumerate(counts):
        go_on(c, n, 100 + i, **sizes)
    assert not trim or c.trim(trim) == trim
    return c


def filled(*slots: Any, left_padding: Any = None, lengths: Any = None) -> ArraysCache:
    vars(made := ArraysCache(0, left_padding)).update(cache=list(slots), lengths=lengths)
    return made


ONES = (1,) * 21
CONV, SSM, IDS = (lambda: normal((1, 3, 8))), (lambda: normal((1, 4, 8, 8), F32)), (lambda: mx.array([[-(2**60), 5]]))
CASES: dict[str, tuple[int, Any]] = {  # tokens, and how to make the cache
    "dense": (11, lambda: [fed(KVCache(), 10, 1)]), "dense, full": (256, lambda: [fed(KVCache(), 256)]),
    "dense, trimmed": (223, lambda: [fed(KVCache(), 257, 43, trim=77)]),
    "sizes": (9, lambda: [fed(KVCache(), 9, dk=512, dv=16)]), "no width": (300, lambda: [fed(KVCache(), 300, dv=0)]),
    "unused layers": (9, lambda: [KVCache(), fed(KVCache(), 9), QuantizedKVCache(), ConcatenateKVCache()]),
    "quantized": (300, lambda: [fed(QuantizedKVCache(64, 8), 299, 1), fed(KVCache(), 300).to_quantized(32, 4)]),
    "window, not full": (5, lambda: [fed(Window(8), 5), fed(Window(5, 2), 5)]),
    "window, wrapped": (21, lambda: [fed(Window(8), *ONES), fed(Window(8, 3), *ONES)]),
    "window, prefilled past it": (51, lambda: [fed(Window(8), 51), fed(Window(8, 2), *ONES, 30)]),
    "window, trimmed": (2, lambda: [fed(Window(8), 7, trim=5), fed(Window(4, 1), 3, trim=1)]),
    "window, grown one by one": (300, lambda: [fed(Window(600), *[1] * 300)]),
    "chunked": (21, lambda: [fed(ChunkedKVCache(512), 21), fed(ChunkedKVCache(8), 20, 1)]),
    "growing": (11, lambda: [fed(ConcatenateKVCache(), 9, 2)]), "arrays": (9, lambda: [filled(CONV(), SSM(), IDS())]),
    "arrays, empty slots": (9, lambda: [filled(None, mx.zeros((1, 0, 8), BF16), SSM(), None), filled(None, None)]),
    "arrays, padded": (9, lambda: [filled(CONV(), left_padding=[1]), filled(SSM(), lengths=mx.array([7]))]),
    "lists": (9, lambda: [CacheList(filled(CONV()), fed(KVCache(), 9)), CacheList(fed(Window(4), 9)),
                          CacheList(fed(KVCache(), 9), CacheList(CacheList(filled(SSM(), None)), KVCache()))]),
    "groups": (22, lambda: [fed(LayerCache(8), 22), fed(LayerCache(8), 20, 2)]),
    "none open": (20, lambda: [fed(LayerCache(8), 20)]), "own": (9, lambda: [Opaque(), fed(Indexed(), 9)]),
    "own, in lists": (9, lambda: [CacheList(Opaque(), CacheList(fed(Indexed("b"), 9)))])}
if LayerCache is None:
    # Nor can that version's ChunkedKVCache go on once chunks are shorter than its buffer, restored or not.
    CASES = {name: case for name, case in CASES.items() if name not in ("groups", "none open", "chunked")}
SIZES: Any = {"sizes": {"dk": 512, "dv": 16}, "no width": {"dv": 0}}


def part(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value.dtype, value.shape, value.size and bytes_of(value)
    return (type(value), [part(v) for v in value]) if isinstance(value, list | tuple) else value


def content(c: Any) -> Any:
    """All that a layer is, but for rows that hold no token, and those that a window drops at the next one."""
    if isinstance(c, CacheList):
        return [content(child) for child in c.caches]
    seen = dict(vars(c))
    for name in [n for n in ("keys", "values") if seen.get(n) is not None]:
        many, used = arrays_of([seen[name]]), c.offset - getattr(c, "start_position", 0)
        if isinstance(c, Window) and (surplus := c.keys.shape[2] - c.max_size) > 0:
            many, seen["_idx"] = [c._trim(surplus, a) for a in many], c.max_size
        seen[name] = tuple(a[..., :used, :] for a in many)
    return type(c), {name: part(value) for name, value in seen.items()}


def stored(cache: Any, tokens: int) -> tuple[layers.Layout, list[layers.Piece], int, Any]:
    """What `join` takes: the bytes alone, as blocks of 8 tokens and a checkpoint."""
    state = layers.read_state(cache, tokens)
    cuts = pairwise([*range(0, tokens, 8), tokens])
    pieces = [layers.Piece(layers.cut(state, a, b), b - a, b - a) for a, b in cuts]
    whole = state.whole and block(0, tensors=state.whole.tensors, data=state.whole.data, classes=state.whole.classes)
    assert not whole or layers.fits_checkpoint(whole, layer_tree.plain(state.layout.classes))
    return state.layout, pieces, tokens, whole


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("case", CASES)
def test_a_restored_cache_is_the_same_and_goes_on_the_same(case, count):
    (tokens, make), sizes = CASES[case], SIZES.get(case, {})
    source = make()
    before = [content(c) for c in source]
    parts = stored(source, tokens)
    restored, other = layers.join(*parts), layers.join(*parts)
    assert [content(c) for c in source] == before, "reading it changed the source"
    assert [content(c) for c in restored] == before
    expected = part([go_on(c, count, **sizes) for c in source])
    assert [content(c) for c in restored] == before, "the source is shared"
    assert part([go_on(c, count, **sizes) for c in restored]) == expected
    assert [content(c) for c in restored] == [content(c) for c in source]
    assert [content(c) for c in other] == before, "two restored ones are shared"


@pytest.mark.parametrize("one", [fed(KVCache(), 9), fed(Window(16), 9), fed(Window(8), *ONES[:9])])
def test_a_batch_of_one_sequence_comes_back_as_that_sequence(one):
    alone, listed = layers.join(*stored([one.merge([one]), CacheList(one.merge([one]))], 9))
    assert type(alone) is type(listed.caches[0]) is type(one)
    assert part(go_on(alone, 3)) == part(go_on(listed.caches[0], 3)) == part(go_on(one, 3))


def with_rows(c: Any, rows: mx.array) -> Any:
    c.update_and_fetch(rows, rows)
    getattr(c, "maybe_trim_front", list)()
    return c


@pytest.mark.parametrize("many", [
    lambda: KVCache.merge([fed(KVCache(), 9)] * 2), lambda: Window.merge([fed(Window(8), n) for n in (9, 4)]),
    lambda: ArraysCache.merge([filled(CONV(), SSM()), filled(CONV(), SSM())]),
    *(lambda made=made: with_rows(made(16), normal((2, 2, 9, 64))) for made in (Window, ChunkedKVCache))],
    ids=["dense", "windows", "arrays", "window", "chunked"])
def test_a_batch_of_two_is_refused(many):
    with pytest.raises(layer_tree.Refused, match="holds 2 sequences"):
        layers.read_state([many()], 9)


def test_a_class_that_is_not_registered_is_refused_by_name():
    with pytest.raises(layer_tree.Refused, match=rf"{__name__}\.Unknown are not known"):
        layers.read_state([fed(KVCache(), 9), CacheList(type("Unknown", (Window,), {})(8))], 9)


@pytest.mark.parametrize("make", [
    lambda big: filled(big[:1, :8]), lambda big: CacheList(filled(None, big[3:4, 9:19])),
    *(lambda big, made=made: with_rows(made(8), big.reshape(1, 1, 4096, 64)) for made in (Window, ChunkedKVCache))],
    ids=["a part", "a part in a list", "a window", "a chunk"])
def test_nothing_of_a_larger_buffer_stays_alive(make):
    before, cache = gc.collect() * 0 + mx.get_active_memory(), [make(normal((64, 4096), F32))]
    mx.eval([arrays_in(c) for _, c in layer_tree.flat(cache)])
    parts = stored(cache, 4096)
    del cache
    assert gc.collect() * 0 + mx.get_active_memory() - before < 20_000
    assert layers.join(*parts)
