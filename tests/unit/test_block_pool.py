"""Blocks in RAM: what is evicted, what is kept, what goes to the SSD, and that every byte is accounted for."""

import random
from typing import Any

import numpy as np
import pytest

from ssd_tier import Block, Entry
from tests.blocks import NAMESPACE, entry
from tiered_cache.block_pool import BlockPool
from tiered_cache.prefix_tree import token_bytes

SIZE, UNIT = 4, 10  # tokens a block, bytes a token


def unsaved(pool):
    """Keys of the blocks in RAM that the SSD is to have, and has not."""
    return {n.key for n in pool.resident() if n.queued or n in pool._dirty}


class Disk:
    """Takes blocks as the SSD tier does: a queue, one batch in hand at a time, then what the pool is told of it."""

    def __init__(self, pool: BlockPool, rng: random.Random, refuse: float = 0.0) -> None:
        self.pool, self.rng, self.refuse = pool, rng, refuse
        self.waiting: list[Block] = []
        self.hand: list[Block] = []
        self.stored: dict[bytes, Entry] = {}
        self.unwanted: list[bytes] = []

    def put(self, block: Block) -> bool:
        if self.rng.random() < self.refuse or (self.refuse and block.key in [b.key for b in self.hand]):
            return False
        above = self.pool.tree.nodes[block.key].path()[:-1]
        assert not unsaved(self.pool) & {n.key for n in above if not n.queued}, "a block came before its ancestor"
        self.waiting.append(block)
        return True

    def cancel(self, key: bytes) -> bool:
        before, self.waiting = self.waiting, [b for b in self.waiting if b.key != key]
        return self.waiting != before

    def touch(self, keys: Any, *, hit: bool = False) -> None:
        assert (starts := [self.pool.tree.nodes[k].start for k in keys]) == sorted(starts)[::-1], "the leaf comes first"

    def discard(self, keys: Any) -> None:
        self.unwanted += keys

    def admits(self, key: bytes) -> bool:
        return True

    def saw(self, key: bytes) -> None: ...

    def take(self, count: int = 100) -> None:
        self.hand += self.waiting[:count]
        del self.waiting[:count]

    def finish(self, lose: float = 0.0) -> None:
        lost = [b for b in self.hand if self.rng.random() < lose]
        new = [entry(b) for b in self.hand if b not in lost]
        self.stored |= {e.key: e for e in new}
        for report in self.rng.sample([lambda: self.pool.on_lost(lost, ""), lambda: self.pool.on_stored(new)], 2):
            report()
        self.hand = []

    def shrink(self) -> None:
        leaves = sorted(self.stored.keys() - {e.parent for e in self.stored.values()})
        self.pool.on_removed([e for k in [*self.unwanted, *leaves[:1]] if (e := self.stored.pop(k, None))])


class Pool:
    """A pool with what a RAM tier does to it, and a check of all promises after each step."""

    def __init__(self, blocks: int, seed: int = 0, refuse: float = 0.0) -> None:
        self.pool = BlockPool(blocks * SIZE * UNIT, SIZE)
        self.root = self.pool.tree.root(NAMESPACE)
        self.disk = Disk(self.pool, random.Random(seed), refuse)
        self.pool.attach(self.disk)
        self.reserved: list[int] = []
        self.pinned: list[list[Any]] = []

    def reserve(self, nbytes: int) -> bool:
        """Reserve, and check who went: leaves first, clean ones first, none that may not, and no more than needed."""
        pool, lost, short = self.pool, self.pool.counters["lost_spill_behind"], nbytes - self.pool.ledger.free
        waiting, sizes = unsaved(pool), {n: n.block.nbytes for n in pool.resident() if n.block}
        stuck = {a for n in sizes if n.pins or n.queued for a in n.path()}
        stay = stuck | {a for n in sizes if n.key in waiting for a in n.path()}
        granted = pool.reserve(nbytes)
        gone = {n: size for n, size in sizes.items() if not n.block}
        assert granted == (sum(size for n, size in sizes.items() if n not in stuck) >= short), "all that may go, goes"
        assert not (stuck if granted else sizes.keys()) & gone.keys(), "pinned or queued, or such a one hangs on it"
        assert not gone or sum(gone.values()) >= short > sum(gone.values()) - max(gone.values()), "no more than that"
        lost = pool.counters["lost_spill_behind"] - lost
        assert lost == sum(n.key in waiting for n in gone)
        assert not lost or sum(size for n, size in sizes.items() if n not in stay) < short, "clean ones would do"
        assert all(a.block for n in pool.resident() for a in n.path() if a in sizes), "an ancestor went first"
        self.reserved += [nbytes] * granted
        self.check()
        return granted

    def store(self, tokens: Any) -> list[Any]:
        """As a RAM tier does; the path, or nothing where there is no room."""
        pool, path, node = self.pool, [], self.root
        known = pool.tree.walk(self.root, token_bytes(tokens))
        pool.pin(known)
        if self.reserve((len(tokens) - sum(n.tokens for n in known if n.block)) * UNIT):
            self.reserved.pop()
            for ids in pool.tree.chunks(token_bytes(tokens)):
                parent, node = node, pool.tree.insert(node, ids)
                data = np.zeros(node.tokens * UNIT, np.uint8)
                block = Block(node.key, NAMESPACE, parent.key, ids, node.start, (), "", data)
                assert node.block or pool.admit(node, block)
                path.append(node)
            pool.set_end(node, True)
            pool.touch(path)
            pool.feed()
        pool.unpin(known)
        return path

    def check(self) -> None:
        pool, ledger, written = self.pool, self.pool.ledger, [*self.disk.waiting, *self.disk.hand]
        pool.check_integrity()
        assert ledger.resident + ledger.queued + ledger.reserved <= ledger.limit
        assert (ledger.queued, ledger.reserved) == (sum(b.nbytes for b in written), sum(self.reserved))
        assert self.root.sequences == sum(n.ends for n in pool.tree.nodes.values())
        for i, node in enumerate(order := pool.resident()):
            assert node.parent not in order[:i], "a leaf is older than its parent"
        assert all(n.block for path in self.pinned for n in path), "what is pinned stays"


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_events_keeps_every_promise(seed):
    rng, it = random.Random(seed), Pool(12, seed, refuse=0.3)
    pool: Any = it.pool
    disk: Any = it.disk
    known: list[tuple[int, ...]] = [()]

    def store(_):
        known.append((*rng.choice(known)[: rng.randrange(16)], *rng.choices(range(3), k=rng.randrange(1, 12))))
        it.store(known[-1])

    def fetch(node):
        it.pinned.append(node.path())
        pool.pin(node.path())
        pool.touch(node.path())

    def forget(node):
        pool.forget([] if len(node.resident) or node.pins else [node])
        assert bool(node.block) == bool(node.pins or len(node.resident)), "what is removed goes"

    events: dict[Any, int] = {
        store: 8, fetch: 2, forget: 2, lambda _: it.reserve(rng.randrange(8 * SIZE * UNIT)): 3,
        lambda _: it.reserved and pool.release(it.reserved.pop()): 3, lambda _: disk.take(rng.randrange(1, 4)): 4,
        lambda _: it.pinned and pool.unpin(it.pinned.pop()): 4, lambda _: pool.end_flush(pool.begin_flush()): 1,
        lambda _: disk.finish(lose=0.3): 4, lambda _: disk.shrink(): 2}
    for event in rng.choices([*events], [*events.values()], k=400):
        here = pool.resident() or it.store((0,))
        event(rng.choice(here)) if here else disk.finish()
        it.check()
    while it.pinned:
        pool.unpin(it.pinned.pop())
    pool.forget(pool.resident())
    disk.take()
    disk.finish()
    assert (pool.ledger.resident, pool.ledger.queued) == (0, 0)
    assert {n.key for n in pool.tree.nodes.values() if n.entry} == disk.stored.keys() - {*disk.unwanted}
    assert pool.counters["evicted_blocks"] > pool.counters["lost_spill_behind"] > 0


def test_what_would_go_first_is_written_ahead_ancestors_before_descendants():
    it = Pool(8)
    old, new = it.store(range(12)), it.store(range(20, 28))
    assert [b.key for b in it.disk.waiting] == [n.key for n in old], "half of RAM is free or can be freed at once"
    assert unsaved(it.pool) == {n.key for n in old + new}


@pytest.mark.parametrize("lose", [0.0, 1.0], ids=["written", "lost"])
def test_a_removed_block_that_is_being_written_stays_in_the_account_until_the_writer_is_done(lose):
    it = Pool(4)
    it.pool.begin_flush()
    path = it.store(range(4))
    it.disk.take()
    it.pool.forget(path, include_ssd=True)
    assert (it.pool.ledger.queued, it.pool.ledger.free) == (40, 120)
    assert not it.store(range(10, 26)), "four blocks, of which one does not fit yet"
    it.disk.finish(lose)
    assert it.pool.ledger.free == 160
    assert it.disk.unwanted == ([] if lose else [path[0].key]), "nobody wants it on the SSD any more"


def test_a_block_stored_again_while_its_removed_self_is_written_stays_in_the_account():
    it = Pool(4)
    it.pool.begin_flush()
    path = it.store(range(4))
    it.disk.take()
    it.pool.forget(path)
    assert it.store(range(4))
    it.disk.finish(lose=1.0)
    it.check()


def test_no_more_unsaved_blocks_are_lost_than_clean_ones_are_short():
    it = Pool(4, refuse=1.0)
    path = [*it.store(range(4)), *it.store(range(10, 14)), *it.store(range(20, 24)), *it.store(range(30, 34))]
    it.pool.on_stored([entry(n.block) for n in path[2:]])
    assert it.reserve(120)
    assert it.pool.counters["lost_spill_behind"] == 1
