"""The writer: takes blocks from the spill queue and puts them on the SSD, ancestors first.

    queue -> encode in threads -> room -> files -> one commit -> listener

No fault of disk or index ends it. What could not be written is lost, with a reason; after some faults in a row the disk
is left alone for a while.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Sequence

from ssd_tier.blob import Block, encode_blob
from ssd_tier.breaker import Breaker
from ssd_tier.buffers import Bytes
from ssd_tier.catalog import Entry
from ssd_tier.clock import now
from ssd_tier.errors import environmental
from ssd_tier.spill import Listener, SpillQueue
from ssd_tier.store import Store

log = logging.getLogger("ssd_tier")

BATCH_BYTES = 64 << 20  # blocks encoded in RAM at a time, in bytes of state
BATCH_BLOCKS = 64
ROW = 2  # a row's token ids are written twice: to the journal, then to the index
FAULTS = 3  # batches in a row of which nothing could be written, before the disk is left alone

Lost = dict[bytes, str]  # reasons by key


class Stopped(Exception):
    """The writer was stopped before this file."""


class Writer:
    """The one task that writes. Loop thread; encoding and files in the store's workers."""

    def __init__(
        self, queue: SpillQueue, store: Store, listener: Listener, counters: Counter[str], level: int | None
    ) -> None:
        self.breaker = Breaker("writing", FAULTS)
        self.progress = asyncio.Event()  # set after each batch
        self.discards: deque[Sequence[bytes]] = deque()  # keys to remove; any thread may append
        self._queue = queue
        self._store = store
        self._listener = listener
        self._counters = counters
        self._level = level
        self._loop = asyncio.get_running_loop()
        self._in_hand: set[bytes] = set()  # keys of the batch
        self._wake = asyncio.Event()
        self._stray = False
        self._stopping = False

    def wake(self) -> None:
        """Look at the queue again. Loop thread."""
        self._wake.set()

    def stop(self) -> None:
        """Let `run` end after the files at hand, whatever waits. Loop thread."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Write what comes until `stop`."""
        while not self._stopping:
            try:
                if not await self._next_batch() and not self._stopping:
                    await self._wake.wait()
            except Exception:  # whatever it is, what comes next may go well
                log.exception("ssd: the writer goes on after a fault of its own")
                await asyncio.sleep(1)

    async def _next_batch(self) -> bool:
        """Write a batch; False where nothing waits. In a method of its own, so that no block outlives its batch."""
        self._wake.clear()
        await self.discard_due()
        batch = self._queue.take(min(BATCH_BYTES, self._store.budget.limit // 8), BATCH_BLOCKS)
        if not batch:
            return False
        lost: Lost = {b.key: "cancelled" for b in batch}
        try:
            lost = await self._attempt(list({b.key: b for b in batch if b.key not in self._store.catalog}.values()))
        finally:  # also where this task is cancelled
            self._queue.finished(batch)  # before the listener, who fills the queue again
            self._tell(batch, lost)
            self.progress.set()
        return True

    async def _attempt(self, blocks: list[Block]) -> Lost:
        """Write blocks, unless the disk is left alone; which were not, and why."""
        if not self.breaker.allows():
            return {b.key: "ssd_off" for b in blocks}
        self._in_hand = {b.key for b in blocks}
        faults: list[BaseException] = []
        lost: Lost = {}
        try:
            if self._stray:
                await self._store.run(self._store.directory.clear_temporary)
            await self._store.mend_index()
            lost = await self._write(blocks, faults)
        except Exception as e:  # the writer outlives every batch
            log.info("ssd: %d blocks not written (%s: %s)", len(blocks), type(e).__name__, str(e))
            lost = {b.key: "write_failed" for b in blocks if b.key not in self._store.catalog}
            faults.append(e)
        written = any(b.key in self._store.catalog for b in blocks)
        self._stray = bool(faults)  # a file that could not be written may not have been removed either
        if faults and not written:
            self.breaker.failed(faults[-1])
        elif written and self.breaker.succeeded():
            self._listener.on_back()
        return lost

    async def discard_due(self) -> None:
        """Remove what is to be removed: before the next batch, which may bring some of it anew."""
        while self.discards:
            await self._store.remove(self.discards.popleft())

    def _tell(self, batch: list[Block], lost: Lost) -> None:
        catalog = self._store.catalog
        for block in batch:
            if block.key not in catalog:
                lost.setdefault(block.key, "no_room")  # stored before, and evicted for this batch
        for reason in set(lost.values()):
            gone = [b for b in batch if b.key not in catalog and lost.get(b.key) == reason]
            self._counters[f"lost_{reason}"] += len(gone)
            if gone:
                self._listener.on_lost(gone, reason)
        self._listener.on_stored([e for b in batch if (e := catalog.get(b.key))])

    async def _write(self, blocks: list[Block], faults: list[BaseException]) -> Lost:
        """Write blocks whose ancestors are stored; return the others with the reason. Raises OSError, sqlite3.Error.

        Faults that cost single files are added to `faults`.
        """
        store, catalog = self._store, self._store.catalog
        if not store.may_write(1):
            return {b.key: "write_budget" for b in blocks}
        lost = self._orphans(blocks)
        blocks = [b for b in blocks if b.key not in lost]
        if not blocks:
            return lost
        encoded = await asyncio.gather(*(store.run(encode_blob, b, self._level) for b in blocks))
        sizes = [sum(len(p) for p in parts) for parts in encoded]
        spare = {key for b in blocks for key in catalog.chain(b.parent)}
        within = store.may_write(sum(sizes))
        coming = sum(sizes) + sum(ROW * (len(b.tokens) + 512) for b in blocks)
        if not (within and await store.make_room(coming, spare, catalog.expected(b.key for b in blocks))):
            if len(blocks) == 1:
                return lost | {blocks[0].key: "no_room" if within else "write_budget"}
            half = len(blocks) // 2  # what comes first may fit
            return lost | await self._write(blocks[:half], faults) | await self._write(blocks[half:], faults)
        entries = [self._entry(b, size) for b, size in zip(blocks, sizes, strict=True)]
        added = await self._write_files(entries, encoded, lost, faults)
        del encoded
        if added:
            await store.add(added, [b for b in blocks if b.key not in lost])
        replaced = [k for b in blocks if b.key not in lost for k in b.replaces if k not in self._in_hand]
        await store.remove([k for k in replaced if k in catalog and not catalog.children(k)])
        return lost

    def _entry(self, b: Block, size: int) -> Entry:
        generation = secrets.randbits(63)
        keep = int(b.keep)
        return Entry(
            b.key, b.namespace, b.parent, generation, b.start, b.tokens, size, b.nbytes, created=now(), keep=keep
        )

    async def _write_files(
        self, entries: list[Entry], encoded: list[list[Bytes | bytes]], lost: Lost, faults: list[BaseException]
    ) -> list[Entry]:
        """Write files; the entries of those that are there, and whose ancestors are. The others become `lost`."""
        jobs = asyncio.gather(
            *(self._store.run(self._write_file, e, parts) for e, parts in zip(entries, encoded, strict=True)),
            return_exceptions=True,
        )
        try:
            outcomes = await asyncio.shield(jobs)
        except asyncio.CancelledError:  # what is on its way comes to its end, and is no use any more
            await jobs
            await self._store.remove_files(entries)
            raise
        added: dict[bytes, Entry] = {}
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, Stopped):
                lost[entry.key] = "closed"
            elif isinstance(outcome, BaseException):
                log.info("ssd: block %s not written (%s)", entry.key.hex()[:12], str(outcome))
                lost[entry.key] = "write_failed"
                faults += [outcome] if environmental(outcome) else []
            elif entry.parent not in (entry.namespace, *added) and entry.parent not in self._store.catalog:
                lost[entry.key] = "parent_not_stored"
            else:
                added[entry.key] = entry
        await self._store.remove_files([e for e in entries if e.key in lost])
        return list(added.values())

    def _write_file(self, entry: Entry, parts: list[Bytes | bytes]) -> None:
        if self._stopping:
            raise Stopped
        nbytes = self._store.directory.write(entry.key, entry.generation, parts, self._store.durability)
        self._loop.call_soon_threadsafe(self._store.wrote, nbytes)

    def _orphans(self, blocks: list[Block]) -> Lost:
        """Blocks that nothing could lead to, since an ancestor is neither stored nor about to be."""
        reachable: set[bytes] = set()
        lost = {}
        for b in blocks:
            if b.parent == b.namespace or b.parent in reachable or b.parent in self._store.catalog:
                reachable.add(b.key)
            else:
                lost[b.key] = "parent_not_stored"
        return lost
