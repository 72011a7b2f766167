"""What is worth writing to the SSD: everything until its budget is first full, then what was seen before.

Most blocks of most traffic are never asked for again. On a full SSD each would push out another, and wear the disk; one
that comes a second time has shown its worth.
"""

from __future__ import annotations

from array import array
from typing import Literal

Policy = Literal["second-touch", "all"]

# Keys remembered for each block on a full SSD, at four bytes each. On public traces, a list of the last four per block
# writes as much and is hit as often as a table of two per block, in which some keys live longer and some shorter.
SLOTS_A_BLOCK = 2


class Ghosts:
    """Keys of blocks that were seen lately and are gone: a table of tags, in which a new key may displace an older one.

    Wrong once in four billion, and then only for one block that is written without need.
    """

    def __init__(self, slots: int) -> None:
        """`slots`: a power of two."""
        self._tags = array("I", bytes(4 * slots))
        self._mask = slots - 1

    def add(self, key: bytes) -> None:
        """Remember a chain key."""
        slot, tag = self._place(key)
        self._tags[slot] = tag

    def discard(self, key: bytes) -> None:
        """Forget it."""
        slot, tag = self._place(key)
        if self._tags[slot] == tag:
            self._tags[slot] = 0

    def __contains__(self, key: bytes) -> bool:
        slot, tag = self._place(key)
        return self._tags[slot] == tag

    def _place(self, key: bytes) -> tuple[int, int]:
        return int.from_bytes(key[:4], "little") & self._mask, int.from_bytes(key[4:8], "little") | 1


class Admission:
    """Any thread: each operation is one look at a table."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.full = False  # the budget: something had to go for something new
        self._ghosts = Ghosts(1)

    def fill(self, blocks: int) -> None:
        """The budget is full, with so many blocks."""
        if not self.full:
            self.full = True
            self._ghosts = Ghosts(1 << (SLOTS_A_BLOCK * blocks).bit_length() >> 1 or 1)

    def admits(self, key: bytes) -> bool:
        """Whether a block that has not been asked for since it was computed may be written. Changes nothing."""
        return self.policy == "all" or not self.full or key in self._ghosts

    def saw(self, key: bytes) -> None:
        """A block has left RAM without being written."""
        self._ghosts.add(key)

    def wrote(self, key: bytes) -> None:
        """A block is on the SSD; should it have to leave, it must show its worth anew."""
        self._ghosts.discard(key)
