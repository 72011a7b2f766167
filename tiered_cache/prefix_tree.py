"""Token chains of both tiers in one tree: a node is a block, and knows where its state is.

Children are sorted by their token ids' bytes. Of all children the one that shares most with a request is then a
neighbour of the place where the request would stand, so a look-up costs O(tokens) however many sequences share a
prefix.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ssd_tier.keys import TOKEN_BYTES, chain_key, pack_ids, unpack_ids

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


def hint_level(hint: str) -> int:
    """DROP, NORMAL or KEEP. Raises ValueError."""
    if hint not in HINTS:
        raise ValueError(f"hint must be one of {', '.join(HINTS)}, not {hint!r}")
    return HINTS.index(hint)


class Node:
    """One block of a chain, or a namespace's root (which has no state)."""

    __slots__ = (
        "block", "children", "classes", "declined", "ends", "entry", "evictions", "failed", "gone", "hint",
        "is_checkpoints", "key", "layout", "packed", "parent", "pins", "queued", "replaces", "resident", "root", "seen",
        "sequences", "start", "tokens",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: Node | None, packed: bytes, tokens: int) -> None:
        """`packed`: so many token ids, as `pack_ids` gives them."""
        self.key = key
        self.parent = parent
        self.root: Node = parent.root if parent else self
        self.start: int = parent.start + parent.tokens if parent else 0  # tokens before it
        self.tokens: int = tokens
        self.packed = packed
        self.children: Children = NO_CHILDREN
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
        self.resident: Children = NO_CHILDREN  # those of the children that are in RAM
        # On a root only, for its whole namespace:
        self.classes = ""  # the tree of the model's layers
        self.is_checkpoints = False  # its children are checkpoints, not blocks
        self.layout: object = None  # what the state of every block looks like, once one has been seen
        self.sequences = 0  # that end in RAM
        self.evictions = 0

    @property
    def ids(self) -> bytes:
        """The block's token ids, int64, little-endian."""
        return unpack_ids(self.packed, self.tokens)

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


class Children(list[Node]):
    """Nodes of one parent, by token ids in byte order. Most nodes have none for ever: these share an empty one, so
    `plus` and `minus` say what to hold from then on.
    """

    __slots__ = ()

    def _place(self, ids: bytes) -> int:
        return bisect_left(self, ids, key=_ids_of)  # each look at a block unpacks its ids: a microsecond

    def get(self, ids: bytes) -> Node | None:
        """The child of exactly these tokens."""
        i = self._place(ids) if len(self) > 1 else 0
        return self[i] if i < len(self) and self[i].ids == ids else None

    def plus(self, node: Node) -> Children:
        """These with a node that is not among them."""
        if not self:
            return Children((node,))
        self.insert(self._place(node.ids), node)
        return self

    def minus(self, node: Node) -> Children:
        """These without one of them."""
        i = self._place(node.ids) if len(self) > 1 else 0
        assert self[i] is node
        if len(self) == 1:
            return NO_CHILDREN
        del self[i]
        return self

    def nearest(self, ids: bytes, usable: Callable[[Node], bool]) -> tuple[Node | None, int]:
        """The usable child that shares most tokens with `ids`, and how many; (None, 0) where none shares any."""
        i = self._place(ids) if len(self) > 1 else 0
        best: Node | None = None
        common = 0
        for step, j in ((1, i), (-1, i - 1)):
            # Away from the place of `ids` the common part only shrinks.
            while 0 <= j < len(self) and TOKEN_BYTES * common < len(ids):
                n = common_tokens(self[j].ids, ids)
                if n <= common:
                    break
                if usable(self[j]):
                    best, common = self[j], n
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
            i = self._place(probe)
            # What sorts just before `probe`, or `probe` itself once it has been cut.
            if i < len(self) and self[i].ids == probe and probe != ids:
                return self[i]
            if i == 0:
                return None
            before = self[i - 1].ids
            common = common_tokens(before, probe) * TOKEN_BYTES
            if common == len(before):
                return self[i - 1]
            probe = probe[:common]
        return None


_ids_of = attrgetter("ids")
NO_CHILDREN = Children()


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
            node = self.roots[namespace] = Node(namespace, None, b"", 0)
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

    def insert(self, parent: Node, ids: bytes) -> Node:
        """The child of these tokens, made where it is not there yet."""
        return parent.children.get(ids) or self._add(
            Node(chain_key(parent.root.key, parent.key, ids), parent, self._packed(ids), len(ids) // TOKEN_BYTES)
        )

    def place(self, parent: Node, entry: Entry) -> None:
        """Note that a child is on the SSD; it is made where it is not there yet."""
        node = self.nodes.get(entry.key)
        if node is None:
            whole = entry.tokens > self.block_tokens
            node = self._add(Node(entry.key, parent, entry.ids if whole else entry.packed, entry.tokens))
        elif entry.packed == node.packed:
            entry.packed = node.packed  # once in RAM
        node.entry = entry

    def _packed(self, ids: bytes) -> bytes:
        """Not those of a checkpoint: there are few, and unpacking all of a sequence takes its time."""
        return pack_ids(ids) if len(ids) <= self.block_tokens * TOKEN_BYTES else ids

    def _add(self, node: Node) -> Node:
        assert node.parent
        node.parent.children = node.parent.children.plus(node)
        self.nodes[node.key] = node
        return node

    def prune(self, node: Node) -> None:
        """Remove a node that is in neither tier and has no children, and its ancestors likewise."""
        while node.parent and self.nodes.get(node.key) is node:
            if node.block or node.entry or node.pins or len(node.children):
                break
            node.parent.children = node.parent.children.minus(node)
            del self.nodes[node.key]
            node = node.parent


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading token ids two int64 byte strings share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n // TOKEN_BYTES
    return int((np.frombuffer(a, "<i8", n // TOKEN_BYTES) != np.frombuffer(b, "<i8", n // TOKEN_BYTES)).argmax())
