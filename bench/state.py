"""States to measure with: realistic bfloat16 attention state without a model, and the real one of SmolLM2."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

LAYERS, HEADS, TOKENS, HEAD_SIZE = 24, 8, 2048, 128  # 192 MiB in bfloat16


class Shapes:
    """Enough of a model to open a cache with."""

    def __init__(self, layers: int = LAYERS) -> None:
        self.layers = [None] * layers
        self.args = SimpleNamespace(model_type="bench")

    def parameters(self) -> dict[str, Any]:
        """One parameter."""
        return {"weight": mx.zeros((1,))}


def realistic(tokens: int = TOKENS, layers: int = LAYERS, heads: int = HEADS, size: int = HEAD_SIZE) -> list[KVCache]:
    """Normal values with a scale for each channel, as keys and values have. Other values at every call."""
    state = []
    for _ in range(layers):
        layer = KVCache()
        scales = (mx.exp(mx.random.normal((1, heads, 1, size))) for _ in range(2))
        layer.update_and_fetch(
            *((mx.random.normal((1, heads, tokens, size)) * scale).astype(mx.bfloat16) for scale in scales)
        )
        mx.eval(layer.keys, layer.values)
        state.append(layer)
    return state


def real(tokens: int) -> list[KVCache]:
    """SmolLM2's state of its own tokenizer's text, in bfloat16."""
    from tiered_cache.demo.smollm2 import load_smollm2

    model, tokenizer = load_smollm2()
    text = Path(__file__).parents[1].joinpath("DESIGN.md").read_text()
    ids = tokenizer.encode(text)[:tokens]
    state: list[KVCache] = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=state))
    return state


def tokens_for(count: int, seed: int) -> list[int]:
    """Token ids; another seed gives others from the first on."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 2**31, count)]


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def interleaved(repeat: int, **functions: Callable[[], object]) -> dict[str, float]:
    """Medians in seconds of functions that take turns, so that a busy moment meets all of them."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeat):
        for name, function in functions.items():
            taken[name].append(seconds(function))
    return {name: statistics.median(values) for name, values in taken.items()}


def drop_from_page_cache(paths: Iterable[Path]) -> None:
    """Make the next read of these files a read of the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
