"""What a cache weighs, from shapes and dtypes alone: nothing is evaluated. Model's thread."""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx


def price(cache: Any) -> int:
    """Bytes of all arrays in a cache, from shapes and dtypes alone: nothing is evaluated.

    Takes layers, dicts with "state", arrays, and nested lists, tuples and dicts of these; anything else counts 0.
    """
    if cache is None:
        return 0
    if hasattr(cache, "shape") and hasattr(cache, "dtype"):
        return array_bytes(cache)
    if isinstance(cache, dict):
        return sum(price(v) for v in ([cache["state"]] if "state" in cache else cache.values()))
    if isinstance(cache, list | tuple):
        return sum(price(c) for c in cache)
    children = getattr(cache, "caches", None)
    if isinstance(children, list | tuple):
        return price(children)
    return sum(price(m) for m in getattr(cache, "__dict__", {}).values() if isinstance(m, list | tuple | mx.array))


def array_bytes(array: Any) -> int:
    """An array's bytes from its shape and dtype; 0 where it has none."""
    dtype = getattr(array, "dtype", None)
    size = getattr(dtype, "size", None) or getattr(dtype, "itemsize", 0)
    try:
        return int(prod(array.shape) * size)
    except (AttributeError, TypeError):
        return 0
