"""RAM and SSD together: what a program that embeds the cache sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd_tier.inspection import Inspection
from tests.models import greedy, prefill, random_tokens, same_state, tiny_llama
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tiered_cache import TieredCache

PER_TOKEN = bytes_per_token()


def reuse(cache: TieredCache, tokens: list[int], **more):
    """Fetch, then promote what the SSD has beyond; the state, how many tokens it covers, and from where."""
    state, remaining = cache.fetch(tokens, **more)
    source = "ram" if state else "none"
    promotion = cache.promote(tokens, **more)
    if promotion:
        state, remaining = promotion.result(20)
        source = "ssd"
    return state, len(tokens) - len(remaining), source


def test_twelve_conversations_in_ram_for_five_reuse_everything(make_config):
    model = tiny_llama()
    conversations = [random_tokens(700, seed) for seed in range(12)]
    per_token = 2 * 2 * 2 * 32 * 2
    config = make_config(ram={"max_memory": 5 * 700 * per_token})
    with TieredCache.open(config, model=model) as cache:
        for turn in range(4):
            for tokens in conversations:
                state, covered, _ = reuse(cache, tokens)
                assert covered == (0 if turn == 0 else len(tokens) - 1 - 30), cache.stats()
                if turn:
                    assert same_state(state, prefill(model, tokens)[0], covered)
                answer, state = greedy(model, tokens[covered:], 1, state)
                assert cache.store(tokens, state)
                tokens.extend(answer + random_tokens(30, len(tokens) * 13 + turn))
                cache.ram.pool.check_integrity()
        stats = cache.stats()
        assert stats["losses"] == {}
        assert stats["ram"]["peak"] <= stats["ram"]["limit"]
        assert stats["promotion"]["started"] >= 3 * 7  # at least seven of twelve had to come from the SSD


def test_answers_are_those_of_a_run_without_cache_after_a_restart(make_config):
    model = tiny_llama(seed=3)
    system = random_tokens(400, 1)
    prompts = [system + random_tokens(150, seed) for seed in (2, 3)]
    with TieredCache.open(make_config(), model=model) as cache:
        for prompt in prompts:
            _, state = greedy(model, prompt, 1)
            assert cache.store(prompt, state)
    for prompt in prompts:
        with TieredCache.open(make_config(), model=model) as cache:
            asked = prompt + random_tokens(20, 9)
            state, covered, source = reuse(cache, asked)
            assert (covered, source) == (len(prompt), "ssd")
            assert greedy(model, asked[covered:], 12, state)[0] == greedy(model, asked, 12)[0]


def test_a_short_match_in_ram_does_not_hide_a_long_one_on_the_ssd(make_config):
    model = ShapeOnlyModel()
    long = random_tokens(8000, 1)
    short = long[:200] + random_tokens(100, 2)
    with TieredCache.open(make_config(), model=model) as cache:
        assert cache.store(long, state_of(long))
    with TieredCache.open(make_config(), model=model) as cache:
        assert cache.store(short, state_of(short))
        assert len(long) - len(cache.fetch(long)[1]) == 200
        state, covered, source = reuse(cache, long)
        assert (covered, source) == (7999, "ssd")
        assert same_state(state, state_of(long), 7999)


def test_a_prefix_partly_in_ram_reads_only_the_rest(make_config):
    model = ShapeOnlyModel()
    tokens = random_tokens(256 * 8, 1)
    with TieredCache.open(make_config(), model=model) as cache:
        assert cache.store(tokens, state_of(tokens))
    with TieredCache.open(make_config(), model=model) as cache:
        assert cache.store(tokens[: 256 * 5], state_of(tokens[: 256 * 5]))
        _, covered, _ = reuse(cache, tokens)
        assert covered == len(tokens) - 1
        assert cache.stats()["ssd"]["blocks_read"] == 3


def test_a_sequence_that_diverges_inside_a_block_reuses_up_to_there_from_the_ssd(make_config):
    model = ShapeOnlyModel()
    stored = [random_tokens(300, 1) + random_tokens(300, seed) for seed in range(2, 8)]
    with TieredCache.open(make_config(), model=model) as cache:
        for tokens in stored:
            assert cache.store(tokens, state_of(tokens))
    with TieredCache.open(make_config(), model=model) as cache:
        for at in (1, 44, 100, 211):
            asked = stored[3][: 300 + at] + [511 - t for t in stored[3][300 + at :]]
            state, covered, _ = reuse(cache, asked)
            assert covered == 300 + at
            assert same_state(state, state_of(asked), covered)


def test_ten_sequences_that_share_8000_tokens_hold_them_once_in_both_tiers(make_config, tmp_path):
    model = ShapeOnlyModel()
    shared = random_tokens(8000, 1)
    sequences = [shared + random_tokens(100, seed) for seed in range(2, 12)]
    distinct = (8000 + 10 * 100) * PER_TOKEN
    with TieredCache.open(make_config(ssd={"write": "through"}), model=model) as cache:
        for tokens in sequences:
            assert cache.store(tokens, state_of(tokens))
        assert cache.ram.pool.ledger.resident + cache.ram.pool.ledger.queued <= 1.15 * distinct
        assert cache.flush(20)
        assert cache.stats()["ssd"]["raw_bytes"] <= 1.15 * distinct
        for tokens in sequences:  # again, and nothing new to write
            assert cache.store(tokens, state_of(tokens))
        written = cache.stats()["ssd"]["blocks_written"]
    names = [p.name.split("-")[0] for p in (tmp_path / "cache" / "blobs").rglob("*.safetensors")]
    assert len(names) == len(set(names)) == written


def test_a_conversation_that_grows_leaves_no_old_tails_behind(make_config, tmp_path):
    model = ShapeOnlyModel()
    tokens: list[int] = random_tokens(300, 0)
    with TieredCache.open(make_config(ssd={"write": "through"}), model=model) as cache:
        for turn in range(1, 12):
            tokens += random_tokens(90, turn)
            assert cache.store(tokens, state_of(tokens))
            assert cache.flush(20)
            cache.ram.pool.check_integrity()
            assert cache.ram.pool.ledger.resident == len(tokens) * PER_TOKEN
        assert cache.flush(20)
    found = Inspection(tmp_path / "cache")
    assert [s.tokens for s in found.sequences()] == [len(tokens)]
    assert sum(e.raw_bytes for e in found.entries) == len(tokens) * PER_TOKEN
    assert len(list((tmp_path / "cache" / "blobs").rglob("*.safetensors"))) == len(found.entries)


def test_nothing_stored_is_read_from_ram_after_it_was_evicted_without_an_ssd(make_config):
    model = ShapeOnlyModel()
    with TieredCache.open(make_config(ssd={"enabled": False}), model=model) as cache:
        tokens = random_tokens(600, 1)
        assert cache.store(tokens, state_of(tokens))
        assert cache.promote(tokens) is None
        assert not cache.flush(1), "there is nothing to write to"
        assert reuse(cache, tokens)[1] == 599
        assert cache.stats()["ssd"] == {"on": False, "off_because": "ssd.enabled is false"}


def test_tenants_never_see_each_others_state(make_config):
    model = ShapeOnlyModel()
    tokens = random_tokens(600, 1)
    for _ in range(2):  # in RAM, and after a restart from the SSD
        with TieredCache.open(make_config(), model=model) as cache:
            assert reuse(cache, tokens, tenant="b")[1] == 0
            assert reuse(cache, tokens)[1] == 0
            if not reuse(cache, tokens, tenant="a")[1]:
                assert cache.store(tokens, state_of(tokens), tenant="a")
            assert reuse(cache, tokens, tenant="a")[1] == 599


def test_models_share_the_budgets_but_not_the_states(make_config):
    one, two = ShapeOnlyModel(name="one"), ShapeOnlyModel(name="two")
    tokens = random_tokens(600, 1)
    for restart in range(2):
        with TieredCache.open(make_config(), model=one, name="first") as cache:
            other = cache.for_model(two, name="second")
            if not restart:
                assert cache.store(tokens, state_of(tokens))
            assert reuse(other, tokens)[1] == 0
            assert reuse(cache, tokens)[1] == 599
            assert other.stats()["ram"]["resident"] == cache.stats()["ram"]["resident"]


@pytest.mark.parametrize("write", ["evict", "through"])
def test_flush_means_on_the_ssd(make_config, tmp_path: Path, write):
    model = ShapeOnlyModel()
    sequences = [random_tokens(400, seed) for seed in range(5)]
    with TieredCache.open(make_config(ssd={"write": write}), model=model) as cache:
        for tokens in sequences:
            assert cache.store(tokens, state_of(tokens))
        assert cache.flush(20)
        assert sorted(s.tokens for s in Inspection(tmp_path / "cache").sequences()) == [400] * 5


def test_closing_writes_the_most_recently_used_first_and_keeps_the_deadline(make_config):
    model = ShapeOnlyModel(layers=8)
    sequences = [random_tokens(512, seed) for seed in range(20)]
    shape = {"layers": 8, "heads": 8, "dim": 64}
    config = make_config(
        ram={"max_memory": "2GB"}, ssd={"close_deadline": "0.3s", "budget": "1GB", "spill_queue": "1MB"}
    )
    import time

    cache = TieredCache.open(config, model=model)
    for tokens in sequences:
        assert cache.store(tokens, state_of(tokens, **shape))
    started = time.perf_counter()
    cache.close()
    assert time.perf_counter() - started < 3
    kept = []
    with TieredCache.open(config, model=model) as cache:
        kept = [reuse(cache, tokens)[1] for tokens in sequences]
    first = next((i for i, n in enumerate(kept) if n), len(sequences))
    assert all(kept[first + 1 :]), f"not the most recent ones: {kept}"
