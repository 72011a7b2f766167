"""The attributes of a layer that is kept whole, as JSON and arrays."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from tiered_cache.layer_tree import Refused

# mlx dtype to safetensors' name.
DTYPES = {
    mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.bool_: "BOOL", mx.complex64: "C64",
    mx.uint8: "U8", mx.uint16: "U16", mx.uint32: "U32", mx.uint64: "U64",
    mx.int8: "I8", mx.int16: "I16", mx.int32: "I32", mx.int64: "I64",
}  # fmt: skip
FROM_NAME = {name: dtype for dtype, name in DTYPES.items()}


def freeze(value: Any, arrays: list[mx.array]) -> Any:
    """One attribute of a whole layer as JSON, its arrays taken out and numbered."""
    if isinstance(value, mx.array):
        if value.dtype not in DTYPES:
            raise Refused("unsupported_dtype", f"an array of {value.dtype} cannot be stored")
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [freeze(v, arrays) for v in value]}
    raise Refused("unsupported_layer", f"an attribute of type {type(value).__name__} cannot be stored")


def thaw(value: Any, place: str, arrays: dict[str, mx.array]) -> Any:
    """Undo `freeze`, with the layer's arrays under their numbers."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[f"{place}.{value['array']}"]
    kind, items = next(iter(value.items()))
    thawed = [thaw(v, place, arrays) for v in items]
    return tuple(thawed) if kind == "tuple" else thawed
