"""mlx-lm's cache layers to blocks of bytes and back: the module that touches MLX arrays.

Every function here belongs to the thread that runs the model. What leaves it are NumPy buffers that share nothing with
MLX, so that other threads never meet an array, lazy or not. On unified memory a copy through NumPy costs what a copy
through MLX does, and on the CPU backend a sixth of it.

A model's cache is a tree of layers (`CacheList` nests). Its leaves are of two kinds, see `layer_kinds`: those cut by
token go into blocks, the others together into a checkpoint, which holds at exactly one length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from ssd_tier.blob import DTYPE_BYTES, Block, TensorSpec
from ssd_tier.buffers import Bytes, view
from tiered_cache.attributes import DTYPES, FROM_NAME, freeze, thaw
from tiered_cache.layer_kinds import arrays_of, kind_named, kind_of
from tiered_cache.layer_tree import LIST, Quantization, Refused, Tree, dump, flat, leaves, plain, single, structure

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Layout:
    """What the state of a model looks like, token count aside.

    `classes`: JSON, a tree of its layers' classes and settings. `tensors`: name, dtype and shape [batch, heads, 0,
    size] of each array that is cut by token, the tokens' axis left at 0.
    """

    classes: str
    tensors: tuple[TensorSpec, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of state a token, in blocks."""
        return sum(t.nbytes for t in self.sized(1))

    def sized(self, tokens: int) -> tuple[TensorSpec, ...]:
        """The tensors of a block of so many tokens."""
        return tuple(_sized(t, tokens) for t in self.tensors)


class State(NamedTuple):
    """An evaluated state to be cut: `rows` are views [batch, heads, capacity, bytes a row] of the arrays cut by token;
    `whole` is the checkpoint of all other layers, or None where there are none.
    """

    layout: Layout
    tokens: int
    rows: list[Bytes]
    whole: Whole | None


class Whole(NamedTuple):
    """The layers that are kept whole: their arrays' names, dtypes and shapes, and the bytes of all of them.

    `classes`: JSON, the tree of the layout and each such layer's attributes.
    """

    classes: str
    tensors: tuple[TensorSpec, ...]
    data: Bytes


class Piece(NamedTuple):
    """The first `take` tokens of a block of `tokens` tokens."""

    data: Bytes
    tokens: int
    take: int


# -- out of MLX


def read_state(cache: Sequence[Any], tokens: int, quantization: Quantization | None = None) -> State:
    """Look at a model's cache and evaluate it.

    Raises `Refused` where it does not cover exactly `tokens` tokens or holds what cannot be restored. Recurrent layers
    do not say what they cover; in a model that has no others, the caller's word is taken.
    """
    if not cache:
        raise Refused("empty", "the cache has no layers")
    cache = single(cache)
    tree = structure(cache, quantization)
    names: list[tuple[str, mx.array]] = []
    whole: list[tuple[str, mx.array]] = []
    attributes: dict[str, Any] = {}
    for (place, layer), (_, leaf) in zip(flat(cache), leaves(tree), strict=True):
        kind = kind_of(layer)
        assert kind
        offset = getattr(layer, "offset", None)
        if kind.rows and offset == 0 and getattr(layer, kind.rows[0]) is None:
            leaf["empty"] = True  # a layer that the model has and does not use
            continue
        unused = offset == 0 and not arrays_of(list(vars(layer).values()))
        if isinstance(offset, int) and offset != tokens and not unused:
            said = f"layer {place} covers {offset} tokens where {tokens} token ids were given"
            raise Refused("coverage", f"{said}; give exactly the tokens that the state covers")
        if kind.rows:
            names += _rows_of(place, layer, leaf, kind.rows, tokens)
        else:
            arrays: list[mx.array] = []
            attributes[place] = {k: freeze(v, arrays) for k, v in kind.attributes(layer).items()}
            # State has the batch for its first axis; of fewer axes are lengths, paddings, token ids.
            if more := [a.shape[0] for a in arrays if a.ndim >= 3 and a.shape[0] != 1]:
                raise Refused("batch", f"layer {place} holds {more[0]} sequences; store them one by one")
            whole += [(f"{place}.{i}", a) for i, a in enumerate(arrays)]
    if not names and not whole:
        raise Refused("coverage", f"no layer holds any of {tokens} tokens")
    mx.eval([a for _, a in names], [a for _, a in whole])  # lazy arrays: only their own thread may evaluate them
    layout = Layout(dump(tree), tuple(_spec(n, a)._replace(shape=_cut_shape(a)) for n, a in names))
    checkpoint = None
    if attributes:
        specs = tuple(_spec(n, a) for n, a in whole)
        data = np.concatenate([_bytes(a) for _, a in whole]) if whole else np.empty(0, np.uint8)
        checkpoint = Whole(dump({"layers": tree, "attributes": attributes}), specs, data)
    return State(layout, tokens, [_rows(a) for _, a in names], checkpoint)


def _rows_of(
    place: str, layer: Any, leaf: Tree, attributes: tuple[str, ...], tokens: int
) -> Iterator[tuple[str, mx.array]]:
    for name in attributes:
        value = getattr(layer, name)
        if "stored" in leaf:
            group_size, bits = leaf["stored"]
            value = mx.quantize(value[..., :tokens, :], group_size=group_size, bits=bits)
        arrays = arrays_of(value)
        for i, array in enumerate(arrays):
            if array.ndim != 4 or array.shape[2] < tokens:
                raise Refused("coverage", f"layer {place}: {name} do not hold {tokens} tokens")
            if array.shape[0] != 1:
                raise Refused("batch", f"layer {place} holds {array.shape[0]} sequences; store them one by one")
            if array.dtype not in DTYPES:
                raise Refused("unsupported_dtype", f"layer {place}: {name} are {array.dtype}")
            yield (f"{place}.{name}" if len(arrays) == 1 else f"{place}.{name}.{i}"), array
        if not arrays:
            raise Refused("coverage", f"layer {place}: {name} do not hold {tokens} tokens")


def cut(state: State, start: int, stop: int) -> Bytes:
    """A compact copy of tokens [start, stop): uint8, the tensors one after the other, each row-contiguous."""
    out = np.empty(state.layout.token_bytes * (stop - start), np.uint8)
    at = 0
    for rows in state.rows:
        piece = rows[:, :, start:stop]
        out[at : at + piece.size].reshape(piece.shape)[...] = piece
        at += piece.size
    return out


def graft(layout: Layout, data: Bytes, tokens: int, source: Bytes, taken: int) -> None:
    """Take the first `taken` tokens of a block of `tokens` tokens from `source`, a block of just these. Any thread."""
    at, origin = 0, 0
    for spec in layout.tensors:
        _, heads, _, size = spec.shape
        width = size * DTYPE_BYTES[spec.dtype]
        rows = data[at : at + heads * tokens * width].reshape(heads, tokens, width)
        rows[:, :taken] = source[origin : origin + heads * taken * width].reshape(heads, taken, width)
        at += heads * tokens * width
        origin += heads * taken * width


# -- back into MLX


def join(
    layout: Layout, pieces: Sequence[Piece], tokens: int | None = None, checkpoint: Block | None = None
) -> list[Any]:
    """A fresh cache that covers `tokens` tokens (default: the pieces'). Shares nothing with pieces and checkpoint."""
    tokens = sum(p.take for p in pieces) if tokens is None else tokens
    tree = json.loads(layout.classes)
    capacities = [_capacity(tokens, _step(t.name, dict(leaves(tree)))) for t in layout.tensors]
    rows = dict(zip((t.name for t in layout.tensors), _fill(layout, pieces, capacities), strict=True))
    attributes, arrays = _checkpoint_parts(checkpoint)
    return [_rebuild(node, str(i), rows, attributes, arrays, tokens) for i, node in enumerate(tree)]


def _step(tensor: str, at: dict[str, Tree]) -> int:
    place = max((p for p in at if tensor.startswith(f"{p}.")), key=len)  # "3" or "3.1" of "3.keys", "3.1.keys.0"
    kind = kind_named(at[place]["class"])
    return kind.step if kind else 1


def _capacity(tokens: int, step: int) -> int:
    # Room for one more step saves a copy of the whole layer at the next token.
    return tokens if step == 1 else (tokens // step + 1) * step


def _fill(layout: Layout, pieces: Sequence[Piece], capacities: Sequence[int]) -> list[mx.array]:
    """The arrays cut by token, [batch, heads, capacity, size], with the pieces' rows and zeros after them."""
    shapes = [_sized(t, c).shape for t, c in zip(layout.tensors, capacities, strict=True)]
    # Zeros as bytes: filling 16-bit zeros takes the CPU backend ten times as long.
    raw = [mx.zeros((prod(s) * DTYPE_BYTES[t.dtype],), mx.uint8) for s, t in zip(shapes, layout.tensors, strict=True)]
    mx.eval(raw)
    at = [0] * len(pieces)  # where the next tensor begins in each piece
    for buffer, shape, spec in zip(raw, shapes, layout.tensors, strict=True):
        width = shape[3] * DTYPE_BYTES[spec.dtype]
        if not buffer.size:
            continue
        rows = np.frombuffer(view(buffer), np.uint8).reshape(shape[0], shape[1], shape[2], width)
        filled = 0
        for i, piece in enumerate(pieces):
            size = shape[0] * shape[1] * piece.tokens * width
            source = piece.data[at[i] : at[i] + size].reshape(shape[0], shape[1], piece.tokens, width)
            rows[:, :, filled : filled + piece.take] = source[:, :, : piece.take]
            at[i] += size
            filled += piece.take
        del rows
    arrays = [_typed(b, t.dtype, s) for b, s, t in zip(raw, shapes, layout.tensors, strict=True)]
    del raw
    mx.eval(arrays)
    return arrays


def _checkpoint_parts(checkpoint: Block | None) -> tuple[dict[str, Any], dict[str, mx.array]]:
    if checkpoint is None:
        return {}, {}
    arrays, at = {}, 0
    for spec in checkpoint.tensors:
        data = mx.array(checkpoint.data[at : at + spec.nbytes])
        arrays[spec.name] = _typed(data, spec.dtype, spec.shape)
        at += spec.nbytes
    mx.eval(list(arrays.values()))
    return json.loads(checkpoint.classes)["attributes"], arrays


def _rebuild(node: Tree, place: str, rows: Arrays, attributes: dict[str, Any], arrays: Arrays, tokens: int) -> Any:
    if node["class"] == LIST:
        children = enumerate(node["caches"])
        return CacheList(*(_rebuild(c, f"{place}.{i}", rows, attributes, arrays, tokens) for i, c in children))
    kind = kind_named(node["class"])
    assert kind, node["class"]
    cls: Any = kind.cls
    layer = cls.__new__(cls)  # its attributes are all that it is
    if not kind.rows:
        for name, value in attributes[place].items():
            setattr(layer, name, thaw(value, place, arrays))
        return layer
    for name in kind.rows:
        parts = [rows[f"{place}.{name}.{i}"] for i in range(3) if f"{place}.{name}.{i}" in rows]
        restored: Any = tuple(parts) or rows.get(f"{place}.{name}")  # None: a layer that the model does not use
        if "stored" in node:
            weights, scales, biases = parts
            restored = mx.dequantize(weights, scales, biases, node["stored"][0], node["stored"][1])
            mx.eval(restored)
        setattr(layer, name, restored)
    for field in kind.fields:
        setattr(layer, field, node[field])
    layer.offset = 0 if "empty" in node else tokens
    return layer


def layout_of(classes: str, tensors: Sequence[TensorSpec], tokens: int) -> Layout | None:
    """The layout of a stored block of `tokens` tokens; None where this program cannot restore it. Any thread."""
    if not _restorable(classes):
        return None
    if not all(len(t.shape) == 4 and t.shape[2] == tokens and t.dtype in FROM_NAME for t in tensors):
        return None
    return Layout(classes, tuple(_sized(t, 0) for t in tensors))


def _restorable(classes: str) -> bool:
    try:
        return all(kind_named(leaf["class"]) for _, leaf in leaves(json.loads(classes)))
    except (ValueError, TypeError, KeyError):
        return False


def fits_checkpoint(block: Block, layout_classes: str) -> bool:
    """Whether a stored checkpoint belongs to a model with these layers. Any thread."""
    try:
        said = json.loads(block.classes)
        return plain(dump(said["layers"])) == layout_classes and _restorable(layout_classes) and "attributes" in said
    except (ValueError, TypeError, KeyError):
        return False


# -- small parts


def _rows(array: mx.array) -> Bytes:
    b, h, n, d = array.shape
    return _bytes(array).reshape(b, h, n, d * array.itemsize)


def _bytes(array: mx.array) -> Bytes:
    """An evaluated array's bytes, not copied where they lie in order."""
    if not array.size:
        return np.empty(0, np.uint8)
    try:
        data = view(array)
    except (TypeError, ValueError, BufferError):  # not row-contiguous: its memory is not its content
        array = mx.contiguous(array)
        mx.eval(array)
        data = view(array)
    return np.frombuffer(data, np.uint8)


def _typed(data: mx.array, dtype: str, shape: Sequence[int]) -> mx.array:
    return data.view(FROM_NAME[dtype]).reshape(shape) if data.size else mx.zeros(shape, FROM_NAME[dtype])


def _spec(name: str, array: mx.array) -> TensorSpec:
    return TensorSpec(name, DTYPES[array.dtype], tuple(array.shape))


def _cut_shape(array: mx.array) -> tuple[int, ...]:
    return (array.shape[0], array.shape[1], 0, array.shape[3])


def _sized(spec: TensorSpec, tokens: int) -> TensorSpec:
    b, h, _, d = spec.shape
    return TensorSpec(spec.name, spec.dtype, (b, h, tokens, d))
