"""The time of day for what outlives the process: ages, days of writing. Never for an order, and never going back."""

from __future__ import annotations

import time

DAY = 86_400  # seconds

# A clock that goes on while the machine sleeps, as macOS' monotonic one does.
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_start = time.time() - time.clock_gettime(_CLOCK)


def now() -> int:
    """Seconds since 1970 by the clock as it stood when the process began: later jumps of it are not followed."""
    return int(_start + time.clock_gettime(_CLOCK))


def today() -> int:
    """The day's number since 1970, UTC."""
    return now() // DAY
