"""Who the model is, and the namespace that its states live in. Runs on the model's thread."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ssd_tier.buffers import view

STATE_VERSION = 1  # raise when a state of an older version must not be met any more
SAMPLES = 64  # values looked at in each parameter
_FREQUENCIES = "_freqs"  # where rope modules keep theirs, out of the parameters


def model_fingerprint(model: Any) -> str:
    """A digest (64 hex digits) of all that shapes a model's attention state. The same on every machine.

    Covers the configuration, every module's class and plain settings (rope, quantization, adapters among them), and of
    each parameter name, shape, dtype and up to 64 values spread over it; so the time does not grow with the weights.
    Two models that differ only in values between the samples are not told apart. Evaluates the samples.
    """
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            digest.update(len(data).to_bytes(8, "little") + data)

    arrays = list(tree_flatten(_parameters(model)))
    add("model", type(model).__module__, type(model).__qualname__)
    add(json.dumps(_plain(getattr(model, "args", None) or getattr(model, "config", None)), sort_keys=True))
    for name, module in sorted(_modules(model), key=lambda item: item[0]):
        settings = {k: v for k, v in sorted(vars(module).items()) if not k.startswith("_") and _is_plain(v)}
        add("module", name, type(module).__qualname__, json.dumps(_plain(settings), sort_keys=True))
        # Other private values are derived from the weights, when first used.
        if isinstance(module, dict) and _FREQUENCIES in module:
            arrays.append((f"{name}.{_FREQUENCIES}", module[_FREQUENCIES]))
    names, samples = [], []
    for name, value in sorted(arrays, key=lambda item: item[0]):
        if isinstance(value, mx.array):
            names.append((name, tuple(value.shape), str(value.dtype)))
            samples.append(_sample(value))
    mx.eval(samples)
    for described, sample in zip(names, samples, strict=True):
        add("parameter", described, bytes(view(sample)) if sample.size else b"")
    return digest.hexdigest()


def namespace(fingerprint: str, classes: list[str], block_tokens: int, tenant: str | None) -> bytes:
    """The digest (32 bytes) within which equal token ids mean equal states. Pure."""
    parts = {
        "version": STATE_VERSION,
        "model": fingerprint,
        "classes": classes,
        "block_tokens": block_tokens,
        "tenant": tenant,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def model_label(model: Any, fingerprint: str) -> str:
    """A short name for people: the model's type and the head of its fingerprint."""
    args = getattr(model, "args", None)
    kind = getattr(args, "model_type", None)
    return f"{kind if isinstance(kind, str) else type(model).__name__}-{fingerprint[:8]}"


def _modules(model: Any) -> list[tuple[str, Any]]:
    named: Callable[[], list[tuple[str, Any]]] | None = getattr(model, "named_modules", None)
    return list(named()) if callable(named) else []


def _parameters(model: Any) -> Any:
    parameters = getattr(model, "parameters", None)
    return parameters() if callable(parameters) else {}


def _sample(array: mx.array) -> mx.array:
    """Values spread over an array by the golden ratio, which meets every row and column alike."""
    if array.size <= SAMPLES:
        return mx.contiguous(array.reshape(-1))
    places = [int((i * 0.6180339887498949) % 1 * array.size) for i in range(1, SAMPLES + 1)]
    return array.reshape(-1)[mx.array(places, dtype=mx.uint32)]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    """What of a configuration can be compared across processes; the rest by its type alone."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if not _is_plain(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        return {k: v for k, v in vars(value).items() if _is_plain(v) and not k.startswith("_")}
    return value if _is_plain(value) else type(value).__qualname__
