"""`TieredPromptCache` in the place of mlx-lm's `LRUPromptCache`: the same answers, from two tiers, never an error."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, LRUPromptCache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests import served_models
from tests.models import greedy, prefill, random_tokens, same_state, tiny_llama
from tiered_cache import TieredCache
from tiered_cache.integrations.mlx_lm import TieredPromptCache

KEY = ("path/of/a-model", None, None)
SYSTEM, USER, ANSWER = random_tokens(40, 1), random_tokens(30, 2), random_tokens(20, 3)


@pytest.fixture
def make(make_config: Callable[..., dict[str, Any]]) -> Iterator[Callable[..., TieredPromptCache]]:
    """Caches with the test's directory; the one before is closed first, as a restart does."""
    opened: list[TieredPromptCache] = []

    def make(model: Any = None, draft: Any = None, ram: dict[str, Any] | None = None, **more: Any) -> TieredPromptCache:
        for cache in opened:
            cache.close()
        config = make_config(
            ram={"max_memory": "8MB", "min_prefix_tokens": 1, **(ram or {})}, promotion={"policy": "always"}
        )
        opened.append(TieredPromptCache(config, **more))
        if model is not None:
            assert opened[-1].add_model(KEY, model, draft)
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama()


def insert(cache: Any, model: Any, tokens: list[int], **more: Any) -> list[Any]:
    state, _ = prefill(model, tokens)
    cache.insert_cache(KEY, tokens, copy.deepcopy(state), **more)
    return state


BASE = random_tokens(300, 7)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        pytest.param([BASE], BASE, id="exact"),
        pytest.param([BASE], [*BASE, 1, 2, 3], id="prefix"),
        pytest.param([BASE], BASE[:100], id="longer"),
        pytest.param([BASE], [*BASE[:100], *random_tokens(50, 8)], id="diverging"),
        pytest.param([BASE[:100], BASE], [*BASE[:200], 1], id="between"),
        pytest.param([BASE], random_tokens(50, 9), id="other"),
        pytest.param([], BASE, id="empty"),
    ],
)
def test_it_answers_as_the_one_of_mlx_lm(make, llama, stored, asked):
    ours, theirs = make(llama), LRUPromptCache()
    for tokens in stored:
        for cache in (ours, theirs):
            insert(cache, llama, tokens)
    got, rest = ours.fetch_nearest_cache(KEY, asked)
    expected, left = theirs.fetch_nearest_cache(KEY, asked)
    assert rest == (left or asked[-1:])  # theirs leaves nothing of an exact match
    assert (got is None) == (expected is None)
    if got:
        assert same_state(got, expected, len(asked) - len(rest))
        assert got[0].offset == len(asked) - len(rest)


@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
@pytest.mark.parametrize("restart", [False, True], ids=["ram", "ssd"])
def test_every_entry_of_a_model_that_cannot_be_cut_is_a_resume_point(make, kind, restart):
    model = served_models.build(kind)
    cache = make(model)
    tokens, state, ends = [], None, {}
    for part, name in ((SYSTEM, "system"), (USER, "user"), (ANSWER, "assistant")):
        state, _ = prefill_any(model, part, state)
        tokens = tokens + [t % served_models.VOCABULARY for t in part]
        cache.insert_cache(KEY, tokens, copy.deepcopy(state), cache_type=name)
        ends[len(tokens)] = copy.deepcopy(state)
    if restart:
        cache = make(model)
    for end, expected in ends.items():
        for asked in ([*tokens[:end], 5], [*tokens[:end], 5, 6, 7]):
            got, rest = cache.fetch_nearest_cache(KEY, asked)
            assert rest == asked[end:]
            after = [5, 6, 7, 8]
            a, b = (prefill_any(model, after, copy.deepcopy(s))[1] for s in (got, expected))
            assert mx.array_equal(a, b)


def prefill_any(model: Any, tokens: list[int], state: Any = None) -> Any:
    state = make_prompt_cache(model) if state is None else state
    logits = model(mx.array([[t % served_models.VOCABULARY for t in tokens]]), cache=state)[0, -1]
    mx.eval(logits, [s.state for s in state])
    return state, logits


def test_a_restart_finds_what_was_stored_where_a_fetch_may_wait(make, llama):
    state = insert(make(llama), llama, BASE)
    assert make(llama, wait=lambda: 0.0).fetch_nearest_cache(KEY, BASE) == (None, BASE)
    got, rest = make(llama).fetch_nearest_cache(KEY, BASE)
    assert rest == BASE[-1:]
    assert same_state(got, state, len(BASE) - 1)


def test_what_was_promoted_beforehand_is_fetched_without_waiting(make, llama):
    insert(make(llama), llama, BASE)
    cache = make(llama, wait=lambda: 0.0)
    promotion = cache.promote(KEY, BASE)
    promotion.result(10)
    assert cache.fetch_nearest_cache(KEY, BASE)[1] == BASE[-1:]
    assert cache.promote(KEY, BASE) is None
    assert cache.promote("unknown", BASE) is None


def test_negative_ids(make, llama):
    tokens = [-1 - int("f" * 15, 16), *BASE[:100], -3]
    state, _ = prefill(llama, [abs(t) % 512 for t in tokens])
    cache = make(llama)
    cache.insert_cache(KEY, tokens, state)
    assert cache.fetch_nearest_cache(KEY, [*tokens, 1])[1] == [1]
    assert cache.fetch_nearest_cache(KEY, [abs(t) for t in tokens])[0] is None


def test_a_system_prompt_outlives_the_rest(make, llama):
    cache = make(llama, ram={"max_memory": "1MB"}, wait=lambda: 0.0)  # about 2,000 tokens
    insert(cache, llama, random_tokens(300, 1), cache_type="system")
    for seed in range(2, 16):
        insert(cache, llama, random_tokens(300, seed), cache_type="user" if seed % 2 else "assistant")
    asked = {seed: [*random_tokens(300, seed), 1] for seed in range(1, 16)}
    hits = {seed for seed, tokens in asked.items() if cache.fetch_nearest_cache(KEY, tokens)[0]}
    assert 1 in hits
    assert 15 in hits
    assert not {2, 3} & hits
    assert cache.nbytes <= 10**6


def test_lazy_state_is_computed(make, llama):
    state, _ = prefill(llama, BASE)
    lazy = [KVCache() for _ in state]
    for new, old in zip(lazy, state, strict=True):
        new.keys, new.values, new.offset = old.keys + 0, mx.contiguous(old.values * 1), old.offset
    cache = make(llama)
    cache.insert_cache(KEY, BASE, lazy)
    assert same_state(cache.fetch_nearest_cache(KEY, [*BASE, 1])[0], state, len(BASE))


def test_figures_and_limits(make, llama):
    cache = make(llama)
    assert (len(cache), cache.nbytes) == (0, 0)
    for seed in (1, 2, 3):
        insert(cache, llama, random_tokens(100, seed), checkpoint=True)
    assert len(cache) == 3
    assert cache.nbytes == 3 * 100 * 2 * 2 * 64 * 2
    assert cache.stats_by_type()["ram"] == {"n_sequences": 3, "n_bytes": cache.nbytes}
    assert cache.stats_by_type()["ssd, in blocks"]["n_sequences"] == 0
    cache.log_cache_stats()
    assert cache.flush(20)
    assert cache.stats_by_type()["ssd, in blocks"]["n_sequences"] == 3
    cache.trim_to(n_bytes=cache.nbytes // 2)
    assert 0 < cache.nbytes <= 3 * 100 * 512 // 2
    cache.trim_to(n_sequences=0, n_bytes=-5)
    assert (len(cache), cache.nbytes) == (0, 0)
    assert cache.fetch_nearest_cache(KEY, [*random_tokens(100, 2), 1])[1] == [1]  # from the SSD


class Strange:
    """A layer that nobody knows."""

    offset = 3


class StrangeModel:
    def make_cache(self) -> list[Any]:
        return [Strange()]


def test_a_model_that_cannot_be_kept_is_served_without_and_one_warning_says_so(make, caplog):
    cache = make()
    cache.add_model(KEY, StrangeModel(), name="odd")
    for _ in range(3):
        cache.insert_cache(KEY, [1, 2, 3], [Strange()])
        assert cache.fetch_nearest_cache(KEY, [1, 2, 3, 4]) == (None, [1, 2, 3, 4])
    assert [r.levelname for r in caplog.records if "odd" in r.message] == ["WARNING"]


def test_nothing_raises(make, llama, caplog, monkeypatch):
    cache = make(llama)
    state, _ = prefill(llama, BASE)
    for key in (KEY, "unknown"):
        for tokens in ([], None, 7, ["a"], [2**70], [1.5], BASE[:10], "text"):
            for given in (state, [], None, [None], [object()], state[:1], 5):
                cache.insert_cache(key, tokens, given, cache_type="of no kind")
                fetched, rest = cache.fetch_nearest_cache(key, tokens)
                assert rest or not tokens
                assert fetched is None or len(rest) < len(tokens)
    cache.trim_to(n_sequences="a", n_bytes="b")
    cache.prefilled("unknown", 1, 1)
    assert cache.stats()["faults"]["unknown_model"]
    caplog.clear()
    monkeypatch.setattr(TieredCache, "fetch", lambda *_, **__: 1 / 0)
    for _ in range(3):
        assert cache.fetch_nearest_cache(KEY, BASE) == (None, BASE)
    assert cache.stats()["faults"]["fetch_ZeroDivisionError"] == 3
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_models_are_told_apart_by_what_they_are(make, llama):
    cache = make(llama)
    insert(cache, llama, BASE)
    adapted = tiny_llama()
    adapted.freeze()
    linear_to_lora_layers(adapted, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    others = {
        "the same elsewhere": (tiny_llama(), None),
        "other weights": (tiny_llama(seed=1), None),
        "adapter": (adapted, None),
        "with a draft": (tiny_llama(), tiny_llama(seed=2)),
    }
    found = {}
    for key, (model, draft) in others.items():
        assert cache.add_model(key, model, draft)
        found[key] = cache.fetch_nearest_cache(key, BASE)[0] is not None
    assert found == {"the same elsewhere": True, "other weights": False, "adapter": False, "with a draft": False}


def test_a_key_is_resolved_when_it_is_first_used(make, llama):
    loaded = [llama]
    cache = make(resolve=lambda key: (loaded[0], None) if key == KEY else None)
    insert(cache, llama, BASE)
    assert cache.fetch_nearest_cache(KEY, BASE)[1] == BASE[-1:]
    assert cache.fetch_nearest_cache("other", BASE)[0] is None
    loaded[0] = tiny_llama(seed=1)  # loaded anew, and what lay there is another one now
    assert cache.fetch_nearest_cache(KEY, BASE)[0] is None
    assert cache.stats()["faults"] == {"unknown_model": 1}


def test_a_draft_model_that_lags_behind(make, llama):
    draft = tiny_llama(seed=2, layers=1)
    tokens = BASE[:120]
    state = prefill(llama, tokens[:119])[0] + prefill(draft, tokens[:118])[0]
    cache = make(llama, draft)
    cache.insert_cache(KEY, tokens, copy.deepcopy(state))
    for again in (cache, make(llama, draft)):
        got, rest = again.fetch_nearest_cache(KEY, [*tokens, 1])
        assert rest == [*tokens[118:], 1]
        assert [c.offset for c in got] == [118] * 3
        assert same_state(got, state, 118)
    assert cache.stats()["models"]


def test_quantized_states_come_back_where_they_are_expected(make, llama):
    state, _ = prefill(llama, BASE)
    quantized = [c.to_quantized(group_size=32, bits=8) for c in copy.deepcopy(state)]
    for expected, tenant in ((True, "kv-bits 8"), (False, "kv-bits 8"), (False, None)):
        cache = make(llama, tenant=tenant, quantized=expected)
        if expected:
            cache.insert_cache(KEY, BASE, quantized)
        got, rest = cache.fetch_nearest_cache(KEY, [*BASE, 1])
        assert (got is not None) == expected
        if got:
            assert rest == [1]
            a, b = (greedy_quantized(llama, s) for s in (got, copy.deepcopy(quantized)))
            assert a == b
    assert cache.stats()["faults"] == {}


def greedy_quantized(model: Any, state: list[Any]) -> list[int]:
    answer = [1]
    for _ in range(4):
        logits = model(mx.array([answer[-1:]]), cache=state)[0, -1]
        answer.append(int(mx.argmax(logits)))
    return answer


def test_answers_go_on_as_without_the_cache(make, llama):
    cache = make(llama)
    prompt = BASE[:200]
    answer, state = greedy(llama, prompt, 8)
    cache.insert_cache(KEY, [*prompt, *answer[:-1]], state)
    longer = [*prompt, *answer, *USER]
    got, rest = cache.fetch_nearest_cache(KEY, longer)
    assert greedy(llama, rest, 8, got)[0] == greedy(llama, longer, 8)[0]
