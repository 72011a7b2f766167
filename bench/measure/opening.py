"""How long it takes to open a cache that holds many blocks, and what RAM its index takes."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import psutil

from bench.directories import Chain, fill, namespace_of
from bench.result import Options, Result, config
from bench.state import Shapes, tokens_for
from tiered_cache import TieredCache

BLOCKS_EACH = 40  # of a sequence


def opening(folder: Path, options: Options) -> list[Result]:
    """Open 20,000 blocks (--full: 100,000) three times, each in a process of its own.

    The index is in the page cache.
    """
    count = 100_000 if options.full else 2000 if options.quick else 20_000
    space = namespace_of(Shapes(1))
    fill(folder / "cache", space, (Chain(tokens_for(256 * BLOCKS_EACH, i)) for i in range(count // BLOCKS_EACH)))
    runs = [json.loads(_open_apart(folder)) for _ in range(3)]
    figures = {name: median(run[name] for run in runs) for name in ("seconds", "rss_mb", "blocks", "index_mb")}
    assert figures["blocks"] == count
    met = figures["seconds"] <= count / 100_000 and figures["rss_mb"] <= 250 * count / 100_000 if options.full else None
    value = f"{figures['seconds']:.2f} s, {figures['rss_mb']:.0f} MB (token ids alone: {count * 2048 / 1e6:.0f} MB)"
    aim = "<= 1 s, <= 250 MB" if options.full else "at 100,000: <= 1 s, <= 250 MB"
    return [Result("opening", f"open with {count:,} blocks indexed: time, growth of RSS", value, aim, met, figures)]


def _open_apart(folder: Path) -> str:
    code = "import sys; from bench.measure.opening import child; child(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout


def child(name: str) -> None:
    """In a process of its own: open once, print what it took."""
    folder = Path(name)
    model = Shapes(1)
    namespace_of(model)  # all that is imported late is there before
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    started = time.perf_counter()
    with TieredCache.open(config(folder), model=model) as cache:
        taken = time.perf_counter() - started
        grown = process.memory_info().rss - before
        tier = cache._runtime.tier
        assert tier
        index = (folder / "cache" / "index.sqlite").stat().st_size
        found = {"seconds": taken, "rss_mb": grown / 1e6, "blocks": len(tier.catalog), "index_mb": index / 1e6}
    print(json.dumps(found))
