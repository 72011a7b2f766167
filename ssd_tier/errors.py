"""What can go wrong with a cache directory. Each `TierError` is one sentence for a person.

Errors are logged as text: a handler that keeps its records would keep the error's frames, and the buffers in them.
"""

from __future__ import annotations

import sqlite3

# SQLite's primary result codes for what the machine, not the file, is to blame for.
_ENVIRONMENT = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOLFS,
}


class TierError(Exception):
    """The SSD tier cannot be used as configured. The message names the thing, its value and what to do."""


class DirectoryUnusable(TierError):
    """The configured path cannot serve as a cache directory (a file, not writable, somebody else's)."""


class DirectoryInUse(TierError):
    """Another running process owns the directory."""


class IndexUnusable(TierError):
    """The index cannot be used and is left as it is: not ours, of a newer version, or the disk fails."""


class IndexDamaged(IndexUnusable):
    """The index is ours, or was, and its content is not to be relied on. It can be made anew from the blobs."""


class BlobDamaged(Exception):
    """A blob's content is not what its name and the index promise. Never leaves the tier: a miss with this reason."""


_DAMAGE = {
    sqlite3.SQLITE_ERROR,  # a table is not there
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_SCHEMA,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_NOTADB,
}


def index_damaged(error: BaseException) -> bool:
    """Whether SQLite says that its file is not what it should be."""
    return isinstance(error, sqlite3.Error) and _code(error) in _DAMAGE


def environmental(error: BaseException) -> bool:
    """Whether the machine failed (disk full, unreadable, no handles, no rights), and not a file's content."""
    if isinstance(error, sqlite3.Error):
        return _code(error) in _ENVIRONMENT
    return isinstance(error, OSError | MemoryError)


def _code(error: sqlite3.Error) -> int:
    """The primary result code; 0 where there is none: the fault is in the way we call."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
