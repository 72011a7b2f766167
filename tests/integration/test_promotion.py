"""Promotions and the handoff: one read a block, reservations given back once, nobody waits who should not."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import CancelledError

import pytest

from ssd_tier.files import Directory
from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tiered_cache import TieredCache

MODEL = ShapeOnlyModel()
PER_TOKEN = bytes_per_token()


@pytest.fixture
def stored(make_config):
    """Twelve sequences of 1,024 tokens on the SSD, none in RAM, and a configuration to open them with."""
    sequences = [random_tokens(1024, seed) for seed in range(12)]
    with TieredCache.open(make_config(), model=MODEL) as cache:
        for tokens in sequences:
            assert cache.store(tokens, state_of(tokens))
    return sequences


class Gate:
    """Holds back the disk's reads until it is opened, and counts them."""

    def __init__(self, monkeypatch, operation: str = "read") -> None:
        self.event = threading.Event()
        self.calls: list[str] = []

        def hook(name: str, file: str) -> None:
            if name == operation:
                self.calls.append(file)
                assert self.event.wait(20)

        monkeypatch.setattr(Directory, "hook", staticmethod(hook))

    def open(self) -> None:
        self.event.set()


def settled(cache: TieredCache) -> None:
    """Nothing reserved, every account right, within a moment."""
    end = time.monotonic() + 5
    while cache.ram.pool.ledger.reserved and time.monotonic() < end:
        time.sleep(0.005)
    assert cache.ram.pool.ledger.reserved == 0
    cache.ram.pool.check_integrity()


def test_many_promotions_of_one_sequence_read_each_block_once(stored, make_config, monkeypatch):
    gate = Gate(monkeypatch)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        promotions = [cache.promote(stored[0]) for _ in range(64)]
        assert cache.ram.pool.ledger.reserved == 1024 * PER_TOKEN
        gate.open()
        for promotion in promotions:
            state, remaining = promotion.result(20)
            assert remaining == stored[0][-1:]
            assert same_state(state, state_of(stored[0]), 1023)
        assert len(gate.calls) == len(set(gate.calls)) == 4
        settled(cache)


def test_more_promotions_than_ram_can_take_neither_deadlock_nor_exceed_the_limit(stored, make_config):
    config = make_config(ram={"max_memory": 4 * 1024 * PER_TOKEN + 100})
    with TieredCache.open(config, model=MODEL) as cache:
        promotions = [(tokens, cache.promote(tokens)) for tokens in stored]
        running = [(tokens, p) for tokens, p in promotions if p]
        assert len(running) == 4
        for tokens, promotion in running:
            assert promotion.result(20)[1] == tokens[-1:]
        del promotion, promotions, running
        assert cache.stats()["losses"] == {"lost_no_memory": 8}
        assert cache.ram.pool.ledger.peak <= cache.ram.pool.ledger.limit
        settled(cache)
        # Those four have been handed out: the next ones find room, by evicting just what they are short of.
        evicted = cache.ram.pool.counters["evicted_blocks"]
        promotion = cache.promote(stored[-1])
        assert promotion.result(20)[1] == stored[-1][-1:]
        assert cache.ram.pool.counters["evicted_blocks"] - evicted == 4


def test_a_promotion_that_only_partly_fits_brings_the_head(stored, make_config):
    config = make_config(ram={"max_memory": 600 * PER_TOKEN})
    with TieredCache.open(config, model=MODEL) as cache:
        state, remaining = cache.promote(stored[0]).result(20)
        assert len(remaining) == 1024 - 512
        assert same_state(state, state_of(stored[0]), 512)
        settled(cache)


def test_cancelling_gives_the_reservation_back_once_and_spares_unmade_reads(stored, make_config, monkeypatch):
    gate = Gate(monkeypatch)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        promotions = [cache.promote(tokens) for tokens in stored[:4]]
        shared = cache.promote(stored[3])
        for promotion in promotions:
            assert promotion.cancel()
            assert promotion.cancelled()
            assert promotion.done()
        with pytest.raises(CancelledError):
            promotions[0].result(1)
        gate.open()
        assert shared.result(20)[1] == stored[3][-1:]  # its blocks were wanted by two
        settled(cache)
        assert len(gate.calls) <= 4 + 4  # what four readers had in hand, and the shared one's


def test_dropping_a_promotion_unasked_lets_its_blocks_go(stored, make_config):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        promotion = cache.promote(stored[0])
        while not promotion.done():
            time.sleep(0.001)
        time.sleep(0.05)
        assert any(n.pins for n in cache.ram.pool.resident())
        del promotion
        gc.collect()
        time.sleep(0.05)
        assert not any(n.pins for n in cache.ram.pool.resident())


def test_a_failing_disk_is_a_miss(stored, make_config, monkeypatch):
    def hook(operation: str, file: str) -> None:
        if operation == "read":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(Directory, "hook", staticmethod(hook))
    with TieredCache.open(make_config(), model=MODEL) as cache:
        state, remaining = cache.promote(stored[0]).result(20)
        assert (state, remaining) == (None, stored[0])
        assert cache.stats()["ssd"]["read_failed"] == 4
        assert cache.stats()["ssd"]["blocks"] == 48  # the machine's fault takes nothing away
        settled(cache)
        monkeypatch.undo()
        assert cache.promote(stored[0]).result(20)[1] == stored[0][-1:]


def test_a_damaged_block_ends_the_prefix_before_it(stored, make_config, tmp_path):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        root = cache.ram.chain(None, cache.ram._classes[0]).root
        node = cache.ram.pool.tree.walk(root, b"".join(t.to_bytes(8, "little") for t in stored[0]))[2]
        assert node.entry
        (file,) = (tmp_path / "cache" / "blobs").rglob(f"{node.key.hex()}-*")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
        state, remaining = cache.promote(stored[0]).result(20)
        assert len(remaining) == 512
        assert same_state(state, state_of(stored[0]), 512)
        assert cache.stats()["losses"] == {"lost_damaged": 1}
        assert not file.exists()
        settled(cache)
        assert cache.store(stored[0], state_of(stored[0]))  # mended by the next turn
        assert cache.flush(20)
        assert cache.stats()["ssd"]["blocks"] == 48


def test_what_arrived_by_the_deadline_is_kept(stored, make_config, monkeypatch):
    slow: list[str] = []
    event = threading.Event()

    def hook(operation: str, file: str) -> None:
        if operation == "read" and len(slow) >= 2:
            event.wait(20)
        slow.append(operation) if operation == "read" else None

    monkeypatch.setattr(Directory, "hook", staticmethod(hook))
    with TieredCache.open(make_config(promotion={"deadline": "0.3s"}), model=MODEL) as cache:
        started = time.perf_counter()
        _, remaining = cache.promote(stored[0]).result(20)
        assert 0.2 < time.perf_counter() - started < 5
        assert len(remaining) in (1024, 768, 512)  # of the first four reads, two came through
        assert cache.stats()["losses"] == {"lost_deadline": 1}
        event.set()
        settled(cache)


def test_closing_under_way_settles_everything(stored, make_config, monkeypatch):
    gate = Gate(monkeypatch)
    cache = TieredCache.open(make_config(), model=MODEL)
    promotion = cache.promote(stored[0])
    threading.Timer(0.2, gate.open).start()
    cache.close()
    assert promotion.cancelled()
    assert cache.ram.pool.ledger.reserved == 0
    cache.ram.pool.check_integrity()
    assert cache.promote(stored[1]) is None
    assert cache.store(stored[1], state_of(stored[1]))  # RAM goes on
    cache.close()


async def test_a_promotion_can_be_awaited(stored, make_config):
    async with TieredCache.open(make_config(), model=MODEL) as cache:
        states = await asyncio.gather(*(cache.promote(tokens) for tokens in stored[:3]))
        for tokens, (state, remaining) in zip(stored, states, strict=False):
            assert remaining == tokens[-1:]
            assert same_state(state, state_of(tokens), 1023)
        assert await cache.aflush(10)


def test_result_gives_up_after_its_timeout_and_can_be_asked_again(stored, make_config, monkeypatch):
    gate = Gate(monkeypatch)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        promotion = cache.promote(stored[0])
        called: list[object] = []
        promotion.add_done_callback(called.append)
        with pytest.raises(TimeoutError):
            promotion.result(0.05)
        gate.open()
        assert promotion.result(20)[1] == stored[0][-1:]
        assert promotion.result(0)[1] == stored[0][-1:]
        assert called == [promotion]


def test_the_handoff_delivers_every_request_once_and_never_waits(stored, make_config, monkeypatch):
    gate = Gate(monkeypatch)
    woken: list[float] = []
    with TieredCache.open(make_config(), model=MODEL) as cache:
        fresh = random_tokens(700, 99)
        assert cache.store(stored[1], state_of(stored[1]))
        handoff = cache.handoff(on_ready=lambda: woken.append(time.perf_counter()))
        started = time.perf_counter()
        outcomes = [handoff.submit(i, t) for i, t in enumerate([stored[0], stored[1], fresh, stored[2]])]
        assert outcomes == ["pending", "hit", "miss", "pending"]
        first = handoff.poll()
        assert time.perf_counter() - started < 1
        assert {(r.request_id, r.source) for r in first} == {(1, "ram"), (2, "miss")}
        assert first[1].remaining == fresh
        assert handoff.cancel(3)
        assert not handoff.cancel(3)
        with pytest.raises(ValueError, match="0 is on its way"):
            handoff.submit(0, stored[0])
        gate.open()
        ready = []
        while not ready:
            ready = handoff.poll()
            time.sleep(0.001)
        assert [(r.request_id, r.source, list(r.remaining)) for r in ready] == [(0, "ssd", stored[0][-1:])]
        assert same_state(ready[0].state, state_of(stored[0]), 1023)
        assert len(woken) >= 3
        assert len(handoff) == 0
        assert handoff.poll() == []
        settled(cache)


def test_requests_can_be_submitted_from_many_threads(stored, make_config):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        ready_event = threading.Event()
        handoff = cache.handoff(on_ready=ready_event.set)

        def submit(i: int) -> None:
            for round_ in range(3):
                handoff.submit((i, round_), stored[(i + round_) % 12])

        threads = [threading.Thread(target=submit, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        got = {}
        end = time.monotonic() + 20
        while len(got) < 36 and time.monotonic() < end:
            ready_event.wait(0.05)
            ready_event.clear()
            for r in handoff.poll(limit=4):
                assert r.request_id not in got
                got[r.request_id] = len(r.remaining)
        for thread in threads:
            thread.join()
        assert len(got) == 36
        assert set(got.values()) == {1}
        settled(cache)
