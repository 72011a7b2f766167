"""Token chains of both tiers in one tree: a node is a block, and knows where its state is.

Children are sorted by their token ids' bytes. Of all children the one that shares most with a request is then a
neighbour of the place where the request would stand, so a look-up costs O(tokens) however many sequences share a
prefix.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ssd_tier.keys import TOKEN_BYTES, chain_key

if TYPE_CHECKING:
    from ssd_tier import Block, Entry


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as int64 little-endian bytes. Raises OverflowError or TypeError for what is no such id."""
    if isinstance(tokens, str | bytes | bytearray | memoryview):  # whose memory `array` would take as it is
        raise TypeError(f"token ids must be integers, not {type(tokens).__name__}")
    if getattr(tokens, "ndim", 1) != 1:
        raise TypeError(f"token ids must be one-dimensional, not {getattr(tokens, 'ndim', None)}-dimensional")
    return array("q", tokens).tobytes()


Hint = Literal["drop", "normal", "keep"]
HINTS: tuple[Hint, ...] = ("drop", "normal", "keep")
DROP, NORMAL, KEEP = range(3)  # what a host says of a sequence: not to be kept for long; to be kept longest


class Node:
    """One block of a chain, or a namespace's root (which has no state)."""

    __slots__ = (
        "block", "children", "classes", "declined", "ends", "entry", "evictions", "failed", "gone", "hint", "ids",
        "is_checkpoints", "key", "layout", "parent", "pins", "queued", "replaces", "resident", "root", "seen",
        "sequences", "start", "tokens",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: Node | None, ids: bytes) -> None:
        self.key = key
        self.parent = parent
        self.root: Node = parent.root if parent else self
        self.ids = ids
        self.start: int = parent.start + parent.tokens if parent else 0  # tokens before it
        self.tokens: int = len(ids) // TOKEN_BYTES
        self.children = Children()
        self.block: Block | None = None  # in RAM
        self.queued = False  # and waits for the SSD
        self.entry: Entry | None = None  # on the SSD
        self.failed = False  # could not be written: not tried again before it is used, or a flush asks
        self.declined = False  # not worth writing, until it is used, or a flush asks
        self.seen = False  # asked for since it was computed
        self.hint = NORMAL
        self.gone = False  # removed by name: a promotion under way must not bring it back
        self.replaces: tuple[bytes, ...] = ()  # keys on the SSD that are of no use once this one is there
        self.pins = 0
        self.ends = False  # a stored sequence ends here
        self.resident = Children()  # those of the children that are in RAM
        # On a root only, for its whole namespace:
        self.classes = ""  # the tree of the model's layers
        self.is_checkpoints = False  # its children are checkpoints, not blocks
        self.layout: object = None  # what the state of every block looks like, once one has been seen
        self.sequences = 0  # that end in RAM
        self.evictions = 0

    def path(self) -> list[Node]:
        """From the sequence's first block to this one."""
        nodes = []
        node = self
        while node.parent:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def in_ram(node: Node) -> bool:
    """Resident, or waiting in the spill queue."""
    return node.block is not None


def anywhere(node: Node) -> bool:
    """In RAM or on the SSD."""
    return node.block is not None or node.entry is not None


def block_bytes(nodes: Iterable[Node]) -> int:
    """Bytes of state that these hold in RAM."""
    return sum(n.block.nbytes for n in nodes if n.block)


class Children:
    """A node's children, by token ids in byte order."""

    __slots__ = ("_ids", "_nodes")

    def __init__(self) -> None:
        self._ids: list[bytes] = []
        self._nodes: list[Node] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def get(self, ids: bytes) -> Node | None:
        """The child of exactly these tokens."""
        i = bisect_left(self._ids, ids)
        return self._nodes[i] if i < len(self._ids) and self._ids[i] == ids else None

    def add(self, node: Node) -> None:
        """Insert a node that is not there yet."""
        i = bisect_left(self._ids, node.ids)
        self._ids.insert(i, node.ids)
        self._nodes.insert(i, node)

    def remove(self, node: Node) -> None:
        """Take a node out."""
        i = bisect_left(self._ids, node.ids)
        del self._ids[i], self._nodes[i]

    def nearest(self, ids: bytes, usable: Callable[[Node], bool]) -> tuple[Node | None, int]:
        """The usable child that shares most tokens with `ids`, and how many; (None, 0) where none shares any."""
        i = bisect_left(self._ids, ids)
        best, common = None, 0
        for step, j in ((1, i), (-1, i - 1)):
            # Away from the place of `ids` the common part only shrinks.
            while 0 <= j < len(self._ids) and (n := common_tokens(self._ids[j], ids)) > common:
                if usable(self._nodes[j]):
                    best, common = self._nodes[j], n
                    break
                j += step
        return best, common

    def longest(self, ids: bytes, usable: Callable[[Node], bool]) -> Node | None:
        """The longest usable child that is a prefix of `ids`, or all of it."""
        node = self.get(ids) or self.longest_prefix(ids)
        while node and not usable(node):
            node = self.longest_prefix(node.ids)
        return node

    def longest_prefix(self, ids: bytes) -> Node | None:
        """The longest child that is a proper prefix of `ids`."""
        probe = ids
        while probe:
            i = bisect_left(self._ids, probe)
            # What sorts just before `probe`, or `probe` itself once it has been cut.
            if i < len(self._ids) and self._ids[i] == probe and probe != ids:
                return self._nodes[i]
            if i == 0:
                return None
            before = self._ids[i - 1]
            common = common_tokens(before, probe) * TOKEN_BYTES
            if common == len(before):
                return self._nodes[i - 1]
            probe = probe[:common]
        return None


class Match(NamedTuple):
    """`nodes` from the first block on; `tokens` is what they have in common with the request (the last one's head)."""

    nodes: list[Node]
    tokens: int


class PrefixTree:
    """Nodes by chain key and by token ids. Not locked: its owner's lock guards it. Knows nothing of bytes or order."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.nodes: dict[bytes, Node] = {}
        self.roots: dict[bytes, Node] = {}

    def root(self, namespace: bytes) -> Node:
        """The namespace's root, made where it is not there yet."""
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Node(namespace, None, b"")
        return node

    def match(
        self,
        root: Node,
        ids: bytes,
        usable: Callable[[Node], bool],
        limit: int,
        among: Callable[[Node], Children] = lambda node: node.children,
    ) -> Match:
        """The longest usable chain that agrees with `ids` (int64 bytes), cut at `limit` tokens. Changes nothing.

        `among` names a node's children to choose from: few of these should turn out not to be usable.
        """
        size = self.block_tokens * TOKEN_BYTES
        node, nodes, at = root, [], 0
        while at < limit:
            chunk = ids[at * TOKEN_BYTES : at * TOKEN_BYTES + size]
            child, common = among(node).nearest(chunk, usable)
            if child is None:
                break
            nodes.append(child)
            at += common
            if common < self.block_tokens:
                break
            node = child
        return Match(nodes, max(0, min(at, limit)))

    def chunks(self, ids: bytes) -> list[bytes]:
        """Token ids cut into blocks; the last one may be shorter."""
        size = self.block_tokens * TOKEN_BYTES
        return [ids[i : i + size] for i in range(0, len(ids), size)]

    def walk(self, root: Node, ids: bytes) -> list[Node]:
        """The nodes of exactly these chunks, as far as they exist. Changes nothing."""
        nodes, node = [], root
        for chunk in self.chunks(ids):
            child = node.children.get(chunk)
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def insert(self, parent: Node, ids: bytes, key: bytes | None = None) -> Node:
        """The child of these tokens, made where it is not there yet."""
        node = parent.children.get(ids)
        if node is None:
            node = Node(key or chain_key(parent.root.key, parent.key, ids), parent, ids)
            parent.children.add(node)
            self.nodes[node.key] = node
        return node

    def prune(self, node: Node) -> None:
        """Remove a node that is in neither tier and has no children, and its ancestors likewise."""
        while node.parent and self.nodes.get(node.key) is node:
            if node.block or node.entry or node.pins or len(node.children):
                break
            node.parent.children.remove(node)
            del self.nodes[node.key]
            node = node.parent


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading token ids two int64 byte strings share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n // TOKEN_BYTES
    return int((np.frombuffer(a, "<i8", n // TOKEN_BYTES) != np.frombuffer(b, "<i8", n // TOKEN_BYTES)).argmax())
