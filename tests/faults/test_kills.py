"""Killed at any instant, and at each operation on the disk: the next open is clean, and nothing flushed is lost."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ssd_tier.budget import INDEX_SLACK
from ssd_tier.inspection import Inspection
from tests.blocks import content, listing
from tests.faults.crash import BLOCKS, SHARES, Child, Oracle, Say, family, in_helpers, make_blocks, opened
from tests.faults.points import HALF
from tests.faults.scripts import flushed, make_scripts, put

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

KILLS = 1000
CACHE_KILLS = int(os.environ.get("CACHE_KILLS", "40"))
AT_EACH_POINT = 100
NBYTES = 16384
POINTS = {
    "open aside", "write aside", HALF, "fsync aside", "fsync folder", "rename blob", "open blob", "read blob",
    "unlink blob", "unlink aside", "begin index", "commit index", "committed index", "migrate index",
    "rename index", "rename index-wal", "rename index-shm",
}  # fmt: skip


async def busy(root: Path, oracle: Oracle, say: Say, seed: int, changes: dict[str, Any], deep: bool) -> None:
    """Look at what the last one left, then store, read, evict and remove without end."""
    tier, teller = await opened(root, oracle, say, deep=deep, **changes)
    rng = random.Random(seed)
    say("ready", [1])
    evicted = tier.counters["blocks_evicted"]

    async def stores() -> None:
        nonlocal evicted
        while True:
            numbers = family(rng.randrange(len(BLOCKS)))
            if rng.random() < 0.8:
                put(tier, say, *numbers[: rng.randint(1, 4)])
            else:
                tier.discard([BLOCKS[n].key for n in reversed(numbers[rng.randrange(4) :])])
            if rng.random() < 0.3:
                await flushed(tier)
            say("evicted", [tier.counters["blocks_evicted"] - evicted])
            evicted = tier.counters["blocks_evicted"]
            await asyncio.sleep(rng.choice((0, 0.0005, 0.002)))

    async def reads_and_removes() -> None:
        while True:
            numbers = family(rng.randrange(len(BLOCKS)))
            if rng.random() < 0.6:
                tier.touch([BLOCKS[n].key for n in reversed(numbers)], hit=True)
                blocks = await asyncio.gather(*(tier.read(BLOCKS[n].key) for n in numbers))
                for n, got in zip(numbers, blocks, strict=True):
                    if got:
                        say("reads", [1])
                        say("wrong", [content(got) != content(BLOCKS[n])])
            else:
                await teller.remove(tier, reversed(numbers[rng.randrange(4) :]))
            await asyncio.sleep(rng.choice((0, 0.001)))

    await asyncio.gather(stores(), reads_and_removes())


def kill_after(child: Child, oracle: Oracle, rng: random.Random, puts: int) -> None:
    """Kill it at any instant, once it has put a few blocks however slow the machine is."""
    for _ in range(rng.randrange(puts)):
        child.hear(oracle, "put")
    time.sleep(rng.uniform(0, 0.015))
    os.kill(child.pid, signal.SIGKILL)
    assert child.end(oracle) == -signal.SIGKILL


def kill_at_random(folder: str, share: int, kills: int) -> dict[str, int]:
    """In a helper: kill, open, and so on; what was found."""
    make_blocks(160, NBYTES)
    root, rng, oracle = Path(folder) / "cache", random.Random(share), Oracle()
    changes = {"budget": INDEX_SLACK + 600_000}  # some 25 blocks and the index
    for kill in range(kills // SHARES + 1):
        child = Child(lambda say, kill=kill: busy(root, oracle, say, rng.randrange(2**32), changes, kill % 100 == 0))
        early = rng.random() < 0.1 and kill < kills // SHARES  # while it puts in order what the last one left
        assert early or child.hear(oracle, "ready"), f"after kill {kill} ({child.end(oracle)})"
        kill_after(child, oracle, rng, 1 if early else 12)
        assert not oracle.found["wrong"], "wrong bytes"
    return oracle.found


def test_killed_at_a_thousand_random_instants(tmp_path):
    began = time.monotonic()
    found = sum(map(Counter, in_helpers(kill_at_random, tmp_path, KILLS)), Counter())
    print(f"{KILLS} kills in {time.monotonic() - began:.0f} s: {dict(found)}")
    assert found["checked"] > 0.8 * KILLS
    # So many files without a row, or half written, or rows without a file were met; else the test has lost its point.
    least = {"strays": 100, "temporary": 5, "reads": 500, "stored": 1000, "served": 9000, "gone": 200, "evicted": 200}
    assert not {what: found[what] for what in least if found[what] < least[what]}


def use_cache(config: dict[str, Any], oracle: Oracle, say: Say, seed: int, evicts: bool) -> NoReturn:
    """Look at what the last one left, then store, promote and remove sequences without end."""
    from tests.faults.victim import SHARED, sequence
    from tests.models import same_state
    from tests.states import ShapeOnlyModel, state_of
    from tiered_cache import TieredCache

    rng = random.Random(seed)
    root = Path(config["ssd"]["path"])
    say("temporary", [len(listing(root, "tmp"))])
    cache = TieredCache.open(config, model=ShapeOnlyModel())
    say("strays", [cache.stats()["ssd"].get("files_adopted", 0)])
    found = Inspection(root)
    assert not listing(root, "tmp")
    assert listing(root, "blobs") == sorted(found.path(e).name for e in found.entries)
    known = max(oracle.possible, default=0) + 1  # whatever was removed is among these
    for number in {*range(max(0, known - 6), known), *rng.sample(range(known), min(known, 6))}:
        tokens = sequence(number)
        promotion = cache.promote(tokens)
        state, remaining = promotion.result(30) if promotion else cache.fetch(tokens)
        covered = len(tokens) - len(remaining)
        assert evicts or number not in oracle.sure or covered == len(tokens) - 1, f"flushed {number} is lost"
        assert number in oracle.possible or covered < SHARED + 20, f"removed {number} came back"
        if state:
            say("served", [1])
            assert same_state(state, state_of(tokens), covered), "wrong bytes"
    assert "lost_damaged" not in cache.stats()["losses"]
    say("ready", [1])
    begun: set[int] = set()  # stored, and not known to be flushed
    while True:
        if rng.random() < 0.3 and (promotion := cache.promote(sequence(rng.randrange(known)))):
            promotion.result(30)
        removed: list[int] = []
        if rng.random() < 0.3:
            n = rng.randrange(known)
            say("going", [n])
            removed = [n] if cache.ram.remove(sequence(n), include_ssd=True) else []
            begun.discard(n)
            assert cache.flush(30)
            say("lost", [n])  # it waits no longer
        say("put", [known])
        if cache.store(sequence(known), state_of(sequence(known))):
            begun.add(known)
            if (removed or rng.random() < 0.3) and cache.flush(30):
                say("stored", begun)
                say("gone", removed)  # what was to be removed is removed before the next is stored
                begun.clear()
        known += 1


def kill_the_cache(folder: str, share: int, kills: int) -> dict[str, int]:
    """In a helper: kill and open; one has room for everything, the other evicts."""
    import tests.faults.victim  # noqa: F401  imported once, before any fork

    ssd = {"path": f"{folder}/cache", "budget": ("2GB", "4MB")[share], "min_free": "1MB", "write": "through"}
    config = {"ram": {"max_memory": "2MB"}, "ssd": ssd}
    rng, oracle = random.Random(share), Oracle()
    for kill in range(kills // SHARES + 1):
        child = Child(lambda say: use_cache(config, oracle, say, rng.randrange(2**32), share == 1))
        assert child.hear(oracle, "ready"), f"after kill {kill} ({child.end(oracle)})"
        kill_after(child, oracle, rng, 8)
    return oracle.found


def test_the_whole_cache_is_killed(tmp_path):
    began = time.monotonic()
    found = sum(map(Counter, in_helpers(kill_the_cache, tmp_path, CACHE_KILLS)), Counter())
    print(f"{CACHE_KILLS} kills in {time.monotonic() - began:.0f} s: {dict(found)}")
    assert found["ready"] == CACHE_KILLS + SHARES
    assert min(found[k] for k in ("served", "stored", "gone")) >= 10


def kill_at_each_point(folder: str, share: int, kills: int) -> dict[str, dict[str, int]]:
    """In a helper: play each script to its end, then kill it at each of its points, and count."""
    make_blocks(24, NBYTES)
    root = Path(folder) / "cache"
    made = make_scripts(Path(folder))
    points = {name: script.points(root) for name, script in made.items()}
    places = Counter(p.name for passed in points.values() for p in passed)
    todo = [(n, p) for n in made for p in points[n] for _ in range(math.ceil(kills / places[p.name]))]
    counts: dict[str, Counter[str]] = {"points": Counter(), "scripts": Counter(), "found": Counter()}
    for number, (name, point) in enumerate(todo):
        if number % SHARES != share:
            continue
        try:
            counts["found"] += made[name].killed_at(point, root, deep=number % 100 == share)
        except AssertionError as e:
            raise AssertionError(f"{name}, killed at {point.name} number {point.time}: {e}") from None
        counts["points"][point.name] += 1
        counts["scripts"][name] += 1
    assert {name for name, _ in todo} == made.keys()
    return counts


def test_killed_a_hundred_times_at_each_point(tmp_path):
    began = time.monotonic()
    # In RAM where that can be had: a kill leaves the same there, and nothing waits for a disk to sync.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        results = in_helpers(kill_at_each_point, Path(folder), AT_EACH_POINT)
    points, by_script, found = (sum((Counter(r[k]) for r in results), Counter()) for k in results[0])
    print(f"{points.total()} kills in {time.monotonic() - began:.0f} s: {points}, {by_script}, {found}")
    assert set(points) == POINTS
    assert min(points.values()) >= AT_EACH_POINT
    assert found["checked"] == points.total()
    assert min(found["strays"], found["temporary"]) > AT_EACH_POINT
