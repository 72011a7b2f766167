"""The durable record of what is on the SSD: SQLite, one writing connection.

Rows are a claim, not the truth: names of files are derived from keys, sizes come from `stat`, contents from the blobs'
own digests. A lost commit costs a file that the next open collects.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiosqlite

from ssd_tier.catalog import Entry
from ssd_tier.errors import IndexUnusable
from ssd_tier.files import Durability
from ssd_tier.migrations import check_version, migrate, scripts

_COLUMNS = "key, namespace, parent, generation, start, ids, file_bytes, raw_bytes, seq, hits, created"
_SELECT = f"SELECT {_COLUMNS} FROM block JOIN block_tokens USING (key)"
_ADD = (
    "INSERT OR REPLACE INTO block "
    "(key, namespace, parent, generation, start, tokens, file_bytes, raw_bytes, seq, hits, created) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)

_COUNT = (
    "INSERT INTO counter (name, value) VALUES (?, ?) "
    "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"
)

_REMEDY = "move it away (the next start is then with an empty cache, and removes the blobs) or choose another ssd.path"


class Index:
    """The one writing connection. Its methods belong to the loop thread."""

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()  # one transaction at a time: all tasks share the connection

    @classmethod
    async def open(cls, path: Path, durability: Durability) -> Index:
        """Connect to an index that `prepare` has made ready. Raises sqlite3.Error."""
        connecting = aiosqlite.connect(path, isolation_level=None)
        # A cache that was never closed must not keep the interpreter from ending.
        worker: Any = getattr(connecting, "_thread", connecting)
        worker.daemon = True
        connection = await connecting
        try:
            for pragma in (
                f"synchronous = {'FULL' if durability == 'full' else 'NORMAL'}",
                "mmap_size = 0",  # a file cut short under a memory map kills the process
                "busy_timeout = 5000",
                "wal_autocheckpoint = 256",
                "trusted_schema = OFF",
            ):
                await connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            await connection.close()
            raise
        return cls(connection)

    async def apply(
        self,
        *,
        added: Sequence[Entry] = (),
        removed: Iterable[bytes] = (),
        touched: Sequence[Entry] = (),
        models: Mapping[bytes, str] | None = None,
        layers: Mapping[bytes, tuple[str, str]] | None = None,
        counters: Mapping[str, int] | None = None,
    ) -> None:
        """All of it in one transaction, or nothing.

        `layers`: origin and classes of namespaces. `counters` are added to what is there. Raises sqlite3.Error.

        Cancelling it does not take it back: it is carried to its end.
        """
        keys = [(k,) for k in removed]
        rows = [
            (e.key, e.namespace, e.parent, e.generation, e.start, len(e.ids) // 8, e.file_bytes, e.raw_bytes, e.seq,
             e.hits, e.created)
            for e in added
        ]  # fmt: skip
        work: list[tuple[str, Sequence[Sequence[object]]]] = [
            ("DELETE FROM block WHERE key = ?", keys),
            ("DELETE FROM block_tokens WHERE key = ?", keys),
            (_ADD, rows),
            ("INSERT OR REPLACE INTO block_tokens (key, ids) VALUES (?, ?)", [(e.key, e.ids) for e in added]),
            ("UPDATE block SET seq = ?, hits = ? WHERE key = ?", [(e.seq, e.hits, e.key) for e in touched]),
            ("INSERT OR REPLACE INTO namespace (digest, model) VALUES (?, ?)", list((models or {}).items())),
            (
                "INSERT OR REPLACE INTO layers (namespace, origin, classes) VALUES (?, ?, ?)",
                [(k, *v) for k, v in (layers or {}).items()],
            ),
            (_COUNT, list((counters or {}).items())),
        ]
        # Cancelling an await does not take back its statement, and would leave the transaction open.
        await asyncio.shield(self._transact(work))

    async def _transact(self, work: Sequence[tuple[str, Sequence[Sequence[object]]]]) -> None:
        c = self._connection
        async with self._lock:
            try:
                await c.execute("BEGIN IMMEDIATE")
                for statement, values in work:
                    if values:  # each call is a trip to the connection's thread and back
                        await c.executemany(statement, values)
                await c.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    if c.in_transaction:
                        await c.execute("ROLLBACK")
                raise

    async def close(self) -> None:
        """Close the connection and end its thread."""
        async with self._lock:
            await self._connection.close()


def prepare(path: Path) -> list[Entry]:
    """Create or migrate the index and read all of it, least recently used first.

    Blocks: before the loop runs. Raises `IndexUnusable`, leaving the file as it is.
    """
    try:
        if not path.exists():
            # Ours before SQLite makes it, so that the index and its journals are private whatever the umask.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        _check_file(path)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA busy_timeout = 5000")
            connection.execute("PRAGMA mmap_size = 0")
            steps = scripts()
            if check_version(connection, path, len(steps)) < len(steps):  # nothing is written to one that is up to date
                connection.execute("PRAGMA journal_mode = WAL")
                migrate(connection, path, steps)
            return [Entry(*row) for row in connection.execute(f"{_SELECT} ORDER BY seq")]
    except (sqlite3.Error, OSError) as e:
        raise _unusable(path, e) from e


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that only reads, beside a running owner. Raises `IndexUnusable`."""
    try:
        _check_file(path)
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("PRAGMA query_only = 1")
            connection.execute("PRAGMA mmap_size = 0")
            if check_version(connection, path, len(scripts())) == 0:
                raise IndexUnusable(f"{path} is empty; start the program that uses it first")
            yield connection
    except (sqlite3.Error, OSError) as e:
        raise _unusable(path, e) from e


def read_entries(connection: sqlite3.Connection) -> list[Entry]:
    """Every row, least recently used first."""
    return [Entry(*row) for row in connection.execute(f"{_SELECT} ORDER BY seq")]


def read_models(connection: sqlite3.Connection) -> dict[bytes, str]:
    """The label of each namespace's model."""
    return dict(connection.execute("SELECT digest, model FROM namespace"))


def read_layers(path: Path) -> dict[bytes, tuple[str, str]]:
    """Origin and classes of each namespace. Blocks; before the loop runs. Raises `IndexUnusable`."""
    with read_only(path) as connection:
        return {k: (o, c) for k, o, c in connection.execute("SELECT namespace, origin, classes FROM layers")}


def read_counters(connection: sqlite3.Connection) -> dict[str, int]:
    """Sums over all runs, by name."""
    return dict(connection.execute("SELECT name, value FROM counter ORDER BY name"))


def now() -> int:
    """Seconds since 1970, for the `created` column."""
    return int(time.time())


def _check_file(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise IndexUnusable(f"{path} is not a regular file; move it away or choose another ssd.path")


def _unusable(path: Path, error: Any) -> IndexUnusable:
    if isinstance(error, FileNotFoundError):
        return IndexUnusable(f"{path} does not exist; check ssd.path, or start the program that writes it first")
    if "locked" in str(error):
        return IndexUnusable(f"{path} is locked by another program; close that one first")
    if isinstance(error, sqlite3.DatabaseError) and "not a database" in str(error):
        return IndexUnusable(f"{path} is not an SQLite database; {_REMEDY}")
    return IndexUnusable(f"{path} cannot be used as an index ({error}); {_REMEDY}")
