"""Run all measurements and print them as a table, or JSON with `--json`. A few minutes."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from bench.state import Shapes, drop_from_page_cache, interleaved, real, realistic, seconds, tokens_for
from ssd_tier.codec import encode
from tiered_cache import TieredCache, layers

MIB = 2**20


class Result(NamedTuple):
    """One line of the table. `aim` is what the project wants to hold, as text."""

    what: str
    value: str
    aim: str
    figures: dict[str, float]


def config(folder: Path, **ram: Any) -> dict[str, Any]:
    """A cache of its own for one measurement."""
    return {
        "ram": {"max_memory": "4GiB", **ram},
        "ssd": {"path": str(folder / "cache"), "budget": "20GB", "min_free": "100MB", "close_deadline": "60s"},
    }


def compression(folder: Path) -> list[Result]:
    """Bytes in files / bytes of state, lossless, and the order-0 entropy bound of the same bytes."""
    results = []
    for name, state, tokens in (("realistic", realistic(), 2048), ("SmolLM2's", real(768), 768)):
        view = layers.read_state(state, tokens)
        blocks = [layers.cut(view, i, i + 256) for i in range(0, tokens, 256)]
        kept = sum(len(part.data) for b in blocks for part in encode(b, "BF16", 1)) / sum(map(len, blocks))
        words = np.concatenate(blocks).view(np.uint16)
        share = np.bincount((words >> 7) & 255, minlength=256) / words.size
        share = share[share > 0]
        bound = float((8 - (share * np.log2(share)).sum()) / 16)
        figures = {"ratio": kept, "order0_bound": bound}
        results.append(
            Result(f"bytes in files / bytes of {name} state", f"{kept:.3f}, bound {bound:.3f}", "<= 0.70", figures)
        )
    return results


def eviction(folder: Path) -> list[Result]:
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
        taken["evict_ms"] = sorted(clean)[len(clean) // 2] * 1e3
        taken["losses"] = sum(cache.stats()["losses"].values())
        copy = np.empty(nbytes, np.uint8)
        source = np.ones(nbytes, np.uint8)
        taken["memcpy_ms"] = interleaved(5, copy=lambda: np.copyto(copy, source))["copy"] * 1e3
    value = f"{taken['evict_ms']:.2f} ms; copying them {taken['memcpy_ms']:.0f} ms"
    return [Result("caller's time per evicted 192 MiB", value, "<= 2 ms", taken)]


def look_up(folder: Path) -> list[Result]:
    """fetch of 8,192 tokens among 10 and 5,000 sequences that share their first 8,000."""
    shared = tokens_for(8000, 0)
    state = realistic(8192, layers=1, heads=1, size=8)
    medians: dict[str, float] = {}
    for count in (10, 5000):
        gc.collect()
        with TieredCache.open(
            {"ram": {"max_memory": "4GiB", "max_entries": 10_000}, "ssd": {"enabled": False}}, model=Shapes(1)
        ) as cache:
            for seed in range(1, count + 1):
                assert cache.store(shared + tokens_for(192, seed), state)
            asked = shared + tokens_for(192, count // 2)
            fetch, find = partial(cache.fetch, asked), partial(cache.ram.covered, asked, leave=1)
            times = interleaved(50, fetch=fetch, find=find)
            medians |= {f"{name}_{count}_ms": t * 1e3 for name, t in times.items()}
    ratio = medians["fetch_5000_ms"] / medians["fetch_10_ms"]
    value = (
        f"{medians['fetch_5000_ms']:.2f} ms ({medians['find_5000_ms']:.2f} to find them), "
        f"{ratio:.2f} times the time among 10"
    )
    return [Result("fetch of 8k tokens among 5,000 sequences", value, "<= 1 ms, flat", medians)]


def promotion(folder: Path) -> list[Result]:
    """192 MiB from a cold page cache to a state the model can use, against `mx.load` of the same arrays as they are."""
    state, tokens = realistic(), tokens_for(2048, 1)
    plain = folder / "plain.safetensors"
    arrays = {f"{i}.{name}": getattr(layer, name) for i, layer in enumerate(state) for name in ("keys", "values")}
    mx.save_safetensors(str(plain), arrays)
    with TieredCache.open(config(folder), model=Shapes()) as cache:
        assert cache.store(tokens, state)
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
            9,
            a=forget,
            promote=ours,
            b=forget,
            mx_load=lambda: mx.eval(mx.load(str(plain))),
            c=forget,
            read=lambda: [p.read_bytes() for p in files],
        )
    figures = {name: times[name] * 1e3 for name in ("promote", "mx_load", "read")}
    ratio = figures["mx_load"] / figures["promote"]
    value = (
        f"{figures['promote']:.0f} ms, mx.load {figures['mx_load']:.0f} ms: {ratio:.2f} times as fast; "
        f"reading our files alone {figures['read']:.0f} ms"
    )
    return [Result("promotion of 192 MiB, cold", value, ">= 1.0 times mx.load", {**figures, "ratio": ratio})]


MEASUREMENTS: dict[str, Callable[[Path], list[Result]]] = {
    "compression": compression,
    "eviction": eviction,
    "look_up": look_up,
    "promotion": promotion,
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *MEASUREMENTS], help="only these")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: list[Result] = []
    for name in arguments.names or MEASUREMENTS:
        folder = Path(tempfile.mkdtemp(prefix="tiered-cache-bench-"))
        try:
            results += MEASUREMENTS[name](folder)
        finally:
            shutil.rmtree(folder)
    machine = {
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "tiered-cache")},
    }
    if arguments.json:
        print(json.dumps({"machine": machine, "results": [r._asdict() for r in results]}, indent=2))
        return
    table = Table("measured", "result", "aim", title=", ".join(f"{k} {v}" for k, v in machine.items()))
    for r in results:
        table.add_row(r.what, r.value, r.aim)
    Console(width=None if Console().is_terminal else 160).print(table)


if __name__ == "__main__":
    main()
