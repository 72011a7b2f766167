"""Traffic as agents make it, for replays: shared system prompt and tools, growing conversations, pauses, one-shots."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator

from tiered_cache.simulation import BLOCK_TOKENS, Request

SYSTEM = 20_000  # tokens of system prompt and tools that all agents share
FIRST = 10_000  # tokens of a task's first request
TURN_IN, TURN_OUT = 2_000, 900  # tokens of a tool's result, and of an answer
TURNS = 60  # of a task, after which the agent takes up another
ONE_SHOT = 0.3  # of the requests stand alone
PAUSE = 8.0  # seconds that a tool takes, on average


def agents(count: int, turns: int = TURNS, seed: int = 0) -> Iterator[Request]:
    """Requests of so many agents, each through one task of `turns` turns, in the order in which they come."""
    rng = random.Random(seed)
    ids = itertools.count(SYSTEM // BLOCK_TOKENS + 1)
    shared = list(range(SYSTEM // BLOCK_TOKENS))
    lengths = [SYSTEM + FIRST] * count
    talks: list[list[int]] = [list(shared) for _ in range(count)]
    due = [(rng.expovariate(1 / PAUSE), agent, 0) for agent in range(count)]
    heapq.heapify(due)
    while due:
        at, agent, turn = heapq.heappop(due)
        talk = talks[agent]
        _grow(talk, lengths[agent], ids)
        yield Request(lengths[agent], list(talk))
        lengths[agent] += TURN_IN + TURN_OUT
        if rng.random() < ONE_SHOT / (1 - ONE_SHOT):
            alone = list(shared)
            _grow(alone, SYSTEM + FIRST, ids)
            yield Request(SYSTEM + FIRST, alone)
        if turn + 1 < turns:
            heapq.heappush(due, (at + rng.expovariate(1 / PAUSE), agent, turn + 1))


def _grow(talk: list[int], length: int, ids: Iterator[int]) -> None:
    """Extend to so many tokens: what was a shorter last block is another one now."""
    whole = length // BLOCK_TOKENS
    if len(talk) > whole:
        return
    del talk[max(SYSTEM // BLOCK_TOKENS, len(talk) - 1) :]
    while len(talk) * BLOCK_TOKENS < length:
        talk.append(next(ids))
