"""The blocks on the SSD: files, rows and the catalog, changed together and kept in agreement.

    add      files -> rows, one commit -> visible
    remove   out of the catalog -> files -> rows, one commit

so that a kill at any instant leaves a file without its row, which is whole, and which the next open takes in; or a row
without its file, which it drops. A file that no row names is thus never one that was to be removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from ssd_tier.admission import Admission
from ssd_tier.blob import Block
from ssd_tier.budget import Budget
from ssd_tier.catalog import Catalog, Entry
from ssd_tier.clock import now, today
from ssd_tier.errors import IndexDamaged, index_damaged
from ssd_tier.files import BlobFile, Directory, Durability
from ssd_tier.index import Contents, Index, check_index, prepare
from ssd_tier.spill import Listener

AT_ONCE = 64  # blocks that are removed in one commit
FULL, NOT_FULL = 0.05, 0.2  # shares of the budget that are free: less, and it is full; more, and it is not

T = TypeVar("T")
log = logging.getLogger("ssd_tier")


class Store:
    """Everything here runs on the loop thread; files are touched in `workers`."""

    def __init__(
        self,
        directory: Directory,
        index: Index,
        contents: Contents,
        doomed: Sequence[BlobFile],
        unread: int,
        budget: Budget,
        listener: Listener,
        counters: Counter[str],
        admission: Admission,
        workers: Executor,
        durability: Durability,
    ) -> None:
        """`doomed`: files that an earlier run could not remove. `unread`: bytes of files that could not be read at
        open; they are in the budget all the same."""
        self.directory = directory
        self._unread = unread
        self.catalog = Catalog(contents.entries)
        self.budget = budget
        self.counters = counters
        self.admission = admission
        self.durability: Durability = durability
        self._index = index
        self._listener = listener
        self._workers = workers
        self._removing = 0  # bytes of files that are being removed
        self._room = asyncio.Lock()  # one at a time decides what goes
        self._unsaved_rows: list[bytes] = []  # of removed blocks, that could not be deleted yet
        self._gone = {(f.key, f.generation) for f in doomed}  # of these, what the index knows
        self._unsaved_written = 0  # bytes written that the index does not know of
        self._models = dict(contents.models)
        self._layers = dict(contents.layers)
        self._written = {today(): contents.written.get(today(), 0)}  # bytes of blobs by day
        self._saved: Counter[str] = Counter()  # what the index has of the counters
        self._undeleted = list(doomed)  # files that could not be removed: tried again, and in the budget until then
        self._deleting = asyncio.Lock()
        self._committing = asyncio.Lock()
        self._index_is_damaged = False

    def run(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Something that blocks, in a worker thread."""
        return asyncio.get_running_loop().run_in_executor(self._workers, function, *args)

    @property
    def written_today(self) -> int:
        """Bytes of blobs written since midnight, UTC. Any thread."""
        return self._written.get(today(), 0)

    def may_write(self, nbytes: int) -> bool:
        """Whether the day's limit of written bytes lets these be written."""
        return not self.budget.daily or self.written_today + nbytes <= self.budget.daily

    def wrote(self, nbytes: int) -> None:
        """Count what was written, whatever becomes of it."""
        self._written = {today(): self.written_today + nbytes}
        self._unsaved_written += nbytes

    async def add(self, entries: Sequence[Entry], blocks: Sequence[Block]) -> None:
        """Take up what lies on the disk already. On any fault it is as if it had not been written.

        Raises OSError, sqlite3.Error.
        """
        models = {b.namespace: b.model for b in blocks if self._models.get(b.namespace) != b.model}
        layers = {b.namespace: (b.origin, b.classes) for b in blocks if b.namespace not in self._layers}
        try:
            if self.durability != "cache":
                await self.run(self.directory.sync_names, [e.key for e in entries])
            for entry in entries:
                self.catalog.add(entry)
            await self._commit(added=entries, models=models, layers=layers)
        except BaseException:
            for entry in entries:
                self.catalog.remove(entry.key)
            await self.remove_files(entries)
            raise
        self._models |= models
        self._layers |= layers
        for entry in entries:
            self.admission.wrote(entry.key)
        self.counters["blocks_written"] += len(entries)
        self.counters["bytes_written"] += sum(e.file_bytes for e in entries)

    async def make_room(self, coming: int, spare: set[bytes], before: int | None = None) -> bool:
        """Remove least recently used leaves until `coming` bytes fit; False, and nothing removed, where they cannot.

        Only what was used `before` that place in the order of use may go for it. Raises OSError.
        """
        async with self._room:
            excess = await self._excess(coming)
            if excess <= 0:
                return True
            if coming:
                self.admission.fill(len(self.catalog))
            victims = self.catalog.victims(excess, spare, before)
            if coming and sum(v.file_bytes for v in victims) < excess:
                return False
            await self.remove([v.key for v in victims])
            self.counters["blocks_evicted"] += len(victims)
            return sum(v.file_bytes for v in victims) >= excess

    async def look_for_room(self) -> None:
        """Give up what the budget and the floor ask for; note whether the disk is full, or no longer so."""
        await self.make_room(0, set())
        if await self._excess(int(FULL * self.budget.limit)) > 0:
            self.admission.fill(len(self.catalog))
        elif await self._excess(int(NOT_FULL * self.budget.limit)) <= 0:
            self.admission.full = False

    async def _excess(self, coming: int) -> int:
        held = self.catalog.file_bytes + self._removing + self._unread + sum(f.nbytes for f in self._undeleted)
        return await self.run(self.budget.excess, self.directory, held, coming)

    async def expire(self) -> None:
        """Remove what was not used for longer than the budget's `retention`."""
        if self.budget.retention:
            expired = self.catalog.expired(now() - int(self.budget.retention))
            await self.remove([e.key for e in expired])
            self.counters["blocks_expired"] += len(expired)

    async def remove(self, keys: Sequence[bytes], *, damaged: bool = False) -> None:
        """Take blocks off the SSD; to quarantine what is `damaged`. No fault of disk or index keeps them here."""
        for i in range(0, len(keys), AT_ONCE):
            entries = [e for k in keys[i : i + AT_ONCE] if (e := self.catalog.remove(k))]
            if entries:
                await self._remove(entries, damaged)

    async def _remove(self, entries: list[Entry], damaged: bool) -> None:
        self._listener.on_removed(entries)
        nbytes = sum(e.file_bytes for e in entries)
        self._removing += nbytes
        try:
            if damaged:
                for entry in entries:
                    try:
                        await self.run(self.directory.quarantine, entry.key, entry.generation)
                    except (OSError, RuntimeError) as e:
                        log.info("ssd: blob %s could not be set aside (%s)", entry.key.hex()[:12], str(e))
            await self.remove_files(entries)
        finally:
            self._removing -= nbytes
        try:
            await self._commit(removed=[e.key for e in entries])
        except (sqlite3.Error, OSError, ValueError) as e:  # ValueError: the index is closed already
            # Tried again with the next commit; else the rows outlive their files, and the next open drops them.
            self._unsaved_rows += [e.key for e in entries]
            log.info("ssd: %d rows could not be removed (%s)", len(entries), str(e))

    def remove_now(self, keys: Sequence[bytes]) -> None:
        """Remove files, once the index is closed. Blocks."""
        for entry in [e for k in keys if (e := self.catalog.remove(k))]:
            with contextlib.suppress(OSError):
                self.directory.remove(entry.key, entry.generation)

    async def remove_files(self, entries: Sequence[Entry]) -> None:
        """Remove files that no row names, with those that could not be removed before."""
        files = [BlobFile(e.key, e.generation, e.file_bytes, 0) for e in entries]

        def unlink() -> list[BlobFile]:
            failed = []
            for file in [*self._undeleted, *files]:
                try:
                    self.directory.remove(file.key, file.generation)
                except OSError:
                    failed.append(file)
            return failed

        if entries or self._undeleted:
            async with self._deleting:
                try:
                    self._undeleted = await self.run(unlink)
                except RuntimeError as e:  # no thread to be had
                    self._undeleted += files
                    log.info("ssd: %d files could not be removed (%s)", len(files), str(e))

    @property
    def undeleted(self) -> int:
        """How many files could not be removed so far."""
        return len(self._undeleted)

    async def save(self) -> None:
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
        async with self._committing:  # the counters go to the index once
            new = {e.key for e in added}
            counters, gone = Counter(self.counters), {(f.key, f.generation) for f in self._undeleted}
            touched = [e for e in self.catalog.take_changed() if e.key not in new]
            written, self._unsaved_written = self._unsaved_written, 0
            rows, self._unsaved_rows = self._unsaved_rows, []
            try:
                await self._index.apply(
                    added=added,
                    removed=[k for k in [*removed, *rows] if k not in self.catalog],  # it may have come again meanwhile
                    touched=touched,
                    models=models,
                    layers=layers,
                    counters=counters - self._saved,
                    written=written,
                    gone=gone - self._gone,
                    removed_files=self._gone - gone,
                )
            except BaseException as e:
                self.catalog.put_changed(touched)
                self._unsaved_written += written
                self._unsaved_rows += rows
                self._index_is_damaged |= index_damaged(e)
                raise
            self._saved, self._gone = counters, gone

    async def mend_index(self) -> None:
        """Where a commit found the index damaged: a new one, from the catalog. Raises OSError, `TierError`."""
        if not self._index_is_damaged:
            return
        path = self.directory.index_path
        await self._index.close()
        contents = Contents(
            list(self.catalog), self._models, self._layers, dict(self.counters), dict(self._written), set(self._gone)
        )

        def replace() -> bool:
            try:
                prepare(path)
                check_index(path)  # SQLite calls some passing faults damage
            except IndexDamaged:
                log.warning("ssd: the index %s is damaged; it is made anew", path)
                self.directory.quarantine_index()
                prepare(path, lambda: contents)
                return True
            return False

        made_anew = await self.run(replace)
        self._index = await Index.open(path, self.durability)
        self._index_is_damaged = False
        if made_anew:
            self._saved, self._unsaved_written = Counter(contents.counters), 0

    async def compact(self) -> None:
        """Empty the quarantine and give back the index's unused space. Raises OSError, sqlite3.Error."""
        await self.run(self.directory.empty_quarantine)
        await self._index.compact(everything=True)

    async def shrink_index(self) -> None:
        """Give back some of the space of rows that have gone. Raises sqlite3.Error."""
        await self._index.compact()

    async def close(self) -> None:
        """Close the index."""
        await self._index.close()
