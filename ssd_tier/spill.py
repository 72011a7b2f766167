"""The spill queue and its writer: blocks go to the SSD in the background, ancestors first.

    put (any thread) -> queue, bounded in bytes -> encode in threads -> room -> files -> one commit -> listener

Files come before their rows, rows go before their files, so that a kill at any instant leaves at most files that the
next open collects. A block becomes visible to look-ups only after its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol, TypeVar

from ssd_tier.blob import Block, encode_blob
from ssd_tier.budget import Budget
from ssd_tier.buffers import Bytes
from ssd_tier.catalog import Catalog, Entry
from ssd_tier.files import Directory, Durability
from ssd_tier.index import Index, now

T = TypeVar("T")
log = logging.getLogger("ssd_tier")

BATCH_BYTES = 64 << 20  # blocks encoded in RAM at a time, in bytes of state
BATCH_BLOCKS = 64


class Listener(Protocol):
    """Who is told what became of blocks. Called on the loop thread; must not block."""

    def on_stored(self, entries: Sequence[Entry]) -> None:
        """These are on the SSD and in the index now."""

    def on_lost(self, blocks: Sequence[Block], reason: str) -> None:
        """These were spilled and will not be written."""

    def on_removed(self, entries: Sequence[Entry]) -> None:
        """These are no longer on the SSD."""


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
            while self._waiting and len(batch) < max_blocks:
                if batch and sum(b.nbytes for b in batch) + self._waiting[0].nbytes > max_bytes:
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


class SpillWriter:
    """The one task that writes. Everything here runs on the loop thread, encoding and files in `workers`."""

    def __init__(
        self,
        queue: SpillQueue,
        directory: Directory,
        index: Index,
        catalog: Catalog,
        budget: Budget,
        listener: Listener,
        counters: Counter[str],
        workers: Executor,
        *,
        level: int | None,
        durability: Durability,
    ) -> None:
        self._queue = queue
        self._directory = directory
        self._index = index
        self._catalog = catalog
        self._budget = budget
        self._listener = listener
        self._counters = counters
        self._workers = workers
        self._level = level
        self._durability: Durability = durability
        self._saved: Counter[str] = Counter()  # what the index has of the counters
        self._undeleted: list[Entry] = []  # files that could not be removed: tried again, and in the budget until then
        self._models: dict[bytes, str] = {}
        self._in_hand: set[bytes] = set()  # keys of the batch
        self._wake = asyncio.Event()
        self._stopping = False
        self.progress = asyncio.Event()  # set after each batch
        self.discards: deque[Sequence[bytes]] = deque()  # keys to remove; any thread may append

    def wake(self) -> None:
        """Look at the queue again. Loop thread."""
        self._wake.set()

    def stop(self) -> None:
        """Let `run` end after the batch at hand, whatever waits. Loop thread."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Write what comes until `stop`. No fault of disk or index ends it: the batch is lost and counted."""
        while not self._stopping:
            if not await self._next_batch() and not self._stopping:
                await self._wake.wait()

    async def _next_batch(self) -> bool:
        """Write a batch; False where nothing waits. In a method of its own, so that no block outlives its batch."""
        self._wake.clear()
        await self.discard_due()
        batch = self._queue.take(min(BATCH_BYTES, self._budget.limit // 8), BATCH_BLOCKS)
        if not batch:
            return False
        blocks = list({b.key: b for b in batch if b.key not in self._catalog}.values())
        self._in_hand = {b.key for b in batch}
        try:
            lost = await self._store(blocks)
        except Exception as e:  # the writer outlives every batch
            log.warning("ssd: %d blocks not written (%s: %s)", len(blocks), type(e).__name__, e)
            lost = {b.key: "write_failed" for b in blocks if b.key not in self._catalog}
        finally:
            self._queue.finished(batch)  # before the listener, who fills the queue again
        self._tell(batch, lost)
        self.progress.set()
        return True

    async def discard_due(self) -> None:
        """Remove what is to be removed: before the next batch, which may bring some of it anew."""
        while self.discards:
            await self.remove(self.discards.popleft())

    def _tell(self, batch: list[Block], lost: dict[bytes, str]) -> None:
        for block in batch:
            if block.key not in self._catalog:
                lost.setdefault(block.key, "no_room")  # stored before, and evicted for this batch
        for reason in set(lost.values()):
            gone = [b for b in batch if lost.get(b.key) == reason]
            self._counters[f"lost_{reason}"] += len(gone)
            self._listener.on_lost(gone, reason)
        self._listener.on_stored([e for b in batch if (e := self._catalog.get(b.key))])

    async def _store(self, blocks: list[Block]) -> dict[bytes, str]:
        """Write blocks whose ancestors are stored; return the others with the reason. Raises OSError, sqlite3.Error."""
        lost = self._orphans(blocks)
        blocks = [b for b in blocks if b.key not in lost]
        if not blocks:
            return lost
        encoded = await asyncio.gather(*(self._run(encode_blob, b, self._level) for b in blocks))
        sizes = [sum(len(p) for p in parts) for parts in encoded]
        spare = {key for b in blocks for key in self._catalog.chain(b.parent)}
        if not await self.make_room(sum(sizes), spare, self._catalog.expected(b.key for b in blocks)):
            if len(blocks) == 1:
                return lost | {blocks[0].key: "no_room"}
            half = len(blocks) // 2  # what comes first may fit
            return lost | await self._store(blocks[:half]) | await self._store(blocks[half:])
        entries = [
            Entry(b.key, b.namespace, b.parent, secrets.randbits(63), b.start, b.tokens, size, b.nbytes, created=now())
            for b, size in zip(blocks, sizes, strict=True)
        ]
        written = await asyncio.gather(
            *(self._run(self._write_file, e, parts) for e, parts in zip(entries, encoded, strict=True)),
            return_exceptions=True,
        )
        del encoded
        added: dict[bytes, Entry] = {}
        for entry, outcome in zip(entries, written, strict=True):
            if isinstance(outcome, BaseException):
                log.warning("ssd: block %s not written (%s)", entry.key.hex()[:12], outcome)
                lost[entry.key] = "write_failed"
            elif entry.parent not in (entry.namespace, *added) and entry.parent not in self._catalog:
                lost[entry.key] = "parent_not_stored"
            else:
                added[entry.key] = entry
        await self._remove_files([e for e in entries if e.key in lost])
        if not added:
            return lost
        try:
            if self._durability != "cache":
                await self._run(self._directory.sync_names, list(added))
            models = {b.namespace: b.model for b in blocks if self._models.get(b.namespace) != b.model}
            layers = {b.namespace: (b.origin, b.classes) for b in blocks if b.namespace in models}
            for entry in added.values():
                self._catalog.add(entry)
            await self._commit(added=list(added.values()), models=models, layers=layers)
            self._models.update(models)
        except BaseException:
            for key in added:
                self._catalog.remove(key)
            await self._remove_files(list(added.values()))
            raise
        self._counters["blocks_written"] += len(added)
        self._counters["bytes_written"] += sum(e.file_bytes for e in added.values())
        replaced = [k for b in blocks if b.key in added for k in b.replaces if k not in self._in_hand]
        await self.remove([k for k in replaced if k in self._catalog and not self._catalog.children(k)])
        return lost

    def _orphans(self, blocks: list[Block]) -> dict[bytes, str]:
        """Blocks that nothing could lead to, since an ancestor is neither stored nor about to be."""
        reachable: set[bytes] = set()
        lost = {}
        for b in blocks:
            if b.parent == b.namespace or b.parent in reachable or b.parent in self._catalog:
                reachable.add(b.key)
            else:
                lost[b.key] = "parent_not_stored"
        return lost

    async def make_room(self, coming: int, spare: set[bytes], before: int | None = None) -> bool:
        """Remove least recently used leaves until `coming` bytes fit; False, and nothing removed, where they cannot.

        Only what was used `before` that place in the order of use may go for it. Raises OSError.
        """
        held = self._catalog.file_bytes + sum(e.file_bytes for e in self._undeleted)
        excess = self._budget.excess(self._directory, held, coming)
        if excess <= 0:
            return True
        victims = self._catalog.victims(excess, spare, before)
        if coming and sum(v.file_bytes for v in victims) < excess:
            return False
        await self.remove([v.key for v in victims])
        self._counters["blocks_evicted"] += len(victims)
        return sum(v.file_bytes for v in victims) >= excess

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Take blocks off the SSD: out of the catalog, then their rows, then their files."""
        entries = [e for k in keys if (e := self._catalog.remove(k))]
        if not entries:
            return
        self._listener.on_removed(entries)
        # Without a commit the rows outlive their files, and the next open drops them.
        with contextlib.suppress(sqlite3.Error, ValueError):  # ValueError: the index is closed already
            await self._commit(removed=[e.key for e in entries])
        await self._remove_files(entries)

    async def save_recency(self) -> None:
        """Write order of use, hits and counters to the index. Raises sqlite3.Error."""
        await self._commit()

    async def _commit(
        self,
        *,
        added: Sequence[Entry] = (),
        removed: Sequence[bytes] = (),
        models: dict[bytes, str] | None = None,
        layers: dict[bytes, tuple[str, str]] | None = None,
    ) -> None:
        new = {e.key for e in added}
        counters = Counter(self._counters)
        change = counters - self._saved
        touched = [e for e in self._catalog.take_changed() if e.key not in new]
        try:
            await self._index.apply(
                added=added, removed=removed, touched=touched, models=models, layers=layers, counters=change
            )
        except BaseException:
            self._catalog.put_changed(touched)
            raise
        self._saved = counters

    def _write_file(self, entry: Entry, parts: list[Bytes | bytes]) -> None:
        self._directory.write(entry.key, entry.generation, parts, self._durability)

    async def _remove_files(self, entries: Sequence[Entry]) -> None:
        def unlink() -> list[Entry]:
            failed = []
            for e in [*self._undeleted, *entries]:
                try:
                    self._directory.remove(e.key, e.generation)
                except OSError:
                    failed.append(e)
            return failed

        if entries:
            self._undeleted = await self._run(unlink)

    def _run(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._workers, function, *args)
