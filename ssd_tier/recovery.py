"""Open after anything: index and directory are brought to agree, whatever instant the last process died at."""

from __future__ import annotations

import contextlib
import logging
from typing import NamedTuple

from ssd_tier.catalog import Entry
from ssd_tier.clock import now
from ssd_tier.errors import IndexDamaged
from ssd_tier.files import BlobFile, Directory
from ssd_tier.index import Contents, check_readable, prepare
from ssd_tier.rebuild import contents_of

log = logging.getLogger("ssd_tier")


MAX_FILE = 1 << 38  # bytes; a larger one can only be a file of holes, and would push out all others


class Recovered(NamedTuple):
    """`contents.entries` can be served; `adopted` are rows to add, `dropped` rows to delete, `removed` files that were
    to be removed and now are, `doomed` such as still cannot be; `unread` files are left for the next open. The rest
    counts files."""

    contents: Contents
    adopted: Contents
    dropped: list[Entry]
    removed: list[tuple[bytes, int]]
    doomed: list[BlobFile]
    unread: list[BlobFile]
    temporary: int
    orphans: int
    rebuilt: bool


def recover(directory: Directory) -> Recovered:
    """Read the index, or make it anew from the blobs where it is missing or damaged; then make both agree.

    A file that no row names was written just before a kill, or its row was lost with a part of the index: it is whole,
    since only whole files have a blob's name, and is taken in as the least recently used. A row without a file of its
    size is dropped, and so is a file of an impossible one.

    Blocks; before the loop runs. Sizes come from the file system. Raises `IndexUnusable` and OSError; then nothing has
    been removed.
    """
    unread: list[BlobFile] = []
    contents, rebuilt = _read_index(directory, unread)
    temporary = directory.clear_temporary()
    removed = [(key, generation) for key, generation in contents.gone if _removed(directory, key, generation)]
    contents.gone -= set(removed)
    rows = {e.key: e for e in contents.entries}
    doomed: list[BlobFile] = []
    sound: set[bytes] = set()
    strays: list[BlobFile] = []
    for file in list(directory.blobs()):
        entry = rows.get(file.key)
        if contents.gone and (file.key, file.generation) in contents.gone:
            doomed.append(file)
        elif unread and file in unread:
            continue
        elif entry is None or entry.generation != file.generation:
            strays.append(file)
        elif file.nbytes == entry.file_bytes <= min(MAX_FILE, entry.most_bytes):
            sound.add(file.key)
        else:  # it holds something else
            _set_aside(directory, entry)
    adopted = contents_of(directory, [f for f in strays if f.key not in sound and f.nbytes <= MAX_FILE], unread)
    left = {(e.key, e.generation) for e in adopted.entries} | {(f.key, f.generation) for f in unread}
    others = [(f.key, f.generation) for f in strays if (f.key, f.generation) not in left]
    orphans = sum(_removed(directory, *file) for file in others)
    dropped = [e for e in contents.entries if e.key not in sound]
    for place, entry in enumerate(adopted.entries, 1 - len(adopted.entries)):
        entry.seq = min(0, place)
    contents.entries = adopted.entries + [e for e in contents.entries if e.key in sound]
    contents.models = adopted.models | contents.models
    contents.layers = adopted.layers | contents.layers
    moment = now()
    for entry in contents.entries:  # a clock that was ahead must not keep them for ever
        entry.used = min(entry.used, moment)
    return Recovered(contents, adopted, dropped, removed, doomed, unread, temporary, orphans, rebuilt)


def _read_index(directory: Directory, unread: list[BlobFile]) -> tuple[Contents, bool]:
    """What the index says, and whether it had to be made anew."""
    rebuilt = False

    def find() -> Contents:
        nonlocal rebuilt
        unread.clear()
        found = contents_of(directory, directory.blobs(), unread)
        rebuilt = bool(found.entries)
        return found

    for again in (True, False):
        try:
            contents = prepare(directory.index_path, find)
            directory.trim_quarantine()
            return contents, rebuilt
        except IndexDamaged as e:
            check_readable(directory.index_path)
            if not again:  # SQLite calls some passing faults damage: only what it finds twice
                log.warning("ssd: %s", str(e))
    directory.quarantine_index()
    return prepare(directory.index_path, find), rebuilt


def _removed(directory: Directory, key: bytes, generation: int) -> bool:
    """Remove a file; one that cannot be removed is tried again at the next open."""
    try:
        directory.remove(key, generation)
    except OSError:
        return False
    return True


def _set_aside(directory: Directory, entry: Entry) -> None:
    with contextlib.suppress(OSError):
        directory.quarantine(entry.key, entry.generation)
