"""Open after anything: index and directory are brought to agree, whatever instant the last process died at."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ssd_tier.catalog import Entry
from ssd_tier.clock import now
from ssd_tier.errors import IndexDamaged
from ssd_tier.files import Directory
from ssd_tier.index import Contents, prepare
from ssd_tier.rebuild import contents_of

log = logging.getLogger("ssd_tier")


class Recovered(NamedTuple):
    """`contents.entries` can be served; `dropped` are rows to delete; the rest counts files, for the log."""

    contents: Contents
    dropped: list[Entry]
    temporary: int
    orphans: int
    rebuilt: bool


def recover(directory: Directory) -> Recovered:
    """Read the index, or make it anew from the blobs where it is missing or damaged; remove temporary files and blobs
    that no row names; sort out rows without a file of the stated size.

    Blocks; before the loop runs. Sizes come from the file system. Raises `IndexUnusable` and OSError; then nothing has
    been removed.
    """
    rebuilt = quarantined = False

    def find() -> Contents:
        nonlocal rebuilt
        found = contents_of(directory)
        rebuilt = bool(found.entries)
        return found

    try:
        contents = prepare(directory.index_path, find)
    except IndexDamaged as e:
        log.warning("ssd: %s", e)
        directory.quarantine_index()
        contents = prepare(directory.index_path, find)
        quarantined = True
    if not quarantined:
        directory.trim_quarantine()
    temporary = directory.clear_temporary()
    named = {(e.key, e.generation): e for e in contents.entries}
    found: set[bytes] = set()
    orphans = 0
    for file in list(directory.blobs()):
        entry = named.get((file.key, file.generation))
        if entry is None:
            orphans += _removed(directory, file.key, file.generation)
        elif file.nbytes == entry.file_bytes:
            found.add(file.key)
        else:  # it holds something else
            _set_aside(directory, entry)
    dropped = [e for e in contents.entries if e.key not in found]
    contents.entries = [e for e in contents.entries if e.key in found]
    for entry in contents.entries:  # a clock that was ahead must not keep them for ever
        entry.used = min(entry.used, now())
    return Recovered(contents, dropped, temporary, orphans, rebuilt)


def _removed(directory: Directory, key: bytes, generation: int) -> bool:
    """Remove a file; one that cannot be removed is tried again at the next open."""
    try:
        directory.remove(key, generation)
    except OSError:
        return False
    return True


def _set_aside(directory: Directory, entry: Entry) -> None:
    try:
        directory.quarantine(entry.key, entry.generation)
    except OSError:
        _removed(directory, entry.key, entry.generation)
