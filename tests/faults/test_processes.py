"""Other processes, other users, other times: a second owner, a forked child, a directory that one may only read, a
clock that jumps."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ssd_tier import DirectoryInUse, DirectoryUnusable, SSDTier, clock
from ssd_tier.inspection import Inspection
from ssd_tier.maintenance import verify
from tests.blocks import chain, content, keys, listing, options, running, spill
from tests.integration.test_cli import run
from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
MODEL = ShapeOnlyModel()
NOBODY = 65534


def in_child(function: Callable[[], str]) -> str:
    """What the function returns, or raises, in a forked child that ends at once."""
    end, other = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(20)  # a child that hangs fails the test
            told = function()
        except BaseException as e:
            told = f"{type(e).__name__}: {e}"
        os.write(other, told.encode()[:60000])
        os._exit(0)
    os.close(other)
    with open(end, "rb") as pipe:
        told = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, "the child hung"
    return told


def test_a_forked_child_is_refused_by_every_call_and_does_its_parent_no_harm(make_config, tmp_path):
    tokens, others = random_tokens(600, 1), random_tokens(600, 2)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(tokens, state_of(tokens))
        assert cache.flush(20)
        handoff = cache.handoff()
        state = state_of(others)
        calls: dict[str, Callable[[], object]] = {
            "fetch": lambda: cache.fetch(tokens),
            "store": lambda: cache.store(others, state),
            "promote": lambda: cache.promote(tokens),
            "flush": cache.flush,
            "submit": lambda: handoff.submit(1, tokens),
            "clear": cache.ram.clear,
        }
        for name, call in calls.items():
            told = in_child(lambda call=call: str(call()))
            assert told.startswith(f"RuntimeError: a TieredCache of process {os.getpid()} was used in its"), name
        assert in_child(lambda: str(cache.close())) == "None"  # nothing to do, and nothing done
        assert cache.store(others, state_of(others))
        assert cache.flush(20)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        for stored in (tokens, others):
            state, remaining = cache.promote(stored).result(20)
            assert remaining == stored[-1:]
            assert same_state(state, state_of(stored), 599)


def lives_on() -> int:
    """A forked child that does nothing for a minute."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def test_a_forked_child_that_lives_on_does_not_keep_the_directory_locked(tmp_path):
    async def own() -> int:
        async with running(tmp_path) as tier:
            await spill(tier, *chain(2))
            return lives_on()

    pid = asyncio.run(own())
    try:
        tier = SSDTier(options(tmp_path))
        tier.disown()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_second_owner_is_refused_and_the_lock_goes_with_a_killed_one(tmp_path):
    tier = SSDTier(options(tmp_path))
    try:
        assert in_child(lambda: str(SSDTier(options(tmp_path)))).startswith(
            f"DirectoryInUse: ssd.path {tmp_path} is in use by process {os.getpid()};"
        )
    finally:
        tier.disown()
    end, other = os.pipe()
    pid = os.fork()
    if pid == 0:
        tier = SSDTier(options(tmp_path))
        os.write(other, b"1")
        time.sleep(60)
        os._exit(1)
    os.read(end, 1)
    with pytest.raises(DirectoryInUse, match=f"process {pid};"):
        SSDTier(options(tmp_path))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    SSDTier(options(tmp_path)).disown()


def filled(root: Path) -> None:
    async def fill() -> None:
        async with running(root) as tier:
            await spill(tier, *chain(3))

    asyncio.run(fill())


def as_user(root: Path, uid: int, function: Callable[[], str]) -> str:
    """The function's outcome as another user, to whom everything above the directory is open."""
    for folder in [root.parent, *root.parent.parents]:
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o001)

    def changed() -> str:
        os.setgid(uid)
        os.setuid(uid)
        return function()

    return in_child(changed)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@needs_root
def test_a_directory_that_may_only_be_read_can_be_looked_into_and_not_opened(tmp_path):
    root = tmp_path / "cache"
    filled(root)
    for path in [root, *root.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert verify(root) == []
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and not p.name.endswith(("-shm", "-wal"))}
    for suffix in ("-shm", "-wal"):
        (root / f"index.sqlite{suffix}").unlink(missing_ok=True)
    assert as_user(root, NOBODY, lambda: f"{len(Inspection(root).entries)} {verify(root)}") == "3 []"
    told = as_user(root, NOBODY, lambda: str(SSDTier(options(root))))
    assert told == (
        f"DirectoryUnusable: ssd.path {root} is not writable; run: chmod 700 {root}, or choose another directory"
    )
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before


@needs_root
def test_a_directory_of_another_user_is_refused_and_left_alone(tmp_path):
    root = tmp_path / "cache"
    filled(root)
    root.chmod(0o755)
    before = listing(root)
    told = as_user(root, NOBODY, lambda: str(SSDTier(options(root))))
    assert told.startswith(f"DirectoryUnusable: ssd.path {root} belongs to another user (uid 0)")
    os.chown(root, NOBODY, NOBODY)
    with pytest.raises(DirectoryUnusable, match=f"belongs to another user \\(uid {NOBODY}\\)"):
        SSDTier(options(root))
    assert listing(root) == before


def test_a_directory_that_all_may_write_to_is_refused_and_its_mode_left(tmp_path):
    filled(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(DirectoryUnusable, match="chmod 700"):
        SSDTier(options(tmp_path))
    assert tmp_path.stat().st_mode & 0o777 == 0o777


YEARS = 10 * 365 * 86400


@pytest.mark.parametrize("jump", [-YEARS, -3600, 3600, YEARS])
async def test_the_order_of_eviction_does_not_know_the_time_of_day(tmp_path, monkeypatch, jump):
    """The clock jumps while the tier runs, and is elsewhere when it is opened again."""
    real = time.time
    families = [chain(3, seed, 1 << 18) for seed in range(4)]
    async with running(tmp_path, retention=30 * 86400) as tier:
        await spill(tier, *families[0])
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        for family in families[1:]:
            await spill(tier, *family)
        tier.touch(keys(*reversed(families[0])))
        await asyncio.sleep(0.01)
        await tier.save()
        assert len(tier.catalog) == 12
    monkeypatch.setattr(clock, "_start", clock._start + jump)
    size = sum(e.file_bytes for e in Inspection(tmp_path).entries) * 7 // 12
    async with running(tmp_path, budget=size + (2 << 20) + 150_000) as tier:
        assert set(keys(*families[0])) <= {e.key for e in tier.catalog}, "what was used last went first"
        assert len(tier.catalog) < 12
        left = [b for family in families for b in family if b.key in {e.key for e in tier.catalog}]
        for b in left:
            assert content(await tier.read(b.key)) == content(b)
        assert all(e.hits <= 1 for e in tier.catalog)
    assert all(s.blocks[-1].used >= 0 for s in Inspection(tmp_path).sequences())


def test_ages_are_never_negative_on_the_command_line(make_config, tmp_path):
    tokens = random_tokens(600, 1)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(tokens, state_of(tokens))
    with sqlite3.connect(tmp_path / "cache" / "index.sqlite") as connection:
        connection.execute("UPDATE block SET created = created + 999999999, used = used + 999999999")
    (row,) = json.loads(run("ls", "-p", tmp_path / "cache", "--json").stdout)
    assert (row["age_seconds"], row["unused_seconds"]) == (0, 0)


def test_a_disk_that_is_taken_away_costs_nothing_but_the_reads(tmp_path):
    """Where the mount point is empty, nothing is known to be lost."""
    root = tmp_path / "mount" / "cache"
    root.parent.mkdir()
    family = chain(3)

    async def use() -> tuple[int, dict[str, int]]:
        async with running(root) as tier:
            await spill(tier, *family)
            root.rename(tmp_path / "unplugged")
            assert [await tier.read(b.key) for b in family] == [None] * 3
            here = len(tier.catalog)
            (tmp_path / "unplugged").rename(root)
            assert content(await tier.read(family[0].key)) == content(family[0])
            return here, dict(tier.counters)

    here, counters = asyncio.run(use())
    assert here == 3
    assert counters["read_failed"] == 3
    assert not counters["lost_missing"]
