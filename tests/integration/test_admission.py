"""What goes to the SSD, and what stays longest: admission once the budget is full, and what a host says of it."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from ssd_tier import Block
from tests.blocks import listing
from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tiered_cache import TieredCache
from tiered_cache.block_pool import BlockPool
from tiered_cache.memory_cache import MemoryAwarePrefixCache
from tiered_cache.prefix_tree import token_bytes

MODEL = ShapeOnlyModel()
LENGTH = 1024  # tokens a sequence: four blocks
SEQUENCE = LENGTH * bytes_per_token()
BUDGET, RAM = "5MB", 4 * SEQUENCE


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Sequences that share nothing."""
    return [random_tokens(LENGTH, 1000 * seed + i) for i in range(count)]


def store(cache, sequences, **more) -> None:
    assert all(cache.store(t, state_of(t), **more) for t in sequences)


def quiet(cache: TieredCache) -> None:
    """Wait until the writer has nothing more to do."""
    end = time.monotonic() + 20
    while cache.stats()["ssd"]["queued_blocks"]:
        assert time.monotonic() < end, cache.stats()
        time.sleep(0.02)


def covered(cache: TieredCache, tokens: list[int]) -> int:
    """How many tokens come back from both tiers, all of them right."""
    promotion = cache.promote(tokens)
    state, remaining = promotion.result(20) if promotion else cache.fetch(tokens)
    count = len(tokens) - len(remaining)
    assert state is None or same_state(state, state_of(tokens), count)
    return count


def fill(cache: TieredCache) -> None:
    """Store what is never asked for again, until the budget is full."""
    for i, tokens in enumerate(prompts(60, seed=99)):
        store(cache, [tokens])
        quiet(cache)
        if cache.stats()["ssd"]["full"] and i > 10:
            return
    pytest.fail("the budget is not full")


@pytest.fixture
def config(make_config):
    def make(**ssd):
        return make_config(ram={"max_memory": RAM}, ssd={"budget": BUDGET, **ssd})

    return make


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "cache"


# -- admission, both tiers


@pytest.mark.parametrize("write", ["evict", "through"])
def test_once_the_budget_is_full_what_comes_once_is_not_written(config, root, write):
    with TieredCache.open(config(write=write), model=MODEL) as cache:
        fill(cache)
        assert cache.stats()["ram"]["evictions"] > 0
        before, told = listing(root, "blobs"), cache.ram.pool.counters["not_admitted"]
        written = cache.stats()["ssd"]["bytes_written"]
        for tokens in prompts(12):
            store(cache, [tokens])
            quiet(cache)
        assert listing(root, "blobs") == before, "no new file, and none that went for one"
        assert cache.stats()["ssd"]["bytes_written"] == written
        assert cache.ram.pool.counters["not_admitted"] - told >= 4 * (8 if write == "evict" else 12)
        assert cache.stats()["losses"] == {}, "it is no loss"


@pytest.mark.parametrize("write", ["evict", "through"])
def test_what_is_fetched_again_is_written_whole(config, write):
    again, *others = prompts(12)
    with TieredCache.open(config(write=write), model=MODEL) as cache:
        fill(cache)
        store(cache, [again])
        assert cache.fetch([*again, 1])[1] == [1]
        for tokens in others:
            store(cache, [tokens])
            quiet(cache)
        assert cache.ram.covered(again) == 0
        assert covered(cache, [*again, 1]) == LENGTH
        assert [covered(cache, t) for t in others[:4]] == [0] * 4


def test_what_is_computed_a_second_time_is_written(config):
    again, *others = prompts(24)
    with TieredCache.open(config(), model=MODEL) as cache:
        fill(cache)
        for tokens in (again, *others[:8], again, *others[8:]):
            assert tokens is not again or cache.ram.covered(again) == 0
            store(cache, [tokens])
            quiet(cache)
        assert cache.ram.covered(again) == 0
        assert covered(cache, [*again, 1]) == LENGTH


@pytest.mark.parametrize("write", ["evict", "through"])
def test_with_admission_all_everything_is_written(config, root, write):
    with TieredCache.open(config(write=write, admission="all"), model=MODEL) as cache:
        fill(cache)
        before = set(listing(root, "blobs"))
        for tokens in prompts(12):
            store(cache, [tokens])
            quiet(cache)
        assert len(set(listing(root, "blobs")) - before) >= 4 * 6
        assert cache.ram.pool.counters["not_admitted"] == 0


def test_flush_writes_all_that_ram_holds(config):
    asked = prompts(3)
    with TieredCache.open(config(), model=MODEL) as cache:
        fill(cache)
        store(cache, asked)
        quiet(cache)
        assert [cache.ram.covered(t) for t in asked] == [LENGTH] * 3
        assert cache.flush(10)
    with TieredCache.open(config(), model=MODEL) as cache:
        assert [covered(cache, [*t, 1]) for t in asked] == [LENGTH] * 3


# -- admission, in RAM alone


class Sink:
    """Takes blocks, and admits what it is told to."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.asked: list[bytes] = []
        self.seen: list[bytes] = []
        self.wanted: set[bytes] = set()

    def put(self, block: Block) -> bool:
        self.blocks.append(block)
        return True

    def cancel(self, key: bytes) -> bool:
        return False

    def touch(self, keys, *, hit: bool = False) -> None: ...

    def discard(self, keys) -> None: ...

    def admits(self, key: bytes) -> bool:
        self.asked.append(key)
        return key in self.wanted

    def saw(self, key: bytes) -> None:
        self.seen.append(key)


@pytest.fixture
def ram():
    """A RAM tier whose blocks go to a `Sink` at once, if it wants them."""
    pool, sink = BlockPool(RAM, 256, write_through=True), Sink()
    pool.attach(sink)
    return MemoryAwarePrefixCache(MODEL, pool=pool), sink


def chain_of(ram: MemoryAwarePrefixCache, tokens: list[int]) -> list[bytes]:
    (end,) = [n for n in ram.pool.resident() if n.ends and b"".join(m.ids for m in n.path()) == token_bytes(tokens)]
    return [n.key for n in end.path()]


@pytest.mark.parametrize("wanted", range(4))
def test_an_admitted_block_takes_its_ancestors_with_it_and_no_others(ram, wanted):
    cache, sink = ram
    tokens, other = prompts(2)
    store(cache, [tokens, other])
    assert sink.blocks == []
    assert cache.pool.counters["not_admitted"] == 8
    keys = chain_of(cache, tokens)
    sink.wanted = {keys[wanted]}
    cache.pool.use([n for n in cache.pool.resident() if n.key in keys][::-1], asked=False)  # computed again
    cache.pool.feed()
    assert [b.key for b in sink.blocks] == keys[: wanted + 1], "ancestors first"


def test_what_leaves_unwritten_is_told_to_the_tier_and_asked_for_once(ram):
    cache, sink = ram
    store(cache, prompts(4))
    assert len(sink.asked) == len(set(sink.asked)) == 16
    cache.pool.feed()
    assert len(sink.asked) == 16, "it was declined"
    store(cache, prompts(2, seed=2))
    assert sink.seen
    assert set(sink.seen) < set(sink.asked)
    assert len(sink.seen) == 8
    assert cache.pool.counters["lost_spill_behind"] == 0


# -- hints


@pytest.mark.parametrize("write", ["evict", "through"])
def test_what_is_hinted_drop_is_never_written_and_flush_does_not_wait_for_it(config, root, write):
    dropped, (normal,) = prompts(6), prompts(1, seed=2)
    with TieredCache.open(config(write=write), model=MODEL) as cache:
        store(cache, [normal])
        store(cache, dropped, hint="drop")
        quiet(cache)
        assert any(cache.ram.covered(t) for t in dropped)
        assert cache.flush(10)
        assert len(listing(root, "blobs")) == 4
        assert cache.stats()["losses"] == {}
    assert len(listing(root, "blobs")) == 4, "closing does not write it either"
    with TieredCache.open(config(), model=MODEL) as cache:
        assert covered(cache, [*normal, 1]) == LENGTH
        assert [covered(cache, t) for t in dropped] == [0] * 6


def test_what_is_hinted_drop_goes_first(config):
    old, (dropped,), (new,) = prompts(3), prompts(1, seed=2), prompts(1, seed=3)
    with TieredCache.open(config(), model=MODEL) as cache:
        store(cache, old)
        assert cache.flush(10), "losing these would cost nothing either"
        store(cache, [dropped], hint="drop")
        assert cache.ram.covered(dropped) == LENGTH
        store(cache, [new])
        assert [cache.ram.covered(t) for t in (*old, dropped, new)] == [LENGTH] * 3 + [0, LENGTH]


def test_what_is_stored_without_the_hint_as_well_is_written(config, root):
    dropped = random_tokens(512, 1)
    longer = dropped + random_tokens(512, 2)
    with TieredCache.open(config(), model=MODEL) as cache:
        store(cache, [dropped], hint="drop")
        assert cache.flush(10)
        assert listing(root, "blobs") == []
        store(cache, [longer])
        assert cache.flush(10)
    with TieredCache.open(config(), model=MODEL) as cache:
        assert covered(cache, [*longer, 1]) == LENGTH


def test_what_is_hinted_keep_stays_in_ram_longest(config):
    (kept,), others = prompts(1), prompts(12, seed=2)
    with TieredCache.open(config(enabled=False), model=MODEL) as cache:
        store(cache, [kept], hint="keep")
        store(cache, others)
        assert cache.ram.covered(kept) == LENGTH
        store(cache, prompts(6, seed=3), hint="keep")  # what is to be kept goes for what is to be kept
        assert cache.ram.covered(kept) == 0


@pytest.mark.parametrize("admission", ["second-touch", "all"])
def test_what_is_hinted_keep_stays_on_the_ssd_longest_after_a_restart_as_well(config, root, admission):
    kept, other = prompts(2)
    with TieredCache.open(config(admission=admission), model=MODEL) as cache:
        store(cache, [kept], hint="keep")
        store(cache, [other])
        assert cache.flush(10)
    with closing(sqlite3.connect(root / "index.sqlite")) as connection:
        assert sorted(connection.execute("SELECT keep, count(*) FROM block GROUP BY keep")) == [(0, 4), (1, 4)]
    for run in range(2):  # each of them pushes all others out
        with TieredCache.open(config(admission=admission), model=MODEL) as cache:
            for tokens in prompts(30, seed=10 + run):
                store(cache, [tokens])
                assert cache.flush(10)
            assert cache.ram.covered(kept) == 0
            assert cache.stats()["ssd"]["blocks_evicted"] > 20
            assert cache.ram.check_ssd(other) is None
            assert cache.ram.check_ssd(kept)["matched_tokens"] == LENGTH
    with TieredCache.open(config(admission=admission), model=MODEL) as cache:
        assert covered(cache, [*kept, 1]) == LENGTH
        for seed in range(20, 24):
            for tokens in prompts(8, seed=seed):
                store(cache, [tokens], hint="keep")
                assert cache.flush(10)
        assert cache.stats()["ssd"]["blocks"] > 0
        assert cache.stats()["losses"] == {}
