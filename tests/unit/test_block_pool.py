"""Blocks in RAM: what is evicted, what is kept, what goes to the SSD, and that every byte is accounted for."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest

from ssd_tier import Block, Entry
from tiered_cache.block_pool import BlockPool, anywhere, in_ram
from tiered_cache.prefix_tree import token_bytes

NAMESPACE = b"n" * 32
SIZE = 4  # tokens a block
UNIT = 10  # bytes a token


class Disk:
    """Takes blocks as the SSD tier does: a queue, one batch in hand at a time, then what the pool is told of it."""

    def __init__(self, pool: BlockPool, rng: random.Random, *, refuse: float = 0.0) -> None:
        self.pool, self.rng, self.refuse = pool, rng, refuse
        self.waiting: deque[Block] = deque()
        self.hand: list[Block] = []
        self.stored: dict[bytes, Entry] = {}
        self.unwanted: list[bytes] = []
        self.put_order: list[bytes] = []

    def put(self, block: Block) -> bool:
        if self.rng.random() < self.refuse or block.key in [b.key for b in self.hand]:
            return False
        for ancestor in self.pool.tree.nodes[block.key].path()[:-1]:
            assert ancestor.queued or ancestor.key not in self.pool.unsaved(), "a block came before its ancestor"
        self.waiting.append(block)
        self.put_order.append(block.key)
        return True

    def cancel(self, key: bytes) -> bool:
        found = [b for b in self.waiting if b.key == key]
        self.waiting = deque(b for b in self.waiting if b.key != key)
        return bool(found)

    def touch(self, keys: Any, *, hit: bool = False) -> None:
        starts = [self.pool.tree.nodes[k].start for k in keys]
        assert starts == sorted(starts, reverse=True), "the leaf is touched first"

    def discard(self, keys: Any) -> None:
        self.unwanted += keys

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in [*self.waiting, *self.hand])

    def take(self, count: int = 100) -> None:
        while self.waiting and len(self.hand) < count:
            self.hand.append(self.waiting.popleft())

    def finish(self, lose: float = 0.0) -> None:
        batch, self.hand = self.hand, []
        lost = [b for b in batch if self.rng.random() < lose]
        for b in batch:
            if b not in lost:
                self.stored[b.key] = Entry(b.key, NAMESPACE, b.parent, 1, b.start, b.tokens, b.nbytes, b.nbytes)
        self.pool.on_lost(lost, "write_failed")
        self.pool.on_stored([self.stored[b.key] for b in batch if b not in lost])

    def remove(self, keys: Any) -> None:
        self.pool.on_removed([e for k in keys if (e := self.stored.pop(k, None))])


def block_of(node: Any) -> Block:
    return Block(node.key, NAMESPACE, node.parent.key, node.ids, node.start, (), "", np.zeros(node.tokens * UNIT, "u1"))


class Pool:
    """A pool with what a RAM tier does to it, and a check of all promises after each step."""

    def __init__(self, blocks: int, seed: int = 0, **options: Any) -> None:
        self.pool = BlockPool(blocks * SIZE * UNIT, SIZE)
        self.root = self.pool.tree.root(NAMESPACE)
        self.disk = Disk(self.pool, random.Random(seed), **options)
        self.pool.attach(self.disk)
        self.reserved = 0
        self.pinned: list[list[Any]] = []

    def reserve(self, nbytes: int) -> bool:
        """Reserve, and check who went: leaves first, clean ones first, none that may not, and no more than needed."""
        pool = self.pool
        before, short = pool.resident(), nbytes - pool.ledger.free
        unsaved, lost = pool.unsaved(), pool.counters["lost_spill_behind"]
        sizes = {n: n.block.nbytes for n in before if n.block}
        stuck = {a for n in before if n.pins or n.queued for a in n.path()}
        stuck_or_dirty = stuck | {a for n in before if n.key in unsaved for a in n.path()}
        granted = pool.reserve(nbytes)
        gone = [n for n in before if not n.block]
        freed = [sizes[n] for n in gone]
        assert granted == (sum(s for n, s in sizes.items() if n not in stuck) >= short), "all that may go, goes"
        assert not stuck & set(gone), "pinned or queued, or something that is hangs on it"
        if granted and short > 0:
            assert sum(freed) >= short > sum(freed) - max(freed), "more went than had to"
        else:
            assert not gone
        dirty = [n for n in gone if n.key in unsaved]
        assert pool.counters["lost_spill_behind"] - lost == len(dirty)
        if sum(s for n, s in sizes.items() if n not in stuck_or_dirty) >= short:
            assert not dirty, "clean blocks would have done"
        self.reserved += nbytes * granted
        self.check()
        assert all(a.block for n in pool.resident() for a in n.path() if a in sizes), "a prefix went before what it bears"
        return granted

    def store(self, tokens: Any) -> list[Any] | None:
        """As `RamTier.store` does; the path, or None where there is no room."""
        pool = self.pool
        known = pool.tree.walk(self.root, token_bytes(tokens))
        pool.pin(known)
        held = sum(n.tokens for n in known if n.block)
        path, node = [], self.root
        if self.reserve((len(tokens) - held) * UNIT):
            self.reserved -= (len(tokens) - held) * UNIT
            for chunk in pool.tree.chunks(token_bytes(tokens)):
                node = pool.tree.insert(node, chunk)
                path.append(node)
                if not node.block:
                    assert pool.admit(node, block_of(node))
            pool.set_end(node, True)
            pool.touch(path)
            pool.feed()
        pool.unpin(known)
        self.check()
        return path or None

    def check(self) -> None:
        pool, ledger = self.pool, self.pool.ledger
        pool.check_integrity()
        assert ledger.resident + ledger.queued + ledger.reserved <= ledger.limit
        assert ledger.reserved == self.reserved
        assert ledger.queued == self.disk.nbytes, "what the writer holds, to the byte"
        assert self.root.sequences == sum(n.ends for n in pool.tree.nodes.values())
        order = {n: i for i, n in enumerate(pool.resident())}
        assert all(order[n] < order[n.parent] for n in order if n.parent in order), "a leaf is older than its parent"


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_events_keeps_every_promise(seed):
    rng = random.Random(seed)
    it = Pool(blocks=12, seed=seed, refuse=0.3)
    pool, disk = it.pool, it.disk
    known: list[tuple[int, ...]] = []
    for step in range(400):
        event = rng.choices(["store", "reserve", "release", "pin", "unpin", "forget", "touch", "take", "finish", "remove",
                             "drain"], [8, 3, 4, 2, 3, 2, 2, 4, 4, 2, 1])[0]
        here = pool.resident()
        if event == "store":
            head = rng.choice(known)[: rng.randrange(16)] if known and rng.random() < 0.7 else ()
            known.append((*head, *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))))
            it.store(known[-1])
        elif event == "reserve":
            it.reserve(rng.randrange(8 * SIZE * UNIT))
        elif event == "release":
            nbytes = rng.randint(0, it.reserved)
            pool.release(nbytes)
            it.reserved -= nbytes
        elif event == "pin" and here and len(it.pinned) < 2:
            it.pinned.append(rng.choice(here).path())
            pool.pin(it.pinned[-1])
        elif event == "unpin" and it.pinned:
            pool.unpin(it.pinned.pop())
        elif event == "forget" and here:
            leaf = rng.choice([n for n in here if not n.resident_children])
            pool.forget([leaf], include_ssd=rng.random() < 0.3)
            assert bool(leaf.block) == bool(leaf.pins), "what is pinned stays, all else goes"
        elif event == "touch" and here:
            pool.touch(rng.choice(here).path())
        elif event == "take":
            disk.take(rng.randrange(1, 4))
        elif event == "finish":
            disk.finish(lose=0.3)
        elif event == "remove" and disk.stored:
            parents = {e.parent for e in disk.stored.values()}
            disk.remove([*disk.unwanted, rng.choice([k for k in disk.stored if k not in parents])])
            disk.unwanted = []
        elif event == "drain":
            pool.drain(True)
            pool.drain(False)
        it.check()
        assert all(n.block for path in it.pinned for n in path), step
    for path in it.pinned:
        pool.unpin(path)
    pool.forget(pool.resident())
    assert pool.ledger.resident == 0
    it.check()
    disk.take()
    disk.finish()
    disk.remove(list(disk.stored))
    assert (pool.ledger.queued, pool.ledger.reserved) == (0, it.reserved)
    assert not pool.tree.nodes, "nothing is left behind"
