"""The account of RAM: the limit, what is held against it at any moment, and the figures that people see."""

import random
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.states import ShapeOnlyModel, state_of
from tiered_cache.block_pool import BlockPool
from tiered_cache.ledger import Ledger
from tiered_cache.memory_cache import CacheStats, MemoryAwarePrefixCache, MemoryCacheConfig
from tiered_cache.metrics import MB


def figures(ledger: Ledger) -> tuple[int, ...]:
    return ledger.resident, ledger.queued, ledger.reserved, ledger.free, ledger.peak


def filled(limit: int = 100, *, resident: int = 30, queued: int = 20, reserved: int = 10) -> Ledger:
    ledger = Ledger(limit)
    assert ledger.reserve(resident + queued + reserved)
    ledger.admit(resident + queued)
    ledger.queue(queued)
    return ledger


def test_a_reservation_of_exactly_the_free_bytes_is_granted_and_one_more_byte_is_not():
    ledger = filled()
    assert ledger.free == 40
    assert ledger.can_reserve(40)
    assert not ledger.can_reserve(41)
    before = figures(ledger)
    assert not ledger.reserve(41)
    assert figures(ledger) == before
    assert ledger.reserve(40)
    assert ledger.free == 0
    assert ledger.reserve(0)
    assert not ledger.reserve(1)


def test_asking_whether_bytes_are_free_takes_none():
    ledger = filled()
    before = figures(ledger)
    assert ledger.can_reserve(1)
    assert not ledger.can_reserve(1000)
    assert figures(ledger) == before


def test_bytes_go_from_reserved_to_resident_to_queued_and_back():
    ledger = Ledger(100)
    assert ledger.reserve(50)
    assert figures(ledger) == (0, 0, 50, 50, 50)
    ledger.admit(40)
    assert figures(ledger) == (40, 0, 10, 50, 50)
    ledger.queue(30)
    assert figures(ledger) == (10, 30, 10, 50, 50)
    ledger.unqueue(20)
    assert figures(ledger) == (30, 10, 10, 50, 50)
    ledger.drop(30)
    assert figures(ledger) == (0, 10, 10, 80, 50)
    ledger.release(10)
    assert figures(ledger) == (0, 10, 0, 90, 50)


def test_a_reservation_cannot_be_released_twice():
    ledger = filled(reserved=10)
    ledger.release(10)
    before = figures(ledger)
    with pytest.raises(ValueError, match=r"10 bytes .* reserved, which holds 0"):
        ledger.release(10)
    assert figures(ledger) == before


@pytest.mark.parametrize(("move", "account", "holds"), [
    ("release", "reserved", 10), ("admit", "reserved", 10), ("drop", "resident", 30), ("queue", "resident", 30),
    ("unqueue", "queued", 20)])
def test_no_account_gives_more_than_it_holds_nor_less_than_nothing(move, account, holds):
    ledger = filled(resident=30, queued=20, reserved=10)
    before = figures(ledger)
    for nbytes in (holds + 1, -1):
        with pytest.raises(ValueError, match=f"{nbytes} bytes .* {account}, which holds {holds}"):
            getattr(ledger, move)(nbytes)
        assert figures(ledger) == before
    getattr(ledger, move)(holds)
    assert getattr(ledger, account) == 0


def test_a_negative_reservation_is_an_error_that_names_the_figure():
    ledger = filled()
    before = figures(ledger)
    with pytest.raises(ValueError, match="-7"):
        ledger.reserve(-7)
    assert figures(ledger) == before


def test_the_peak_is_the_most_ever_held_with_reservations_and_without_refusals():
    ledger = Ledger(100)
    assert ledger.reserve(60)
    ledger.release(60)
    assert ledger.peak == 60
    assert ledger.reserve(30)
    ledger.admit(30)
    assert not ledger.reserve(71)
    assert ledger.peak == 60
    assert ledger.reserve(45)
    assert ledger.peak == 75
    ledger.drop(30)
    assert ledger.peak == 75


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_moves_keeps_the_invariant(seed):
    rng, ledger, limit = random.Random(seed), Ledger(1000), 1000
    oracle = {"resident": 0, "queued": 0, "reserved": 0}
    moves: dict[str, tuple[str, str | None]] = {
        "release": ("reserved", None), "admit": ("reserved", "resident"), "drop": ("resident", None),
        "queue": ("resident", "queued"), "unqueue": ("queued", "resident")}
    peak = refused = 0
    for _ in range(2000):
        nbytes = rng.randrange(400)
        name = rng.choice(["reserve", "reserve", *moves])
        if name == "reserve":
            fits = sum(oracle.values()) + nbytes <= limit
            assert ledger.reserve(nbytes) is fits
            oracle["reserved"] += nbytes * fits
        else:
            source, target = moves[name]
            if nbytes > oracle[source]:
                refused += 1
                with pytest.raises(ValueError, match=source):
                    getattr(ledger, name)(nbytes)
            else:
                getattr(ledger, name)(nbytes)
                oracle[source] -= nbytes
                if target:
                    oracle[target] += nbytes
        peak = max(peak, sum(oracle.values()))
        ledger.check_integrity(**oracle)
        assert ledger.resident + ledger.queued + ledger.reserved + ledger.free == limit
        assert ledger.free >= 0
    assert ledger.peak == peak
    assert refused > 50


@pytest.mark.parametrize("wrong", [{"resident": 29}, {"queued": 21}, {"reserved": 0}])
def test_the_check_finds_an_account_that_differs_from_what_is_there(wrong):
    truth: dict[str, Any] = {"resident": 30, "queued": 20, "reserved": 10}
    ledger = filled()
    ledger.check_integrity(**truth)
    with pytest.raises(AssertionError, match="really"):
        ledger.check_integrity(**{**truth, **wrong})


def test_the_check_finds_a_ledger_over_its_limit():
    ledger = filled()
    ledger.limit = 59
    with pytest.raises(AssertionError, match="over the limit by 1 bytes"):
        ledger.check_integrity(resident=30, queued=20, reserved=10)


@pytest.mark.parametrize(("field", "values"), [
    ("max_memory_mb", [0, -1, -0.5]), ("max_memory_percent", [0, -0.1, 1.01]), ("max_entries", [0, -3]),
    ("kv_bits", [0, 1, 7, 16]), ("kv_group_size", [0, 16, 96]), ("kv_min_quantize_tokens", [-1]),
    ("min_prefix_tokens", [0, -1])])
def test_a_wrong_setting_is_an_error_that_names_field_and_value(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{field}.* {value}$"):
            MemoryCacheConfig(**{field: value})


def test_the_limit_is_what_was_given_or_a_share_of_what_is_available(monkeypatch):
    assert MemoryCacheConfig(max_memory_mb=1.5).compute_memory_limit() == 1.5 * MB
    assert MemoryCacheConfig(max_memory_percent=1.0, max_entries=1, min_prefix_tokens=1, kv_min_quantize_tokens=0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000 * MB))
    assert MemoryCacheConfig().compute_memory_limit() == 2000 * MB
    assert MemoryCacheConfig(max_memory_percent=0.001).compute_memory_limit() == 100 * MB
    monkeypatch.setattr(psutil, "virtual_memory", lambda: 1 / 0)
    assert MemoryCacheConfig(max_memory_percent=0.5).compute_memory_limit() == 4096 * MB


def test_statistics_are_rounded_for_people_and_safe_where_nothing_happened():
    assert (CacheStats().hit_rate, CacheStats().memory_utilization) == (0.0, 0.0)
    stats = CacheStats(hits=2, misses=1, evictions=3, tokens_saved=4, current_memory_bytes=MB + 5 * MB // 1000,
                       max_memory_bytes=3 * MB, entry_count=5)
    assert stats.to_dict() == {
        "hits": 2, "misses": 1, "hit_rate": 0.6667, "evictions": 3, "tokens_saved": 4, "current_memory_mb": 1.0,
        "max_memory_mb": 3.0, "memory_utilization": 0.335, "entry_count": 5}


def test_a_model_with_too_many_sequences_gives_up_none_of_another_models():
    pool = BlockPool(MB, 256)
    one, other = (MemoryAwarePrefixCache(ShapeOnlyModel(name=name), MemoryCacheConfig(max_entries=kept), pool=pool)
                  for name, kept in (("one", 2), ("other", 1)))
    for cache in (one, one, other, other):
        tokens = range(len(cache), len(cache) + 300)
        assert cache.store(tokens, state_of(tokens))
    assert (len(one), len(other)) == (2, 1)
