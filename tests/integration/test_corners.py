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


def at_rest(cache: TieredCache) -> int:
    """Blocks written, once nothing is being written any more; fails where that goes on."""
    end, before = time.monotonic() + 10, -1
    while time.monotonic() < end:
        written = cache.stats()["ssd"]["blocks_written"]
        if written == before and not cache.stats()["ssd"]["queued_blocks"]:
            return written
        before = written
        time.sleep(0.3)
    raise AssertionError("blocks are written without end")


@pytest.mark.parametrize("write", ["through", "evict"])
def test_an_ssd_smaller_than_ram_is_not_written_to_without_end(make_config, write):
    config = make_config(ram={"max_memory": "12MB"}, ssd={"budget": "6MB", "write": write})
    sequences = [random_tokens(1024, seed) for seed in range(40)]
    with TieredCache.open(config, model=MODEL) as cache:
        for tokens in sequences:
            assert cache.store(tokens, state_of(tokens))
        assert at_rest(cache) <= 2 * 40 * 4


def test_what_was_used_last_survives_a_close_into_a_small_ssd(make_config):
    config = make_config(ram={"max_memory": "40MB"}, ssd={"budget": "6MB"})
    sequences = [random_tokens(1024, seed) for seed in range(40)]
    with TieredCache.open(config, model=MODEL) as cache:
        for tokens in sequences:
            assert cache.store(tokens, state_of(tokens))
    kept = []
    with TieredCache.open(config, model=MODEL) as cache:
        for tokens in sequences:
            promotion = cache.promote(tokens)
            kept.append(1024 - len(promotion.result(10)[1]) if promotion else 0)
    first = next(i for i, n in enumerate(kept) if n)
    assert kept[first + 1 :] == [1023] * (39 - first), kept
    assert first < 30, kept


def test_flush_tells_when_a_block_was_lost_and_the_next_one_tries_again(make_config, monkeypatch):
    fail = [True]

    def hook(operation: str, _: str) -> None:
        if operation == "write" and fail and fail.pop():
            raise OSError(28, "No space left on device")

    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
        monkeypatch.setattr(Directory, "hook", staticmethod(hook))
        assert not cache.flush(10)
        assert cache.flush(10)
        assert cache.stats()["ssd"]["raw_bytes"] == 600 * bytes_per_token()


def test_flush_waits_for_what_takes_a_blocks_place(make_config, monkeypatch):
    gate = threading.Event()
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A[:300], state_of(A[:300]))
        monkeypatch.setattr(Directory, "hook", staticmethod(lambda op, _: gate.wait(10) if op == "write" else None))
        done: list[bool] = []
        thread = threading.Thread(target=lambda: done.append(cache.flush(10)))
        thread.start()
        time.sleep(0.1)
        assert cache.store(A[:350], state_of(A[:350]))
        gate.set()
        thread.join()
        assert done == [True]
        assert cache.stats()["ssd"]["raw_bytes"] >= 350 * bytes_per_token()


def test_a_request_cancelled_and_submitted_again_comes_once_and_harms_no_other(make_config, monkeypatch):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
    gate = threading.Event()
    with TieredCache.open(make_config(), model=MODEL) as cache:
        monkeypatch.setattr(Directory, "hook", staticmethod(lambda op, _: gate.wait(10) if op == "read" else None))
        handoff = cache.handoff()
        assert [handoff.submit("other", B), handoff.submit("r", B)] == ["miss", "miss"]
        handoff.cancel("r")
        assert handoff.submit("r", A) == "pending"
        assert [r.request_id for r in handoff.poll()] == ["other"]
        gate.set()
        end, ready = time.monotonic() + 10, []
        while not ready and time.monotonic() < end:
            ready = handoff.poll()
        assert [(r.request_id, r.source) for r in ready] == [("r", "ssd")]
        assert not len(handoff)


def test_flush_and_close_at_once_both_end(make_config, monkeypatch):
    monkeypatch.setattr(Directory, "hook", staticmethod(lambda op, _: time.sleep(0.2) if op == "write" else None))
    config = make_config(ram={"max_memory": "40MB"}, ssd={"close_deadline": "0.2s", "spill_queue": "300kB"})
    cache = TieredCache.open(config, model=MODEL)
    for seed in range(20):
        tokens = random_tokens(600, seed)
        assert cache.store(tokens, state_of(tokens))
    flushed: list[bool] = []
    threads = [threading.Thread(target=lambda: flushed.append(cache.flush())) for _ in range(2)]
    threads += [threading.Thread(target=cache.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert not any(t.is_alive() for t in threads)
    assert flushed == [False, False]
    assert cache.stats()["losses"]


def test_waiting_in_a_callback_is_refused_instead_of_hanging(make_config, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Directory, "hook", staticmethod(lambda op, _: gate.wait(10) if op == "read" else None))
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
    with TieredCache.open(make_config(), model=MODEL) as cache:
        said: list[str] = []

        def callback(_: object) -> None:
            for wait in (lambda: cache.flush(1), cache.close):
                try:
                    wait()
                except RuntimeError as e:
                    said.append(str(e))

        promotion = cache.promote(A)
        promotion.add_done_callback(callback)
        gate.set()
        promotion.result(10)
        end = time.monotonic() + 5
        while len(said) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(said) == 2
        assert "callback" in said[0]
        assert cache.flush(10)


def test_what_left_ram_leaves_memory(make_config):
    import gc
    import weakref

    with TieredCache.open(make_config(ssd={"write": "through"}), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
        assert cache.flush(10)
        buffers = [weakref.ref(n.block.data) for n in cache.ram.pool.resident()]
        cache.ram.clear()
        time.sleep(0.1)
        gc.collect()
        assert [b() for b in buffers] == [None] * 3


def test_clearing_ram_takes_nothing_off_the_ssd(make_config, monkeypatch):
    gate = threading.Event()
    with TieredCache.open(make_config(ssd={"write": "through"}), model=MODEL) as cache:
        assert cache.store(A[:300], state_of(A[:300]))
        assert cache.flush(10)
        monkeypatch.setattr(Directory, "hook", staticmethod(lambda op, _: gate.wait(10) if op == "write" else None))
        assert cache.store(A[:350], state_of(A[:350]))
        time.sleep(0.1)  # the writer has it in hand
        cache.ram.clear()
        gate.set()
        assert at_rest(cache)
        assert cache.promote(A).result(10)[1] in (A[350:], A[300:])


def test_of_a_sequence_larger_than_the_ssd_the_head_is_kept(make_config):
    config = make_config(ram={"max_memory": "40MB"}, ssd={"budget": "5MB", "write": "through"})
    with TieredCache.open(config, model=MODEL) as cache:
        assert cache.store(A, state_of(A))
        assert cache.flush(10)
        long = random_tokens(25_600, 5)
        assert cache.store(long, state_of(long))
        assert not cache.flush(20)
        blocks = cache.stats()["ssd"]["blocks"]
        cache.ram.clear()
        state, remaining = cache.promote(long).result(10)
        covered = 25_600 - len(remaining)
        assert covered >= 256 * (blocks - 3) > 10_000, "what was evicted made room for what was stored"
        assert same_state(state, state_of(long), covered)


def test_a_disk_with_no_room_at_all_costs_the_ssd_and_nothing_else(make_config):
    with TieredCache.open(make_config(ssd={"min_free": "900TB"}), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
        assert not cache.flush(5)
        assert cache.fetch(A)[1] == A[-1:]
        assert set(cache.stats()["losses"]) <= {"lost_no_room", "lost_parent_not_stored"}


def test_a_budget_that_was_cut_is_told(make_config, caplog):
    with TieredCache.open(make_config(ram={"max_memory": "60MB"}), model=MODEL) as cache:
        for seed in range(30):
            tokens = random_tokens(1024, seed)
            assert cache.store(tokens, state_of(tokens, layers=4))
    with TieredCache.open(make_config(ssd={"budget": "4MB"}), model=MODEL) as cache:
        assert cache.stats()["ssd"]["blocks"] < 120
    assert any("held more than ssd.budget" in r.getMessage() for r in caplog.records)


def test_a_cache_that_is_never_closed_says_so(make_config):
    import json
    import subprocess
    import sys

    script = (
        "import sys, json; from tests.states import ShapeOnlyModel; from tiered_cache import TieredCache\n"
        "cache = TieredCache.open(json.loads(sys.argv[1]), model=ShapeOnlyModel())\n"
    )
    command = [sys.executable, "-c", script, json.dumps(make_config())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "was not closed" in done.stderr


def test_states_of_other_layers_than_the_models_own_are_found_after_a_restart(make_config):
    from mlx_lm.models.cache import QuantizedKVCache

    with TieredCache.open(make_config(), model=MODEL) as cache:
        state = [layer.to_quantized(group_size=32, bits=8) for layer in state_of(A, dim=32)]
        assert cache.store(A, state)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        restored, remaining = cache.promote(A).result(10)
        assert remaining == A[-1:]
        assert {type(layer) for layer in restored} == {QuantizedKVCache}


def busy_loop(cache: TieredCache) -> None:
    """Hold the cache's own thread for a moment, so that what is asked of it comes late."""
    loop = cache._runtime._loop_thread.loop
    loop.call_soon_threadsafe(time.sleep, 0.3)


def test_a_promotion_of_what_is_being_removed_ends(make_config):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
    with TieredCache.open(make_config(), model=MODEL) as cache:
        early = cache.promote(A)
        busy_loop(cache)
        assert cache.ram.remove(A, include_ssd=True)
        late = cache.promote(A)
        assert late is None or late.result(5) == (None, A)
        early.cancel()
        assert cache.flush(5)


def test_what_is_stored_right_after_it_was_removed_is_kept(make_config):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(A, state_of(A))
    with TieredCache.open(make_config(), model=MODEL) as cache:
        busy_loop(cache)
        assert cache.ram.remove(A, include_ssd=True)
        assert cache.store(A, state_of(A))
        assert cache.flush(10)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.promote(A).result(10)[1] == A[-1:]


def test_removing_one_sequence_takes_nothing_from_another():
    cache = MemoryAwarePrefixCache(MODEL)
    assert cache.store(A, state_of(A))
    assert cache.store(A[:512], state_of(A[:512]))
    assert cache.remove(A[:512])
    assert cache.fetch(A)[1] == []
    cache.pool.check_integrity()


def test_a_layer_that_raises_and_a_wrong_thread_are_refused_with_their_reason():
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    class Broken(KVCache):
        @property
        def offset(self) -> int:
            raise OSError("out of order")

        @offset.setter
        def offset(self, value: int) -> None:
            pass

    from tiered_cache import layer_kinds

    layer_kinds.register(layer_kinds.LayerKind(Broken, rows=("keys", "values")))
    cache = MemoryAwarePrefixCache(MODEL)
    assert not cache.store(A, [Broken()])
    lazy = state_of(A)
    for layer in lazy:
        layer.keys = mx.exp(layer.keys)
    stored: list[bool] = []
    thread = threading.Thread(target=lambda: stored.append(cache.store(A, lazy)))
    thread.start()
    thread.join()
    assert stored == [False]
    assert cache.get_stats()["losses"] == {"refused_error": 1, "refused_thread": 1}
    assert cache.store(A, lazy)  # on its own thread it is fine
