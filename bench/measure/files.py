"""Blocks to files: how small, and how fast."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench.result import Options, Result, Skipped, config
from bench.state import Shapes, real, realistic, seconds, tokens_for
from ssd_tier.blob import Block, encode_blob
from ssd_tier.codec import encode
from tiered_cache import TieredCache, layers
from tiered_cache.demo.smollm2 import ModelMissing

WRITERS = 2  # threads that the SSD tier encodes in


def compression(folder: Path, options: Options) -> list[Result]:
    """Bytes in files / bytes of state, lossless, and the order-0 entropy bound of the same bytes."""
    results = []
    for name, make, tokens in (("realistic", realistic, 2048), ("SmolLM2's", real, 768)):
        try:
            state = make(tokens)
        except ModelMissing as e:
            why = f"skipped: {str(e) or 'SmolLM2 is not installed'}"
            results.append(Result(f"bytes_{name}", f"bytes of {name} state", why, "", None, {}))
            continue
        view = layers.read_state(state, tokens)
        blocks = [layers.cut(view, i, i + 256) for i in range(0, tokens, 256)]
        kept = sum(len(part.data) for b in blocks for part in encode(b, "BF16", 1)) / sum(map(len, blocks))
        words = np.concatenate(blocks).view(np.uint16)
        share = np.bincount((words >> 7) & 255, minlength=256) / words.size
        share = share[share > 0]
        bound = float((8 - (share * np.log2(share)).sum()) / 16)
        figures = {"ratio": kept, "order0_bound": bound}
        what = f"bytes in files / bytes of {name} state"
        results.append(Result(f"bytes_{name}", what, f"{kept:.3f}, bound {bound:.3f}", "<= 0.70", kept <= 0.7, figures))
    return results


def encode_all(workers: ThreadPoolExecutor, blocks: list[Block]) -> None:
    """Encode them and let go of the result, as the writer does."""
    for _ in workers.map(lambda block: len(encode_blob(block, 1)), blocks):
        pass


def spilling(folder: Path, options: Options) -> list[Result]:
    """State written to the SSD a second, from RAM to the last commit, against encoding alone in as many threads."""
    sequences = 1 if options.quick else 3
    state = realistic()
    rates: dict[str, list[float]] = {"spill": [], "encode": []}
    with TieredCache.open(config(folder), model=Shapes()) as cache, ThreadPoolExecutor(WRITERS) as workers:
        for round_ in range(3):
            before = set(cache.ram.pool.resident())
            for i in range(sequences):
                if not cache.store(tokens_for(2048, round_ * sequences + i), state):
                    raise Skipped("the state was not stored")
            blocks = [n.block for n in cache.ram.pool.resident() if n.block and n not in before]
            nbytes = sum(b.nbytes for b in blocks)
            encoding = partial(encode_all, workers, blocks)
            rates["encode"].append(nbytes / seconds(encoding) / 1e6)
            rates["spill"].append(nbytes / seconds(partial(cache.flush, 300)) / 1e6)
            cache.ram.clear()
        lost = sum(cache.stats()["losses"].values())
    spill, alone = median(rates["spill"]), median(rates["encode"])
    ratio = median(s / e for s, e in zip(rates["spill"], rates["encode"], strict=True))
    figures = {"spill_mb_s": spill, "encode_mb_s": alone, "ratio": ratio, "lost": lost}
    value = f"{ratio:.2f} ({spill:.0f} MB/s; {WRITERS} threads encode {alone:.0f} MB/s)"
    return [Result("spill", "spill throughput / encoding alone", value, ">= 0.8", ratio >= 0.8, figures)]
