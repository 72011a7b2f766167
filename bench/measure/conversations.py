"""Conversations that take turns, more of them than RAM has room for."""

from __future__ import annotations

import time
from math import inf
from pathlib import Path

from mlx_lm.models.cache import KVCache

from bench.result import Options, Result, config
from bench.state import Shapes, realistic, tokens_for
from tiered_cache import TieredCache, layers

COUNT, ROOM = 12, 5  # conversations; how many of them RAM holds
LENGTHS = (1024, 1536, 2048)  # tokens after each round
SYSTEM = 512  # tokens of a shared system prompt
SPEED = 10_000  # tokens a second that the model would compute; at 32 KiB a token, 330 MB of new state a second


def head_of(state: list[KVCache], tokens: int) -> list[KVCache]:
    """The state of the first tokens."""
    heads = []
    for layer in state:
        head = KVCache()
        head.update_and_fetch(layer.keys[..., :tokens, :], layer.values[..., :tokens, :])
        heads.append(head)
    return heads


def play(cache: TieredCache, states: list[list[KVCache]], shared: int, speed: float) -> int:
    """Tokens reused in all rounds: bring back what there is, wait as computing the rest would take, store the turn."""
    system = tokens_for(shared, 99)
    conversations = [system + tokens_for(LENGTHS[-1] - shared, seed) for seed in range(COUNT)]
    reused = 0
    for length, state in zip(LENGTHS, states, strict=True):
        for conversation in conversations:
            tokens = conversation[:length]
            promotion = cache.promote(tokens)
            _, remaining = promotion.result(60) if promotion else cache.fetch(tokens)
            reused += length - len(remaining)
            time.sleep(len(remaining) / speed)
            cache.store(tokens, state)
    return reused


def conversations(folder: Path, options: Options) -> list[Result]:
    """The share of the reuse that infinite RAM gives: with the time that computing takes, and as fast as turns can
    follow without."""
    count = 2 if options.quick else 8
    longest = realistic(LENGTHS[-1], layers=count)
    states = [head_of(longest, n) for n in LENGTHS]
    room = ROOM * LENGTHS[-1] * layers.read_state(longest, LENGTHS[-1]).layout.token_bytes
    results = []
    for name, shared in (("without", 0), ("with", SYSTEM)):
        figures: dict[str, float] = {}
        for kind, memory, speed in (("infinite", 16 * room, inf), ("ours", room, SPEED), ("hurried", room, inf)):
            place = folder / f"{name}-{kind}"
            place.mkdir()
            settings = config(place, max_memory=memory)
            settings["ssd"]["enabled"] = kind != "infinite"
            with TieredCache.open(settings, model=Shapes(count)) as cache:
                figures[kind] = play(cache, states, shared, speed)
                figures[f"{kind}_lost"] = sum(cache.stats()["losses"].values())
        figures["ratio"] = ratio = figures["ours"] / figures["infinite"]
        figures["hurried_ratio"] = hurried = figures["hurried"] / figures["infinite"]
        value = f"{ratio:.1%} ({hurried:.1%} where computing takes no time)"
        what = f"{COUNT} conversations, RAM for {ROOM}, {name} a shared system prompt: reuse / that of infinite RAM"
        results.append(Result(f"reuse_{name}", what, value, ">= 98 %", ratio >= 0.98, figures))
    return results
