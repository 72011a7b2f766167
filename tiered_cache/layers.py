"""mlx-lm's cache layers to blocks of bytes and back: the one module that knows these classes and touches MLX arrays.

Every function here belongs to the thread that runs the model. What leaves it are NumPy buffers that share nothing with
MLX, so that other threads never meet an array, lazy or not. On unified memory a copy through NumPy costs what a copy
through MLX does, and on the CPU backend a sixth of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from ssd_tier.blob import DTYPE_BYTES, TensorSpec
from ssd_tier.buffers import Bytes, view

STEP = 256  # KVCache grows by this many tokens; room for one more step saves a copy of every layer at the next token

# mlx dtype to safetensors' name. What a cut by token needs to know of a class is in `_tensors` and `_rebuild`.
_DTYPES = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32"}
_FROM_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_KV = f"{KVCache.__module__}.{KVCache.__qualname__}"


class Refused(Exception):
    """A state that cannot be stored. `reason` names a counter; the message says why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Layout:
    """What the state of a model looks like, token count aside: `classes` a JSON list of class names, one a layer;
    `tensors` name, dtype and shape [batch, heads, 0, head size] of each tensor, the tokens' axis left at 0.
    """

    classes: str
    tensors: tuple[TensorSpec, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of state a token."""
        return sum(prod(_sized(t, 1).shape) * DTYPE_BYTES[t.dtype] for t in self.tensors)

    def sized(self, tokens: int) -> tuple[TensorSpec, ...]:
        """The tensors of a block of so many tokens."""
        return tuple(_sized(t, tokens) for t in self.tensors)


class State(NamedTuple):
    """An evaluated state to be cut: `rows` are views [batch, heads, capacity, bytes a row] of its arrays."""

    layout: Layout
    tokens: int
    rows: list[Bytes]


class Piece(NamedTuple):
    """The first `take` tokens of a block of `tokens` tokens."""

    data: Bytes
    tokens: int
    take: int


def class_names(cache: Sequence[Any]) -> list[str]:
    """Module and qualified name of each layer's class."""
    return [f"{type(c).__module__}.{type(c).__qualname__}" for c in cache]


def unsupported(cache: Sequence[Any]) -> list[str]:
    """Names of the layer classes that cannot be stored, each once, in order."""
    return list(dict.fromkeys(n for n in class_names(cache) if n != _KV))


def unsupported_reason(names: Sequence[str]) -> tuple[str, str]:
    """The counter and the sentence for layer classes that cannot be stored."""
    return "unsupported_layer", f"this version cannot store layers of class {', '.join(names)}"


def read_state(cache: Sequence[Any], tokens: int) -> State:
    """Look at a model's cache and evaluate it. Raises `Refused` where it does not cover exactly `tokens` tokens or
    holds what cannot be restored.
    """
    if not cache:
        raise Refused("empty", "the cache has no layers")
    if names := unsupported(cache):
        raise Refused(*unsupported_reason(names))
    arrays = []
    tensors = []
    for i, layer in enumerate(cache):
        if layer.offset != tokens:
            said = f"layer {i} covers {layer.offset} tokens where {tokens} token ids were given"
            raise Refused("coverage", f"{said}; give exactly the tokens that the state covers")
        for name, array in (("keys", layer.keys), ("values", layer.values)):
            if not isinstance(array, mx.array) or array.ndim != 4 or array.shape[2] < tokens:
                raise Refused("coverage", f"layer {i}: {name} do not hold {tokens} tokens")
            if array.shape[0] != 1:
                raise Refused("batch", f"layer {i} holds {array.shape[0]} sequences; store them one by one")
            if array.dtype not in _DTYPES:
                raise Refused("unsupported_dtype", f"layer {i}: {name} are {array.dtype}")
            arrays.append(array)
            heads, size = array.shape[1], array.shape[3]
            tensors.append(TensorSpec(f"{i}.{name}", _DTYPES[array.dtype], (1, heads, 0, size)))
    mx.eval(arrays)  # an engine hands over lazy arrays; only their own thread may evaluate them
    layout = Layout(json.dumps(class_names(cache), separators=(",", ":")), tuple(tensors))
    return State(layout, tokens, [_rows(a) for a in arrays])


def cut(state: State, start: int, stop: int) -> Bytes:
    """A compact copy of tokens [start, stop): uint8, the tensors one after the other, each row-contiguous."""
    out = np.empty(state.layout.token_bytes * (stop - start), np.uint8)
    at = 0
    for rows in state.rows:
        piece = rows[:, :, start:stop]
        out[at : at + piece.size].reshape(piece.shape)[...] = piece
        at += piece.size
    return out


def join(layout: Layout, pieces: Sequence[Piece]) -> list[Any]:
    """A fresh cache that covers the pieces' tokens. Shares nothing with them, and has room for the next tokens."""
    tokens = sum(p.take for p in pieces)
    capacity = (tokens // STEP + 1) * STEP
    # Zeros as bytes: filling 16-bit zeros takes the CPU backend ten times as long.
    shapes = [_sized(t, capacity).shape for t in layout.tensors]
    raw = [
        mx.zeros((prod(s) * DTYPE_BYTES[t.dtype],), mx.uint8) for s, t in zip(shapes, layout.tensors, strict=True)
    ]
    mx.eval(raw)
    at = [0] * len(pieces)  # where the next tensor begins in each piece
    for buffer, shape, spec in zip(raw, shapes, layout.tensors, strict=True):
        width = shape[3] * DTYPE_BYTES[spec.dtype]
        rows = np.frombuffer(view(buffer), np.uint8).reshape(shape[0], shape[1], capacity, width)
        filled = 0
        for i, piece in enumerate(pieces):
            size = shape[0] * shape[1] * piece.tokens * width
            source = piece.data[at[i] : at[i] + size].reshape(shape[0], shape[1], piece.tokens, width)
            rows[:, :, filled : filled + piece.take] = source[:, :, : piece.take]
            at[i] += size
            filled += piece.take
        del rows
    arrays = [
        b.view(_FROM_NAME[t.dtype]).reshape(s) for b, s, t in zip(raw, shapes, layout.tensors, strict=True)
    ]
    del raw, buffer
    mx.eval(arrays)
    return list(_rebuild(layout, arrays, tokens))


def layout_of(classes: str, tensors: Sequence[TensorSpec], tokens: int) -> Layout | None:
    """The layout of a stored block of `tokens` tokens; None where this version cannot restore it."""
    try:
        names = json.loads(classes)
    except ValueError:
        return None
    fits = (
        isinstance(names, list)
        and len(tensors) == 2 * len(names)
        and all(n == _KV for n in names)
        and all(len(t.shape) == 4 and t.shape[2] == tokens and t.dtype in _FROM_NAME for t in tensors)
    )
    return Layout(classes, tuple(_sized(t, 0) for t in tensors)) if fits else None


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


def _rebuild(layout: Layout, arrays: list[mx.array], tokens: int) -> Iterator[KVCache]:
    for keys, values in zip(arrays[::2], arrays[1::2], strict=True):
        layer = KVCache()
        layer.keys, layer.values, layer.offset = keys, values, tokens
        yield layer


def _rows(array: mx.array) -> Bytes:
    try:
        data = view(array)
    except (TypeError, ValueError, BufferError):  # not row-contiguous: its memory is not its content
        array = mx.contiguous(array)
        mx.eval(array)
        data = view(array)
    b, h, n, d = array.shape
    return np.frombuffer(data, np.uint8).reshape(b, h, n, d * array.itemsize)


def _sized(spec: TensorSpec, tokens: int) -> TensorSpec:
    b, h, _, d = spec.shape
    return TensorSpec(spec.name, spec.dtype, (b, h, tokens, d))
