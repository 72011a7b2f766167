"""What a process that is to be killed stores: sequences that every process knows by their numbers."""

from __future__ import annotations

import random

SHARED = 300  # tokens that all sequences begin with


def sequence(number: int) -> list[int]:
    """The same tokens for the same number, in every process."""
    rng = random.Random(number)
    return [7] * SHARED + [rng.randrange(500) for _ in range(rng.randrange(50, 700))]
