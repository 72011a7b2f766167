"""Many blocks on the SSD: what each costs in RAM, and what the threads that read them cost the host's."""

from __future__ import annotations

import os
import random
import sys
import threading
import tracemalloc

import pytest

from ssd_tier.catalog import Catalog, Entry
from ssd_tier.keys import chain_key, pack_ids, unpack_ids
from ssd_tier.workers import workers
from tiered_cache.block_pool import BlockPool
from tiered_cache.prefix_tree import token_bytes

NAMESPACE = bytes(32)
BLOCK = 256


def chains(count: int, blocks: int, vocabulary: int) -> list[Entry]:
    rng = random.Random(1)
    entries = []
    for _ in range(count):
        parent = NAMESPACE
        for i in range(blocks):
            ids = token_bytes([rng.randrange(vocabulary) for _ in range(BLOCK)])
            key = chain_key(NAMESPACE, parent, ids)
            entries.append(Entry(key, NAMESPACE, parent, rng.getrandbits(63), i * BLOCK, ids, 10_000, 20_000))
            parent = key
    return entries


@pytest.mark.parametrize(("vocabulary", "most"), [(150_000, 2000), (2**60, 3000)])
def test_a_block_on_the_ssd_takes_little_ram(vocabulary, most):
    tracemalloc.start()
    entries = chains(50, 40, vocabulary)
    catalog = Catalog(entries)
    pool = BlockPool(1 << 20, BLOCK)
    pool.attach(None, entries)
    each = tracemalloc.get_traced_memory()[0] / len(entries)
    tracemalloc.stop()
    assert len(catalog) == len(pool.tree.nodes) == 2000
    assert all(pool.tree.nodes[e.key].ids == e.ids for e in entries)
    assert each < most


@pytest.mark.parametrize(
    "ids", [[0], [2**31 - 1, -(2**31)], [2**31], [-(2**31) - 1], [5, -(2**60), 7], [], [1] * 255 + [2**62]]
)
def test_packed_token_ids_come_back(ids):
    wide = token_bytes(ids)
    packed = pack_ids(wide)
    assert unpack_ids(packed, len(ids)) == wide
    assert len(packed) == len(ids) * (4 if all(-(2**31) <= i < 2**31 for i in ids) else 8)


@pytest.mark.skipif(sys.platform != "linux", reason="only there has a thread a priority of its own")
def test_threads_that_read_and_write_step_back():
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with workers(2, "test") as pool:
        assert {pool.submit(priority).result() for _ in range(8)} == {min(19, priority() + 10)}
