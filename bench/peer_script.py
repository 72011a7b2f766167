"""Measures vllm-mlx and mlx-lm as they are; run by `bench.peers` in an environment of theirs. Imports nothing of ours.

Prints JSON: {peer: {key: {"value": text, "figures": {...}}}}, with the keys of our results. What fails says so in its
text.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache, load_prompt_cache, save_prompt_cache

PATIENCE = 30.0  # seconds for storing sequences
MANY = 5000
LENGTHS, COUNT, ROOM, SYSTEM = (1024, 1536, 2048), 12, 5, 512  # as bench.measure.conversations has them
Told = dict[str, Any]


class Model:
    """Enough of a model to open a cache with."""

    def __init__(self, layers: int) -> None:
        self.layers = [None] * layers
        self.args = SimpleNamespace(model_type="bench")

    def parameters(self) -> dict[str, Any]:
        """One parameter."""
        return {"weight": mx.zeros((1,))}


def state(tokens: int, layers: int = 1, heads: int = 1, size: int = 8) -> list[KVCache]:
    """Normal values in bfloat16."""
    made = []
    for _ in range(layers):
        layer = KVCache()
        layer.update_and_fetch(
            *(mx.random.normal((1, heads, tokens, size)).astype(mx.bfloat16) for _ in range(2))
        )
        mx.eval(layer.keys, layer.values)
        made.append(layer)
    return made


def tokens_for(count: int, seed: int) -> list[int]:
    """Token ids; another seed gives others from the first on."""
    numbers = random.Random(seed)
    return [numbers.randrange(2**31) for _ in range(count)]


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def median_ms(function: Callable[[], object], patience: float = 5.0) -> float:
    """Of up to 50 calls."""
    taken: list[float] = []
    started = time.perf_counter()
    while len(taken) < 50 and (len(taken) < 3 or time.perf_counter() - started < patience):
        taken.append(seconds(function))
    return statistics.median(taken) * 1e3


def forget(folder: Path) -> None:
    """Make the next read of these files a read of the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Vllm:
    """vllm-mlx's MemoryAwarePrefixCache, its RAM tier alone."""

    def __init__(self, limit: int = 8 << 30, layers: int = 1) -> None:
        self.module = importlib.import_module("vllm_mlx.memory_cache")
        settings = self.module.MemoryCacheConfig(max_memory_mb=max(1, limit >> 20), max_entries=100_000)
        self.cache = self.module.MemoryAwarePrefixCache(Model(layers), settings)
        self.cache._max_memory = limit

    def store(self, tokens: list[int], kv: list[KVCache]) -> None:
        """Keep."""
        self.cache.store(tokens, kv)

    def fetch(self, tokens: list[int]) -> tuple[Any, list[int]]:
        """Find."""
        found: tuple[Any, list[int]] = self.cache.fetch(tokens)
        return found

    def nbytes(self) -> int:
        """By its own account."""
        return int(self.cache._current_memory)


class Lru:
    """mlx-lm's LRUPromptCache."""

    def __init__(self, limit: int = 8 << 30, layers: int = 1) -> None:
        self.cache = LRUPromptCache(max_size=100_000, max_bytes=limit)

    def store(self, tokens: list[int], kv: list[KVCache]) -> None:
        """Keep."""
        self.cache.insert_cache("bench", tokens, kv)

    def fetch(self, tokens: list[int]) -> tuple[Any, list[int]]:
        """Find."""
        found: tuple[Any, list[int]] = self.cache.fetch_nearest_cache("bench", tokens)
        return found

    def nbytes(self) -> int:
        """By its own account."""
        return int(self.cache.nbytes)


def look_up(peer: type[Vllm] | type[Lru]) -> Told:
    """fetch of 8,192 tokens among 10 and up to 5,000 that share 8,000: a stored one, and a new one."""
    shared, kv = tokens_for(8000, 0), state(8192)
    figures: dict[str, float] = {}
    # Longer than what is stored, as a next turn is; each falls elsewhere among the stored ones.
    new = itertools.cycle([shared + tokens_for(256, 10**6 + i) for i in range(10)])
    cache, stored, started = peer(), 0, time.perf_counter()
    for goal in (10, MANY):
        while stored < goal and time.perf_counter() - started < PATIENCE:
            stored += 1
            cache.store(shared + tokens_for(192, stored), kv)
        asked = shared + tokens_for(192, max(1, stored // 2))
        name = "few" if goal == 10 else "many"
        figures[f"fetch_{name}_ms"] = median_ms(partial(cache.fetch, asked))
        figures[f"new_{name}_ms"] = median_ms(lambda: cache.fetch(next(new)))
    figures["sequences"] = stored
    among = "" if stored >= MANY else f" among {stored:,}"
    return {
        f"look_up_{kind}": {
            "value": f"{figures[f'{kind}_many_ms']:.2f} ms{among}; {figures[f'{kind}_few_ms']:.2f} among 10",
            "figures": figures,
        }
        for kind in ("fetch", "new")
    }


def sharing(peer: type[Vllm] | type[Lru]) -> Told:
    """RAM for ten sequences of 10k tokens that share 8k, by its own account, against the distinct bytes."""
    cache, shared = peer(layers=4), tokens_for(8000, 0)
    token_bytes = 4 * 8 * 128 * 2 * 2
    for seed in range(1, 11):
        cache.store(shared + tokens_for(2000, seed), state(10_000, 4, 8, 128))
    ratio = cache.nbytes() / (token_bytes * (8000 + 10 * 2000))
    return {"sharing": {"value": f"{ratio:.2f} by its own account", "figures": {"ratio": ratio}}}


def conversations(peer: type[Vllm] | type[Lru]) -> Told:
    """12 conversations with RAM for 5: the share of the reuse that infinite RAM gives. No SSD."""
    states = [state(n) for n in LENGTHS]
    room = ROOM * LENGTHS[-1] * 8 * 2 * 2
    told: Told = {}
    for name, shared in (("without", 0), ("with", SYSTEM)):
        reused = []
        for limit in (room, 1 << 33):
            cache, system, covered = peer(limit), tokens_for(shared, 99), 0
            texts = [system + tokens_for(LENGTHS[-1] - shared, seed) for seed in range(COUNT)]
            for length, kv in zip(LENGTHS, states, strict=True):
                for text in texts:
                    found, remaining = cache.fetch(text[:length])
                    covered += length - len(remaining) if found is not None else 0
                    cache.store(text[:length], [copy_of(layer) for layer in kv])
            reused.append(covered)
        ratio = reused[0] / reused[1] if reused[1] else 0.0
        told[f"reuse_{name}"] = {"value": f"{ratio:.1%} (RAM alone)", "figures": {"ratio": ratio}}
    return told


def copy_of(layer: KVCache) -> KVCache:
    """Another wrapper of the same arrays."""
    other = KVCache()
    other.state = layer.state
    return other


def vllm_disk(folder: Path) -> Told:
    """save_to_disk and a cold load_from_disk of one entry of 192 MiB."""
    tokens, kv = tokens_for(2048, 1), state(2048, 24, 8, 128)
    cache = Vllm(layers=24)
    cache.store(tokens, kv)
    save = seconds(lambda: cache.cache.save_to_disk(str(folder)))
    loads, loaded = [], 0
    for _ in range(3):
        forget(folder)
        other = Vllm(layers=24)

        def load(into: Any = other.cache) -> None:
            nonlocal loaded
            loaded = into.load_from_disk(str(folder))
            found, _ = into.fetch(tokens)
            if found:
                mx.eval([layer.state for layer in found])

        loads.append(seconds(load))
    told = disk(save, loads, "" if loaded else "; loaded nothing")
    return {f"snapshot_{kind}": figures for kind, figures in told.items()}


def vllm_tier(folder: Path) -> Told:
    """Its SSDCacheTier: 192 MiB spilled, and promoted from a cold page cache, to arrays that a model can use."""
    module = importlib.import_module("vllm_mlx.ssd_cache")
    tokens, kv = tuple(tokens_for(2048, 1)), state(2048, 24, 8, 128)
    nbytes = sum(layer.nbytes for layer in kv)
    tier = module.SSDCacheTier(module.SSDCacheConfig(cache_dir=str(folder)))
    tier.start_writer()
    started = time.perf_counter()
    tier.enqueue_spill(tokens, kv, nbytes)
    told = time.perf_counter() - started
    while tier.lookup_ssd(tokens) is None and time.perf_counter() - started < PATIENCE:
        time.sleep(0.01)
    save = time.perf_counter() - started
    kept = sum(p.stat().st_size for p in folder.rglob("*.safetensors")) / nbytes
    loads = []
    for _ in range(3):
        forget(folder)

        def promote() -> None:
            layers = asyncio.run(tier.async_promote(tokens, lambda _: True, lambda _: None))
            mx.eval([mx.array(a).astype(mx.bfloat16) for layer in layers for a in (layer["keys"], layer["values"])])

        loads.append(seconds(promote))
    tier.close()
    evict = {"value": f"{told * 1e3:.0f} ms", "figures": {"evict_ms": told * 1e3}}
    size = {"value": f"{kept:.2f}", "figures": {"ratio": kept}}
    return {**disk(save, loads, ""), "eviction": evict, "bytes_realistic": size}


def lm_disk(folder: Path) -> Told:
    """save_prompt_cache and a cold load_prompt_cache of 192 MiB."""
    kv, path = state(2048, 24, 8, 128), str(folder / "cache.safetensors")
    save = seconds(lambda: save_prompt_cache(path, kv))
    loads = []
    for _ in range(5):
        forget(folder)
        loads.append(seconds(lambda: mx.eval([layer.state for layer in load_prompt_cache(path)])))
    return disk(save, loads, "")


def disk(save: float, loads: list[float], more: str) -> Told:
    """Both figures."""
    load = statistics.median(loads) * 1e3
    return {
        "load": {"value": f"{load:.0f} ms{more}", "figures": {"load_ms": load}},
        "save": {"value": f"{save * 1e3:.0f} ms", "figures": {"save_ms": save * 1e3}},
    }


def vllm_ssd(folder: Path) -> Told:
    """The look-up that check_ssd makes, among up to 5,000 stored sequences that share 8,000 tokens: index only."""
    index = importlib.import_module("vllm_mlx.ssd_cache").SSDIndex(str(folder))
    shared, stored, started = tokens_for(8000, 0), 0, time.perf_counter()
    while stored < MANY and time.perf_counter() - started < PATIENCE:
        stored += 1
        index.insert_entry(tuple(shared + tokens_for(192, stored)), f"{stored}", 1024, 8192)
    asked = {
        "exact": tuple(shared + tokens_for(192, 1)),
        "head": tuple(shared + tokens_for(192, 10**6)),
        "nothing": tuple(tokens_for(8192, 10**6)),
    }

    def find(tokens: tuple[int, ...]) -> None:
        index.lookup_exact(tokens) or index.lookup_prefix(tokens)

    figures = {f"{name}_ms": median_ms(partial(find, tokens)) for name, tokens in asked.items()}
    index.close()
    value = ", ".join(f"{figures[f'{name}_ms']:.2f} ms {name}" for name in asked)
    return {"ssd_look_up": {"value": f"{value}, among {stored:,}", "figures": {**figures, "sequences": stored}}}


def main() -> None:
    """Entry point."""
    logging.disable(logging.CRITICAL)
    told: dict[str, Told] = {"vllm-mlx": {}, "mlx-lm": {}}
    with tempfile.TemporaryDirectory(prefix="tiered-cache-peers-") as name:
        vllm, lm, index, tier = (Path(name, n) for n in ("vllm", "lm", "index", "tier"))
        for folder in (vllm, lm, index, tier):
            folder.mkdir()
        jobs: list[tuple[str, str, Callable[[], Told]]] = []
        for peer, kind in (("vllm-mlx", Vllm), ("mlx-lm", Lru)):
            for measure in (sharing, conversations, look_up):
                jobs.append((peer, measure.__name__, partial(measure, kind)))
        jobs.append(("vllm-mlx", "disk", lambda: vllm_disk(vllm)))
        jobs.append(("vllm-mlx", "tier", lambda: vllm_tier(tier)))
        jobs.append(("vllm-mlx", "ssd_look_up", lambda: vllm_ssd(index)))
        jobs.append(("mlx-lm", "disk", lambda: lm_disk(lm)))
        for peer, what, job in jobs:
            gc.collect()
            try:
                told[peer] |= job()
            except Exception as e:
                told[peer][what] = {"value": f"failed: {type(e).__name__}: {e}"[:200], "figures": {}}
                print(f"{peer}, {what}: {e!r}", file=sys.stderr)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
