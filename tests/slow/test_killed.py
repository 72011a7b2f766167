"""Killed at any instant, the next open is clean, and everything served is right."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time

import pytest

from ssd_tier.inspection import Inspection
from tests.models import same_state
from tests.slow.victim import SHAPE, run, sequence
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KILLS = 50


def test_killed_fifty_times_while_spilling(make_config, tmp_path):
    # Forked from a server that has imported all and run nothing: milliseconds a process instead of seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.slow.victim"])
    config = make_config(ram={"max_memory": "40MB"}, ssd={"write": "through", "budget": "2GB"})
    rng = random.Random(20)
    flushed: set[int] = set()
    stored = 0
    collected = 0
    for kill in range(KILLS):
        mine, theirs = context.Pipe()
        process = context.Process(target=run, args=(config, stored, theirs))
        process.start()
        theirs.close()
        first = mine.recv()[1]
        time.sleep(rng.uniform(0, 0.25))
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        while mine.poll():
            try:
                what, number = mine.recv()
            except EOFError:
                break
            if what == "flushed":
                flushed |= set(range(first, number))
            stored = max(stored, number + (what == "storing"))
        mine.close()
        with TieredCache.open(config, model=ShapeOnlyModel(layers=4)) as cache:
            collected += cache.stats()["ssd"]["orphans_removed"]
            files = {p.name for p in (tmp_path / "cache" / "blobs").rglob("*") if p.is_file()}
            assert not list((tmp_path / "cache" / "tmp").iterdir())
            found = Inspection(tmp_path / "cache")
            assert files == {found.path(e).name for e in found.entries}
            recent = range(max(0, stored - 8), stored)
            for number in [*recent, *rng.sample(sorted(flushed), min(4, len(flushed)))]:
                tokens = sequence(number)
                promotion = cache.promote(tokens)
                state, remaining = promotion.result(30) if promotion else cache.fetch(tokens)
                covered = len(tokens) - len(remaining)
                assert number not in flushed or covered == len(tokens) - 1, f"kill {kill}: flushed {number} is lost"
                if state:
                    assert same_state(state, state_of(tokens, **SHAPE), covered), f"kill {kill}: wrong bytes"
            assert "lost_damaged" not in cache.stats()["losses"]
    print(f"{KILLS} kills, {stored} sequences begun, {len(flushed)} flushed, {collected} half-written files collected")
    assert collected, "no kill met a file between its first byte and its row: the test has lost its point"
    assert flushed
