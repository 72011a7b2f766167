"""The SSD tier: named blocks of bytes that survive a restart. It knows keys and bytes, not what they mean."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssd_tier.admission import Admission, Policy
from ssd_tier.blob import Block
from ssd_tier.breaker import Breaker
from ssd_tier.budget import QUARANTINE_SHARE, Budget
from ssd_tier.catalog import Catalog, Entry
from ssd_tier.errors import BlobDamaged, IndexUnusable
from ssd_tier.files import Directory, Durability
from ssd_tier.index import Index
from ssd_tier.reader import read_block
from ssd_tier.recovery import recover
from ssd_tier.spill import Listener, SpillQueue
from ssd_tier.store import Store
from ssd_tier.workers import CODERS, READERS, WRITERS, workers
from ssd_tier.writer import Writer

log = logging.getLogger("ssd_tier")

FAULTS = 8  # reads in a row that failed twice each, before the disk is left alone
SAVE_EVERY = 30.0  # seconds between looks at the budget, and writes of recency when nothing else is written


class TierOptions(NamedTuple):
    """Where the blocks lie and how many bytes they may take. `level`: zstandard's, or None for no compression.
    `retention` in seconds, `daily` in bytes written a day; 0: no limit."""

    path: Path
    budget: int
    min_free: int
    spill_queue: int
    level: int | None = 1
    durability: Durability = "cache"
    retention: float = 0
    daily: int = 0
    admission: Policy = "second-touch"


class SSDTier:
    """Opened by the constructor, run by `start` on an event loop, ended by `close` on the same."""

    def __init__(self, options: TierOptions) -> None:
        """Take the directory and bring it in order. Blocks on the disk.

        Raises `DirectoryUnusable`, `DirectoryInUse` or `IndexUnusable`; then nothing has been deleted.
        """
        self.options = options
        self.counters: Counter[str] = Counter()
        self.queue = SpillQueue(options.spill_queue)
        self._admission = Admission(options.admission)
        self.reading = Breaker("reading", FAULTS)
        self._directory = Directory.own(options.path, options.budget // QUARANTINE_SHARE)
        try:
            self._recovered = recover(self._directory)
        except OSError as e:
            self._directory.close()
            raise IndexUnusable(f"{options.path} cannot be read ({e.strerror}); check the disk") from e
        except BaseException:
            self._directory.close()
            raise
        if self._recovered.rebuilt:
            log.warning("ssd: %d blocks found without an index", len(self._recovered.contents.entries))
        self.layers = self._recovered.contents.layers  # of namespaces: origin and classes
        self.counters["orphans_removed"] = self._recovered.orphans + self._recovered.temporary
        self.counters["files_adopted"] = len(self._recovered.adopted.entries)
        self.counters["lost_missing"] = len(self._recovered.dropped)
        self._decoding = threading.Semaphore(CODERS)
        self._touches: deque[tuple[Sequence[bytes], bool]] = deque()
        self._touch_due = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    async def start(self, listener: Listener) -> None:
        """Connect to the index, enforce the budget, start the writer. On the loop that the tier lives on.

        Raises `IndexUnusable` where the disk fails.
        """
        options = self.options
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._readers = workers(READERS, "tiered-cache-read")
        self._writers = workers(WRITERS, "tiered-cache-write")
        index = None
        try:
            index = await Index.open(self._directory.index_path, options.durability)
            adopted = self._recovered.adopted
            await index.apply(
                removed=[e.key for e in self._recovered.dropped],
                added=adopted.entries,
                models=adopted.models,
                layers=adopted.layers,
                removed_files=self._recovered.removed,
            )
            self._store = Store(
                self._directory,
                index,
                self._recovered.contents,
                self._recovered.doomed,
                sum(f.nbytes for f in self._recovered.unread),
                Budget(options.budget, options.min_free, options.retention, options.daily),
                listener,
                self.counters,
                self._admission,
                self._writers,
                options.durability,
            )
            del self._recovered
            self.writer = Writer(self.queue, self._store, listener, self.counters, options.level)
            await self._store.expire()
            await self._store.look_for_room()
            if evicted := self.counters["blocks_evicted"]:
                log.warning(
                    "ssd: %s held more than ssd.budget and ssd.min_free allow: %d blocks removed",
                    options.path,
                    evicted,
                )
        except BaseException as e:
            if index:
                await index.close()
            self._readers.shutdown()
            self._writers.shutdown()
            if isinstance(e, sqlite3.Error | OSError):
                raise IndexUnusable(f"{options.path} cannot be used ({e}); check the disk") from e
            raise
        self._tasks = [self._loop.create_task(self.writer.run()), self._loop.create_task(self._now_and_then())]

    @property
    def catalog(self) -> Catalog:
        """What is on the SSD. Changed on the loop thread alone."""
        return self._store.catalog

    def put(self, block: Block) -> bool:
        """Queue a block for writing; False where the queue is full. Any thread; never waits."""
        if self._closed or not self.queue.put(block):
            return False
        self._call(self.writer.wake)
        return True

    def cancel(self, key: bytes) -> bool:
        """Take a queued block back; False where it is being written already. Any thread; never waits."""
        return self.queue.cancel(key)

    def touch(self, keys: Sequence[bytes], *, hit: bool = False) -> None:
        """Blocks that were just used, leaf first; `hit`: read from here. Any thread; never waits."""
        self._touches.append((keys, hit))
        if not self._touch_due:
            self._touch_due = True
            self._call(self._apply_touches)

    def admits(self, key: bytes) -> bool:
        """Whether a block that was not asked for since it was computed is worth writing. Any thread; never waits."""
        return self._admission.admits(key)

    def saw(self, key: bytes) -> None:
        """A block leaves RAM without having been written. Any thread; never waits."""
        self._admission.saw(key)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Remove blocks soon. Any thread; never waits."""
        self.writer.discards.append(keys)
        self._call(self.writer.wake)

    async def remove(self, keys: Sequence[bytes], *, damaged: bool = False) -> None:
        """Remove blocks from index and disk; to quarantine what is `damaged`. Loop thread."""
        if not self._closed:
            await self._store.remove(keys, damaged=damaged)

    async def compact(self) -> None:
        """Empty the quarantine and give back the index's unused space. Raises OSError, sqlite3.Error. Loop thread."""
        await self._store.compact()

    @property
    def undeleted(self) -> int:
        """How many files could not be removed so far. Any thread."""
        return self._store.undeleted

    async def read(self, key: bytes, wanted: Callable[[], bool] = lambda: True) -> Block | None:
        """A verified block, or None and a counter that says why. Loop thread; the work is done in reader threads.

        `wanted` is asked before the disk is: a read that nobody waits for any more is not made.
        """
        entry = self.catalog.get(key)
        if entry is None or self._closed:
            self.counters["miss_evicted"] += 1
            return None
        if not self.reading.allows():
            self.counters["miss_ssd_off"] += 1
            return None
        try:
            block = await self._loop.run_in_executor(self._readers, self._read, entry, wanted)
        except (BlobDamaged, FileNotFoundError) as e:
            if self.catalog.get(key) is not entry:  # evicted while the read was on its way
                self.counters["miss_evicted"] += 1
                return None
            damaged = isinstance(e, BlobDamaged)
            self.counters["lost_damaged" if damaged else "lost_missing"] += 1
            log.warning("ssd: block %s is lost: %s", key.hex()[:12], str(e))
            await self._store.remove([key], damaged=damaged)
            return None
        except (OSError, MemoryError, RuntimeError) as e:  # the machine's fault, not the blob's: it stays
            self.counters["read_failed"] += 1
            log.info("ssd: block %s could not be read (%s)", key.hex()[:12], str(e))
            if isinstance(e, OSError):
                self.reading.failed(e)
            return None
        if block:
            self.reading.succeeded()
            self.counters["blocks_read"] += 1
            self.counters["bytes_read"] += entry.file_bytes
        else:
            self.reading.try_soon()  # nothing was tried
        return block

    def _read(self, entry: Entry, wanted: Callable[[], bool]) -> Block | None:
        """Twice, where the machine fails: many such faults pass. In a reader thread."""
        if not wanted():
            return None
        try:
            return read_block(self._directory, entry, self._decoding)
        except FileNotFoundError:
            raise
        except OSError:
            self.counters["read_again"] += 1
            return read_block(self._directory, entry, self._decoding)

    def expect(self, keys: Sequence[bytes]) -> None:
        """The order of use, least recent first, of blocks that are here or about to come. Loop thread."""
        self._apply_touches()
        self.catalog.expect(keys)

    async def save(self) -> None:
        """Write recency and counters to the index; a fault of the index is passed over. Loop thread."""
        self._apply_touches()
        with contextlib.suppress(sqlite3.Error, OSError, ValueError):  # ValueError: closed already
            await self._store.save()

    async def close(self) -> None:
        """Stop the writer after the files at hand, save recency, let go of everything. Loop thread; idempotent.

        Cancelling it does not stop it: whoever asks again waits for its end.
        """
        if self._closing is None:
            self._closed = True
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.writer.stop()
        self._tasks[1].cancel()
        await asyncio.wait(self._tasks)
        try:
            await self.writer.discard_due()
            self.writer.progress.set()  # for a flush that waits: it will not get further
            left = self.queue.close()
            if left:
                self.counters["lost_closed"] += len(left)
                self._listener.on_lost(left, "closed")
            await self.save()
            await self.writer.discard_due()  # what was to be removed meanwhile
        finally:
            try:
                await self._store.close()
            finally:
                self._listener.on_closed()
                for keys in self.writer.discards:  # even now; their rows are dropped at the next open
                    self._store.remove_now(keys)
                self._readers.shutdown()
                self._writers.shutdown()
                self._directory.close()

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes and counts; why the disk is left alone, if it is. Any thread."""
        return {
            "writing_off": self.writer.breaker.fault,
            "reading_off": self.reading.fault,
            "written_today": self._store.written_today,
            "full": self._admission.full,
            "blocks": len(self.catalog),
            "file_bytes": self.catalog.file_bytes,
            "raw_bytes": self.catalog.raw_bytes,
            "budget": self.options.budget,
            "queued_blocks": len(self.queue),
            "queued_bytes": self.queue.nbytes,
            **{k: v for k, v in sorted(self.counters.items()) if not k.startswith("lost_")},
        }

    @property
    def closed(self) -> bool:
        """Whether nothing more will be written. Any thread."""
        return self._closed

    def disown(self) -> None:
        """Give the directory back where `start` was never called or failed."""
        self._directory.close()

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function)

    def _apply_touches(self) -> None:
        self._touch_due = False  # first: what comes from now on may be too late for this round
        while self._touches:
            keys, hit = self._touches.popleft()
            self.catalog.touch(keys, hit=hit)

    async def _now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY)
            try:
                await self._store.expire()
                await self._store.look_for_room()  # somebody else may have filled the disk
                await self.save()
                await self._store.shrink_index()
            except Exception as e:  # the disk fails: what is read and written there says so
                log.info("ssd: not tidied up (%s)", str(e))
