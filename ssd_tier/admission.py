"""What is worth writing to the SSD: everything until its budget is first full, then what was seen before.

Most blocks of most traffic are never asked for again. On a full SSD each would push out another, and wear the disk; one
that comes a second time has shown its worth.
"""

from __future__ import annotations

from array import array
from typing import Literal

Policy = Literal["second-touch", "all"]

SLOTS = 1 << 21  # keys remembered, at four bytes each: four times as many as 250,000 blocks, less what collides


class Ghosts:
    """Keys of blocks that were seen lately and are gone: a table of tags, in which a new key may displace an older one.

    Wrong once in four billion, and then only for one block that is written without need.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        """`slots`: a power of two."""
        self._tags = array("I", bytes(4 * slots))
        self._mask = slots - 1

    def add(self, key: bytes) -> None:
        """Remember a chain key."""
        slot, tag = self._place(key)
        self._tags[slot] = tag

    def __contains__(self, key: bytes) -> bool:
        slot, tag = self._place(key)
        return self._tags[slot] == tag

    def _place(self, key: bytes) -> tuple[int, int]:
        return int.from_bytes(key[:4], "little") & self._mask, int.from_bytes(key[4:8], "little") | 1


class Admission:
    """Any thread: each operation is one look at a table."""

    def __init__(self, policy: Policy, slots: int = SLOTS) -> None:
        self.policy = policy
        self.full = False  # the budget: something had to go for something new
        self._ghosts = Ghosts(slots if policy == "second-touch" else 1)

    def admits(self, key: bytes) -> bool:
        """Whether a block that has not been asked for since it was computed may be written. Changes nothing."""
        return self.policy == "all" or not self.full or key in self._ghosts

    def saw(self, key: bytes) -> None:
        """A block has left without being written, or has left the SSD."""
        self._ghosts.add(key)
