"""Cancelled at any await, closed at any moment: what is lost is counted, what was reserved is given back once."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ssd_tier import SSDTier
from ssd_tier.files import Directory
from tests.blocks import Recorder, chain, content, keys, options, running, spill
from tests.faults.shim import quiet, stepped, whole
from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tiered_cache import TieredCache

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
MODEL = ShapeOnlyModel()
PER_TOKEN = bytes_per_token()


@pytest.mark.parametrize("durability", ["cache", "full"])
async def test_a_writer_cancelled_at_any_await_loses_its_batch_and_leaves_nothing(tmp_path, durability):
    kept = chain(2)
    async with running(tmp_path, heard := Recorder(), durability=durability) as tier:
        await spill(tier, *kept)
        tier._tasks[0].cancel()
        await asyncio.wait(tier._tasks[:1])
        for n in itertools.count():
            new = chain(2, 1 + n)
            heard.lost.clear(), heard.stored.clear()
            assert all(tier.put(b) for b in new)
            cancelled = await stepped(tier.writer._next_batch(), n)
            assert (len(tier.queue), tier.queue.nbytes) == (0, 0)
            assert sorted([*heard.stored, *heard.lost]) == sorted(keys(*new)), f"told otherwise, at await {n}"
            assert {k for k in keys(*new) if k in tier.catalog} == set(heard.stored)
            await quiet(tier)
            assert await tier.writer._next_batch() is False
            assert all(tier.put(b) for b in new)
            assert await tier.writer._next_batch()
            assert content(await tier.read(new[1].key)) == content(new[1])
            whole(tmp_path, tier)
            if not cancelled:
                break
        assert n >= (5 if durability == "full" else 4), f"only {n} awaits"
        tier._tasks[0] = asyncio.create_task(tier.writer.run())
        assert [content(await tier.read(b.key)) for b in kept] == [content(b) for b in kept]
    async with running(tmp_path) as tier:
        whole(tmp_path, tier)
        assert len(tier.catalog) == 2 + 2 * (n + 1)


async def test_a_removal_cancelled_at_any_await_is_made_good_by_the_next_open(tmp_path):
    for n in itertools.count():
        family = chain(3, n)
        async with running(tmp_path) as tier:
            await spill(tier, *family)
            cancelled = await stepped(tier._store.remove(keys(*reversed(family))), n)
            assert not any(k in tier.catalog for k in keys(*family))
            await quiet(tier)
        async with running(tmp_path) as tier:
            whole(tmp_path, tier)
            assert all([content(await tier.read(b.key)) in (None, content(b)) for b in family])
            await tier.remove([k for k in keys(*reversed(family)) if k in tier.catalog])
        if not cancelled:
            break
    assert n >= 2


async def test_a_close_cancelled_at_any_await_can_be_made_again(tmp_path):
    for n in itertools.count():
        before = set(threading.enumerate())
        tier = SSDTier(options(tmp_path))
        await tier.start(heard := Recorder())
        new = chain(3, n)
        assert all(tier.put(b) for b in new)
        cancelled = await stepped(tier.close(), n)
        await tier.close()
        told = sorted([*heard.stored, *heard.lost])
        left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        if told != sorted(keys(*new)) or left or len(tier.queue):  # nothing of it may disturb the other tests
            tier._closed = False
            await tier.close()
            pytest.fail(f"cancelled at await {n}: told of {len(told)} blocks of 3, {len(left)} tasks go on")
        for thread in {t for t in threading.enumerate() if not t.name.startswith("asyncio_")} - before:
            thread.join(2)
            assert not thread.is_alive(), f"{thread.name} goes on, at await {n}"
        async with running(tmp_path) as tier:  # the lock was given back
            whole(tmp_path, tier)
            assert set(heard.stored) <= set(keys(*tier.catalog))
        if not cancelled:
            break


# -- promotions


@pytest.fixture
def stored(make_config):
    """Eight sequences of 1,024 tokens on the SSD, none in RAM."""
    return store(make_config(), [random_tokens(1024, seed) for seed in range(8)])


def store(config: dict, sequences: list[list[int]]) -> list[list[int]]:
    with TieredCache.open(config, model=MODEL) as cache:
        assert all(cache.store(tokens, state_of(tokens)) for tokens in sequences)
    return sequences


def settled(cache: TieredCache) -> None:
    """Nothing reserved, every account right, within a moment."""
    pool, end = cache.ram.pool, time.monotonic() + 5
    while pool.ledger.reserved and time.monotonic() < end:
        time.sleep(0.005)
    assert pool.ledger.reserved == 0
    pool.check_integrity()


def slow(monkeypatch, operation: str, seconds: float) -> None:
    """Each such operation takes so long."""

    def hook(name: str, file: str) -> None:
        if name == operation:
            time.sleep(seconds)

    monkeypatch.setattr(Directory, "hook", staticmethod(hook))


def test_a_read_cancelled_at_any_await_gives_its_reservation_back_once(stored, make_config, monkeypatch):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        promoter = cache._runtime.promoter
        real = promoter._read
        for n in range(8):
            outcomes = []

            async def read(one, n=n, outcomes=outcomes) -> None:
                outcomes.append(await stepped(real(one), n))

            monkeypatch.setattr(promoter, "_read", read)
            promotion = cache.promote(stored[n])
            state, remaining = promotion.result(10)
            covered = 1024 - len(remaining)
            assert covered == 0 or same_state(state, state_of(stored[n]), covered)
            settled(cache)
            if outcomes and not any(outcomes):
                break
        assert (n, remaining) == (1, stored[n][-1:]), "an await of a read was not met, or there are more"
        monkeypatch.setattr(promoter, "_read", real)
        assert cache.promote(stored[0]).result(10)[1] == stored[0][-1:], "a cancelled read is in the way of the next"


def test_64_promotions_of_one_sequence_read_each_block_once(stored, make_config, monkeypatch):
    seen: Counter[str] = Counter()
    gate = threading.Event()

    def hook(operation: str, file: str) -> None:
        if operation == "read":
            assert gate.wait(20)
            seen[file] += 1

    monkeypatch.setattr(Directory, "hook", staticmethod(hook))
    with TieredCache.open(make_config(), model=MODEL) as cache, ThreadPoolExecutor(64) as threads:
        promotions = list(threads.map(lambda _: cache.promote(stored[0]), range(64)))
        assert cache.ram.pool.ledger.reserved == 1024 * PER_TOKEN
        gate.set()
        for promotion in promotions:
            assert promotion.result(20)[1] == stored[0][-1:]
        assert list(seen.values()) == [1, 1, 1, 1]
        settled(cache)


def test_64_sequences_and_ram_for_four_neither_deadlock_nor_exceed_the_limit(make_config, monkeypatch):
    sequences = store(make_config(), [random_tokens(256, seed) for seed in range(64)])
    slow(monkeypatch, "read", 0.005)
    with TieredCache.open(make_config(ram={"max_memory": 4 * 256 * PER_TOKEN + 100}), model=MODEL) as cache:
        ledger, over, stop = cache.ram.pool.ledger, [], threading.Event()

        def sample() -> None:
            while not stop.wait(0.001):
                with cache.ram.pool.lock:
                    over.extend([ledger.free] if ledger.free < 0 else [])

        sampler = threading.Thread(target=sample)
        sampler.start()
        left, end = dict(enumerate(sequences)), time.monotonic() + 30
        while left and time.monotonic() < end:
            running = {i: p for i, tokens in left.items() if (p := cache.promote(tokens))}
            assert len(running) <= 4
            for i in list(running):
                tokens = left.pop(i)
                assert running.pop(i).result(20)[1] == tokens[-1:]
        stop.set()
        sampler.join()
        assert (left, over) == ({}, [])
        assert ledger.peak <= ledger.limit
        settled(cache)


# -- close


def test_closing_during_a_spill_and_a_promotion_settles_everything(stored, make_config, monkeypatch):
    for operation in ("read", "write", "rename", "commit"):
        slow(monkeypatch, operation, 0.05)
        cache = TieredCache.open(make_config(ssd={"write": "through"}), model=MODEL)
        promotion = cache.promote(stored[1])
        tokens = random_tokens(600, 50 + len(operation))
        assert cache.store(tokens, state_of(tokens))
        time.sleep(0.02)
        cache.close()
        assert promotion.done()
        assert cache.ram.pool.ledger.queued == 0
        settled(cache)
        with TieredCache.open(make_config(), model=MODEL) as cache:
            assert cache.promote(tokens).result(10)[1] == tokens[-1:]


BLOCKS, DEADLINE, SLOW = 1000, 0.5, 0.02  # seconds of a close, and of each file


def holder(config: dict) -> TieredCache:
    """A cache whose queue holds a thousand blocks for a slow disk."""
    cache = TieredCache.open(config, model=MODEL)
    tokens = random_tokens(16 * BLOCKS, 1)
    assert cache.store(tokens, state_of(tokens))
    return cache


def accounted(cache: TieredCache) -> tuple[int, int]:
    """Of a closed cache: blocks that were written, and those that were not; each of a thousand is one or the other."""
    stats = cache.stats()
    assert cache.ram.pool.ledger.queued == stats["ssd"]["queued_bytes"] == stats["ssd"]["queued_blocks"] == 0
    settled(cache)
    assert set(stats["losses"]) <= {"lost_close_deadline", "lost_closed"}
    written, lost = stats["ssd"]["blocks_written"], sum(stats["losses"].values())
    assert written + lost == BLOCKS, f"{written} written, lost: {stats['losses']}"
    return written, lost


@pytest.fixture
def slow_config(make_config):
    """Small blocks, all queued at once, and little time to close."""
    ssd = {"write": "through", "close_deadline": f"{DEADLINE}s"}
    return make_config(ram={"max_memory": "64MB"}, cache={"block_tokens": 16}, ssd=ssd)


def test_a_queue_of_a_thousand_blocks_on_a_slow_disk_ends_at_the_deadline(slow_config, monkeypatch):
    slow(monkeypatch, "open", SLOW)
    cache = holder(slow_config)
    started = time.monotonic()
    cache.close()
    assert time.monotonic() - started < DEADLINE + 2.5
    written, lost = accounted(cache)
    assert lost > BLOCKS / 2
    monkeypatch.undo()
    with TieredCache.open(slow_config, model=MODEL) as cache:
        assert cache.stats()["ssd"]["blocks"] == written


def test_a_process_told_to_end_closes_within_the_deadline(slow_config, tmp_path):
    program = f"from tests.faults import test_cancelled as t; t.until_told({slow_config!r})"
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGTERM)
            started = time.monotonic()
            written, lost, threads = json.loads(child.stdout.readline())
            assert child.wait(10) == 0
            assert time.monotonic() - started < DEADLINE + 3
        finally:
            child.kill()
    assert (lost > BLOCKS / 2, threads) == (True, [])
    with TieredCache.open(slow_config, model=MODEL) as cache:
        assert (cache.stats()["ssd"]["blocks"], cache.stats()["losses"]) == (written, {})


def until_told(config: dict) -> None:
    """A program that ends as SIGTERM asks it to."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    slow(pytest.MonkeyPatch(), "open", SLOW)
    try:
        with (cache := holder(config)):
            print("ready", flush=True)
            while True:  # in short naps: a signal that comes just before one must not wait for its end
                time.sleep(0.01)
    finally:
        left = [t.name for t in threading.enumerate() if "tiered-cache" in t.name]
        print(json.dumps([*accounted(cache), left]), flush=True)
