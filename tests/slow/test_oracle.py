"""The cache against a plain dictionary: random stores, look-ups, promotions, removals, evictions and restarts.

Every state's values depend on the tenant and on all tokens before them, so whatever is mixed up shows in the bits.
Three models: layers cut by token, one such layer beside one that is kept whole, and a layer kept whole alone.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from functools import cache as memoized
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from mlx_lm.models.cache import ArraysCache, KVCache

from tests.models import bytes_of
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

EXAMPLES = 170  # of each model
LIMIT = 24_000  # bytes of RAM: a few sequences
SHORTEST = 4
TENANTS = {"a": 1, "b": 2, None: 3}
EXPLAINED = {"lost_spill_behind", "lost_no_memory", "refused_no_room", "miss_evicted"}  # by a small RAM
Tokens = tuple[int, ...]


class Model(ShapeOnlyModel):
    """`kind`: a letter a layer, k for one cut by token, w for one kept whole."""

    def __init__(self, kind: str) -> None:
        super().__init__(len(kind), f"oracle {kind}")
        self.kind = kind

    def make_cache(self) -> list[Any]:
        return [KVCache() if letter == "k" else ArraysCache(2) for letter in self.kind]


@memoized
def state_for(kind: str, tenant: str | None, tokens: Tokens) -> list[Any]:
    """The state of exactly these tokens: the dictionary's values, made when they are asked for."""
    state: list[Any] = []
    salted = (TENANTS[tenant], *tokens)
    for i, dense in enumerate(state_of(salted, layers=len(kind), heads=1, dim=8)):
        if kind[i] == "k":
            layer: Any = KVCache()
            layer.keys, layer.values = dense.keys[..., 1 : len(salted), :], dense.values[..., 1 : len(salted), :]
            layer.offset = len(tokens)
        else:
            digest = np.frombuffer(sha256(repr((i, salted)).encode()).digest() * 8, np.uint8)
            layer = ArraysCache(2)
            layer[0] = mx.array(digest[:192]).view(mx.bfloat16).reshape(1, 3, 32)
            layer[1] = mx.array(digest).view(mx.float32).reshape(1, 2, 4, 8)
        state.append(layer)
    return state


def bits(state: list[Any]) -> list[Any]:
    """All that a state says, as values that compare."""
    return [
        (KVCache, c.offset, bytes_of(c.keys[..., : c.offset, :]), bytes_of(c.values[..., : c.offset, :]))
        if isinstance(c, KVCache)
        else (ArraysCache, *(bytes_of(a) for a in c.cache), c.left_padding, c.lengths)
        for c in state
    ]


def shared(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TAIL = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 20)), max_size=3)
ANY, LEAVE, TENANT = st.integers(0, 99), st.integers(0, 3), st.sampled_from(list(TENANTS))
SEQUENCE = {"pick": ANY, "cut": st.one_of(st.just(99), st.sampled_from([16, 32]), st.integers(0, 70)), "tail": TAIL}


class Oracle(RuleBasedStateMachine):
    """For each tenant: what may be found (stored, and not taken off the SSD), what must be, and what a kill leaves."""

    kind = "kk"

    @initialize(write=st.sampled_from(["evict", "through"]))
    def begin(self, write: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="oracle-"))
        self.write, self.opened = write, 0
        self.used: list[Tokens] = [()]
        self.may: dict[str | None, set[Tokens]] = {t: set() for t in TENANTS}
        self.must: dict[str | None, set[Tokens]] = {t: set() for t in TENANTS}
        self.durable: dict[str | None, set[Tokens]] = {t: set() for t in TENANTS}
        self.open()

    def open(self) -> None:
        ssd = {"path": str(self.folder / str(self.opened)), "budget": "200MB", "min_free": "1MB", "write": self.write}
        ram = {"max_memory": LIMIT, "min_prefix_tokens": SHORTEST}
        config = {"cache": {"block_tokens": 16}, "ram": ram, "ssd": {**ssd, "spill_queue": LIMIT // 4}}
        self.cache = TieredCache.open(config, model=Model(self.kind))
        self.lost = 0

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            shutil.rmtree(self.folder)

    def sequence(self, pick: int, cut: int, tail: list[tuple[int, int]]) -> Tokens:
        """Tokens that were used before, cut, and a tail of a few runs of equal tokens."""
        return (*self.used[pick % len(self.used)][:cut], *(t for t, n in tail for _ in range(n)))[:90]

    def check(self, tokens: Tokens, leave: int, tenant: str | None, found: Any, least: int = 0) -> None:
        state, remaining = found
        covered = len(tokens) - len(remaining)
        assert tuple(remaining) == tokens[covered:]
        assert (state is None) == (covered == 0), "a state that covers nothing, or none that covers something"
        assert least <= covered <= max(0, len(tokens) - leave), (least, covered)
        if state is not None:
            assert covered >= SHORTEST
            head = tokens[:covered]
            if "w" in self.kind:
                assert head in self.may[tenant], "a phantom: not stored, or removed"
            else:
                assert any(shared(head, t) == covered for t in self.may[tenant]), "a phantom: not stored, or removed"
            assert bits(state) == bits(state_for(self.kind, tenant, head)), "other bits"

    def least(self, tokens: Tokens, leave: int, tenant: str | None) -> int:
        """How many tokens both tiers together must cover."""
        limit, must = len(tokens) - leave, self.must[tenant]
        if "w" in self.kind:
            best = max((len(t) for t in must if len(t) <= limit and tokens[: len(t)] == t), default=0)
        else:
            best = min(limit, max((shared(tokens, t) for t in must), default=0))
        return best if best >= SHORTEST else 0

    def promoted(self, tokens: Tokens, leave: int, tenant: str | None) -> Any:
        promotion = self.cache.promote(tokens, leave=leave, tenant=tenant)
        if promotion is None:
            return self.cache.fetch(tokens, leave=leave, tenant=tenant)
        return promotion.result(20)

    def count_losses(self) -> None:
        """What was counted as lost need not be found any more, unless it had been flushed."""
        lost = self.cache.stats()["losses"].get("lost_spill_behind", 0)
        if lost != self.lost:
            self.lost = lost
            self.must = {t: self.must[t] & self.durable[t] for t in TENANTS}

    @rule(**SEQUENCE, tenant=TENANT, leave=LEAVE)
    def store(self, pick: int, cut: int, tail: Any, tenant: str | None, leave: int) -> None:
        tokens = self.sequence(pick, cut, tail)
        if len(tokens) < SHORTEST:
            return
        self.used.append(tokens)
        if not self.cache.store(tokens, state_for(self.kind, tenant, tokens), tenant=tenant):
            assert self.cache.stats()["losses"]["refused_no_room"]
            return
        self.may[tenant].add(tokens)
        self.must[tenant].add(tokens)
        self.check(tokens, 0, tenant, self.cache.fetch(tokens, leave=0, tenant=tenant), len(tokens))
        self.check(tokens, leave, tenant, self.cache.fetch(tokens, leave=leave, tenant=tenant))

    @rule(**SEQUENCE, tenant=TENANT, leave=LEAVE)
    def fetch(self, pick: int, cut: int, tail: Any, tenant: str | None, leave: int) -> None:
        tokens = self.sequence(pick, cut, tail)
        expected = self.cache.ram.covered(tokens, leave=leave, tenant=tenant)
        found = self.cache.fetch(tokens, leave=leave, tenant=tenant)
        assert len(tokens) - len(found[1]) == expected
        self.check(tokens, leave, tenant, found)

    @rule(**SEQUENCE, tenant=TENANT, leave=LEAVE)
    def promote(self, pick: int, cut: int, tail: Any, tenant: str | None, leave: int) -> None:
        tokens = self.sequence(pick, cut, tail)
        found, no_memory = self.promoted(tokens, leave, tenant), "lost_no_memory" in self.cache.stats()["losses"]
        self.count_losses()
        self.check(tokens, leave, tenant, found, 0 if no_memory else self.least(tokens, leave, tenant))

    @rule(pick=ANY, tenant=TENANT, include_ssd=st.booleans())
    def remove(self, pick: int, tenant: str | None, include_ssd: bool) -> None:
        tokens = self.used[pick % len(self.used)]
        self.count_losses()
        if not self.cache.ram.remove(tokens, include_ssd=include_ssd, tenant=tenant):
            return
        # A longer sequence takes the place of those that it continues, unless each is the one point to resume at.
        gone = {t for t in self.must[tenant] if t == tokens or ("w" not in self.kind and tokens[: len(t)] == t)}
        if include_ssd:
            self.may[tenant].discard(tokens)
            self.durable[tenant] -= gone
        self.must[tenant] -= gone - self.durable[tenant]
        for other in (tokens, *sorted(self.must[tenant])[:3]):  # what others share is still there
            found, no_memory = self.promoted(other, 0, tenant), "lost_no_memory" in self.cache.stats()["losses"]
            self.check(other, 0, tenant, found, 0 if no_memory else self.least(other, 0, tenant))

    @rule(part=st.floats(0.1, 1))
    def evict(self, part: float) -> None:
        nbytes = int(part * LIMIT)
        if self.cache.ram.try_reserve_memory(nbytes):
            self.cache.ram.release_reserved_memory(nbytes)

    @rule()
    def flush(self) -> None:
        self.count_losses()
        assert self.cache.flush(20)
        self.count_losses()
        self.durable = {t: set(self.must[t]) for t in TENANTS}

    @rule(leave=LEAVE)
    def reopen(self, leave: int) -> None:
        """Close and open: all that was stored and not removed is there, to its last token."""
        self.flush()
        self.cache.close()
        self.open()
        for tenant in TENANTS:
            for tokens in sorted(self.must[tenant])[-4:]:
                found = self.promoted(tokens, leave, tenant)
                self.check(tokens, leave, tenant, found, self.least(tokens, leave, tenant))
        assert self.cache.stats()["losses"] == {}

    @rule(keep=ANY)
    def kill(self, keep: int) -> None:
        """Go on with a copy of the directory as it was after a flush: what was stored later is lost with RAM."""
        self.flush()
        old = self.folder / str(self.opened)
        copy = shutil.copytree(old, self.folder / str(self.opened + 1))
        (copy / "tmp" / "half").write_bytes(b"half a file")
        self.store(keep, 99, [(1, 5)], "a", 0)
        self.cache.close()
        shutil.rmtree(old)
        self.opened += 1
        self.must = {t: set(self.durable[t]) for t in TENANTS}
        self.open()

    @invariant()
    def accounts_are_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.count_losses()
        pool, ledger = self.cache.ram.pool, self.cache.ram.pool.ledger
        pool.check_integrity()
        assert ledger.resident + ledger.queued + ledger.reserved <= ledger.limit == LIMIT
        assert ledger.reserved == 0
        assert not any(n.pins for n in pool.tree.nodes.values())
        assert set(self.cache.stats()["losses"]) <= EXPLAINED, self.cache.stats()["losses"]


RUN = {"stateful_step_count": 30, "deadline": None, "derandomize": True, "database": None,
       "phases": [Phase.generate]}


@pytest.mark.parametrize("kind", ["kk", "kw", "w"])
def test_whatever_is_done_the_cache_agrees_with_a_dictionary(kind):
    machine = type(f"Oracle_{kind}", (Oracle,), {"kind": kind})
    start = time.monotonic()
    checks = list(HealthCheck)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=EXAMPLES, suppress_health_check=checks, report_multiple_bugs=False, **RUN),
    )
    print(f"{kind}: {EXAMPLES} examples, {time.monotonic() - start:.0f} s")
