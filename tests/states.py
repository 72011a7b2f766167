"""States without a model: KVCache layers filled with values that depend on every token before them, as real ones do."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache


class ShapeOnlyModel:
    """Enough of a model to open a cache with: layers, arguments and one parameter."""

    def __init__(self, layers: int = 2, name: str = "shapes") -> None:
        self.layers = [None] * layers
        self.args = SimpleNamespace(model_type=name)
        self.name = name

    def parameters(self) -> dict[str, Any]:
        return {"weight": mx.array(list(self.name.encode()))}


def state_of(
    tokens: Sequence[int], layers: int = 2, heads: int = 2, dim: int = 16, dtype: Any = mx.bfloat16
) -> list[KVCache]:
    """A state for `tokens`: position i's values come from a digest of tokens[:i+1], so two prompts share them exactly
    as far as they share tokens.
    """
    n, width = len(tokens), 2 * layers * heads * dim
    seeds = np.empty(n, np.uint64)
    running = sha256()
    for i, token in enumerate(tokens):
        running.update(int(token).to_bytes(8, "little", signed=True))
        seeds[i] = int.from_bytes(running.copy().digest()[:8], "little")
    values = (np.outer(seeds, np.arange(1, 2 * width, 2, dtype=np.uint64)) >> np.uint64(40)).astype(np.float32)
    values = (values / 2**23 - 1).reshape(n, 2 * layers, heads, dim).transpose(1, 2, 0, 3)
    state = []
    for i in range(layers):
        layer = KVCache()
        layer.update_and_fetch(*(mx.array(values[2 * i + j][None]).astype(dtype) for j in range(2)))
        state.append(layer)
    mx.eval([[c.keys, c.values] for c in state])
    return state


def bytes_per_token(layers: int = 2, heads: int = 2, dim: int = 16, itemsize: int = 2) -> int:
    """Bytes of state a token that `state_of` makes."""
    return 2 * layers * heads * dim * itemsize
