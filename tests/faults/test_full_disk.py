"""A disk that is full, or may not take more: nothing beyond the caps, no file in part, and back once there is room."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import ssd_tier.breaker
import ssd_tier.clock
import ssd_tier.tier
from ssd_tier.files import Directory
from tests.blocks import Recorder, block, chain, content, keys, listing, on_disk, rows, running, spill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
MB, KB = 1 << 20, 1000
FLOOR = 8 * MB


def child(function: str, root: Path, size: int = 0) -> None:
    """Run a function of this module in a process of its own; with `size`, on a disk of so many bytes."""
    code = "import asyncio, sys; from tests.faults import test_full_disk as t; "
    code += "asyncio.run(getattr(t, sys.argv[1])(t.Path(sys.argv[2])))"
    command = [sys.executable, "-c", code, function, str(root)]
    root.mkdir(exist_ok=True)
    if size:
        if not sys.platform.startswith("linux") or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode:
            assert not os.environ.get("CI"), "CI must let `unshare -Urm` make a small disk"
            pytest.skip("no small disk can be made: `unshare -Urm` is not allowed here")
        mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
        command = ["unshare", "-Urm", "sh", "-c", mount, str(root), *command]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


async def until(true, what: str) -> None:
    """Wait for something that must come true soon."""
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.01)
    pytest.fail(what)


async def all_right(tier, root: Path, *blocks) -> None:
    """These are there, bit for bit; each file has its entry and row, each row its parent; tmp/ is empty."""
    for b in blocks:
        assert content(await tier.read(b.key)) == content(b)
    names = {tier._directory.blob_path(e.key, e.generation).name for e in tier.catalog}
    assert set(listing(root, "blobs")) == names
    assert set(keys(*rows(root))) == set(keys(*tier.catalog))
    assert listing(root, "tmp") == []
    assert all(e.parent in (*keys(*tier.catalog), e.namespace) for e in tier.catalog)


def free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def fill(path: Path, leave: int) -> None:
    """Somebody else takes the disk, but for `leave` bytes."""
    with open(path, "ab") as file:
        while (more := free(path.parent) - leave) > 0:
            file.write(bytes(min(more, MB)))
            file.flush()


# -- somebody else fills the disk


async def filled(disk: Path) -> None:
    ssd_tier.tier.SAVE_EVERY = 0.05
    root, other = disk / "cache", disk / "other"
    families = [chain(8, seed, MB // 4) for seed in range(8)]
    async with running(root, heard := Recorder(), budget=32 * MB, min_free=FLOOR, level=None) as tier:
        for family in families:
            await spill(tier, *family)
        assert len(tier.catalog) == 64
        fill(other, FLOOR - 4 * MB)
        await until(lambda: free(disk) >= FLOOR, "own blocks make room")
        await asyncio.sleep(0.2)
        left = [b for family in families for b in family if b.key in tier.catalog]
        assert 20 < len(left) < 60, "no more goes than must"
        await all_right(tier, root, *left)
        for _ in range(200):
            fill(other, MB)
            await asyncio.sleep(0.05)
            if not len(tier.catalog):
                break
        assert len(tier.catalog) == 0, "given up down to the floor"
        fill(other, MB)
        await spill(tier, *families[0])
        assert (set(heard.lost), "no_room" in heard.lost.values()) == (set(keys(*families[0])), True)
        assert not tier.writer.breaker.open, "a full disk is no fault"
        other.unlink()
        await spill(tier, *families[1])
        await all_right(tier, root, *families[1])
        reasons = {k for k, v in tier.counters.items() if v and k.startswith("lost_")}
        assert reasons <= {"lost_no_room", "lost_parent_not_stored"}, reasons


def test_below_the_floor_nothing_is_stored_and_own_blocks_make_room(tmp_path):
    child("filled", tmp_path / "disk", 40 * MB)


async def really_full(disk: Path) -> None:
    Directory.free_bytes = lambda self: 1 << 40  # somebody else is faster than every look at the disk
    ssd_tier.breaker.FIRST_PAUSE = 60
    root, other = disk / "cache", disk / "other"
    kept, families = chain(8, 0, MB // 4), [chain(2, seed, MB // 2) for seed in range(1, 8)]
    async with running(root, heard := Recorder(), budget=1 << 30, level=None) as tier:
        await spill(tier, *kept)
        for n, leave in enumerate((MB, 0, 300 * KB)):
            fill(other, leave)
            while not tier.writer.breaker.open:
                await spill(tier, *families[0], *families[1], *families[2])
            await spill(tier, *families[4])
            reasons = set(heard.lost.values())
            assert {"write_failed", "ssd_off"} <= reasons <= {"write_failed", "ssd_off", "parent_not_stored"}, reasons
            assert heard.removed == []
            other.unlink()
            tier.writer.breaker.try_soon()
            await spill(tier, *families[6])
            assert heard.came_back == n + 1
            await all_right(tier, root, *kept, *families[6])
            await tier.remove(keys(*reversed(families[6])))
            heard.removed.clear(), heard.lost.clear()
    async with running(root, budget=1 << 30) as tier:
        await all_right(tier, root, *kept)


def test_a_write_that_finds_no_space_costs_its_block_and_no_other(tmp_path):
    child("really_full", tmp_path / "disk", 16 * MB)


async def too_large(disk: Path) -> None:
    root, kept = disk / "cache", chain(3)
    async with running(root, heard := Recorder()) as tier:
        await spill(tier, *kept)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        for seed, limit in enumerate((MB, 100 * KB, 3 * KB, 0), 1):
            large, small = block(90 + seed, nbytes=2 * MB), chain(2, seed)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            await spill(tier, large, *small)
            assert heard.lost.pop(large.key) == "write_failed"
            assert large.key not in heard.stored
            if limit != 100 * KB:  # else the index may do or not
                assert (small[1].key in heard.stored) == (limit == MB), limit
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            tier.writer.breaker.try_soon()
            await spill(tier, large, *small)
            await all_right(tier, root, *kept, large, *small)
        assert heard.removed == []


def test_a_file_that_may_not_grow_costs_its_block_and_no_other(tmp_path):
    child("too_large", tmp_path / "disk")


# -- the caps of our own


class Sampler(threading.Thread):
    """Looks every few milliseconds at how many bytes lie in a directory. What is seen in two sweeps, one after the
    other, was there between them, all of it at once.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.peak, self.samples, self.ended = root, 0, 0, threading.Event()

    def sweep(self) -> dict[object, int]:
        found: dict[object, int] = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                try:
                    s = os.lstat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue
                found[name if name.startswith("index") else (s.st_ino, s.st_mtime_ns)] = s.st_size
        return found

    def run(self) -> None:
        before = self.sweep()
        while not self.ended.wait(0.004):
            after = self.sweep()
            self.peak = max(self.peak, sum(min(size, after[key]) for key, size in before.items() if key in after))
            self.samples += 1
            before = after

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()


def blocks_of_many_sizes(count: int, least: int, most: int):
    """Blocks in chains of four, of random sizes."""
    rng, data = np.random.default_rng(5), np.random.default_rng(6).integers(0, 256, 2 * most, np.uint8)
    parent = None
    for i in range(count):
        n = int(rng.integers(least // 128, most // 128)) * 128
        at = int(rng.integers(0, most))
        shape = (1, 2, 16, n // 128)
        b = block(i, parent if i % 4 else None)
        parent = replace(b, data=data[at : at + n], tensors=tuple(t._replace(shape=shape) for t in b.tensors))
        yield parent


@pytest.mark.parametrize("damage", [False, True])
async def test_the_budget_holds_at_every_moment(tmp_path, damage):
    count, limit, set_aside = (1500, 20 * MB, 0) if damage else (10_000, 100 * MB, 0)
    async with running(tmp_path, heard := Recorder(), budget=limit, spill_queue=limit // 4, level=None) as tier:
        with Sampler(tmp_path) as sampler:
            for i, b in enumerate(blocks_of_many_sizes(count, 10 * KB, 500 * KB)):
                while not tier.put(b):
                    tier.writer.progress.clear()
                    await tier.writer.progress.wait()
                if damage and i % 40 == 39 and len(tier.catalog):
                    entry = list(tier.catalog)[-1]
                    path = tier._directory.blob_path(entry.key, entry.generation)
                    with path.open("r+b") as file:
                        file.seek(-1, os.SEEK_END)
                        file.write(b"!?"[file.read(1) == b"!" :][:1])
                    assert await tier.read(entry.key) is None
                    set_aside += bool(listing(tmp_path, "quarantine"))  # one that is too large goes at once
            await spill(tier)
        assert limit * 0.6 < sampler.peak <= limit
        assert sampler.samples > 50
        assert on_disk(tmp_path) <= limit
        assert (set_aside > 5) == (tier.counters["lost_damaged"] > 20) == damage
        assert tier.counters["blocks_evicted"] > count / 2
        assert set(heard.lost.values()) <= {"parent_not_stored"} if damage else not heard.lost
        assert len(heard.stored) + len(heard.lost) == count
        tier.catalog.check_integrity()


async def test_the_day_s_bytes_are_not_exceeded_and_the_next_day_goes_on(tmp_path, monkeypatch):
    daily = 2 * MB
    async with running(tmp_path, heard := Recorder(), daily=daily, level=None) as tier:
        with Sampler(tmp_path) as sampler:
            many = [chain(2, seed, 200 * 1024) for seed in range(20)]
            for family in many:
                await spill(tier, *family)
        assert daily - 2 * 210 * 1024 < tier.stats()["written_today"] == tier.counters["bytes_written"] <= daily
        assert sampler.peak <= daily + 3 * MB
        assert set(heard.lost.values()) <= {"write_budget", "parent_not_stored"}
        assert tier.counters["lost_write_budget"] >= 10
        assert not tier.writer.breaker.open
        await all_right(tier, tmp_path, *(b for family in many for b in family if b.key in tier.catalog))
    async with running(tmp_path, heard := Recorder(), daily=daily, level=None) as tier:  # a restart is no new day
        await spill(tier, *chain(2, 50, 200 * 1024))
        assert "write_budget" in heard.lost.values()
        monkeypatch.setattr(ssd_tier.clock, "_start", ssd_tier.clock._start + ssd_tier.clock.DAY)
        assert tier.stats()["written_today"] == 0
        await spill(tier, *chain(2, 50, 200 * 1024))
        await all_right(tier, tmp_path, *chain(2, 50, 200 * 1024))


async def test_what_is_not_used_goes_after_its_time_leaves_first_and_the_rest_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(ssd_tier.tier, "SAVE_EVERY", 0.02)
    start, used, unused = ssd_tier.clock._start, chain(4), chain(3, 1)

    def after(seconds: int) -> None:
        monkeypatch.setattr(ssd_tier.clock, "_start", start + seconds)

    async with running(tmp_path, heard := Recorder(), retention=1000) as tier:
        await spill(tier, *used, *unused)
        after(600)
        tier.touch(keys(used[1], used[0]), hit=True)
        await asyncio.sleep(0.1)
        assert heard.removed == []
        after(1100)
        await until(lambda: len(heard.removed) >= 5, "what was not used goes")
        await asyncio.sleep(0.1)
        assert sorted(heard.removed) == sorted(keys(*unused, used[2], used[3]))
        for upper, lower in [*pairwise(unused), (used[2], used[3])]:
            assert heard.removed.index(lower.key) < heard.removed.index(upper.key), "a leaf goes first"
        assert tier.counters["blocks_expired"] == 5
        await all_right(tier, tmp_path, *used[:2])
    after(1550)
    async with running(tmp_path, retention=1000) as tier:  # the last use outlives the process
        await all_right(tier, tmp_path, *used[:2])
    after(2700)
    async with running(tmp_path, retention=1000) as tier:
        assert (len(tier.catalog), listing(tmp_path, "blobs")) == (0, [])
