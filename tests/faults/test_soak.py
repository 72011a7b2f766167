"""Hours in short: agents take turns, disks fail now and then, files rot, the process restarts; nothing grows.

`SOAK_SECONDS=1800 pytest -m faults tests/faults/test_soak.py -s` runs it for half an hour.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import threading
import time
from typing import Any, NamedTuple

import psutil
import pytest

from ssd_tier import breaker
from ssd_tier.files import Directory
from tests.models import same_state
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache

SECONDS = float(os.environ.get("SOAK_SECONDS", "30"))
pytestmark = [pytest.mark.faults, pytest.mark.timeout(SECONDS + 120)]

MODEL = ShapeOnlyModel()
AGENTS = 12
TURNS = 6  # of a conversation, before its agent begins another
SYSTEM = [7] * 600
ONE_IN = 200  # operations on files that fail


class Sample(NamedTuple):
    """What must not grow. Bytes, handles, threads."""

    memory: int
    handles: int
    threads: int


def sample() -> Sample:
    gc.collect()
    me = psutil.Process()
    return Sample(me.memory_info().rss, me.num_fds(), threading.active_count())


class Agents:
    """Conversations that take turns, and what an infinite cache would give each of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.asked = self.reused = self.possible = 0
        self.names = itertools.count(1000)  # the token that a talk begins with after the system prompt
        self.talks = [[*SYSTEM, next(self.names)] for _ in range(AGENTS)]
        self.stored = [0] * AGENTS  # tokens of each talk that were stored
        self.any_stored = 0

    def turn(self, cache: TieredCache) -> None:
        """One agent's next turn: reuse, check, extend, store."""
        i = self.rng.randrange(AGENTS)
        talk = self.talks[i]
        if len(talk) > len(SYSTEM) + TURNS * 150:
            talk[len(SYSTEM) :] = [next(self.names)]
            self.stored[i] = min(self.any_stored, len(SYSTEM))
        talk += [self.rng.randrange(500) for _ in range(150)]
        promotion = cache.promote(talk)
        state, remaining = promotion.result(30) if promotion else cache.fetch(talk)
        covered = len(talk) - len(remaining)
        assert state is None or same_state(state, state_of(talk), covered), "wrong bytes"
        self.asked += len(talk)
        self.reused += covered
        self.possible += max(self.stored[i], min(self.any_stored, len(SYSTEM)))
        assert covered <= max(self.stored[i], self.any_stored and len(SYSTEM)), "more than was ever stored"
        if cache.store(talk, state_of(talk)):
            self.stored[i] = self.any_stored = len(talk)


def rot(path: Any, rng: random.Random) -> bool:
    """One byte of one file changes."""
    files = [p for p in (path / "blobs").rglob("*.safetensors") if p.is_file()]
    if not files:
        return False
    victim = rng.choice(files)
    data = bytearray(victim.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    victim.write_bytes(data)
    return True


def test_nothing_grows_and_nothing_is_wrong(make_config, tmp_path, monkeypatch):
    rng, agents = random.Random(5), Agents(6)
    faults = rotten = restarts = 0

    def hook(operation: str, name: str) -> None:
        nonlocal faults
        if rng.random() < 1 / ONE_IN:
            faults += 1
            raise OSError(rng.choice([errno.EIO, errno.ENOSPC, errno.EMFILE]), f"no {operation}")

    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.05)
    config = make_config(ram={"max_memory": "2MB"}, ssd={"budget": "60MB", "write": "through"})
    samples = []
    begun = time.monotonic()
    while time.monotonic() - begun < SECONDS:
        with TieredCache.open(config, model=MODEL) as cache:
            monkeypatch.setattr(Directory, "hook", staticmethod(hook))
            until = time.monotonic() + 2
            while time.monotonic() < until:
                agents.turn(cache)
            rotten += rot(tmp_path / "cache", rng)
            ram = cache.stats()["ram"]
            assert ram["peak"] <= ram["limit"]
            cache.ram.pool.check_integrity()
        monkeypatch.setattr(Directory, "hook", staticmethod(lambda operation, name: None))
        restarts += 1
        samples.append(sample())
    first, last = samples[len(samples) // 3], samples[-1]
    share = agents.reused / agents.possible
    print([s.memory >> 20 for s in samples])
    print(
        f"\n{SECONDS:.0f} s, {restarts} restarts, {faults} faults, {rotten} rotten files: {agents.asked} tokens asked, "
        f"{agents.reused} reused, {share:.3f} of what an infinite cache gives; {first} -> {last}"
    )
    assert faults > restarts
    assert share >= 0.95
    assert last.handles <= first.handles + 2
    assert last.threads <= first.threads
    assert last.memory - first.memory < max(16 << 20, SECONDS / 60 * (1 << 20))
    size = sum(p.stat().st_size for p in (tmp_path / "cache").rglob("*") if p.is_file())
    assert size <= 60_000_000


def test_a_log_that_keeps_its_records_keeps_no_buffers(make_config, tmp_path, caplog):
    """Nothing that is logged holds an error, whose frames hold what was being read or written."""
    with caplog.at_level("DEBUG"):
        with TieredCache.open(make_config(ssd={"write": "through"}), model=MODEL) as cache:
            tokens = [7] * 700
            assert cache.store(tokens, state_of(tokens))
            assert cache.flush(20)
        for path in (tmp_path / "cache" / "blobs").rglob("*.safetensors"):
            path.write_bytes(b"\xff" * path.stat().st_size)
        with TieredCache.open(make_config(), model=MODEL) as cache:
            cache.promote(tokens).result(20)
    ours = [r for r in caplog.records if r.name in ("ssd_tier", "tiered_cache")]
    assert any("is lost" in r.getMessage() for r in ours)
    assert not [a for r in ours for a in (r.args or ()) if isinstance(a, BaseException)]
