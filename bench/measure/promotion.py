"""Bringing state back from the SSD: how long it takes, and what other threads feel of it."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from statistics import median

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from bench.result import Options, Result, config
from bench.state import Shapes, drop_from_page_cache, interleaved, realistic, seconds, tokens_for
from tiered_cache import TieredCache

TICK = 0.001  # seconds that the other thread sleeps at a time


def promotion(folder: Path, options: Options) -> list[Result]:
    """192 MiB from a cold page cache to a state the model can use, against `mx.load` of the same arrays as they are.

    And the way there: until they are written.
    """
    state, tokens = realistic(), tokens_for(2048, 1)
    plain = folder / "plain.safetensors"
    arrays = {f"{i}.{name}": getattr(layer, name) for i, layer in enumerate(state) for name in ("keys", "values")}
    saves, plain_saves = [], []
    for i in range(3):
        place = folder / str(i)
        place.mkdir()
        with TieredCache.open(config(place), model=Shapes()) as cache:
            saves.append(seconds(partial(_save, cache, tokens, state)))
        plain_saves.append(seconds(lambda: mx.save_safetensors(str(plain), arrays)))
    folder = place
    files = [p for p in (folder / "cache" / "blobs").rglob("*") if p.is_file()]

    with TieredCache.open(config(folder), model=Shapes()) as cache:

        def ours() -> None:
            promotion = cache.promote(tokens)
            assert promotion
            promoted, remaining = promotion.result(60)
            assert promoted
            assert len(remaining) == 1

        def forget() -> None:
            cache.ram.clear()
            drop_from_page_cache([*files, plain])

        times = interleaved(
            5 if options.quick else 9,
            a=forget,
            promote=ours,
            b=forget,
            mx_load=lambda: mx.eval(mx.load(str(plain))),
            c=forget,
            read=lambda: [p.read_bytes() for p in files],
        )
    figures = {name: times[name] * 1e3 for name in ("promote", "mx_load", "read")}
    figures["ratio"] = ratio = figures["mx_load"] / figures["promote"]
    value = (
        f"{figures['promote']:.0f} ms, mx.load {figures['mx_load']:.0f} ms: {ratio:.2f} times as fast; "
        f"reading our files alone {figures['read']:.0f} ms"
    )
    saved = {"save": median(saves) * 1e3, "mx_save": median(plain_saves) * 1e3}
    to_disk = f"{saved['save']:.0f} ms, mx.save_safetensors {saved['mx_save']:.0f} ms"
    return [
        Result("load", "promotion of 192 MiB, cold", value, ">= 1.0 times mx.load", ratio >= 1, figures),
        Result("save", "192 MiB stored and written to the SSD", to_disk, "", None, saved),
    ]


def _save(cache: TieredCache, tokens: list[int], state: list[KVCache]) -> None:
    assert cache.store(tokens, state)
    assert cache.flush(60)


class Watch(threading.Thread):
    """A thread that sleeps a millisecond at a time and notes how much later it woke up."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.longest = 0.0

    def run(self) -> None:
        last = time.perf_counter()
        while not self._ended.is_set():
            time.sleep(TICK)
            now = time.perf_counter()
            self.longest = max(self.longest, now - last - TICK)
            last = now

    def take(self) -> float:
        """The longest pause since the last call, in milliseconds."""
        longest, self.longest = self.longest, 0.0
        return longest * 1e3

    def end(self) -> None:
        """Stop."""
        self._ended.set()
        self.join()


def pauses(folder: Path, options: Options) -> list[Result]:
    """The longest pause of another Python thread while 1 GB (--quick: 256 MB) is promoted: while the blocks are read,
    and while the model's thread joins them to a state. The medians of five promotions; beside them, an idle second."""
    count = 2560 if options.quick else 10_240  # tokens of 96 KiB
    tokens = tokens_for(count, 1)
    with TieredCache.open(config(folder), model=Shapes()) as cache:
        assert cache.store(tokens, realistic(count))
    watch = Watch()
    longest: dict[str, list[float]] = {"idle": [], "reading": [], "joining": []}
    with TieredCache.open(config(folder), model=Shapes()) as cache:
        watch.start()
        for _ in range(5):
            cache.ram.clear()
            time.sleep(0.1)
            watch.take()
            time.sleep(1)
            longest["idle"].append(watch.take())
            promotion = cache.promote(tokens)
            assert promotion
            ready = threading.Event()
            promotion.add_done_callback(partial(_tell, ready))
            assert ready.wait(120)
            longest["reading"].append(watch.take())
            state, _ = promotion.result(0)
            longest["joining"].append(watch.take())
            assert state
            del state, promotion
        watch.end()
    figures = {f"{name}_ms": median(values) for name, values in longest.items()}
    figures |= {f"{name}_worst_ms": max(values) for name, values in longest.items()}
    worst = max(figures["reading_ms"], figures["joining_ms"])
    value = (
        f"{worst:.1f} ms ({figures['reading_ms']:.1f} while reading, {figures['joining_ms']:.1f} while joining, "
        f"{figures['idle_ms']:.1f} while idle; worst of five {max(map(max, longest.values())):.1f})"
    )
    what = f"longest pause of another Python thread while {count * 98304 / 1e9:.2f} GB is promoted"
    return [Result("pauses", what, value, "<= 10 ms", worst <= 10, figures)]


def _tell(ready: threading.Event, _: object) -> None:
    ready.set()
