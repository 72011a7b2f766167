"""Open after anything: index and directory are brought to agree, whatever instant the last process died at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ssd_tier.catalog import Entry
from ssd_tier.files import Directory


class Recovered(NamedTuple):
    """`entries` can be served; `dropped` are rows to delete; the rest counts files, for the log and the counters."""

    entries: list[Entry]
    dropped: list[Entry]
    temporary: int
    orphans: int


def recover(directory: Directory, rows: Sequence[Entry]) -> Recovered:
    """Remove temporary files and blobs that no row names; sort out rows without a file of the stated size.

    Blocks; before the loop runs. Sizes come from the file system. Raises OSError.
    """
    temporary = directory.clear_temporary()
    named = {(e.key, e.generation): e for e in rows}
    found: set[bytes] = set()
    orphans = 0
    for file in list(directory.blobs()):
        entry = named.get((file.key, file.generation))
        if entry is None:
            orphans += _removed(directory, file.key, file.generation)
        elif file.nbytes == entry.file_bytes:
            found.add(file.key)
    kept = [e for e in rows if e.key in found]
    dropped = [e for e in rows if e.key not in found]
    for entry in dropped:  # a file of another size than its row says holds something else
        _removed(directory, entry.key, entry.generation)
    return Recovered(kept, dropped, temporary, orphans)


def _removed(directory: Directory, key: bytes, generation: int) -> bool:
    """Remove a file; one that cannot be removed is tried again at the next open."""
    try:
        directory.remove(key, generation)
    except OSError:
        return False
    return True
