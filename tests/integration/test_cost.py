"""Promotion by cost: brought back is only what computing would not bring sooner."""

from __future__ import annotations

import time

import pytest

from ssd_tier.files import Directory
from ssd_tier.workers import READERS
from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache
from tiered_cache.metrics import Rate

MODEL = ShapeOnlyModel()
TOKENS = random_tokens(1536, 1)  # six blocks


@pytest.fixture
def stored(make_config):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(TOKENS, state_of(TOKENS))


def slow(monkeypatch, seconds: float) -> None:
    """Each read of a blob takes so long."""
    hook = staticmethod(lambda operation, _: time.sleep(seconds) if operation == "read" else None)
    monkeypatch.setattr(Directory, "hook", hook)


def test_without_a_word_from_the_host_everything_is_brought_back(stored, make_config, monkeypatch):
    slow(monkeypatch, 0.2)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.promote(TOKENS).result(20)[1] == TOKENS[-1:]
        assert cache.stats()["promotion"]["not_worth_it"] == 0


def test_a_fast_model_computes_what_a_slow_disk_would_bring_too_late(stored, make_config, monkeypatch):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        slow(monkeypatch, 0.2)
        cache.promote(TOKENS[:600]).result(20)  # the disk's rate is known from now on
        before = cache.stats()["ram"]
        cache.prefilled(10_000, 0.1)
        assert cache.promote(TOKENS) is None
        handoff = cache.handoff()
        assert handoff.submit(1, TOKENS) == "hit"  # what RAM has is there at once
        assert cache.stats()["promotion"]["not_worth_it"] == 2
        assert cache.stats()["ram"]["reserved"] == 0 == before["reserved"]


def test_a_slow_model_waits_for_the_disk(stored, make_config, monkeypatch):
    slow(monkeypatch, 0.05)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        cache.prefilled(100, 5.0)
        assert cache.promote(TOKENS).result(20)[1] == TOKENS[-1:]


def test_the_policy_always_asks_nobody(stored, make_config, monkeypatch):
    slow(monkeypatch, 0.1)
    with TieredCache.open(make_config(promotion={"policy": "always"}), model=MODEL) as cache:
        cache.prefilled(10**6, 0.01)
        assert cache.promote(TOKENS).result(20)[1] == TOKENS[-1:]


def test_a_disk_that_turns_slow_costs_no_more_than_computing_would(stored, make_config, monkeypatch):
    """What has arrived by then is kept, and of use."""
    with TieredCache.open(make_config(), model=MODEL) as cache:
        cache.prefilled(1536, 0.8)  # 256 tokens in 0.13 s
        slow(monkeypatch, 0.5)  # for as many as are read at a time
        arrived = 256 * READERS
        begun = time.monotonic()
        state, remaining = cache.promote(TOKENS).result(20)
        assert time.monotonic() - begun < 1.3
        assert state
        assert len(remaining) == 1536 - arrived
        assert same_state(state, state_of(TOKENS), arrived)
        assert cache.stats()["promotion"]["lost_deadline"] == 1


def test_a_rate_follows_what_was_seen_last():
    rate = Rate()
    assert (rate.value, rate.seconds(5)) == (None, None)
    rate.add(0, 1)
    rate.add(1, 0)
    assert rate.value is None
    for _ in range(5):
        rate.add(100, 1)
    assert (rate.value, rate.seconds(50)) == (100, 0.5)
    for _ in range(30):
        rate.add(10, 1)
    assert rate.value == pytest.approx(10, rel=0.02)
