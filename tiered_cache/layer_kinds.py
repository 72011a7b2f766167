"""Which cache classes can be kept, and how: an open registry.

Every layer is one of two kinds. *Cut by token*: its arrays hold a row for each token, in order, so any run of tokens
can be stored by itself and a prefix is a prefix of the rows. *Whole*: recurrent states, sliding windows, anything
opaque; it can be kept only as it stood after exactly n tokens. A whole layer is saved as all of its attributes, which
is exact whatever the class, and does not depend on the `state` protocol, which mlx-lm changed between releases.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

Attributes = dict[str, Any]


class LayerKind(NamedTuple):
    """How to keep one class of layers.

    `rows`: attributes whose arrays [batch, heads, tokens, size] are cut by token; empty for a whole layer. `fields`:
    plain attributes that all blocks of a chain share. `step`: the class grows its arrays by so many tokens; restored
    ones get room for the next. `attributes`: what to keep of a whole layer (default: all of `vars`).
    """

    cls: type
    rows: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    step: int = 1
    attributes: Callable[[Any], Attributes] = lambda layer: dict(vars(layer))


_KINDS: dict[str, LayerKind] = {}


def name_of(cls: type) -> str:
    """Module and qualified name: what names a class in a file. Classes are found by it in the registry, nowhere
    else."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register(kind: LayerKind) -> None:
    """Make a class of layers known. Whatever a program registers may come back from the SSD in a later run, so register
    before the cache is opened. Any thread.
    """
    _KINDS[name_of(kind.cls)] = kind


def kind_of(layer: Any) -> LayerKind | None:
    """How a layer is kept; None for a class that is not known."""
    return _KINDS.get(name_of(type(layer)))


def kind_named(name: str) -> LayerKind | None:
    """The kind that a file names; None where this program does not know it."""
    return _KINDS.get(name)


def _rotating(layer: Any) -> Attributes:
    """Rows that are not used, or will be dropped at the next token, are left out."""
    kept = dict(vars(layer))
    if layer.keys is None:
        return kept
    rows = layer.keys.shape[2]
    for name in ("keys", "values"):
        array = kept[name]
        if rows > layer.max_size:
            kept[name] = layer._trim(rows - layer.max_size, array)
        elif layer.offset < rows:
            kept[name] = array[..., : layer.offset, :]
    if rows > layer.max_size:
        kept["_idx"] = layer.max_size
    return kept


def _chunked(layer: Any) -> Attributes:
    kept = dict(vars(layer))
    if layer.keys is not None:
        for name in ("keys", "values"):
            kept[name] = kept[name][..., : layer.offset - layer.start_position, :]
    return kept


register(LayerKind(mlx_cache.KVCache, rows=("keys", "values"), step=256))
register(LayerKind(mlx_cache.QuantizedKVCache, rows=("keys", "values"), fields=("group_size", "bits"), step=256))
register(LayerKind(mlx_cache.ConcatenateKVCache, rows=("keys", "values")))
register(LayerKind(mlx_cache.RotatingKVCache, attributes=_rotating))
register(LayerKind(mlx_cache.ChunkedKVCache, attributes=_chunked))
register(LayerKind(mlx_cache.ArraysCache))
for _module, _name in (("mlx_lm.models.deepseek_v41", "LayerCache"),):  # classes that a model brings along
    try:
        register(LayerKind(getattr(importlib.import_module(_module), _name)))
    except (ImportError, AttributeError):  # this mlx-lm does not have that model
        continue


def arrays_of(value: Any) -> list[mx.array]:
    """All arrays in nested lists and tuples, in order."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, list | tuple):
        return [a for v in value for a in arrays_of(v)]
    return []
