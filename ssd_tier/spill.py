"""The spill queue: what waits to be written to the SSD, and who is told what became of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ssd_tier.blob import Block
from ssd_tier.catalog import Entry


class Listener(Protocol):
    """Who is told what became of blocks. Called on the loop thread; must not block."""

    def on_stored(self, entries: Sequence[Entry]) -> None:
        """These are on the SSD and in the index now."""

    def on_lost(self, blocks: Sequence[Block], reason: str) -> None:
        """These were spilled and will not be written."""

    def on_removed(self, entries: Sequence[Entry]) -> None:
        """These are no longer on the SSD."""

    def on_back(self) -> None:
        """The disk takes blocks again, after a time when it took none."""

    def on_closed(self) -> None:
        """Nothing is taken, read or removed any more."""


class SpillQueue:
    """Blocks that wait for the writer, oldest first, bounded in bytes. Any thread may `put`; the writer takes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0  # waiting and being written
        self._waiting: deque[Block] = deque()
        self._taken = 0
        self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting) + self._taken

    def put(self, block: Block) -> bool:
        """Take a block; False where it does not fit. A block larger than the queue fits when nothing else waits."""
        with self._lock:
            if self._closed or (len(self) and self.nbytes + block.nbytes > self.capacity):
                return False
            self._waiting.append(block)
            self.nbytes += block.nbytes
            return True

    def take(self, max_bytes: int, max_blocks: int) -> list[Block]:
        """The next blocks, at least one where any waits. They count until `finished`."""
        with self._lock:
            batch: list[Block] = []
            room = max_bytes
            while self._waiting and len(batch) < max_blocks:
                head = self._waiting[0]
                room -= head.nbytes + len(head.tokens)
                if batch and room < 0:
                    break
                batch.append(self._waiting.popleft())
            self._taken += len(batch)
            return batch

    def finished(self, batch: Sequence[Block]) -> None:
        """The writer is done with these."""
        with self._lock:
            self._taken -= len(batch)
            self.nbytes -= sum(b.nbytes for b in batch)

    def cancel(self, key: bytes) -> bool:
        """Take one block back; False where it is being written already."""
        with self._lock:
            for block in self._waiting:
                if block.key == key:
                    self._waiting.remove(block)
                    self.nbytes -= block.nbytes
                    return True
            return False

    def close(self) -> list[Block]:
        """Take nothing more, and give back all that waits."""
        with self._lock:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self.nbytes -= sum(b.nbytes for b in left)
            return left
