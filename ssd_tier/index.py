"""The durable record of what is on the SSD: SQLite, one writing connection.

Rows are a claim, not the truth: names of files are derived from keys, sizes come from `stat`, contents from the blobs'
own digests. A lost commit costs nothing: the next open takes the file in. A lost index is made anew from the blobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiosqlite

from ssd_tier.catalog import Entry
from ssd_tier.clock import today
from ssd_tier.errors import IndexDamaged, IndexUnusable, environmental
from ssd_tier.files import Directory, Durability
from ssd_tier.migrations import check_version, migrate, scripts
from ssd_tier.rows import read_entries

DatabaseError = sqlite3.DatabaseError
SQLITE_VERSION = sqlite3.sqlite_version
SPARE_PAGES = 128  # that may stay free in the file
KEEP_DAYS = 30  # of `written`

_ADD = (
    "INSERT OR REPLACE INTO block "
    "(key, namespace, parent, generation, start, tokens, file_bytes, raw_bytes, seq, hits, created, used, keep) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_COUNT = (
    "INSERT INTO counter (name, value) VALUES (?, ?) "
    "ON CONFLICT (name) DO UPDATE SET value = min(max(value, 0), 1 << 61) + excluded.value"
)
_WRITTEN = (
    "INSERT INTO written (day, bytes) VALUES (?, ?) "
    "ON CONFLICT (day) DO UPDATE SET bytes = min(max(bytes, 0), 1 << 61) + excluded.bytes"
)

Work = list[tuple[str, Sequence[Sequence[object]]]]  # statements with the rows that each is run for


@dataclass
class Contents:
    """What an index says. `entries`: least recently used first; `models`: label of each namespace; `layers`: origin and
    classes of each namespace; `written`: bytes of blobs by day; `gone`: keys and generations of files that are still to
    be removed."""

    entries: list[Entry] = field(default_factory=list)
    models: dict[bytes, str] = field(default_factory=dict)
    layers: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    gone: set[tuple[bytes, int]] = field(default_factory=set)


class Index:
    """The one writing connection. Its methods belong to the loop thread."""

    def __init__(self, connection: aiosqlite.Connection, path: Path) -> None:
        self._connection = connection
        self._name = path.name
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
                "cell_size_check = ON",
            ):
                await connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            await connection.close()
            raise
        return cls(connection, path)

    async def apply(self, **changes: Any) -> None:
        """All of `statements(**changes)` in one transaction, or nothing. Raises sqlite3.Error.

        Cancelling it does not take it back: it is carried to its end.
        """
        # Cancelling an await does not take back its statement, and would leave the transaction open.
        await asyncio.shield(self._transact(statements(**changes)))

    async def _transact(self, work: Work) -> None:
        c = self._connection
        async with self._lock:
            try:
                Directory.hook("begin", self._name)
                await c.execute("BEGIN IMMEDIATE")
                for statement, rows in work:
                    await c.executemany(statement, rows)  # each call is a trip to the connection's thread and back
                Directory.hook("commit", self._name)
                await c.execute("COMMIT")
                Directory.hook("committed", self._name)
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    if c.in_transaction:
                        await c.execute("ROLLBACK")
                raise

    async def compact(self, *, everything: bool = False) -> None:
        """Give back the space of rows that have gone, some of it or `everything`. Raises sqlite3.Error."""
        async with self._lock:
            free = next(iter(await self._connection.execute_fetchall("PRAGMA freelist_count")))[0]
            if everything or free > SPARE_PAGES:
                pages = "" if everything else f"({free - SPARE_PAGES})"
                # A step a page, and no row to fetch: only a script is carried to its end.
                await self._connection.executescript(f"PRAGMA incremental_vacuum{pages}")
                mode = "TRUNCATE" if everything else "PASSIVE"
                await self._connection.execute_fetchall(f"PRAGMA wal_checkpoint({mode})")

    async def close(self) -> None:
        """Close the connection and end its thread."""
        async with self._lock:
            await self._connection.close()


def statements(
    *,
    added: Sequence[Entry] = (),
    removed: Iterable[bytes] = (),
    touched: Sequence[Entry] = (),
    models: Mapping[bytes, str] | None = None,
    layers: Mapping[bytes, tuple[str, str]] | None = None,
    counters: Mapping[str, int] | None = None,
    written: int = 0,
    gone: Iterable[tuple[bytes, int]] = (),
    removed_files: Iterable[tuple[bytes, int]] = (),
) -> Work:
    """SQL for a change. `counters`, and the bytes `written` today, are added to what is there. `gone` are files that
    could not be removed, `removed_files` such as have been since. Pure."""
    keys = [(k,) for k in removed]
    rows = [
        (e.key, e.namespace, e.parent, e.generation, e.start, e.tokens, e.file_bytes, e.raw_bytes, e.seq,
         e.hits, e.created, e.used, e.keep)
        for e in added
    ]  # fmt: skip
    work: Work = [
        ("DELETE FROM block WHERE key = ?", keys),
        ("DELETE FROM block_tokens WHERE key = ?", keys),
        (_ADD, rows),
        ("INSERT OR REPLACE INTO block_tokens (key, ids) VALUES (?, ?)", [(e.key, e.ids) for e in added]),
        (
            "UPDATE block SET seq = ?, hits = ?, used = ? WHERE key = ?",
            [(e.seq, e.hits, e.used, e.key) for e in touched],
        ),
        ("INSERT OR REPLACE INTO namespace (digest, model) VALUES (?, ?)", list((models or {}).items())),
        (
            "INSERT OR REPLACE INTO layers (namespace, origin, classes) VALUES (?, ?, ?)",
            [(k, *v) for k, v in (layers or {}).items()],
        ),
        (_COUNT, list((counters or {}).items())),
        (_WRITTEN, [(today(), written)] if written else []),
        ("INSERT OR IGNORE INTO gone (key, generation) VALUES (?, ?)", list(gone)),
        ("DELETE FROM gone WHERE key = ? AND generation = ?", list(removed_files)),
        ("DELETE FROM written WHERE day <= ?", [(today() - KEEP_DAYS,)] if written else []),
    ]
    return [(statement, values) for statement, values in work if values]


def prepare(path: Path, find: Callable[[], Contents] = Contents) -> Contents:
    """Create or migrate the index and read all of it. A new one is filled with what `find` returns, in the transaction
    that creates it: killed before its end, the next open finds a new one again.

    Blocks: before the loop runs. Raises `IndexUnusable` or `IndexDamaged`, leaving the file as it is.
    """
    with _told(path):
        if not os.path.lexists(path):
            # Ours before SQLite makes it, so that the index and its journals are private whatever the umask.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        _check_files(path)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA busy_timeout = 5000")
            connection.execute("PRAGMA mmap_size = 0")
            connection.execute("PRAGMA cell_size_check = ON")
            steps = scripts()

            def fill() -> None:
                found = find()
                changes = statements(
                    added=found.entries,
                    models=found.models,
                    layers=found.layers,
                    counters=found.counters,
                    written=found.written.get(today(), 0),
                    gone=found.gone,
                )
                for statement, rows in changes:
                    connection.executemany(statement, rows)

            have = check_version(connection, path, len(steps))
            if have == 0:
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            if have < len(steps):  # nothing is written to one that is up to date
                connection.execute("PRAGMA journal_mode = WAL")
                migrate(connection, path, steps, fill)
            return read_contents(connection)


@contextlib.contextmanager
def read_only(path: Path, *, older: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that only reads, beside a running owner. Raises `IndexUnusable` or `IndexDamaged`.

    `older`: also where it waits to be migrated, or to be filled.
    """
    with _told(path):
        os.lstat(path)
        _check_files(path)
        # In a directory that we may not write to, SQLite can only read an index that nobody has open.
        mode = "ro" if os.access(path.parent, os.W_OK) or os.path.exists(f"{path}-wal") else "ro&immutable=1"
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True)) as connection:
            connection.execute("PRAGMA query_only = 1")
            connection.execute("PRAGMA mmap_size = 0")
            have, known = check_version(connection, path, len(scripts())), len(scripts())
            if have == 0 and not older:
                raise IndexUnusable(f"{path} is empty; start the program that uses it first")
            if have < known and not older:
                raise IndexUnusable(f"{path} is of an older version; start the program that uses it, which migrates it")
            yield connection


def check_index(path: Path) -> int:
    """Have SQLite look through the whole file; the schema's version. Raises `IndexUnusable` or `IndexDamaged`."""
    with read_only(path, older=True) as connection:
        (told,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if told != "ok":
            raise IndexDamaged(f"{path} is damaged ({told}); run: tiered-cache rebuild-index")
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def read_contents(connection: sqlite3.Connection) -> Contents:
    """All of an index, of one moment. Raises sqlite3.Error, or ValueError for what no index of ours says."""
    with connection:  # ends the transaction
        connection.execute("BEGIN")
        contents = Contents(
            read_entries(connection),
            dict(connection.execute("SELECT digest, model FROM namespace")),
            {k: (o, c) for k, o, c in connection.execute("SELECT namespace, origin, classes FROM layers")},
            dict(connection.execute("SELECT name, value FROM counter ORDER BY name")),
            dict(connection.execute("SELECT day, bytes FROM written ORDER BY day")),
            set(connection.execute("SELECT key, generation FROM gone")),
        )
    for table, kinds in (
        (contents.models, (bytes, str)), (contents.counters, (str, int)), (contents.written, (int, int))
    ):  # fmt: skip
        if not all(isinstance(k, kinds[0]) and isinstance(v, kinds[1]) for k, v in table.items()):
            raise ValueError("a row of another type than its column's")
    if not all(type(v) is str for k, values in contents.layers.items() for v in values):
        raise ValueError("a row of another type than its column's")
    if not all(type(k) is bytes and len(k) == 32 and type(g) is int and g >= 0 for k, g in contents.gone):
        raise ValueError("a row of another type than its column's")
    return contents


def _check_files(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(f"{path}{suffix}").st_mode):  # SQLite would hang on a FIFO
                raise IndexUnusable(f"{path}{suffix} is not a regular file; move it away or choose another ssd.path")


def check_readable(path: Path) -> None:
    """Raise `IndexUnusable` where the disk does not give the index's bytes, which SQLite calls damage.

    Only while no connection of this process is open: closing a handle gives back the locks of all.
    """
    try:
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError), open(f"{path}{suffix}", "rb") as file:
                while file.read(1 << 20):
                    pass
    except OSError as e:
        raise IndexUnusable(f"{path} cannot be read ({e}); check the disk or choose another ssd.path") from e


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Faults of an index as sentences."""
    try:
        yield
    except FileNotFoundError as e:
        told = f"{path} does not exist; check ssd.path, or start the program that writes it first"
        raise IndexUnusable(told) from e
    except (sqlite3.Error, OSError, ValueError) as e:
        if "locked" in str(e):
            raise IndexUnusable(f"{path} is locked by another program; close that one first") from e
        if environmental(e):
            raise IndexUnusable(f"{path} cannot be used ({e}); check the disk or choose another ssd.path") from e
        told = "it is made anew when the program that uses it starts, or by: tiered-cache rebuild-index"
        raise IndexDamaged(f"{path} is damaged ({e}); {told}") from e
