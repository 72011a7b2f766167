"""The account of RAM: resident, queued and reserved bytes never exceed the limit, and nothing is given back twice."""

import random
from typing import Any

import pytest

from tiered_cache.ledger import Ledger


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
    rng = random.Random(seed)
    ledger, limit = Ledger(1000), 1000
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
