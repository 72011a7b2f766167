"""Replays of public request traces through the real tree, eviction and admission."""

from __future__ import annotations

from pathlib import Path

from bench.result import Options, Result, Skipped
from tiered_cache.simulation import Simulation, read_trace

RAM, SSD = 1000, 5000  # blocks
AIMS = {"conversation": (0.17, 50_000), "synthetic": (0.31, 35_000)}  # tokens reused, blocks written


def replay(folder: Path, options: Options) -> list[Result]:
    """Share of the tokens reused, and blocks written, with RAM for 1,000 blocks and an SSD for 5,000."""
    if options.traces is None:
        raise Skipped("no traces; give their folder with --traces")
    results = []
    for name, (share, writes) in AIMS.items():
        path = options.traces / f"{name}_trace.jsonl"
        if not path.is_file():
            raise Skipped(f"{path} is not there")
        out = Simulation(RAM, SSD, 1).run(read_trace(path))
        ceiling = out.ceiling_tokens / out.tokens
        figures = {"share": out.share, "written": out.written, "read": out.read, "ceiling": ceiling}
        value = f"{out.share:.1%} (infinite: {ceiling:.1%}), {out.written / 1e3:.1f} k blocks written"
        aim = f">= {share:.0%}, <= {writes // 1000} k"
        met = out.share >= share and out.written <= writes
        what = f"{name} trace, RAM {RAM:,} and SSD {SSD:,} blocks: tokens reused, writes"
        results.append(Result(f"replay_{name}", what, value, aim, met, figures))
    return results
