"""Breaches that an evaluation found in opening, flushing, closing and counting, as hosts would notice them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import sqlite3
import threading
import time

import pytest

import ssd_tier.tier
from ssd_tier import maintenance
from ssd_tier.files import Directory
from ssd_tier.folders import Folders
from ssd_tier.index import Index
from ssd_tier.store import Store
from tests.blocks import block, content, running, spill
from tests.faults.test_found_tier import fails, hooked, no_thread, stored, until  # noqa: F401  a fixture
from tests.integration.test_cli_mend import MODEL, served
from tests.models import random_tokens, same_state
from tests.states import state_of
from tiered_cache import TieredCache
from tiered_cache.runtime import LoopThread, Runtime

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
TOKENS = random_tokens(600, 1)


# -- flush() is False, or it is there after a restart


def test_flush_does_not_vouch_for_what_the_ssd_gave_up_and_ram_still_holds(make_config, monkeypatch):
    monkeypatch.setattr(ssd_tier.tier, "SAVE_EVERY", 0.1)
    sequences = [random_tokens(600, seed) for seed in range(3)]
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert all(cache.store(t, state_of(t)) for t in sequences)
        assert cache.flush(10)
        with monkeypatch.context() as full:
            full.setattr(Folders, "free_bytes", lambda self: 0)
            end = time.monotonic() + 5
            while cache.stats()["ssd"]["blocks"] and time.monotonic() < end:
                time.sleep(0.02)
        assert cache.stats()["ssd"]["blocks"] == 0, "somebody filled the disk"
        assert [cache.ram.covered(t) for t in sequences] == [600] * 3
        flushed = cache.flush(10)
        found = cache.stats()["ssd"]["blocks"]
    assert not flushed or [served(make_config, t) for t in sequences] == [599] * 3
    assert not flushed or found == 9


def test_flush_does_not_vouch_for_what_failed_and_left_ram_meanwhile(make_config, hooked):  # noqa: F811
    first, gate, answers = random_tokens(2000, 1), threading.Event(), []

    def hook(operation: str, name: str) -> None:
        if operation == "open" and name.startswith(f"{os.getpid()}-"):
            gate.wait(10)
            raise OSError(errno.EIO, "no open")

    with TieredCache.open(make_config(ram={"max_memory": "2MB"}), model=MODEL) as cache:
        assert cache.store(first, state_of(first))
        hooked(hook)
        flush = threading.Thread(target=lambda: answers.append(cache.flush(15)))
        flush.start()
        time.sleep(0.3)
        gate.set()
        for seed in range(2, 12):
            tokens = random_tokens(2000, seed)
            cache.store(tokens, state_of(tokens))
        flush.join()
        assert cache.ram.covered(first) < 2000, "it was pushed out of RAM"
        hooked()
    assert answers == [False] or served(make_config, first) == 1999


def test_flush_does_not_vouch_for_what_was_pushed_out_while_it_waited(make_config, hooked):  # noqa: F811
    hooked(lambda operation, name: time.sleep(0.03) if operation == "rename" else None)
    early, late = ([random_tokens(2000, seed) for seed in seeds] for seeds in (range(6), range(100, 112)))
    states = [state_of(t) for t in late]
    answers: list[bool] = []
    config = make_config(ram={"max_memory": "4MB"}, ssd={"spill_queue": "1MB"})
    with TieredCache.open(config, model=MODEL) as cache:
        assert all(cache.store(t, state_of(t)) for t in early)
        assert [cache.ram.covered(t) for t in early] == [2000] * 6
        flush = threading.Thread(target=lambda: answers.append(cache.flush(20)))
        flush.start()
        time.sleep(0.05)
        for tokens, state in zip(late, states, strict=True):
            cache.store(tokens, state)
        flush.join()
    hooked()
    assert answers == [False] or [served(make_config, t) for t in early] == [1999] * 6


# -- the day's writes


def test_a_day_counts_what_was_written_even_where_commits_fail(make_config, tmp_path, hooked, monkeypatch):  # noqa: F811
    config, written, real = make_config(ssd={"daily_writes": "1MB"}), [], Directory.write

    def write(self: Directory, *args) -> int:
        written.append(real(self, *args))
        return written[-1]

    monkeypatch.setattr(Directory, "write", write)
    with TieredCache.open(config, model=MODEL) as cache:
        hooked(fails("commit", "", errno.ENOSPC))
        for seed in range(12):
            tokens = random_tokens(1000, seed)
            assert cache.store(tokens, state_of(tokens))
            assert not cache.flush(5)
        assert 0 < sum(written) == cache.stats()["ssd"]["written_today"]
        hooked()
        cache.flush(5)
    assert 500_000 < sum(written) <= 1_000_000
    for _ in range(2):
        with TieredCache.open(config, model=MODEL) as cache:
            assert cache.stats()["ssd"]["written_today"] == sum(written)
        maintenance.rebuild_index(tmp_path / "cache")


# -- loops that go on


async def test_the_writer_outlives_a_fault_of_its_own(tmp_path, monkeypatch):
    gone, kept = block(1), block(2)
    async with running(tmp_path) as tier:
        await spill(tier, gone)
        with monkeypatch.context() as patched:
            patched.setattr(tier._store, "run", no_thread)
            tier.discard([gone.key])
            await asyncio.sleep(0.2)
        await spill(tier, kept)
        assert content(await tier.read(kept.key)) == content(kept)
        await until(lambda: gone.key not in tier.catalog, "it was to be removed")
    async with running(tmp_path) as tier:
        assert (await tier.read(gone.key), content(await tier.read(kept.key))) == (None, content(kept))


async def test_looks_at_the_disk_go_on_after_a_fault_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(ssd_tier.tier, "SAVE_EVERY", 0.05)
    async with running(tmp_path) as tier:
        await spill(tier, block(1))
        with monkeypatch.context() as patched:
            patched.setattr(tier._store, "run", no_thread)
            await asyncio.sleep(0.3)
        assert len(tier.catalog) == 1
        monkeypatch.setattr(Folders, "free_bytes", lambda self: 0)
        await until(lambda: not len(tier.catalog), "nobody saw that the disk is full")


# -- closing


@contextlib.contextmanager
def failing_close(monkeypatch, what: str):
    """Closing fails somewhere."""
    with monkeypatch.context() as patched:
        if what == "threads":
            patched.setattr(threading.Thread, "start", no_thread)
        else:
            of, name, error = {
                "flush": (Runtime, "_flush", RuntimeError("flush")),
                "save": (Store, "save", RuntimeError("save")),
                "store": (Store, "close", sqlite3.OperationalError("disk I/O error")),
                "index": (Index, "close", OSError(errno.EIO, "no close")),
                "compute": (Store, "remove", RuntimeError("remove")),
            }[what]
            real = getattr(of, name)

            async def fail(self, *args, **more):
                await real(self, *args, **more)
                raise error

            patched.setattr(of, name, fail)
        yield


@pytest.mark.parametrize("removes", [False, True])
@pytest.mark.parametrize("what", ["threads", "flush", "save", "store", "index", "compute"])
def test_closing_gives_the_directory_back_whatever_fails(make_config, monkeypatch, what, removes):
    other = random_tokens(500, 2)
    stored(make_config(), TOKENS, other)
    cache = TieredCache.open(make_config(), model=MODEL)
    with failing_close(monkeypatch, what), contextlib.suppress(RuntimeError, OSError, sqlite3.Error):
        if removes:
            cache.ram.remove(other, include_ssd=True)
        cache.close()
    with TieredCache.open(make_config(), model=MODEL) as again:
        assert again.stats()["ssd"]["on"]
    assert served(make_config, TOKENS) == 599
    assert not removes or served(make_config, other) == 0
    del cache, again
    gc.collect()  # complains about what was left open


def test_a_flush_that_meets_close_is_false_and_raises_nothing(make_config, monkeypatch):
    cache, answers, real = TieredCache.open(make_config(), model=MODEL), [], LoopThread.run
    assert cache.store(TOKENS, state_of(TOKENS))

    def run(self, coroutine):
        if threading.current_thread().name == "flush":
            time.sleep(0.7)  # meanwhile the other thread closes
        return real(self, coroutine)

    def flush() -> None:
        try:
            answers.append(cache.flush(2))
        except BaseException as e:
            answers.append(e)

    monkeypatch.setattr(LoopThread, "run", run)
    thread = threading.Thread(target=flush, name="flush", daemon=True)
    thread.start()
    time.sleep(0.1)
    cache.close()
    thread.join(10)
    assert answers == [False]
    assert served(make_config, TOKENS) == 599


# -- opening


@contextlib.contextmanager
def failing_open(monkeypatch, what: str, code: int):
    """Calls that opening needs fail: on a folder to make, the lock, a listing, the index."""

    def fail_on(real, ends: str):
        def call(path, *args, **more):
            if str(path).endswith(ends):
                raise OSError(code, os.strerror(code), str(path))
            return real(path, *args, **more)

        return call

    with monkeypatch.context() as patched:
        if what in ("begin", "commit", "migrate"):
            patched.setattr(Directory, "hook", staticmethod(fails(what, "", code)))
        else:
            name, ends = {"root": ("mkdir", "cache"), "folders": ("mkdir", "blobs"), "lock": ("open", "lock"),
                          "index": ("open", "index.sqlite"), "listing": ("scandir", "blobs")}[what]  # fmt: skip
            patched.setattr(os, name, fail_on(getattr(os, name), ends))
        yield


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("what", ["root", "folders", "lock", "index", "listing", "migrate", "begin", "commit"])
def test_a_disk_that_fails_at_open_leaves_ram_alone_and_one_warning(make_config, monkeypatch, caplog, what, code):
    with failing_open(monkeypatch, what, code), caplog.at_level(logging.WARNING):
        cache = TieredCache.open(make_config(), model=MODEL)
    with cache:
        assert cache.store(TOKENS, state_of(TOKENS))
        assert same_state(cache.fetch(TOKENS)[0], state_of(TOKENS), 599)
        assert (cache.stats()["ssd"]["on"], cache.flush(1)) == (False, False)
        (warning,) = caplog.records
        assert (warning.levelname, warning.exc_info) == ("WARNING", None)
        assert "SSD tier is off" in warning.getMessage()
        assert "\n" not in warning.getMessage()
    stored(make_config(), TOKENS)
    assert served(make_config, TOKENS) == 599, "the disk is well again"
