"""The account of RAM: every byte of attention state that the cache holds is resident, queued or reserved."""

from __future__ import annotations


class Ledger:
    """`resident + queued + reserved <= limit`, at every moment. All figures are bytes.

    resident: blocks that can be evicted or kept; queued: blocks that wait for the SSD and stay until they are written;
    reserved: set aside for a promotion that is under way. Not locked: its owner's lock guards it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.resident = 0
        self.queued = 0
        self.reserved = 0
        self.peak = 0  # most bytes ever held, reservations included

    @property
    def free(self) -> int:
        """Bytes that may still be taken."""
        return self.limit - self.resident - self.queued - self.reserved

    def can_reserve(self, nbytes: int) -> bool:
        """Whether `nbytes` are free. Changes nothing."""
        return nbytes <= self.free

    def reserve(self, nbytes: int) -> bool:
        """Set bytes aside; False, and nothing changed, where they are not free."""
        if nbytes < 0:
            raise ValueError(f"a reservation of {nbytes} bytes; give 0 or more")
        if not self.can_reserve(nbytes):
            return False
        self.reserved += nbytes
        self.peak = max(self.peak, self.limit - self.free)
        return True

    def release(self, nbytes: int) -> None:
        """Give reserved bytes back. Raises ValueError for more than are reserved."""
        self._move("reserved", None, nbytes)

    def admit(self, nbytes: int) -> None:
        """Reserved bytes hold a block now."""
        self._move("reserved", "resident", nbytes)

    def drop(self, nbytes: int) -> None:
        """Resident bytes are free again."""
        self._move("resident", None, nbytes)

    def queue(self, nbytes: int) -> None:
        """Resident bytes wait for the SSD."""
        self._move("resident", "queued", nbytes)

    def unqueue(self, nbytes: int) -> None:
        """Queued bytes are written, or will not be: resident again."""
        self._move("queued", "resident", nbytes)

    def _move(self, source: str, target: str | None, nbytes: int) -> None:
        have = getattr(self, source)
        if not 0 <= nbytes <= have:
            raise ValueError(f"{nbytes} bytes to take from {source}, which holds {have}")
        setattr(self, source, have - nbytes)
        if target:
            setattr(self, target, getattr(self, target) + nbytes)

    def check_integrity(self, *, resident: int, queued: int, reserved: int) -> None:
        """Compare with sums recomputed from what is really there; AssertionError where they differ."""
        assert (self.resident, self.queued, self.reserved) == (resident, queued, reserved), (
            f"ledger {self.resident}+{self.queued}+{self.reserved}, really {resident}+{queued}+{reserved}"
        )
        assert self.free >= 0, f"over the limit by {-self.free} bytes"
