"""How long it takes to find a prefix among many: in RAM, and on the SSD."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

from bench.directories import Chain, fill, namespace_of
from bench.result import Options, Result, config, ram_only
from bench.state import Shapes, interleaved, realistic, seconds, tokens_for
from tiered_cache import Promotion, TieredCache

COUNTS = (10, 100, 1000, 5000)


def look_up(folder: Path, options: Options) -> list[Result]:
    """fetch of 8,192 tokens among 10 to 5,000 sequences that share their first 8,000: a stored one, and a new one."""
    counts = COUNTS[:3] if options.quick else COUNTS
    shared = tokens_for(8000, 0)
    state = realistic(8192, layers=1, heads=1, size=8)
    figures: dict[str, float] = {}
    # Longer than what is stored, as a next turn is; each falls elsewhere among the stored ones.
    new = itertools.cycle([shared + tokens_for(256, 10**6 + i) for i in range(10)])
    for count in counts:
        gc.collect()
        with TieredCache.open(ram_only("4GiB", max_entries=10_000), model=Shapes(1)) as cache:
            for seed in range(1, count + 1):
                assert cache.store(shared + tokens_for(192, seed), state)
            asked = shared + tokens_for(192, count // 2)
            find = partial(cache.ram.covered, asked, leave=1)
            times = interleaved(50, fetch=partial(cache.fetch, asked), find=find, new=partial(_fetch_next, cache, new))
            figures |= {f"{name}_{count}_ms": t * 1e3 for name, t in times.items()}
    most = counts[-1]
    results = []
    for kind, what in (("fetch", "a stored sequence of 8k tokens"), ("new", "8k tokens of which 8,000 are shared")):
        ms, few = figures[f"{kind}_{most}_ms"], figures[f"{kind}_{counts[0]}_ms"]
        value = f"{ms:.2f} ms ({figures[f'find_{most}_ms']:.2f} to find it), {ms / few:.2f} times that among 10"
        own = {k: v for k, v in figures.items() if not k.startswith("new" if kind == "fetch" else "fetch")}
        met = ms <= 1 and ms <= 1.5 * few
        results.append(Result(f"look_up_{kind}", f"fetch of {what} among {most:,}", value, "<= 1 ms, flat", met, own))
    return results


def _fetch_next(cache: TieredCache, requests: Iterator[list[int]]) -> None:
    cache.fetch(next(requests))


def ssd_look_up(folder: Path, options: Options) -> list[Result]:
    """`promote`, nothing read, among 10,000 sequences of 8,192 tokens on the SSD that share 8,000.

    The index is made directly, with files of one byte. The loop's thread is held meanwhile, so no read begins before
    the promotion is cancelled.
    """
    count = 1000 if options.quick else 10_000
    shared = tokens_for(8000, 0)
    model = Shapes(1)
    settings = config(folder)
    space = namespace_of(model)
    chains = (Chain(shared + tokens_for(192, seed)) for seed in range(1, count + 1))
    blocks = fill(folder / "cache", space, chains)
    taken: dict[str, list[float]] = {"all": [], "head": [], "nothing": []}
    with TieredCache.open(settings, model=model) as cache:
        loop = cache._runtime.promoter._loop if cache._runtime.promoter else None
        assert loop
        for turn in range(50):
            requests = {
                "all": shared + tokens_for(192, 1 + turn * (count // 50)),
                "head": shared + tokens_for(192, 10**6 + turn),
                "nothing": tokens_for(8192, 10**6 + turn),
            }
            for name, tokens in requests.items():
                held, go_on = threading.Event(), threading.Event()
                loop.call_soon_threadsafe(_hold, held, go_on)
                held.wait(10)
                found: list[Promotion | None] = []
                taken[name].append(seconds(partial(_promote, cache, tokens, found)))
                assert (found[0] is None) == (name == "nothing"), name
                if found[0]:
                    found[0].cancel()
                go_on.set()
                while cache.stats()["promotion"]["reading"]:  # else the next one wants what this one has given up
                    time.sleep(0.001)
    figures = {f"{name}_ms": median(values) * 1e3 for name, values in taken.items()} | {"blocks": blocks}
    worst = max(figures[f"{name}_ms"] for name in taken)
    value = (
        f"{figures['all_ms']:.2f} ms where all is found, {figures['head_ms']:.2f} where 8,000 tokens are, "
        f"{figures['nothing_ms']:.2f} where nothing is"
    )
    what = f"promote, without reading, among {count:,} sequences of 8k tokens on the SSD"
    return [Result("ssd_look_up", what, value, "<= 1 ms", worst <= 1, figures)]


def _hold(held: threading.Event, go_on: threading.Event) -> None:
    """Keep the loop's thread from reading anything."""
    held.set()
    go_on.wait(10)


def _promote(cache: TieredCache, tokens: list[int], found: list[Promotion | None]) -> None:
    found.append(cache.promote(tokens))
