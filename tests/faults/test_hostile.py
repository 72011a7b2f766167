"""A directory in which somebody has laid traps: nothing outside is touched, nothing hangs, memory stays small."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ssd_tier import Block, SSDTier
from ssd_tier.errors import TierError
from tests.blocks import Recorder, blob, block, chain, content, listing, on_disk, path_of, running, spill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]

MB, TB = 1 << 20, 1 << 40
FAMILY = [*chain(3), block(50), *chain(2, seed=6)]
BUDGET = 16 * MB


# -- watching what is touched, and how much memory is taken

_inside: list[str] = []  # the one directory in which files may be changed now; empty: nobody looks
_touched: list[str] = []
_CHANGES = {
    "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.chmod": 1, "os.truncate": 1, "os.rename": 2, "os.link": 2,
    "os.symlink": 2, "shutil.rmtree": 1, "sqlite3.connect": 1,
}  # and how many paths they name  # fmt: skip


def _folder_of(fd: object) -> str:
    if type(fd) is not int or fd < 0:
        return os.getcwd()
    if sys.platform == "darwin":
        return fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
    return os.readlink(f"/proc/self/fd/{fd}")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _inside:
        return
    paths: list[tuple[object, object]] = []
    if event == "open":
        path, mode, flags = args
        relative = isinstance(path, str) and "/" not in path and mode is None  # its folder was opened before
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND) and not relative:
            paths = [(path, -1)]
    elif event in _CHANGES:
        many = _CHANGES[event]
        folders = args[-many:] if event not in ("sqlite3.connect", "os.truncate", "os.symlink") else (-1,) * many
        paths = list(zip(args[:many], folders, strict=True))
    for path, folder in paths:
        if isinstance(path, str | bytes | os.PathLike) and path != os.devnull:
            name = os.path.join(_folder_of(folder), os.fsdecode(path).removeprefix("file://").split("?")[0])
            real = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
            there_already = event == "os.mkdir" and os.path.lexists(name)
            if not real.startswith(_inside[0] + "/") and not there_already:
                _touched.append(f"{event} {name}")


sys.addaudithook(_audit)


@contextlib.contextmanager
def guarded(root: Path, seconds: float = 5) -> Iterator[None]:
    """Fails where anything outside of `root` is changed, or where it takes too long."""
    start = time.monotonic()
    _inside.append(os.path.realpath(root))
    try:
        yield
    finally:
        _inside.clear()
        touched = _touched.copy()
        _touched.clear()
    assert touched == []
    assert time.monotonic() - start < seconds


@contextlib.contextmanager
def small(limit: int = 64 * MB) -> Iterator[None]:
    """Fails where the process grows by more than `limit` at any time."""
    process, done, peak = psutil.Process(), threading.Event(), [0]

    def look() -> None:
        while not done.wait(0.002):
            peak.append(process.memory_info().rss)

    before, watcher = process.memory_info().rss, threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    assert max(peak) - before < limit


@pytest.fixture
async def root(tmp_path: Path) -> Path:
    """A cache that holds FAMILY, closed."""
    async with running(tmp_path / "cache", budget=BUDGET) as tier:
        await spill(tier, *FAMILY)
    return tmp_path / "cache"


@pytest.fixture
def precious(tmp_path: Path, root: Path) -> Iterator[Path]:
    """Files outside that must not change, in a folder where they have names that we would remove."""
    folder = tmp_path / "precious"
    folder.mkdir()
    for name in ("file", "1-0", "index-5.sqlite", *listing(root)):
        (folder / name).write_bytes(b"precious " * 500)
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_mode) for p in folder.iterdir()}
    yield folder
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_mode) for p in folder.iterdir()} == before


async def live(root: Path, *, but: set[bytes] | None = None, harm: Callable[[SSDTier], object] = lambda _: None) -> str:
    """All that a tier does; what is read is right, and all blocks but those named in `but` come back."""
    new = chain(2, seed=9)
    try:
        async with running(root, heard := Recorder(), budget=BUDGET) as tier:
            harm(tier)
            for b in FAMILY:
                back = content(await tier.read(b.key))
                assert back in (None, content(b))
                assert back or but is None or b.key in but, "another block was lost"
            await spill(tier, *new)
            for b in new:
                back = content(await tier.read(b.key))
                assert back == content(b) or (back is None and b.key not in heard.stored)
            tier.discard([FAMILY[-1].key])
            await spill(tier, block(70))
            with contextlib.suppress(OSError):  # it cannot measure what is not in its place
                await tier._store.make_room(BUDGET - 3 * MB, set())  # evicts
            return "open"
    except TierError:
        return "refused"


# -- links, pipes and folders in the place of files

INDEX = tuple(f"index.sqlite{suffix}" for suffix in ("", "-wal", "-shm"))
PLACES = ("blob", "fan-out", "tmp", "quarantine", "blobs", "lock", *INDEX)
TRAPS = ("link to a file", "link to a folder", "link to nothing", "pipe", "folder", "full folder")


def lay(trap: str, place: str, root: Path, precious: Path, at: Path) -> None:
    """Put a trap in a place; what was there is moved away."""
    place_of = {"blob": at, "fan-out": at.parent}.get(place, root / place)
    if os.path.lexists(place_of):
        place_of.rename(precious.parent / f"was-{place}")
    if trap.startswith("link"):
        target = {"link to a file": precious / "file", "link to a folder": precious}.get(trap, precious / "nothing")
        place_of.symlink_to(target)
    elif trap == "pipe":
        os.mkfifo(place_of)
    else:
        place_of.mkdir()
        if trap == "full folder":
            (place_of / "note").write_bytes(b"x")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("trap", TRAPS)
async def test_a_trap_laid_before_the_open_leads_nowhere(root, precious, trap, place):
    victim = FAMILY[3]
    (at,) = (p for p in (root / "blobs").glob("*/*") if p.name.startswith(victim.key.hex()))
    lay(trap, place, root, precious, at)
    with guarded(root), small():
        outcome = await live(root, but={victim.key} if place in ("blob", "fan-out") else None)
        assert outcome == "open" or place not in ("blob", "fan-out")
        await live(root)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("trap", TRAPS)
async def test_a_trap_laid_under_a_running_tier_leads_nowhere(root, precious, trap, place):
    victim = FAMILY[3]

    def harm(tier: SSDTier) -> None:
        watched = _inside.pop()
        lay(trap, place, root, precious, path_of(tier, victim))
        _inside.append(watched)

    with guarded(root), small():
        assert await live(root, but=None if place == "blobs" else {victim.key}, harm=harm) == "open"


@pytest.mark.parametrize("place", ["blob", "fan-out"])
async def test_a_link_to_what_was_in_its_place_is_not_followed(root, precious, place):
    async with running(root, budget=BUDGET) as tier:
        lay("link to nothing", place, root, precious, at := path_of(tier, FAMILY[3]))
        (precious / "nothing").symlink_to(moved := precious.parent / f"was-{place}")
        intact = blob(FAMILY[3])
        assert at.read_bytes() == intact, "the links lead to it"
        assert await tier.read(FAMILY[3].key) is None
        assert tier.counters["lost_damaged"] == 1
        assert (moved if place == "blob" else moved / at.name).read_bytes() == intact
    (precious / "nothing").unlink()


async def test_a_lock_that_is_another_name_of_a_file_is_refused(root, precious):
    (root / "lock").unlink()
    os.link(precious / "file", root / "lock")
    with guarded(root):
        assert await live(root) == "refused"
    (precious / "file").stat()


def test_the_guard_sees_what_it_is_there_for(tmp_path):
    (tmp_path / "in").mkdir()
    fd = os.open(tmp_path, os.O_RDONLY)
    for act in (
        lambda: (tmp_path / "a").write_bytes(b""),
        lambda: os.mkdir("b", dir_fd=fd),
        lambda: os.rename("a", "c", src_dir_fd=fd, dst_dir_fd=fd),
        lambda: os.unlink("c", dir_fd=fd),
    ):
        with pytest.raises(AssertionError), guarded(tmp_path / "in"):
            act()
    with guarded(tmp_path / "in"):
        (tmp_path / "in" / "a").write_bytes(b"")
    os.close(fd)
    with pytest.raises(AssertionError), small():
        _hold(100 * MB)


def _hold(nbytes: int) -> None:
    held = np.ones(nbytes, np.uint8)
    time.sleep(0.05)
    del held


# -- files that are larger than any disk

SPARSE = 10 * TB


def change(root: Path, statement: str, *values: object) -> None:
    """Somebody's SQL, which the schema's checks do not hold up."""
    with contextlib.closing(sqlite3.connect(root / "index.sqlite", isolation_level=None)) as c:
        c.execute("PRAGMA ignore_check_constraints = ON")
        c.execute(statement, values)


def file_of(root: Path, b: Block) -> Path:
    """Where a closed cache keeps the block."""
    (path,) = (root / "blobs" / b.key.hex()[:2]).glob(f"{b.key.hex()}-*.safetensors")
    return path


@pytest.mark.parametrize("claim", ["no row", "row of the old size", "row of this size", "row of this state, too"])
@pytest.mark.parametrize("use", ["first", "last"])
async def test_a_sparse_blob_costs_no_other_block(root, precious, claim, use):
    victim, path = FAMILY[3], file_of(root, FAMILY[3])
    os.truncate(path, SPARSE)
    change(root, "UPDATE block SET seq = ? WHERE key = ?", {"first": 0, "last": 10**6}[use], victim.key)
    if claim == "no row":
        change(root, "DELETE FROM block WHERE key = ?", victim.key)
    if "this" in claim:
        change(root, "UPDATE block SET file_bytes = ? WHERE key = ?", SPARSE, victim.key)
    if claim == "row of this state, too":
        change(root, "UPDATE block SET raw_bytes = ? WHERE key = ?", SPARSE, victim.key)
    with guarded(root), small():
        assert await live(root, but={victim.key}) == "open"
    assert on_disk(root) <= BUDGET


@pytest.mark.parametrize("name", ["tmp/1-0", "tmp/17-3", "quarantine/index-5.sqlite", *INDEX[:2]])
async def test_sparse_files_elsewhere_cost_no_block(root, precious, name):
    (root / name).touch()
    os.truncate(root / name, SPARSE)
    with guarded(root), small():
        await live(root, but=set())


@pytest.mark.parametrize("size", [4952, SPARSE])
async def test_a_sparse_blob_under_a_running_tier_is_a_miss(root, precious, size):
    def harm(tier: SSDTier) -> None:
        os.truncate(path_of(tier, FAMILY[3]), 0)
        os.truncate(path_of(tier, FAMILY[3]), size)
        tier.catalog.get(FAMILY[3].key).file_bytes = size

    with guarded(root), small():
        assert await live(root, but={FAMILY[3].key}, harm=harm) == "open"


# -- the index as a weapon

PATHS = ("../../x", "/etc/passwd", "", "\0", "a\0b", "x" * 300, "../" * 90, "%s%n", "\n")
COLUMNS = [("block", c) for c in ("key", "namespace", "parent")] + [
    ("block_tokens", "key"), ("block_tokens", "ids"), ("namespace", "digest"), ("namespace", "model"),
    ("layers", "namespace"), ("layers", "origin"), ("layers", "classes"), ("counter", "name"),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("table", "column"), COLUMNS)
async def test_no_path_in_the_index_leads_anywhere(root, precious, table, column, path):
    text = (table, column) in [("namespace", "model"), ("layers", "origin"), ("layers", "classes"), ("counter", "name")]
    which = f"(SELECT min({column}) FROM {table})"
    change(root, f"UPDATE {table} SET {column} = ? WHERE {column} = {which}", path if text else path.encode())
    with guarded(root), small():
        assert await live(root, but=set()) == "open"


HUGE = 2**63 - 1
NUMBERS = [(c, n) for c in ("generation", "start", "file_bytes", "raw_bytes", "seq", "hits", "created", "used")
           for n in (-HUGE - 1, -1, 0, HUGE)]  # fmt: skip


@pytest.mark.parametrize(("column", "number"), NUMBERS)
async def test_no_number_in_a_row_costs_another_block(root, precious, column, number):
    change(root, f"UPDATE block SET {column} = ? WHERE key = ?", number, FAMILY[3].key)
    with guarded(root), small():
        async with running(root, heard := Recorder(), budget=BUDGET) as tier:
            await spill(tier, block(80))
        assert heard.stored == [block(80).key]
        assert await live(root, but={FAMILY[3].key}) == "open"


@pytest.mark.parametrize("number", [HUGE, -HUGE - 1])
async def test_counters_that_are_full_do_not_stop_the_writing(root, precious, number):
    change(root, "UPDATE counter SET value = ?", number)
    change(root, "UPDATE written SET bytes = ?", number)
    with guarded(root):
        async with running(root, heard := Recorder(), budget=BUDGET) as tier:
            await spill(tier, block(80))
    assert heard.stored == [block(80).key]


class Counted(OrderedDict[bytes, Any]):
    """Entries of a catalog that give out after so many look-ups: for what would go on without end."""

    looked = 0

    def get(self, key: bytes, default: Any = None) -> Any:
        self.looked += 1
        assert self.looked < 10_000, "a walk that does not end"
        return super().get(key, default)


@pytest.mark.parametrize("parents", [{3: 3}, {0: 2}, {0: 1}, {3: 5, 4: 3}])
async def test_rows_that_are_their_own_ancestors_hang_nothing(root, precious, parents):
    """By number in FAMILY: whose child becomes whose."""
    for child, parent in parents.items():
        change(root, "UPDATE block SET parent = ? WHERE key = ?", FAMILY[parent].key, FAMILY[child].key)
    with guarded(root), small():
        async with running(root, budget=BUDGET) as tier:
            entries = tier.catalog._entries = Counted(tier.catalog._entries)
            for n, above in enumerate(FAMILY):
                await spill(tier, block(90 + n, above))
            tier.touch([b.key for b in FAMILY])
            await tier._store.make_room(BUDGET - 3 * MB, set())
    assert entries.looked < 10_000
