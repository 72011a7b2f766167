"""The time of day for what outlives the process: ages, days of writing. Never for an order, and never going back."""

from __future__ import annotations

import time

DAY = 86_400  # seconds

_start = time.time() - time.monotonic()


def now() -> int:
    """Seconds since 1970 by the clock as it stood when the process began: later jumps of it are not followed."""
    return int(_start + time.monotonic())


def today() -> int:
    """The day's number since 1970, UTC."""
    return now() // DAY
