"""The blocks on the SSD: files, rows and the catalog, changed together and kept in agreement.

    add      files -> rows, one commit -> visible
    remove   out of the catalog -> files -> rows, one commit

so that a kill at any instant leaves a file without its row, which is whole, and which the next open takes in; or a row
without its file, which it drops. A file that no row names is thus never one that was to be removed.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from ssd_tier.blob import Block
from ssd_tier.budget import Budget
from ssd_tier.catalog import Catalog, Entry
from ssd_tier.clock import now, today
from ssd_tier.errors import IndexDamaged, index_damaged
from ssd_tier.files import Directory, Durability
from ssd_tier.index import Contents, Index, check_index, prepare
from ssd_tier.spill import Listener

T = TypeVar("T")
log = logging.getLogger("ssd_tier")


class Store:
    """Everything here runs on the loop thread; files are touched in `workers`."""

    def __init__(
        self,
        directory: Directory,
        index: Index,
        contents: Contents,
        budget: Budget,
        listener: Listener,
        counters: Counter[str],
        workers: Executor,
        durability: Durability,
    ) -> None:
        self.directory = directory
        self.catalog = Catalog(contents.entries)
        self.budget = budget
        self.counters = counters
        self.durability: Durability = durability
        self._index = index
        self._listener = listener
        self._workers = workers
        self._models = dict(contents.models)
        self._layers = dict(contents.layers)
        self._written = {today(): contents.written.get(today(), 0)}  # bytes of blobs by day
        self._saved: Counter[str] = Counter()  # what the index has of the counters
        self._undeleted: list[Entry] = []  # files that could not be removed: tried again, and in the budget until then
        self._deleting = asyncio.Lock()
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

    async def add(self, entries: Sequence[Entry], blocks: Sequence[Block]) -> None:
        """Take up what lies on the disk already. On any fault it is as if it had not been written.

        Raises OSError, sqlite3.Error.
        """
        models = {b.namespace: b.model for b in blocks if self._models.get(b.namespace) != b.model}
        layers = {b.namespace: (b.origin, b.classes) for b in blocks if b.namespace not in self._layers}
        nbytes = sum(e.file_bytes for e in entries)
        try:
            if self.durability != "cache":
                await self.run(self.directory.sync_names, [e.key for e in entries])
            for entry in entries:
                self.catalog.add(entry)
            await self._commit(added=entries, models=models, layers=layers, written=nbytes)
        except BaseException:
            for entry in entries:
                self.catalog.remove(entry.key)
            await self.remove_files(entries)
            raise
        self._models |= models
        self._layers |= layers
        self._written = {today(): self.written_today + nbytes}
        self.counters["blocks_written"] += len(entries)
        self.counters["bytes_written"] += nbytes

    async def make_room(self, coming: int, spare: set[bytes], before: int | None = None) -> bool:
        """Remove least recently used leaves until `coming` bytes fit; False, and nothing removed, where they cannot.

        Only what was used `before` that place in the order of use may go for it. Raises OSError.
        """
        held = self.catalog.file_bytes + sum(e.file_bytes for e in self._undeleted)
        excess = await self.run(self.budget.excess, self.directory, held, coming)
        if excess <= 0:
            return True
        victims = self.catalog.victims(excess, spare, before)
        if coming and sum(v.file_bytes for v in victims) < excess:
            return False
        await self.remove([v.key for v in victims])
        self.counters["blocks_evicted"] += len(victims)
        return sum(v.file_bytes for v in victims) >= excess

    async def expire(self) -> None:
        """Remove what was not used for longer than the budget's `retention`."""
        if self.budget.retention:
            expired = self.catalog.expired(now() - int(self.budget.retention))
            await self.remove([e.key for e in expired])
            self.counters["blocks_expired"] += len(expired)

    async def remove(self, keys: Sequence[bytes], *, damaged: bool = False) -> None:
        """Take blocks off the SSD; to quarantine what is `damaged`. No fault of disk or index keeps them here."""
        entries = [e for k in keys if (e := self.catalog.remove(k))]
        if not entries:
            return
        self._listener.on_removed(entries)
        if damaged:
            for entry in entries:
                try:
                    await self.run(self.directory.quarantine, entry.key, entry.generation)
                except OSError as e:
                    log.info("ssd: blob %s could not be set aside (%s)", entry.key.hex()[:12], e)
        await self.remove_files(entries)
        try:
            await self._commit(removed=[e.key for e in entries])
        except (sqlite3.Error, OSError, ValueError) as e:  # ValueError: the index is closed already
            # The rows outlive their files, and the next open drops them.
            log.info("ssd: %d rows could not be removed (%s)", len(entries), e)

    async def remove_files(self, entries: Sequence[Entry]) -> None:
        """Remove files that no row names, with those that could not be removed before."""

        def unlink() -> list[Entry]:
            failed = []
            for e in [*self._undeleted, *entries]:
                try:
                    self.directory.remove(e.key, e.generation)
                except OSError:
                    failed.append(e)
            return failed

        if entries or self._undeleted:
            async with self._deleting:
                self._undeleted = await self.run(unlink)

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
        written: int = 0,
    ) -> None:
        new = {e.key for e in added}
        counters = Counter(self.counters)
        touched = [e for e in self.catalog.take_changed() if e.key not in new]
        try:
            await self._index.apply(
                added=added,
                removed=removed,
                touched=touched,
                models=models,
                layers=layers,
                counters=counters - self._saved,
                written=written,
            )
        except BaseException as e:
            self.catalog.put_changed(touched)
            self._index_is_damaged |= index_damaged(e)
            raise
        self._saved = counters

    async def mend_index(self) -> None:
        """Where a commit found the index damaged: a new one, from the catalog. Raises OSError, `TierError`."""
        if not self._index_is_damaged:
            return
        path = self.directory.index_path
        await self._index.close()
        contents = Contents(list(self.catalog), self._models, self._layers)

        def replace() -> None:
            try:
                prepare(path)
                check_index(path)  # SQLite calls some passing faults damage
            except IndexDamaged:
                log.warning("ssd: the index %s is damaged; it is made anew", path)
                self.directory.quarantine_index()
                prepare(path, lambda: contents)

        await self.run(replace)
        self._index = await Index.open(path, self.durability)
        self._index_is_damaged = False

    async def compact(self) -> None:
        """Empty the quarantine and give back the index's unused space. Raises OSError, sqlite3.Error."""
        await self.run(self.directory.empty_quarantine)
        await self._index.compact()

    async def close(self) -> None:
        """Close the index."""
        await self._index.close()
