"""Token chains: what a look-up finds, against a plain dict of token tuples; and what it costs among many siblings."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from ssd_tier.keys import chain_key, pack_ids
from tiered_cache.prefix_tree import NO_CHILDREN, Children, Node, PrefixTree, token_bytes

NAMESPACE = b"n" * 32
IDS = [0, 2**31, 2**32, -(2**59), 2**63 - 1, 1, -1]


def among(keys: Any) -> Callable[[Node], bool]:
    return lambda node: node.key in keys


def shared(a: Any, b: Any) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def ids_of(node: Node) -> tuple[int, ...]:
    """All tokens from the sequence's first to the node's last."""
    return tuple(memoryview(b"".join(n.ids for n in node.path())).cast("q"))


class Oracle:
    """Stored chains as a dict: all tokens up to a block's end -> the tree's node."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tree = PrefixTree(size)
        self.root = self.tree.root(NAMESPACE)
        self.nodes: dict[tuple[int, ...], Node] = {}

    def parent(self, chain):
        return chain[: max(0, len(chain) - 1) // self.size * self.size]

    def children(self, chain):
        return [c for c in self.nodes if len(c) > len(chain) and self.parent(c) == chain]

    def add(self, tokens):
        node = self.root
        for chunk in self.tree.chunks(token_bytes(tokens)):
            node = self.tree.insert(node, chunk)
            self.nodes[ids_of(node)] = node

    def longest(self, tokens, usable):
        """The most tokens that a chain of usable blocks shares with `tokens`."""
        reachable = [c for c in usable if all(c[:end] in usable for end in range(self.size, len(c), self.size))]
        return max((shared(c, tokens) for c in reachable if self.parent(c) == tokens[: len(self.parent(c))]), default=0)

    def prune(self, chain):
        """What pruning must leave: a bare node without children goes, then its parent likewise."""
        while chain and not self.children(chain):
            node = self.nodes[chain]
            if node.block or node.entry or node.pins:
                break
            del self.nodes[chain]
            chain = self.parent(chain)

    def check(self):
        assert {ids_of(n): n for n in self.tree.nodes.values()} == self.nodes
        for chain, node in [((), self.root), *self.nodes.items()]:
            assert (node.start, node.start + node.tokens) == (len(self.parent(chain)), len(chain))
            assert sorted(map(ids_of, node.children)) == sorted(self.children(chain))


def random_tokens(rng, alphabet, known, size):
    """Mostly a stored chain's head with another end, so that requests share much and diverge anywhere."""
    head = rng.choice(known)[: rng.randrange(4 * size)] if known and rng.random() < 0.7 else ()
    return (*head, *rng.choices(alphabet, k=rng.randrange(1, 2 * size)))


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("seed", range(6))
def test_look_ups_equal_a_brute_force_search(size, seed):
    rng = random.Random(seed)
    alphabet = rng.sample(IDS, 2 + seed % 2)
    oracle = Oracle(size)
    for step in range(150):
        known = list(oracle.nodes)
        if step % 3 == 0:
            oracle.add(random_tokens(rng, alphabet, known, size))
            oracle.check()
        tokens = random_tokens(rng, alphabet, known, size)
        usable = {c for c in oracle.nodes if rng.random() < rng.choice([0.3, 0.8, 1.0])}
        keys = {oracle.nodes[c].key for c in usable}
        limit = rng.choice([len(tokens), rng.randrange(len(tokens) + 1)])
        nodes, found = oracle.tree.match(oracle.root, token_bytes(tokens), among(keys), limit)
        assert found == min(oracle.longest(tokens, usable), limit)
        assert bool(nodes) == bool(found)
        for last in nodes[-1:]:
            assert nodes == last.path()
            assert {n.key for n in nodes} <= keys
            assert last.start < found <= last.start + last.tokens
            assert ids_of(last)[:found] == tokens[:found]
        there = [oracle.nodes.get(tokens[:end]) for end in [*range(size, len(tokens), size), len(tokens)]]
        walked = oracle.tree.walk(oracle.root, token_bytes(tokens))
        assert walked == there[: there.index(None) if None in there else None]


@pytest.mark.parametrize("seed", range(6))
def test_of_all_children_the_nearest_and_the_longest_prefix_are_found(seed):
    rng = random.Random(seed)
    alphabet = rng.sample(IDS, 2 + seed % 3)
    for _ in range(60):
        children = NO_CHILDREN
        chunks = {tuple(rng.choices(alphabet, k=rng.randrange(1, 9))) for _ in range(rng.randrange(12))}
        nodes = {c: Node(str(c).encode(), None, pack_ids(token_bytes(c)), len(c)) for c in chunks}
        for chunk in chunks:  # in no order
            children = children.plus(nodes[chunk])
        for gone in rng.sample(sorted(chunks), len(chunks) // 4):
            children = children.minus(nodes.pop(gone))
        visible = [c for c in nodes if rng.random() < 0.6]
        for _ in range(20):
            ids = tuple(rng.choices(alphabet, k=rng.randrange(1, 9)))
            node, common = children.nearest(token_bytes(ids), among({nodes[c].key for c in visible}))
            assert common == max((shared(c, ids) for c in visible), default=0)
            assert node in [nodes[c] for c in visible if shared(c, ids) == common] if common else node is None
            prefixes = [c for c in nodes if len(c) < len(ids) and c == ids[: len(c)]]
            assert children.longest_prefix(token_bytes(ids)) is (nodes[max(prefixes, key=len)] if prefixes else None)
            assert children.get(token_bytes(ids)) is nodes.get(ids)


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_pruning_removes_what_holds_nothing_and_nothing_else(size, seed):
    rng = random.Random(seed)
    oracle = Oracle(size)
    removed = 0
    for _ in range(80):
        oracle.add(random_tokens(rng, IDS[:2], list(oracle.nodes), size))
        for chain in rng.choices(list(oracle.nodes), k=3):
            setattr(oracle.nodes[chain], rng.choice(["block", "entry", "pins"]), rng.choice([None, object()]))
        chain = rng.choice(list(oracle.nodes))
        node, before = oracle.nodes[chain], len(oracle.nodes)
        oracle.tree.prune(node)
        oracle.prune(chain)
        oracle.check()
        removed += before - len(oracle.nodes)
    assert removed > 20


def test_a_key_stands_for_namespace_and_all_tokens_before_it():
    tree = PrefixTree(2)
    one, other = tree.root(NAMESPACE), tree.root(b"o" * 32)
    first = tree.insert(one, token_bytes([0, 2**32]))
    second = tree.insert(first, token_bytes([-(2**59)]))
    assert first.key == chain_key(NAMESPACE, NAMESPACE, first.ids)
    assert second.key == chain_key(NAMESPACE, first.key, token_bytes([-(2**59)]))
    assert tree.insert(one, token_bytes([0, 2**32])) is first
    assert tree.insert(other, token_bytes([0, 2**32])).key != first.key
    assert tree.insert(one, token_bytes([0, 0])) is not first  # the same in the low 32 bits
    assert tree.match(other, token_bytes([0, 2**32, -(2**59)]), among(tree.nodes), 3).tokens == 2


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1, 1.5, "a", None])
def test_what_is_no_token_id_is_an_error(token):
    with pytest.raises((OverflowError, TypeError)):
        token_bytes([0, token])


def cost_ratio(prefix: int, all_hidden: bool = False) -> float:
    """Time of an 8k-token look-up among 5,000 sequences that share `prefix` tokens, relative to one among 10."""
    rng = random.Random(0)
    head, end = (rng.choices(range(50_000), k=n) for n in (prefix, 8192 - prefix))
    whole = prefix // 256 * 256
    trees = [PrefixTree(256), PrefixTree(256)]
    for tree, siblings in zip(trees, (9, 4999), strict=True):
        node = parent = tree.root(NAMESPACE)
        for chunk in tree.chunks(token_bytes(head + end)):
            node = tree.insert(node, chunk)
            if node.parent and node.start < whole:
                node.parent.resident = node.parent.resident.plus(node)  # in RAM; what hangs below is on the SSD alone
            parent = node if node.start + node.tokens == whole else parent
        while len(parent.children) <= siblings:
            tree.insert(parent, token_bytes(head[whole:] + rng.choices(range(50_000), k=256 + whole - prefix)))
    times: list[list[float]] = [[], []]
    among: Callable[[Node], Children] = lambda n: n.resident if all_hidden else n.children  # noqa: E731
    for _ in range(15):
        for tree, spent in zip(trees, times, strict=True):
            request, start = token_bytes(head + end), time.perf_counter()
            found = tree.match(tree.root(NAMESPACE), request, lambda n: True, 8192, among).tokens
            spent.append(time.perf_counter() - start)
            assert found == (whole if all_hidden else 8192)
    return statistics.median(times[1]) / statistics.median(times[0])


@pytest.mark.parametrize("prefix", [4096, 4196], ids=["after_a_block", "inside_a_block"])
def test_a_look_up_costs_the_same_among_5000_sequences_that_share_a_prefix(prefix):
    assert cost_ratio(prefix) <= 3


def test_a_look_up_costs_the_same_among_5000_siblings_that_are_all_elsewhere():
    assert cost_ratio(4196, all_hidden=True) <= 3
