"""A process that stores without end, to be killed."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from typing import Any

from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache

SHAPE = {"layers": 4, "heads": 4, "dim": 64}
SHARED = 300  # tokens that all sequences begin with


def sequence(number: int) -> list[int]:
    """The same tokens for the same number, in every process."""
    rng = random.Random(number)
    return [7] * SHARED + [rng.randrange(500) for _ in range(rng.randrange(50, 700))]


def run(config: dict[str, Any], first: int, pipe: Connection) -> None:
    """Store sequences `first`, `first + 1`, ...; say what is stored before, and what is flushed after the fact."""
    rng = random.Random(first)
    with TieredCache.open(config, model=ShapeOnlyModel(layers=4)) as cache:
        number = first
        pipe.send(("ready", number))
        while True:
            tokens = sequence(number)
            pipe.send(("storing", number))
            if not cache.store(tokens, state_of(tokens, **SHAPE)):  # too fast for the disk: nothing can make room
                cache.flush(30)
                assert cache.store(tokens, state_of(tokens, **SHAPE)), cache.stats()
            number += 1
            if rng.random() < 0.2:
                upto = number
                if cache.flush(30):
                    pipe.send(("flushed", upto))
            if rng.random() < 0.3 and (promotion := cache.promote(sequence(rng.randrange(first + 1)))):
                promotion.result(30)
