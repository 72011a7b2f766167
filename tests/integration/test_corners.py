"""Corners where two things happen at once, or where a host does what it should not."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from ssd_tier.files import Directory
from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tiered_cache import TieredCache
from tiered_cache.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig

MODEL = ShapeOnlyModel()
A, B = random_tokens(600, 1), random_tokens(600, 2)


def test_blocks_removed_while_a_cancelled_promotion_reads_them_do_not_come_back(make_config, monkeypatch):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
    gate = threading.Event()
    with TieredCache.open(make_config(), model=MODEL) as cache:
        monkeypatch.setattr(Directory, "hook", staticmethod(lambda op, _: gate.wait(10) if op == "read" else None))
        promotion = cache.promote(A)
        time.sleep(0.05)
        promotion.cancel()
        assert cache.ram.remove(A, include_ssd=True)
        end = time.monotonic() + 5
        while cache.stats()["ssd"]["blocks"] and time.monotonic() < end:
            time.sleep(0.01)
        gate.set()
        while cache.ram.pool.ledger.reserved and time.monotonic() < end:
            time.sleep(0.01)
        cache.ram.pool.check_integrity()
        assert cache.ram.pool.ledger.resident == 0
        assert cache.promote(A) is None


def test_a_removal_holds_although_a_promotion_pins_the_blocks(make_config):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
    with TieredCache.open(make_config(), model=MODEL) as cache:
        promotion = cache.promote(A)
        while not promotion.done():
            time.sleep(0.001)
        assert cache.ram.remove(A, include_ssd=True)
        assert promotion.result(5) == (None, A)
        cache.ram.pool.check_integrity()


def test_the_most_entries_are_kept_without_losing_what_was_just_stored():
    for first, second, kept in ((A, B, [B]), (A[:512], A, [A])):
        cache = MemoryAwarePrefixCache(MODEL, MemoryCacheConfig(max_entries=1))
        assert cache.store(first, state_of(first))
        assert cache.store(second, state_of(second), evict_prefixes=False)
        assert [t for t in (first, second) if t in cache] == kept
        assert len(cache) == 1
        assert cache.get_stats()["evictions"] == 1
        cache.pool.check_integrity()


def test_a_refused_state_does_not_decide_what_states_look_like():
    cache = MemoryAwarePrefixCache(MODEL, MemoryCacheConfig(max_memory_mb=1))
    assert not cache.store(A, state_of(A, layers=60))
    assert cache.store(A, state_of(A))


def test_a_tier_can_be_taken_away_again(make_config):
    with TieredCache.open(make_config(ssd={"write": "through"}), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
        assert cache.flush(10)
        assert cache.store(B, state_of(B))
        cache.ram.set_ssd_tier(None)
        cache.ram.clear()
        cache.ram.pool.check_integrity()
        assert cache.ram.pool.ledger.resident + cache.ram.pool.ledger.queued == 0
        assert cache.ram.check_ssd(A) is None


@pytest.mark.parametrize("tokens", [bytes(600), "x" * 600, [2**63] * 600, [1.5] * 600, [None] * 600])
def test_what_are_no_token_ids_is_refused_and_missed(tokens):
    cache = MemoryAwarePrefixCache(MODEL)
    assert not cache.store(tokens, state_of(A))
    assert cache.fetch(tokens) == (None, tokens)
    cache.pool.check_integrity()


@pytest.mark.parametrize("kind", [tuple, np.array, lambda t: np.array(t, np.int32)])
def test_token_ids_may_come_in_any_sequence(kind):
    cache = MemoryAwarePrefixCache(MODEL)
    assert cache.store(kind(A), state_of(A))
    state, remaining = cache.fetch(kind(A + B))
    assert list(remaining) == B
    assert same_state(state, state_of(A))


def test_a_conversation_stored_over_and_over_keeps_no_list_of_its_past(make_config):
    with TieredCache.open(make_config(ssd={"write": "through"}), model=MODEL) as cache:
        assert cache.store(A[:300], state_of(A[:300]))
        assert cache.ram.store(A[:400], state_of(A[:400]), False)
        assert cache.flush(10)
        for _ in range(10):
            assert cache.store(A[:400], state_of(A[:400]))
        assert max(len(n.replaces) for n in cache.ram.pool.tree.nodes.values()) == 0
        end = time.monotonic() + 5
        while cache.stats()["ssd"]["raw_bytes"] > 400 * bytes_per_token() and time.monotonic() < end:
            time.sleep(0.01)
        assert cache.stats()["ssd"]["raw_bytes"] == 400 * bytes_per_token()
