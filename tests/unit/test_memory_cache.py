"""The RAM tier under the names that other programs use: what is found, kept, refused, reserved and counted."""

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from tests.blocks import entry
from tests.models import prefill, random_tokens, same_state, tiny_llama
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tiered_cache.block_pool import BlockPool
from tiered_cache.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig
from tiered_cache.metrics import MB

A, B, C, X = (random_tokens(n, seed) for n, seed in ((600, 1), (600, 2), (600, 3), (200, 4)))
SEQUENCE = 600 * bytes_per_token()


def make(nbytes: float = 64 * MB, pool: Any = None, model: Any = None, **config: Any) -> MemoryAwarePrefixCache:
    settings = MemoryCacheConfig(max_memory_mb=nbytes / MB, **config)
    return MemoryAwarePrefixCache(model or ShapeOnlyModel(), settings, pool=pool)


def put(cache: Any, *sequences: Any, **options: Any) -> None:
    for tokens in sequences:
        assert cache.store(tokens, state_of(tokens), **options)


def covered(cache: Any, tokens: Any, **options: Any) -> int:
    """How many tokens are handed out, after a check that these, and only these, are right to the bit."""
    state, remaining = cache.fetch(tokens, **options)
    n = len(tokens) - len(remaining)
    assert remaining == tokens[n:]
    assert same_state(state, state_of(tokens[:n])) if state else n == 0
    return n


@pytest.mark.parametrize(("request_", "kind", "tokens"), [
    (A, "exact", 600), (A[:400], "supersequence", 400), (A[:512], "supersequence", 512), (A + X, "prefix", 600),
    (A[:450] + X, "lcp", 450), (A[:512] + X, "lcp", 512), (X, "miss", 0), ([], "miss", 0),
    (A[:100], "miss_short_prefix", 0), (A[:127] + X, "miss_short_lcp", 0)])
def test_each_kind_of_match_is_found_and_named(request_, kind, tokens):
    cache = make()
    put(cache, A, B)
    assert (covered(cache, request_), cache._last_match_type) == (tokens, kind)
    assert cache.get_stats().items() >= {"hits": bool(tokens), "misses": not tokens, "tokens_saved": tokens}.items()


@pytest.mark.parametrize("evict_prefixes", [True, False])
def test_the_longest_match_wins_whatever_was_stored_before_and_after(evict_prefixes):
    cache = make(pool=BlockPool(64 * MB, 16), min_prefix_tokens=5)
    rng = np.random.default_rng(0)
    stored: list[list[int]] = [[]]
    for _ in range(60):
        head = stored[rng.integers(len(stored))]
        tokens = head[: rng.integers(len(head) + 1)] + rng.integers(0, 3, rng.integers(5, 40)).tolist()
        longest = max(n for s in stored for n in range(len(tokens) + 1) if s[:n] == tokens[:n])
        for leave in (0, 1, 3):
            best = min(longest, len(tokens) - leave)
            assert covered(cache, tokens, leave=leave) == (best if best >= 5 else 0)
        put(cache, tokens, evict_prefixes=evict_prefixes)
        stored.append(tokens)
        cache.pool.check_integrity()


def test_neither_the_source_of_a_stored_state_nor_a_fetched_one_shares_anything_with_it():
    cache, source = make(), state_of(A)
    assert cache.store(A, source)
    for state in (source, cache.fetch(A)[0], cache.fetch(A[:400])[0]):
        for layer in state or []:
            layer.trim(100)
            layer.update_and_fetch(*2 * [mx.ones((1, 2, 9, 16), mx.bfloat16)])
            layer.keys[:, :, :50] = 0
        assert not same_state(state or [], state_of(A), 50)
        assert covered(cache, A) == 600


@pytest.mark.parametrize("request_", [A, A[:400], A + X, A[:450] + X, A[:512] + X], ids=len)
def test_a_model_goes_on_from_a_fetched_state_as_from_a_cold_start(request_):
    model = tiny_llama()
    cache = make(model=model)
    assert cache.store(A, prefill(model, A)[0])
    state, remaining = cache.fetch(request_, leave=1)
    warm, cold = prefill(model, remaining, state), prefill(model, request_)
    assert len(remaining) < len(request_)
    assert mx.array_equal(warm[1], cold[1])
    assert same_state(warm[0], cold[0])


@pytest.mark.parametrize("limit", [{"max_entries": 2}, {"nbytes": 2 * SEQUENCE}])
def test_what_was_fetched_least_recently_goes_first(limit):
    cache = make(**limit)
    put(cache, A, B)
    assert (covered(cache, A), cache.store(C, state_of(C))) == (600, True)
    assert (A in cache, B in cache, C in cache, len(cache)) == (True, False, True, 2)
    assert (covered(cache, A), covered(cache, C), cache.get_stats()["evictions"]) == (600, 600, 1)
    assert cache.memory_usage_mb <= cache.memory_limit_mb == cache.config.max_memory_mb


@pytest.mark.parametrize("evict_prefixes", [True, False])
def test_a_sequence_that_another_continues_goes_or_stays_as_asked(evict_prefixes):
    cache = make()
    put(cache, A[:300], A, evict_prefixes=evict_prefixes)
    assert (A[:300] in cache, len(cache)) == ((False, 1) if evict_prefixes else (True, 2))
    assert cache.memory_usage_mb * MB == SEQUENCE + (0 if evict_prefixes else 44 * bytes_per_token())
    assert (covered(cache, A[:300]), cache._last_match_type) == (300, ("exact", "supersequence")[evict_prefixes])


def test_a_removed_sequence_leaves_what_others_share():
    cache, fork = make(), A[:550] + X
    put(cache, A, fork)
    assert [cache.remove(t) for t in (B, A[:300], A[:512], [], A, A)] == [False] * 4 + [True, False]
    assert (A in cache, fork in cache, len(cache)) == (False, True, 1)
    assert (covered(cache, fork), covered(cache, A)) == (750, 550)
    assert (cache.remove(fork), len(cache), cache.memory_usage_mb, covered(cache, A)) == (True, 0, 0.0, 0)


def test_sequences_that_share_a_prefix_hold_it_once():
    cache, head = make(), random_tokens(8000, 5)
    put(cache, A, A[:550] + X)
    assert cache.memory_usage_mb * MB == (512 + 88 + 238) * bytes_per_token()
    cache = make(model=ShapeOnlyModel(1))
    for tokens in [head + random_tokens(200, 10 + i) for i in range(10)]:
        assert cache.store(tokens, state_of(tokens, 1, 1, 4))
    assert cache.memory_usage_mb * MB <= 1.15 * (8000 + 10 * 200) * bytes_per_token(1, 1, 4)


def test_a_reservation_evicts_what_it_is_short_of_survives_clear_and_is_given_back_once():
    cache = make(2 * SEQUENCE)
    put(cache, A, B)
    assert (covered(cache, A), cache.try_reserve_memory(SEQUENCE // 2)) == (600, True)
    assert not cache.try_reserve_memory(2 * SEQUENCE), "cannot be, so nothing goes for it"
    assert (covered(cache, A), covered(cache, B)) == (600, 256)
    cache.clear()
    assert (len(cache), cache.memory_usage_mb, cache.try_reserve_memory(2 * SEQUENCE)) == (0, 0.0, False)
    assert cache.try_reserve_memory(3 * SEQUENCE // 2)
    for _ in range(2):
        cache.release_reserved_memory(2 * SEQUENCE + 1)
    assert (cache.try_reserve_memory(2 * SEQUENCE), cache.try_reserve_memory(1)) == (True, False)


@pytest.mark.parametrize("figure", ["hits", "misses", "hit_rate", "tokens_saved", "entry_count", "current_memory_mb",
    "evictions"])
def test_a_figure_is_counted_and_reset_and_cleared(figure):
    cache = make(max_entries=1)
    for reset, kept in ((cache.clear, ()), (cache.reset_stats, ("entry_count", "current_memory_mb"))):
        put(cache, A, B)
        assert (covered(cache, B), covered(cache, X)) == (600, 0)
        assert cache.get_stats()[figure]
        reset()
        assert bool(cache.get_stats()[figure]) == (figure in kept)


@pytest.mark.parametrize(("reason", "tokens", "state", "logged"), [
    ("empty", [], [], 0), ("too_short", A[:127], state_of(A[:127]), 0), ("too_large", A * 3, state_of(A * 3), 0),
    ("empty", A, [], 0), ("empty", A, None, 0), ("unsupported_layer", A, [None, None], 1),
    ("unsupported_layer", A, [*state_of(A), type("Mine", (KVCache,), {})()], 1),
    ("unsupported_layer", A, [object()], 1), ("coverage", A, [KVCache()], 1), ("tokens", [2**63] * 600, state_of(A), 1),
    ("tokens", ["a"] * 600, state_of(A), 1), ("layout", A, state_of(A, dim=8), 1),
    ("coverage", A, state_of(A[:599]), 1)])
def test_what_cannot_be_stored_is_refused_counted_and_logged_once(reason, tokens, state, logged, caplog):
    cache = make(2 * SEQUENCE)
    put(cache, B)
    with caplog.at_level(logging.WARNING, "tiered_cache"):
        assert [cache.store(tokens, state), cache.store(tokens, state)] == [False, False]
    assert cache.get_stats()["losses"] == {f"refused_{reason}": 2}
    assert (len(caplog.records), covered(cache, tokens), covered(cache, B), len(cache)) == (logged, 0, 600, 1)


def test_two_threads_store_fetch_and_remove_at_once():
    cache, sequences = make(2 * SEQUENCE), [A, A[:400] + X, A[:500] + X, B]
    states = [state_of(tokens) for tokens in sequences]  # computed here: no lazy array may cross threads

    def work(first):
        for i in range(first, 120):
            cache.store(sequences[i % 4], states[i % 4])
            covered(cache, sequences[(i + first) % 4])
            cache.remove(sequences[i % 3])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, (0, 1)))
    cache.pool.check_integrity()


def test_the_ssd_is_asked_for_what_it_holds_beyond_ram():
    source, cache = make(), make()
    put(source, A)
    put(cache, A[:256])
    blocks: Any = [n.block for n in source.pool.resident()]
    disk: Any = SimpleNamespace(catalog=map(entry, blocks), touch=lambda keys, **_: None, put=lambda block: False)
    cache.set_ssd_tier(disk)
    for tokens, kind, n, there in ((A, "exact", 600, 600), (A + X, "prefix", 600, 600), (A[:450] + X, "lcp", 450, 512)):
        assert cache.check_ssd(tokens) == {"match_type": kind, "matched_tokens": n, "num_tokens": there,
                                           "memory_bytes": (there - 256) * bytes_per_token()}
    assert [cache.check_ssd(tokens) for tokens in (A[:256], A[:100], B, [])] == [None] * 4
