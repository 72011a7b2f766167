"""Breaches that an evaluation found, as those who embed the cache would notice them: files, bytes, tokens, counters."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import ssd_tier.clock
import ssd_tier.tier
from ssd_tier import maintenance
from ssd_tier.files import Directory
from ssd_tier.folders import default_hook
from ssd_tier.store import Store
from tests.blocks import block, content, keys, listing, on_disk, running, spill
from tests.integration.test_cli_mend import MODEL, SEQUENCES, served
from tests.models import random_tokens
from tests.states import state_of
from tiered_cache import TieredCache

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
MB = 1 << 20


@pytest.fixture
def hooked(monkeypatch) -> Callable[..., None]:
    """Calls a hook before each operation on a file; without one, none again."""
    return lambda hook=default_hook: monkeypatch.setattr(Directory, "hook", staticmethod(hook))


def fails(operation: str, suffix: str = ".safetensors", code: int = errno.EIO) -> Callable[[str, str], None]:
    """A hook: this operation fails on all files whose names end so."""

    def hook(now: str, name: str) -> None:
        if now == operation and name.endswith(suffix):
            raise OSError(code, os.strerror(code))

    return hook


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def stored(config, *sequences: list[int]) -> None:
    """A run that stores these."""
    with TieredCache.open(config, model=MODEL) as cache:
        assert all(cache.store(tokens, state_of(tokens)) for tokens in sequences)


@contextlib.contextmanager
def watched(root: Path, most: int) -> Iterator[None]:
    """Fails where the files below `root` ever have more than so many bytes."""
    done, seen = threading.Event(), [0]

    def look() -> None:
        while not done.wait(0.01):
            seen.append(on_disk(root))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    assert len(seen) > 5
    assert max(seen) <= most


async def until(true: Callable[[], object], what: str) -> None:
    """Wait for what must come true soon."""
    end = time.monotonic() + 8
    while not true():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("operation", ["open", "read"])
@pytest.mark.parametrize("index", ["gone", "without rows"])
def test_headers_that_cannot_be_read_at_open_cost_no_file(make_config, tmp_path, hooked, index, operation):
    root = tmp_path / "cache"
    stored(make_config(), *SEQUENCES)
    if index == "gone":
        (root / "index.sqlite").unlink()
    else:
        with closing(sqlite3.connect(root / "index.sqlite")) as connection, connection:
            connection.execute("DELETE FROM block")
            connection.execute("DELETE FROM block_tokens")
    before = listing(root, "blobs")
    hooked(fails(operation))
    with TieredCache.open(make_config(ssd={"budget": "4MB"}), model=MODEL) as cache:
        assert cache.promote(SEQUENCES[0]) is None
    assert (listing(root, "blobs"), listing(root, "quarantine")) == (before, [])
    hooked()
    assert [served(make_config, t) for t in SEQUENCES] == [len(t) - 1 for t in SEQUENCES]
    assert listing(root, "blobs") == before


@pytest.mark.parametrize("opens", [0, 2])
def test_a_sequence_whose_files_could_not_be_removed_does_not_come_back(make_config, tmp_path, hooked, opens):
    """`opens`: how many more times the directory is opened before files can be removed again."""
    gone, kept = SEQUENCES[0], random_tokens(700, 9)
    stored(make_config(), gone, kept)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        hooked(fails("unlink"))
        assert cache.ram.remove(gone, include_ssd=True)
        assert cache.promote(gone) is None
        cache.flush(5)
    for _ in range(opens):
        assert (served(make_config, gone), served(make_config, kept)) == (0, 699)
    hooked()
    assert (served(make_config, gone), served(make_config, kept)) == (0, 699)
    assert len(listing(tmp_path / "cache", "blobs")) == 3, "removed at last"


# -- the budget


async def test_the_budget_holds_however_many_token_ids_the_rows_have(tmp_path, monkeypatch):
    monkeypatch.setattr(ssd_tier.tier, "SAVE_EVERY", 0.05)
    async with running(tmp_path, budget=16 * MB, admission="all") as tier:
        with watched(tmp_path, 16 * MB):
            for seeds in (range(40), range(40, 60)):
                await spill(tier, *(block(seed, nbytes=320_000, tokens=40_000) for seed in seeds))
        assert len(tier.catalog) >= 5
        index = tmp_path / "index.sqlite"
        assert index.stat().st_size > 3 * MB
        await tier.remove(keys(*tier.catalog))
        await until(lambda: index.stat().st_size < 1.25 * MB, "the index shrinks with its rows")


async def test_the_budget_holds_while_removals_are_slow(tmp_path, hooked, monkeypatch):
    monkeypatch.setattr(ssd_tier.tier, "SAVE_EVERY", 0.1)
    old, new = ([block(seed, nbytes=MB // 2) for seed in range(start, start + 10)] for start in (0, 100))
    async with running(tmp_path, budget=8 * MB, level=None, retention=1, admission="all") as tier:
        await spill(tier, *old)
        assert len(tier.catalog) == 10
        hooked(lambda operation, name: time.sleep(0.2) if operation == "unlink" else None)
        with watched(tmp_path, 8 * MB):
            await until(lambda: not len(tier.catalog), "they are too old")
            assert len(listing(tmp_path, "blobs")) > 5, "the files take longer"
            await spill(tier, *new)
        hooked()


async def test_two_who_make_room_at_once_evict_what_one_would(tmp_path):
    left = []
    for at_once in (1, 2):
        root = tmp_path / str(at_once)
        async with running(root, level=None) as tier:
            await spill(tier, *(block(seed, nbytes=100 << 10) for seed in range(50)))
            store = tier._store
            held = store.catalog.file_bytes + store.directory.other_bytes()
            store.budget = store.budget._replace(limit=held + 2 * MB - MB)  # 1 MB over
            await asyncio.gather(*(store.make_room(0, set()) for _ in range(at_once)))
            left.append(len(tier.catalog))
            assert len(listing(root, "blobs")) == len(tier.catalog)
    assert left[0] == left[1]
    assert 35 <= left[0] < 42


def test_the_clock_goes_on_while_the_machine_sleeps(monkeypatch):
    goes_on, real = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC), time.clock_gettime
    before, slept = ssd_tier.clock.now(), 31 * 86_400
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + slept * (clock == goes_on))
    assert slept <= ssd_tier.clock.now() - before <= slept + 2


# -- looking while files go


async def test_verify_beside_an_owner_that_removes_reports_nothing(tmp_path, hooked):
    found: list[object] = []
    async with running(tmp_path) as tier:
        blocks = [block(seed) for seed in range(60)]
        await spill(tier, *blocks)
        hooked(lambda operation, name: time.sleep(0.03) if operation == "unlink" else None)
        removal = asyncio.create_task(tier.remove(keys(*blocks)))
        looks = 0
        while not removal.done():
            found += await asyncio.to_thread(maintenance.verify, tmp_path)
            looks += 1
            await asyncio.sleep(0.02)
        await removal
    assert looks >= 2
    assert found == []


async def test_files_that_vanish_while_they_are_listed_are_passed_over(tmp_path, monkeypatch):
    async with running(tmp_path) as tier:
        await spill(tier, *(block(seed) for seed in range(8)))
    real = os.scandir

    @contextlib.contextmanager
    def vanishing(path):
        with real(path) as found:
            yield (os.unlink(e.path) or e if e.name.endswith("safetensors") else e for e in found)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert list(Directory(tmp_path).blobs()) == []
    monkeypatch.setattr(os, "scandir", real)
    assert {f.kind for f in maintenance.verify(tmp_path)} == {"missing"}


# -- what was removed stays removed


@pytest.mark.parametrize("in_ram", [False, True])
@pytest.mark.parametrize("slow", ["save", "close"])
def test_a_removal_while_the_cache_closes_is_kept(make_config, monkeypatch, slow, in_ram):
    """Or refused, once the index is about to be closed."""
    gone = SEQUENCES[0]
    stored(make_config(), gone)
    real, begun = getattr(Store, slow), threading.Event()

    async def slowly(self: Store) -> None:
        begun.set()
        await asyncio.sleep(0.4)
        await real(self)

    cache = TieredCache.open(make_config(), model=MODEL)
    assert not in_ram or cache.store(gone, state_of(gone))
    with monkeypatch.context() as patched:
        patched.setattr(Store, slow, slowly)
        closer = threading.Thread(target=cache.close)
        closer.start()
        assert begun.wait(10)
        removed = cache.ram.remove(gone, include_ssd=True)
        closer.join()
    assert removed or slow == "close"
    assert served(make_config, gone) == (0 if removed else len(gone) - 1)


def test_removing_a_sequence_removes_the_tail_that_it_replaced(make_config, tmp_path):
    short = random_tokens(300, 1)
    long = short + random_tokens(100, 2)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(short, state_of(short))
        assert cache.flush(5)
        assert cache.store(long, state_of(long))  # its last block will replace that of `short`, still on the SSD
        assert cache.ram.remove(long, include_ssd=True)
        assert cache.flush(5)
    assert (served(make_config, short), served(make_config, long)) == (0, 0)
    assert listing(tmp_path / "cache", "blobs") == []


async def test_a_removal_whose_commit_failed_is_not_counted_as_a_loss(tmp_path, hooked):
    gone, kept = block(1), block(2)
    async with running(tmp_path) as tier:
        await spill(tier, gone)
        hooked(fails("commit", ""))
        await tier.remove([gone.key])
        hooked()
        await spill(tier, kept)
    async with running(tmp_path) as tier:
        assert tier.counters["lost_missing"] == 0
        assert (await tier.read(gone.key), content(await tier.read(kept.key))) == (None, content(kept))
