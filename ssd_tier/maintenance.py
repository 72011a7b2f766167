"""Checking and mending a cache directory from outside: what the command line does to one that nobody uses.

`verify` only reads, and may run beside a running owner. Everything else takes the directory's lock, and raises
`DirectoryInUse` where a program has it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ssd_tier.blob import Block
from ssd_tier.budget import Budget
from ssd_tier.catalog import Catalog, Entry
from ssd_tier.claim import is_owned
from ssd_tier.clock import now
from ssd_tier.errors import BlobDamaged, IndexDamaged
from ssd_tier.files import BlobFile, Directory
from ssd_tier.index import Contents, prepare, read_contents, read_only
from ssd_tier.inspection import Inspection
from ssd_tier.keys import TOKEN_BYTES
from ssd_tier.reader import read_verified
from ssd_tier.rebuild import contents_of
from ssd_tier.tier import SSDTier, TierOptions

WORKERS = 2
_ALL = 2**60  # bytes: nothing is thrown away here
_PATIENCE = 40  # looks at the rows, half a second apart
_SETTLED = 60.0  # seconds after which a file that no row names is not about to get one


class Finding(NamedTuple):
    """Something that is not as it should be. `kind`: "damaged", "unreadable", "missing" or "orphan"."""

    kind: str
    key: bytes
    nbytes: int
    why: str


class Nobody:
    """A listener for a tier that serves no one."""

    def on_stored(self, entries: Sequence[Entry]) -> None: ...

    def on_lost(self, blocks: Sequence[Block], reason: str) -> None: ...

    def on_removed(self, entries: Sequence[Entry]) -> None: ...

    def on_back(self) -> None: ...

    def on_closed(self) -> None: ...


def verify(root: Path, on_read: Callable[[int], object] = lambda nbytes: None) -> list[Finding]:
    """Read every blob and compare it with its digest and its row; `on_read` is told the bytes as they are read.

    Changes nothing. Blocks for as long as the disk takes. Raises `TierError`.
    """
    directory = Directory(root)
    files = list(directory.blobs())  # before the rows: what is written from now on is in neither
    entries = Inspection(root).entries
    found = [f for f in check(directory, entries, on_read) if f]
    generations = {e.key: e.generation for e in entries}
    for _ in range(_PATIENCE):  # a running owner removes a file, then its row
        named = {(e.key, e.generation) for e in Inspection(root).entries}
        found = [f for f in found if (f.key, generations[f.key]) in named]
        if not found or not is_owned(root):
            break
        time.sleep(0.5)
    return found + _orphans(files, named | {(e.key, e.generation) for e in entries})


def check(directory: Directory, entries: Iterable[Entry], on_read: Callable[[int], object]) -> list[Finding | None]:
    """What is wrong with each blob, read in threads."""

    def look(entry: Entry) -> Finding | None:
        try:
            read_verified(directory, entry)
            return None
        except BlobDamaged as e:
            return Finding("damaged", entry.key, entry.file_bytes, str(e))
        except FileNotFoundError:
            return Finding("missing", entry.key, entry.file_bytes, "there is no such file")
        except OSError as e:
            return Finding("unreadable", entry.key, entry.file_bytes, str(e))
        finally:
            on_read(entry.file_bytes)

    with ThreadPoolExecutor(WORKERS, "tiered-cache-verify") as pool:
        return list(pool.map(look, entries))


def _orphans(files: Iterable[BlobFile], named: set[tuple[bytes, int]]) -> list[Finding]:
    settled = time.time() - _SETTLED
    return [
        Finding("orphan", f.key, f.nbytes, "no row of the index names it")
        for f in files
        if (f.key, f.generation) not in named and f.mtime < settled
    ]


@contextlib.asynccontextmanager
async def owned(options: TierOptions) -> AsyncIterator[SSDTier]:
    """The directory as its owner sees it: recovered, within its budget. Raises `TierError`."""
    tier = SSDTier(options)
    try:
        await tier.start(Nobody())
    except BaseException:
        tier.disown()
        raise
    try:
        yield tier
    finally:
        await tier.close()


async def repair(options: TierOptions, on_read: Callable[[int], object]) -> tuple[list[Finding], dict[str, int]]:
    """`verify`, and what is damaged goes to quarantine; what is unreadable stays. The counters say what opening did.

    Raises `TierError`.
    """
    async with owned(options) as tier:
        found = [f for f in check(Directory(options.path), list(tier.catalog), on_read) if f]
        await tier.remove([f.key for f in found if f.kind == "damaged"], damaged=True)
        await tier.remove([f.key for f in found if f.kind == "missing"])
        return found, dict(tier.counters)


class Removed(NamedTuple):
    """What a removal came to. `nbytes`: of the files of chosen blocks. `undeleted`: files that could not be removed."""

    blocks: int
    nbytes: int
    undeleted: int


async def remove(
    options: TierOptions, choose: Callable[[Catalog], Sequence[bytes]], *, compact: bool = False
) -> Removed:
    """Open the directory, which keeps it within its budget, and remove the blocks that are chosen.

    `compact`: empty the quarantine, too. Raises `TierError`, OSError and sqlite3.Error.
    """
    async with owned(options) as tier:
        chosen = choose(tier.catalog)
        gone = [e for k in chosen if (e := tier.catalog.get(k))]
        at_open = tier.counters["blocks_evicted"] + tier.counters["blocks_expired"]
        await tier.remove(chosen)
        if compact:
            await tier.compact()
        return Removed(len(gone) + at_open, sum(e.file_bytes for e in gone), tier.undeleted)


def rebuild_index(root: Path) -> int:
    """Make the index anew from the blobs alone; how many blocks it has. The old one goes to quarantine.

    What was written each day, and the counters, are taken over where the old index can be read. Raises `TierError`; an
    index of another program, or of a newer version, is left alone.
    """
    directory = Directory.own(root, _ALL)
    with contextlib.closing(directory):
        old = Contents()
        with contextlib.suppress(IndexDamaged):
            if directory.index_path.exists():
                with read_only(directory.index_path, older=True) as connection:
                    old = read_contents(connection)

        def find() -> Contents:
            found = contents_of(directory, directory.blobs(), [])
            found.counters, found.written, found.gone = old.counters, old.written, old.gone
            return found

        directory.quarantine_index()
        return len(prepare(directory.index_path, find).entries)


def surplus(root: Path, budget: Budget) -> list[Entry]:
    """What `gc` would remove to keep within a budget. Changes nothing. Raises `TierError` and OSError."""
    catalog = Catalog(Inspection(root).entries)
    gone = catalog.expired(now() - int(budget.retention)) if budget.retention else []
    for entry in gone:
        catalog.remove(entry.key)
    return gone + catalog.victims(max(0, budget.excess(Directory(root), catalog.file_bytes, 0)))


def below(catalog: Catalog, key: bytes) -> list[bytes]:
    """A block, all that hangs on it, and the blocks before it that nothing else needs: leaves first.

    What holds the same tokens in another namespace goes with it: a hybrid's blocks and checkpoint are one sequence.
    """
    tokens = _tokens(catalog, key)
    end = len(tokens) // TOKEN_BYTES
    ends = [e.key for e in catalog if e.start + e.tokens == end]
    twins = [k for k in ends if _tokens(catalog, k) == tokens]
    found: dict[bytes, None] = {}
    children: dict[bytes, list[bytes]] = {}
    for entry in catalog:
        children.setdefault(entry.parent, []).append(entry.key)
    for twin in twins:
        found |= dict.fromkeys(_subtree(catalog, children, twin))
    return list(found)


def _subtree(catalog: Catalog, children: dict[bytes, list[bytes]], key: bytes) -> list[bytes]:
    found, at = {key: None}, [key]
    while at:
        at = [k for parent in at for k in children.get(parent, []) if k not in found]
        found |= dict.fromkeys(at)
    chosen = list(found)[::-1]
    for above in catalog.chain(key)[1:]:
        if catalog.children(above) > 1:
            break
        chosen.append(above)
    return chosen


def _tokens(catalog: Catalog, key: bytes) -> bytes:
    chain = [e for k in catalog.chain(key) if (e := catalog.get(k))]
    return b"".join(e.ids for e in reversed(chain))
