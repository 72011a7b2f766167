"""What the caller's thread and the machine's RAM pay for what is kept."""

from __future__ import annotations

import gc
import resource
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np
import psutil

from bench.result import Options, Result, config, ram_only
from bench.state import Shapes, interleaved, realistic, seconds, tokens_for
from tiered_cache import TieredCache, layers


def eviction(folder: Path, options: Options) -> list[Result]:
    """The caller's time while 192 MiB leave RAM: clean blocks, and blocks that were just handed to the spill queue."""
    state = realistic()
    nbytes = layers.read_state(state, 2048).layout.token_bytes * 2048
    taken: dict[str, float] = {}
    with TieredCache.open(config(folder, max_memory=4 * nbytes), model=Shapes()) as cache:
        clean = []
        for seed in range(12):
            tokens = tokens_for(2048, seed)
            assert cache.store(tokens, state)
            assert cache.flush(60)
            if seed >= 4:  # RAM is full: make room for 192 MiB, and give it back
                clean.append(seconds(lambda: cache.ram.try_reserve_memory(nbytes)))
                cache.ram.release_reserved_memory(nbytes)
        taken["evict_ms"] = median(clean) * 1e3
        taken["losses"] = sum(cache.stats()["losses"].values())
        copy = np.empty(nbytes, np.uint8)
        source = np.ones(nbytes, np.uint8)
        taken["memcpy_ms"] = interleaved(5, copy=lambda: np.copyto(copy, source))["copy"] * 1e3
    value = f"{taken['evict_ms']:.2f} ms; copying them {taken['memcpy_ms']:.0f} ms"
    return [Result("eviction", "caller's time per evicted 192 MiB", value, "<= 2 ms", taken["evict_ms"] <= 2, taken)]


def next_turn(folder: Path, options: Options) -> list[Result]:
    """store of 32k tokens of which 30k are stored already, against copying the new part out of the state once.

    What was stored ends inside a block, so a few tokens are copied again.
    """
    count, new, repeat = (4, 2048, 5) if options.quick else (8, 2048, 7)
    before = 30_700
    total = before + new
    history = tokens_for(before, 0)
    state = realistic(before, layers=count)
    taken: dict[str, list[float]] = {"store": [], "copy": []}
    kept: list[list[np.ndarray]] = []  # as store keeps them: fresh memory every time
    with TieredCache.open(ram_only("8GiB"), model=Shapes(count)) as cache:
        assert cache.store(history, state)
        turn = realistic(new, layers=count)
        for layer, more in zip(state, turn, strict=True):
            layer.update_and_fetch(more.keys[..., :new, :], more.values[..., :new, :])
        rows = layers.read_state(state, total).rows
        for seed in range(1, repeat + 1):
            tokens = history + tokens_for(new, seed)
            taken["store"].append(seconds(partial(cache.store, tokens, state)))
            assert tokens in cache.ram
            taken["copy"].append(seconds(lambda: kept.append([r[:, :, before:total].copy() for r in rows])))
    figures = {f"{name}_ms": median(values) * 1e3 for name, values in taken.items()}
    figures["ratio"] = ratio = median(s / c for s, c in zip(taken["store"], taken["copy"], strict=True))
    value = f"{ratio:.2f} ({figures['store_ms']:.1f} ms; copying {figures['copy_ms']:.1f} ms)"
    what = "store of a next turn, 2k new of 32k tokens / copying the new part once"
    return [Result("next_turn", what, value, "<= 1.5", ratio <= 1.5, figures)]


def sharing(folder: Path, options: Options) -> list[Result]:
    """RAM for ten sequences of 10k tokens that share 8k, against the bytes of their distinct tokens."""
    count = 1 if options.quick else 4
    state = realistic(10_000, layers=count)
    shared = tokens_for(8000, 0)
    with TieredCache.open(ram_only("8GiB"), model=Shapes(count)) as cache:
        distinct = layers.read_state(state, 10_000).layout.token_bytes * (8000 + 10 * 2000)
        gc.collect()
        mx.clear_cache()
        before = psutil.Process().memory_info().rss
        for seed in range(1, 11):
            assert cache.store(shared + tokens_for(2000, seed), state)
        resident = cache.stats()["ram"]["resident"]
        grown = psutil.Process().memory_info().rss - before
    ratio = max(resident, grown) / distinct
    figures = {"resident_ratio": resident / distinct, "process_ratio": grown / distinct, "ratio": ratio}
    value = f"{resident / distinct:.3f} by our account, {grown / distinct:.3f} by the process's growth"
    what = "RAM for ten sequences that share 8k of 10k tokens / distinct bytes"
    return [Result("sharing", what, value, "<= 1.15", ratio <= 1.15, figures)]


def promotion_peak(folder: Path, options: Options) -> list[Result]:
    """What the process grows by at most while 192 MiB come back, until they are in RAM, and with the host's state.

    Another process has written them: nothing is left over that memory could be taken from.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        nbytes = process.submit(_write, folder).result()
    with TieredCache.open(config(folder), model=Shapes()) as cache:
        before = psutil.Process().memory_info().rss
        promotion = cache.promote(tokens_for(2048, 1))
        assert promotion
        ready = threading.Event()
        promotion.add_done_callback(lambda _: ready.set())
        assert ready.wait(60)
        in_ram = (_peak() - before) / nbytes
        state, _ = promotion.result(0)
        assert state
        with_state = (_peak() - before) / nbytes
    figures = {"in_ram": in_ram, "with_state": with_state}
    value = f"{in_ram:.2f} until it is in RAM, {with_state:.2f} with the host's own state"
    return [Result("peak", "peak memory of promoting 192 MiB / its bytes", value, "<= 1.3", in_ram <= 1.3, figures)]


def _write(folder: Path) -> int:
    state = realistic()
    with TieredCache.open(config(folder), model=Shapes()) as cache:
        assert cache.store(tokens_for(2048, 1), state)
    return layers.read_state(state, 2048).layout.token_bytes * 2048


def _peak() -> int:
    """The most RAM that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
