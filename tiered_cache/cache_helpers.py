"""Helpers on mlx-lm's caches that programs written for `vllm_mlx.memory_cache` reach for. Model's thread."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from tiered_cache.layer_kinds import arrays_of, kind_of


def is_trimmable(layer: Any) -> bool:
    """Whether the last tokens of a layer can be taken back, exactly.

    A class's own word is not enough: rings that have wrapped, and chunks whose front is gone, claim what they cannot
    do.
    """
    if isinstance(layer, CacheList):
        return all(is_trimmable(c) for c in layer.caches)
    if type(layer) is RotatingKVCache:
        return bool(layer.offset < layer.max_size)
    kind = kind_of(layer)
    return bool(kind and kind.rows)


def trim_offset(cache: Sequence[Any], count: int) -> list[Any]:
    """New layers without the last `count` tokens; the given ones are not touched.

    Rows past the new end are cut off, so no position of another request can be reached. Raises ValueError for a
    negative count, more tokens than a layer holds, or a layer that cannot be trimmed.
    """
    return [_trimmed(layer, count) for layer in cache]


def trim_to_offset(cache: Sequence[Any], tokens: int) -> list[Any]:
    """New layers that hold the first `tokens` tokens. Raises ValueError as `trim_offset`."""
    return [_trimmed(layer, (_offset(layer) or tokens) - tokens) for layer in cache]


def quantize(cache: Sequence[Any], bits: int = 8, group_size: int = 64) -> list[Any]:
    """Dense layers whose head size `group_size` divides as QuantizedKVCache, all others as they are."""
    return [_quantized(layer, bits, group_size) for layer in cache]


def dequantize(cache: Sequence[Any]) -> list[Any]:
    """QuantizedKVCache layers as KVCache, all others as they are."""
    return [_dense(layer) for layer in cache]


def _offset(layer: Any) -> int:
    """Tokens that a layer holds; 0 where it is not used, or does not say."""
    return max(map(_offset, layer.caches)) if isinstance(layer, CacheList) else int(getattr(layer, "offset", 0))


def _trimmed(layer: Any, count: int) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*(_trimmed(c, count) for c in layer.caches))
    if is_trimmable(layer) and layer.keys is None:
        return layer  # the model has it and does not use it
    if not is_trimmable(layer):
        raise ValueError(f"a {type(layer).__name__} in this state cannot be trimmed")
    if not 0 <= count <= layer.offset:
        raise ValueError(f"{count} tokens to trim from a layer of {layer.offset}")
    new = copy.copy(layer)
    new.offset = layer.offset - count
    for name in ("keys", "values"):
        setattr(new, name, _head(getattr(layer, name), new.offset))
    if type(layer) is RotatingKVCache:
        new._idx = new.offset
    return new


def _head(value: Any, tokens: int) -> Any:
    if isinstance(value, mx.array):
        return mx.contiguous(value[..., :tokens, :])  # a slice would keep the whole buffer alive
    return type(value)(_head(v, tokens) for v in value) if arrays_of(value) else value


def _quantized(layer: Any, bits: int, group_size: int) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*(_quantized(c, bits, group_size) for c in layer.caches))
    if type(layer) is not KVCache or layer.keys is None:
        return layer
    if layer.keys.shape[-1] % group_size or layer.values.shape[-1] % group_size:
        return layer
    return _trimmed(layer, 0).to_quantized(group_size=group_size, bits=bits)


def _dense(layer: Any) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*(_dense(c) for c in layer.caches))
    if type(layer) is not QuantizedKVCache or layer.keys is None:
        return layer
    new = KVCache()
    new.keys, new.values = (
        mx.dequantize(weights, scales, biases, layer.group_size, layer.bits)
        for weights, scales, biases in (_head(v, layer.offset) for v in (layer.keys, layer.values))
    )
    new.offset = layer.offset
    return new
