"""Counters for people and programs: what was handed out, and every loss with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MB = 2**20
FADING = 0.8  # weight of what was observed before


class Rate:
    """How much a second, lately: an average in which each observation counts less the older it is. Any thread."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    @property
    def value(self) -> float | None:
        """The rate; None until something has been observed."""
        return self._amount / self._seconds if self._seconds > 0 else None

    def seconds(self, amount: float) -> float | None:
        """How long so much takes; None where that is not known."""
        return amount * self._seconds / self._amount if self._seconds > 0 else None

    def add(self, amount: float, seconds: float) -> None:
        """An observation. What took no time, or was nothing, says nothing."""
        if amount > 0 and seconds > 0:
            self._amount, self._seconds = FADING * self._amount + amount, FADING * self._seconds + seconds


@dataclass
class CacheStats:
    """Counts of one RAM tier. `hits` and `tokens_saved` count what was handed out; bytes are bytes of state in RAM."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    tokens_saved: int = 0
    current_memory_bytes: int = 0
    max_memory_bytes: int = 0
    entry_count: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits / completed look-ups; 0.0 with none."""
        looked_up = self.hits + self.misses
        return self.hits / looked_up if looked_up else 0.0

    @property
    def memory_utilization(self) -> float:
        """Share of the limit in use; 0.0 with no limit."""
        return self.current_memory_bytes / self.max_memory_bytes if self.max_memory_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON: memory in MB (2**20 bytes, 2 digits), rates with 4 digits."""
        fields = asdict(self)
        current, limit = fields.pop("current_memory_bytes"), fields.pop("max_memory_bytes")
        return {
            **fields,
            "hit_rate": round(self.hit_rate, 4),
            "current_memory_mb": round(current / MB, 2),
            "max_memory_mb": round(limit / MB, 2),
            "memory_utilization": round(self.memory_utilization, 4),
        }


def losses(*counters: Mapping[str, int]) -> dict[str, int]:
    """All counters of losses and refusals, by reason; reasons that never happened are left out."""
    found: dict[str, int] = {}
    for counter in counters:
        for name, value in counter.items():
            if value and name.startswith(("lost_", "refused_", "miss_", "read_failed")):
                found[name] = found.get(name, 0) + value
    return dict(sorted(found.items()))
