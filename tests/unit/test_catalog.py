"""The catalog against a brute-force oracle: who was used last, who may go first, and what the index is told of it."""

import random
from collections import Counter

import pytest

from ssd_tier.catalog import Catalog, Entry

NAMESPACE = bytes(32)
SEEDS = range(12)
TREE = dict(enumerate([None, 0, 1, 2, 1, 0, 5, None, 7, 7, 9, None, 11, 12, 13, 14]))  # each node's parent


def name(i):
    return NAMESPACE if i is None else bytes([1, i]) + bytes(30)


class Oracle:
    """The same, slow and plain: a list of nodes, least recently used first, and every question asked of all of it."""

    def __init__(self):
        self.order: list[int] = []
        self.bytes: dict[int, int] = {}
        self.hits: Counter[int] = Counter()

    def chain(self, node):
        found = []
        while node in self.order:
            found.append(node)
            node = TREE[node]
        return found

    def touch(self, nodes):
        for node in nodes:
            self.order.remove(node)
            self.order.append(node)

    def leaves(self, here):
        return [n for n in here if not any(TREE[m] == n for m in here)]

    def victims(self, nbytes, spare):
        here = list(self.order)
        chosen: list[int] = []
        while sum(self.bytes[n] for n in chosen) < nbytes:
            free = [n for n in self.leaves(here) if n not in spare]
            if not free:
                break
            here.remove(free[0])
            chosen.append(free[0])
        return chosen


class Pair:
    """A catalog and its oracle, driven together; `rows` is what an index would hold."""

    def __init__(self, rng):
        self.rng, self.catalog, self.oracle = rng, Catalog(), Oracle()
        self.rows: dict[bytes, tuple[int, int]] = {}

    def add(self):
        here = self.oracle.order
        new = [n for n in TREE if n not in here and (TREE[n] is None or TREE[n] in here)]
        if new:
            node = self.rng.choice(new)
            self.oracle.bytes[node], self.oracle.hits[node] = self.rng.randrange(1, 100), 0
            here.append(node)
            self.oracle.touch(self.oracle.chain(node))
            size = self.oracle.bytes[node]
            self.catalog.add(Entry(name(node), NAMESPACE, name(TREE[node]), 1, 0, bytes(8), size, 2 * size))

    def touch(self):
        if self.oracle.order:
            node, hit = self.rng.choice(self.oracle.order), self.rng.random() < 0.5
            assert self.catalog.chain(name(node)) == [name(n) for n in self.oracle.chain(node)]
            self.catalog.touch([b"unknown", *self.catalog.chain(name(node))], hit=hit)
            self.oracle.hits.update(self.oracle.chain(node) if hit else ())
            self.oracle.touch(self.oracle.chain(node))

    def remove(self):
        if self.oracle.order:
            node = self.rng.choice(self.oracle.leaves(self.oracle.order))
            self.oracle.order.remove(node)
            removed = self.catalog.remove(name(node))
            assert removed
            assert removed.key == name(node)
        assert self.catalog.remove(b"unknown") is None

    def evict(self):
        spare = self.rng.sample(self.oracle.order, self.rng.choice([0, 0, len(self.oracle.order) // 3]))
        nbytes = self.rng.randrange(-10, 200)
        before = list(self.catalog)
        victims = self.catalog.victims(nbytes, {name(n) for n in spare})
        assert [v.key for v in victims] == [name(n) for n in self.oracle.victims(nbytes, spare)]
        assert list(self.catalog) == before  # asking changes nothing
        if self.rng.random() < 0.3:
            for v in victims:
                self.catalog.remove(v.key)
                self.oracle.order.remove(v.key[1])

    def save(self):
        self.rows |= {e.key: (e.seq, e.hits) for e in self.catalog.take_changed()}
        self.rows = {k: v for k, v in self.rows.items() if k in self.catalog}
        assert self.catalog.take_changed() == []
        assert sorted(self.rows, key=lambda k: self.rows[k][0]) == [name(n) for n in self.oracle.order]

    def reload(self):
        self.save()
        self.catalog = Catalog(
            Entry(e.key, e.namespace, e.parent, 1, 0, e.ids, e.file_bytes, e.raw_bytes, *self.rows[e.key])
            for e in sorted(self.catalog, key=lambda e: self.rows[e.key][0])
        )

    def check(self):
        here = self.oracle.order
        assert [e.key for e in self.catalog] == [name(n) for n in here]
        assert len(self.catalog) == len(here)
        assert all((name(n) in self.catalog) == (n in here) for n in TREE)
        assert self.catalog.file_bytes == sum(self.oracle.bytes[n] for n in here)
        assert self.catalog.raw_bytes == 2 * self.catalog.file_bytes
        assert {e.key: e.hits for e in self.catalog} == {name(n): self.oracle.hits[n] for n in here}
        self.catalog.check_integrity()


@pytest.mark.parametrize("seed", SEEDS)
def test_order_victims_sums_and_rows_are_the_oracles_after_every_operation(seed):
    rng = random.Random(seed)
    for _ in range(20):
        pair = Pair(rng)
        for step in rng.choices(["add", "touch", "remove", "evict", "save", "reload"], [5, 4, 1, 2, 1, 1], k=60):
            getattr(pair, step)()
            pair.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_victims_leave_no_block_without_its_ancestors_and_free_enough_when_they_can(seed):
    rng = random.Random(seed)
    pair = Pair(rng)
    for _ in range(80):
        rng.choice([pair.add, pair.add, pair.touch])()
        entries = list(pair.catalog)
        spare = {e.key for e in entries if rng.random() < 0.2}
        wanted = rng.randrange(1, 400)
        victims = pair.catalog.victims(wanted, spare)
        gone = {v.key for v in victims}
        assert not gone & spare
        assert all(e.key in gone for e in entries if e.parent in gone)
        held = {k for s in spare for k in pair.catalog.chain(s)}  # what is spared holds its ancestors
        possible = sum(e.file_bytes for e in entries if e.key not in held)
        assert sum(v.file_bytes for v in victims) >= min(wanted, possible)
        assert sum(v.file_bytes for v in victims[:-1]) < wanted  # and no more go than have to


def line(*nodes):
    return [Entry(name(n), NAMESPACE, name(TREE[n]), 1, 0, bytes(8), 10, 20) for n in nodes]


def test_a_conversation_that_goes_on_keeps_its_first_block_longest():
    catalog = Catalog()
    for entry in line(7, 8, 0, 1, 2, 3):
        catalog.add(entry)
    catalog.touch(catalog.chain(name(8)))
    assert [v.key[1] for v in catalog.victims(60)] == [3, 2, 1, 0, 8, 7]
    assert [v.key[1] for v in catalog.victims(21)] == [3, 2, 1]


def test_a_block_whose_ancestor_is_lost_can_still_go():
    catalog = Catalog(line(3, 2, 1, 0))
    catalog.remove(name(1))
    catalog.check_integrity()
    assert [v.key[1] for v in catalog.victims(100)] == [3, 2, 0]


def test_a_block_that_comes_back_still_has_its_children():
    catalog = Catalog(line(3, 2, 1, 0))
    catalog.remove(name(1))
    catalog.add(line(1)[0])
    assert catalog.victims(10, spare={name(3)}) == []  # everything else carries the spared one
    catalog.check_integrity()
    catalog.remove(name(3))
    catalog.remove(name(2))
    assert [catalog.children(e.key) for e in catalog] == [0, 1]
