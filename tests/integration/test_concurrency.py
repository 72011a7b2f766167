"""Many threads at one cache: what each is given is right, and the accounts close."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache

MODEL = ShapeOnlyModel()
SMALL = {"cache": {"block_tokens": 16}, "ram": {"max_memory": "300kB", "min_prefix_tokens": 4}}
ROOT = random_tokens(40, 1)
SEQUENCES = [ROOT + random_tokens(20 + 17 * i, 10 + i) for i in range(8)]
STATES = [state_of(tokens) for tokens in SEQUENCES]  # evaluated here: no other thread may do it
STEPS = 60


def run_all(works: list[Callable[[], None]], between: Callable[[], None] = lambda: None) -> None:
    """Each on a thread of its own, all at once; fails where one raises or does not end."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        barrier.wait(10)
        try:
            work()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    between()
    end = time.monotonic() + 60
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    assert not [t for t in threads if t.is_alive()], "a thread hangs"
    if errors:
        raise errors[0]


def right(found: tuple[list[Any] | None, Any], i: int) -> None:
    state, remaining = found
    covered = len(SEQUENCES[i]) - len(remaining)
    assert (state is None) == (covered == 0)
    if state is not None:
        assert [c.offset for c in state] == [covered] * 2
        assert same_state(state, STATES[i], covered)


def each(cache: TieredCache, seed: int, act: Callable[[TieredCache, int, random.Random], None]) -> Callable[[], None]:
    def work() -> None:
        rng = random.Random(seed)
        for _ in range(STEPS):
            act(cache, rng.randrange(len(SEQUENCES)), rng)

    return work


def model_thread(cache: TieredCache, i: int, rng: random.Random) -> None:
    cache.store(SEQUENCES[i], STATES[i], tenant=rng.choice(["a", None]))
    for j in rng.sample(range(len(SEQUENCES)), 3):
        right(cache.fetch(SEQUENCES[j], tenant=rng.choice(["a", None])), j)


def promoting(cache: TieredCache, i: int, rng: random.Random) -> None:
    promotion = cache.promote(SEQUENCES[i])
    if promotion and rng.random() < 0.3:
        promotion.cancel()
    elif promotion:
        right(promotion.result(20), i)


def removing(cache: TieredCache, i: int, rng: random.Random) -> None:
    if rng.random() < 0.1:
        cache.ram.clear()
    cache.ram.remove(SEQUENCES[i], include_ssd=rng.random() < 0.3, tenant=rng.choice(["a", None]))
    time.sleep(0.001)


def flushing(cache: TieredCache, i: int, rng: random.Random) -> None:
    if rng.random() < 0.3:
        cache.flush(5)
    if cache.ram.try_reserve_memory(50_000):
        cache.ram.release_reserved_memory(50_000)
    cache.stats()
    cache.ram.sequences()
    cache.ram.pool.check_integrity()


ACTS = (model_thread, model_thread, promoting, promoting, removing, flushing)


@pytest.mark.parametrize("write", ["evict", "through"])
def test_everything_at_once_gives_right_states_and_closed_accounts(make_config, write):
    for _ in range(2):  # the second time with what the first one left
        with TieredCache.open(make_config(**SMALL, ssd={"write": write}), model=MODEL) as cache:
            run_all([each(cache, seed, act) for seed, act in enumerate(ACTS)])
            pool = cache.ram.pool
            pool.check_integrity()
            assert pool.ledger.reserved == 0
            assert not any(n.pins for n in pool.tree.nodes.values())
        cache.ram.pool.check_integrity()
        assert cache.stats()["ram"]["queued"] == 0


def test_closing_while_all_is_busy_ends_everything(make_config):
    cache = TieredCache.open(make_config(**SMALL), model=MODEL)

    def close() -> None:
        time.sleep(0.1)
        cache.close()

    acts = (model_thread, model_thread, removing, flushing)  # a promotion's result would say that it was cancelled
    run_all([*(each(cache, seed, act) for seed, act in enumerate(acts)), close])
    cache.ram.pool.check_integrity()
    assert cache.ram.pool.ledger.reserved == cache.ram.pool.ledger.queued == 0
