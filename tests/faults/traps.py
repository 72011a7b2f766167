"""A cache that others tamper with, all that a tier does in it, and guards over what it touches and how it grows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ssd_tier import SSDTier
from ssd_tier.errors import TierError
from tests.blocks import Recorder, block, chain, content, listing, running, spill

MB = 1 << 20
FAMILY = [*chain(3), block(50), *chain(2, seed=6)]
BUDGET = 16 * MB
INDEX = tuple(f"index.sqlite{suffix}" for suffix in ("", "-wal", "-shm"))
inside: list[str] = []  # the one directory in which files may be changed now; empty: nobody looks
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
    if not inside:
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
            if not real.startswith(inside[0] + "/") and not there_already:
                _touched.append(f"{event} {name}")


sys.addaudithook(_audit)


@contextlib.contextmanager
def guarded(root: Path, seconds: float = 5) -> Iterator[None]:
    """Fails where anything outside of `root` is changed, or where it takes too long."""
    start = time.monotonic()
    inside.append(os.path.realpath(root))
    try:
        yield
    finally:
        inside.clear()
        touched = _touched.copy()
        _touched.clear()
    assert touched == [], touched
    assert (took := time.monotonic() - start) < seconds, f"{took:.1f} s"


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
    assert (grown := max(peak) - before) < limit, f"grown by {grown}"


@pytest.fixture(name="root")
async def closed_cache(tmp_path: Path) -> Path:
    """A cache that holds FAMILY, closed."""
    async with running(tmp_path / "cache", budget=BUDGET) as tier:
        await spill(tier, *FAMILY)
    return tmp_path / "cache"


@pytest.fixture(name="precious")
def precious_files(tmp_path: Path, root: Path) -> Iterator[Path]:
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
