"""A system call that fails, whichever: a counted loss, a miss or a clear error, and nothing stored goes for it."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import time
from types import SimpleNamespace

import pytest

import ssd_tier.breaker
from ssd_tier.files import Directory
from ssd_tier.folders import default_hook
from tests.blocks import Recorder, chain, content, failing, keys, listing, running, spill
from tests.faults import shim
from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
MODEL = ShapeOnlyModel()
TOKENS = 512  # two blocks


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The library that makes system calls fail."""
    return shim.build(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize(
    ("operation", "durability", "fired"),
    [("any", "full", 250), ("any", "batch", 200), ("write", "cache", 80), ("open", "cache", 100), ("sync", "batch", 25),
     ("sync", "full", 35), ("rename", "cache", 12), ("unlink", "cache", 12)],
)  # fmt: skip
def test_a_store_whose_nth_call_fails_costs_its_blocks_and_no_more(library, tmp_path, operation, durability, fired):
    found = shim.run(library, "stores", tmp_path / "cache", operation, durability)
    assert found["problems"] == []
    assert found["fired"] >= fired, "fewer calls failed than a store makes: the test has lost its point"


@pytest.mark.parametrize("operation", ["read", "open", "any"])
def test_a_read_whose_nth_call_fails_is_read_again_or_a_miss(library, tmp_path, operation):
    found = shim.run(library, "reads", tmp_path / "cache", operation)
    assert found["problems"] == []
    assert found["fired"] >= 8


@pytest.mark.parametrize(("operation", "fired"), [("any", 150), ("read", 40)])  # all, and reading alone
def test_an_open_whose_nth_call_fails_is_a_clear_error_and_takes_nothing_away(library, tmp_path, operation, fired):
    found = shim.run(library, "opens", tmp_path / "cache", operation, "batch")
    assert found["problems"] == []
    assert found["fired"] >= fired


# -- the whole cache, its faults injected at `Directory.hook`


def settled(cache: TieredCache) -> None:
    """Nothing reserved, nothing queued, every account right, within a moment."""
    pool, end = cache.ram.pool, time.monotonic() + 5
    while (pool.ledger.reserved or pool.ledger.queued) and time.monotonic() < end:
        time.sleep(0.005)
    assert (pool.ledger.reserved, pool.ledger.queued) == (0, 0)
    pool.check_integrity()


def hooked(monkeypatch, hook=default_hook) -> None:
    monkeypatch.setattr(Directory, "hook", staticmethod(hook))


def test_a_cache_keeps_its_accounts_whichever_call_of_a_store_and_a_promotion_fails(make_config, monkeypatch):
    stored = random_tokens(TOKENS, 0)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(stored, state_of(stored))
    config = make_config(ssd={"write": "through", "durability": "full"})
    for n in itertools.count():
        calls = []

        def hook(operation: str, name: str, n=n, calls=calls) -> None:
            calls.append(operation)
            if len(calls) == n + 1:
                raise OSError(errno.EIO, f"no {operation}")

        hooked(monkeypatch)
        with TieredCache.open(config, model=MODEL) as cache:
            tokens = random_tokens(TOKENS, 1 + n)
            hooked(monkeypatch, hook)
            promotion = cache.promote(stored)
            assert cache.store(tokens, state_of(tokens))
            assert cache.flush(10) in (True, False)
            assert promotion.result(10)[1] == stored[-1:]  # a read that fails once is made again
            assert same_state(cache.fetch(tokens)[0], state_of(tokens), TOKENS - 1)
            settled(cache)
            hooked(monkeypatch)
            assert cache.flush(10)
            settled(cache)
            stats = cache.stats()
            assert set(stats["losses"]) <= {"lost_write_failed", "lost_parent_not_stored"}
            assert stats["ssd"]["blocks"] == 2 * (n + 2)
        if len(calls) <= n:
            break
    assert n > 15


@pytest.mark.parametrize("operation", ["begin", "commit"])
def test_an_index_that_cannot_be_written_at_open_leaves_the_cache_with_ram_alone(make_config, monkeypatch, operation):
    tokens = random_tokens(TOKENS, 0)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(tokens, state_of(tokens))
    hooked(monkeypatch, failing(operation))
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(tokens, state_of(tokens))
        assert same_state(cache.fetch(tokens)[0], state_of(tokens), TOKENS - 1)
    hooked(monkeypatch)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.promote(tokens).result(10)[1] == tokens[-1:], "what was stored is still there"


# -- the breaker


@pytest.fixture
def clock(monkeypatch):
    """The breaker's clock, which stands still unless it is moved."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(ssd_tier.breaker, "time", clock)
    return clock


async def test_a_disk_that_takes_nothing_is_left_alone_for_growing_pauses_and_comes_back(tmp_path, clock, caplog):
    kept, asked = chain(2), []

    def hook(operation: str, name: str) -> None:
        if operation == "open" and name.startswith(f"{os.getpid()}-"):
            asked.append(name)
            raise OSError(errno.EIO, "no open")

    async with running(tmp_path, heard := Recorder()) as tier:
        await spill(tier, *kept)
        tier._directory.hook = hook
        with caplog.at_level(logging.WARNING, "ssd_tier"):
            for seed in range(1, 4):
                assert not tier.writer.breaker.open
                await spill(tier, *chain(1, seed))
            assert tier.stats()["writing_off"] == "[Errno 5] no open"
            before, many = len(asked), [b for seed in range(4, 14) for b in chain(10, seed)]
            started = time.monotonic()
            await spill(tier, *many)
            assert time.monotonic() - started < 2
            assert len(asked) == before, "the disk was asked while it is left alone"
            assert heard.lost.items() >= dict.fromkeys(keys(*many), "ssd_off").items()
            assert tier.counters["lost_ssd_off"] == 100
            assert [content(await tier.read(b.key)) for b in kept] == [content(b) for b in kept]
            tries: list[float] = []
            for seed in range(20, 100):
                clock.now += 0.25
                before = len(asked)
                await spill(tier, *chain(1, seed))
                tries += [clock.now - 100] if len(asked) > before else []
            assert tries == [1, 3, 7, 15], "pauses of 1, 2, 4 and 8 seconds"
            assert [r.levelname for r in caplog.records] == ["WARNING"], caplog.text
            tier._directory.hook = default_hook
            clock.now += 16
            await spill(tier, *chain(3, 999))
        assert (heard.came_back, tier.stats()["writing_off"], len(caplog.records)) == (1, None, 2)
        assert [content(await tier.read(b.key)) for b in chain(3, 999)] == [content(b) for b in chain(3, 999)]
        assert heard.removed == []
        assert len(listing(tmp_path, "blobs")) == 5


def test_what_ram_still_holds_is_written_once_the_disk_is_back(make_config, monkeypatch, clock):
    sequences = [random_tokens(TOKENS, seed) for seed in range(8)]
    with TieredCache.open(make_config(ssd={"write": "through"}), model=MODEL) as cache:
        hooked(monkeypatch, failing("open", name=f"{os.getpid()}-"))
        for tokens in sequences[:-1]:
            assert cache.store(tokens, state_of(tokens))
            settled(cache)
        assert cache.stats()["ssd"]["writing_off"]
        assert cache.stats()["ssd"]["blocks"] == 0
        assert cache.stats()["losses"]["lost_ssd_off"] >= 2
        hooked(monkeypatch)
        clock.now += 1.5
        assert cache.store(sequences[-1], state_of(sequences[-1]))  # the attempt that finds the disk well
        end = time.monotonic() + 10
        while cache.stats()["ssd"]["blocks"] < 16 and time.monotonic() < end:
            time.sleep(0.01)
        assert cache.stats()["ssd"]["blocks"] == 16, cache.stats()
        assert cache.stats()["ssd"]["writing_off"] is None
        settled(cache)


def test_a_disk_that_cannot_be_read_is_left_alone_and_comes_back(make_config, monkeypatch, clock, caplog):
    sequences, fresh = [random_tokens(1024, seed) for seed in range(3)], random_tokens(TOKENS, 9)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        for tokens in sequences:
            assert cache.store(tokens, state_of(tokens))
    with TieredCache.open(make_config(), model=MODEL) as cache, caplog.at_level(logging.WARNING, "ssd_tier"):
        hooked(monkeypatch, failing("read"))
        for tokens in sequences[:2]:  # four blocks each
            assert cache.promote(tokens).result(10) == (None, tokens)
        stats = cache.stats()
        assert stats["ssd"]["reading_off"] == "[Errno 5] no read"
        assert (stats["ssd"]["read_failed"], stats["ssd"]["read_again"]) == (8, 8)
        assert [cache.promote(tokens) for tokens in sequences] == [None, None, None]
        settled(cache)
        assert cache.store(fresh, state_of(fresh))
        assert cache.flush(10), "writing goes on"
        clock.now += 1.5
        assert cache.promote(sequences[0]).result(10) == (None, sequences[0])  # one more attempt, in vain
        assert cache.stats()["ssd"]["read_failed"] == 9, "more than one block was tried"
        clock.now += 1.5
        assert cache.promote(sequences[0]) is None, "the pause did not grow"
        hooked(monkeypatch)
        clock.now += 1.5
        cache.promote(sequences[0]).result(10)  # its first block is the attempt; the others may be a miss
        assert cache.stats()["ssd"]["reading_off"] is None
        state, remaining = cache.promote(sequences[2]).result(10)
        assert remaining == sequences[2][-1:]
        assert same_state(state, state_of(sequences[2]), 1023)
        assert [r.getMessage().split(",")[0] for r in caplog.records] == [
            "ssd: reading is off", "ssd: reading works again"
        ]  # fmt: skip
        assert cache.stats()["ssd"]["blocks"] == 14, "nothing was deleted"
        assert not {"lost_damaged", "lost_missing"} & set(cache.stats()["losses"])
        settled(cache)


@pytest.mark.parametrize("operation", ["open", "read"])
async def test_one_read_that_fails_is_made_again_and_is_a_hit(tmp_path, operation):
    blocks = chain(2)
    async with running(tmp_path) as tier:
        await spill(tier, *blocks)
        tier._directory.hook = failing(operation, at=0)
        assert content(await tier.read(blocks[1].key)) == content(blocks[1])
        assert (tier.counters["read_again"], tier.counters["read_failed"]) == (1, 0)
        assert not tier.reading.open
        assert sorted(keys(*tier.catalog)) == sorted(keys(*blocks))
