"""Agents that take turns for hours: how many bytes the SSD has to take for what is new."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from bench.result import Options, Result, config
from bench.state import Shapes, realistic, tokens_for
from tiered_cache import TieredCache, layers
from tiered_cache.traffic import FIRST, SYSTEM, TURN_IN, TURN_OUT, TURNS

AGENTS = 8
TURN = TURN_IN + TURN_OUT
HEADS, HEAD_SIZE = 4, 64  # of one layer: 1 KiB a token
MAX_MEMORY = 256 << 20  # bytes: of eight agents' histories RAM holds one


def written(folder: Path, options: Options) -> list[Result]:
    """Eight agents, 60 turns each (--quick: 10): each brings its history back, and stores the whole of it after every
    turn. Bytes written / bytes of state of distinct tokens.
    """
    turns = 10 if options.quick else TURNS
    longest = SYSTEM + FIRST + turns * TURN
    (layer,) = realistic(longest, layers=1, heads=HEADS, size=HEAD_SIZE)
    shared = tokens_for(SYSTEM, 0)
    histories = [shared + tokens_for(longest - SYSTEM, seed) for seed in range(1, AGENTS + 1)]
    with TieredCache.open(config(folder, max_memory=MAX_MEMORY), model=Shapes(1)) as cache:
        per_token = layers.read_state([layer], longest).layout.token_bytes
        again = 0
        for turn in range(1, turns + 1):
            for history in histories:
                before, tokens = turn_of(history, turn - 1), turn_of(history, turn)
                promotion = cache.promote(before) if turn > 1 else None
                _, rest = promotion.result(60) if promotion else cache.fetch(before)
                again += len(rest) if turn > 1 else 0
                cache.store(tokens, [head_of(layer, len(tokens))])
        assert cache.flush(300)
        stats = cache.stats()
    distinct = (SYSTEM + AGENTS * (longest - SYSTEM)) * per_token
    whole = sum(len(turn_of(h, t)) for h in histories for t in range(1, turns + 1)) * per_token
    figures = {
        "ratio": stats["ssd"]["bytes_written"] / distinct,
        "whole_entries": whole / distinct,
        "recomputed": again / (sum(len(turn_of(h, t)) for h in histories for t in range(1, turns))),
        "losses": sum(stats["losses"].values()),
    }
    value = (
        f"{figures['ratio']:.2f}; whole entries, as they are: {figures['whole_entries']:.1f}; "
        f"{figures['recomputed']:.1%} of the histories computed again"
    )
    what = f"bytes written / distinct bytes, {AGENTS} agents, {turns} turns"
    return [Result("written", what, value, "<= 0.75", figures["ratio"] <= 0.75, figures)]


def turn_of(history: list[int], turn: int) -> list[int]:
    """What has been said after so many turns."""
    return history[: SYSTEM + FIRST + turn * TURN]


def head_of(layer: KVCache, tokens: int) -> KVCache:
    """The state of the first tokens, nothing copied."""
    head = KVCache()
    head.keys, head.values, head.offset = layer.keys[..., :tokens, :], layer.values[..., :tokens, :], tokens
    mx.eval(head.keys, head.values)
    return head
