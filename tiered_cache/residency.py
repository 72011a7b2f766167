"""Blocks in RAM: order of use, room, eviction. One for all models and tenants of a process."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager

from ssd_tier import Block
from ssd_tier.leaf_first import leaf_first
from tiered_cache.ledger import Ledger
from tiered_cache.prefix_tree import DROP, KEEP, Match, Node, PrefixTree, anywhere, block_bytes, in_ram


class Residency:
    """The tree, the ledger and the order of use, under one lock. Any thread; methods named `_...` hold the lock.

    The lock is held for dictionary work only, never for a copy or a file. What of the blocks would be lost with their
    RAM copy is for a subclass to say (`_dirty`): these are evicted last, and counted.
    """

    def __init__(self, limit: int, block_tokens: int) -> None:
        self.lock: AbstractContextManager[object] = threading.RLock()
        self.tree = PrefixTree(block_tokens)
        self.ledger = Ledger(limit)
        self.counters: Counter[str] = Counter()
        self._order: OrderedDict[Node, None] = OrderedDict()  # resident blocks, least recently used first
        self._dirty: OrderedDict[Node, None] = OrderedDict()  # of these, what is to be on the SSD, is not, nor queued
        self._leaving: dict[bytes, int] = {}  # removed while being written: bytes that are still held

    # -- room

    def reserve(self, nbytes: int) -> bool:
        """Set bytes aside, evicting what they are short of and no more; False where that cannot be."""
        with self.lock:
            if nbytes > self.ledger.free and not self._evict(nbytes):
                return False
            return self.ledger.reserve(nbytes)

    def release(self, nbytes: int) -> None:
        """Give back what `reserve` set aside."""
        with self.lock:
            self.ledger.release(nbytes)

    def _evict(self, nbytes: int) -> bool:
        """Have `nbytes` free, clean blocks going first; False, and nothing evicted, where not enough may go."""

        def free(node: Node) -> bool:
            return not node.pins and not node.queued

        short = nbytes - self.ledger.free
        if block_bytes(self._victims(short, free)) < short:
            return False
        # What costs least first: what is on the SSD, or not worth writing; then what a host has not asked to keep.
        self._evict_some(nbytes, lambda n: free(n) and n.hint != KEEP and not self._is_due(n))
        self._evict_some(nbytes, lambda n: free(n) and n.hint != KEEP)
        self._evict_some(nbytes, free)
        return True

    def _evict_some(self, nbytes: int, free: Callable[[Node], bool]) -> None:
        self._evict_all(self._victims(nbytes - self.ledger.free, free))

    def _is_due(self, node: Node) -> bool:
        """Whether with a block something would be lost that is worth writing."""
        return node in self._dirty and node.hint != DROP and not node.declined

    def _evict_all(self, victims: list[Node]) -> None:
        for node in victims:
            self.counters["lost_spill_behind"] += self._is_due(node)
            node.root.evictions += node.ends
            self._evicted(node)
            self._drop(node)
        self.counters["evicted_blocks"] += len(victims)

    def _evicted(self, node: Node) -> None:
        """A block is about to leave RAM for want of room."""

    def _victims(self, nbytes: int, free: Callable[[Node], bool]) -> list[Node]:
        return leaf_first(
            self._order,
            nbytes,
            name=lambda n: n,
            parent=lambda n: n.parent,
            children=lambda n: len(n.resident),
            size=lambda n: block_bytes([n]),
            free=free,
        )

    def retire(self, roots: Collection[Node], spare: Node) -> bool:
        """End the least recently used sequence below these roots but `spare`; False where there is none.

        What it shares with others stays. What only it holds goes: at once where that loses nothing, else in its turn.
        """
        with self.lock:
            node: Node | None = next((n for n in self._order if n.ends and n is not spare and n.root in roots), None)
            if node is None:
                return False
            self.set_end(node, False)
            node.root.evictions += 1
            while node and node.block and not (node.ends or node.pins or node.queued or len(node.resident)):
                if node in self._dirty:
                    break  # written when it is due
                parent = node.parent
                self._drop(node)
                node = parent
            return True

    # -- blocks in and out

    def admit(self, node: Node, block: Block, *, promoted: bool = False) -> bool:
        """Put a block into RAM against bytes reserved for it.

        False where it is there already, or was removed while it was `promoted`: the bytes are given back.
        """
        with self.lock:
            if node.block or (promoted and node.gone) or self.tree.nodes.get(node.key) is not node:
                self.ledger.release(block.nbytes)
                return False
            self.ledger.admit(block.nbytes)
            node.block = block
            node.gone = False
            if node.parent:
                node.parent.resident = node.parent.resident.plus(node)
            self._order[node] = None
            for n in reversed(node.path()):  # what hangs on a block is never more recent than it
                if n.block:
                    self._order.move_to_end(n)
            self._mark(node)
            return True

    def _drop(self, node: Node) -> None:
        """Take a node's block out of RAM."""
        assert node.block
        self.set_end(node, False)
        del self._order[node]
        self._let_go(node, node.block.nbytes)
        self._dirty.pop(node, None)
        node.block = None
        if node.parent:
            node.parent.resident = node.parent.resident.minus(node)
        self.tree.prune(node)

    def _let_go(self, node: Node, nbytes: int) -> None:
        """Take a block that is being dropped off the ledger."""
        self.ledger.drop(nbytes)

    def _mark(self, node: Node) -> None:
        """A block has come, or was used, or written: say whether it is dirty."""

    def set_end(self, node: Node, ends: bool) -> None:
        """Say whether a stored sequence ends here."""
        node.root.sequences += ends - node.ends
        node.ends = ends

    def match(self, root: Node, ids: bytes, usable: Callable[[Node], bool], limit: int) -> Match:
        """The longest chain of usable blocks (`in_ram` or `anywhere`). Changes nothing."""
        with self.lock:
            if usable is in_ram:  # of thousands of siblings, few may be here
                return self.tree.match(root, ids, usable, limit, lambda node: node.resident)
            return self.tree.match(root, ids, usable, limit)

    def touch(self, nodes: Sequence[Node]) -> None:
        """Mark a path (first block first) as just used: the leaf first, so that the root is the last to go."""
        with self.lock:
            for node in reversed(nodes):
                if node.block:
                    self._order.move_to_end(node)
                    self._mark(node)

    def pin(self, nodes: Iterable[Node]) -> None:
        """Keep these from being evicted until `unpin`."""
        with self.lock:
            for node in nodes:
                node.pins += 1

    def unpin(self, nodes: Iterable[Node]) -> None:
        """Undo one `pin`."""
        with self.lock:
            for node in nodes:
                node.pins -= 1
                self.tree.prune(node)

    def demote(self, nodes: Sequence[Node]) -> None:
        """Make blocks of a path (first block first) the next to go, the last one first."""
        with self.lock:
            for node in nodes:
                if node.block:
                    self._order.move_to_end(node, last=False)

    def resident(self) -> list[Node]:
        """Nodes with a block in RAM, least recently used first."""
        with self.lock:
            return list(self._order)

    def check_integrity(self) -> None:
        """Recompute every account and count from the nodes; AssertionError where one differs. Changes nothing."""
        with self.lock:
            here = [n for n in self.tree.nodes.values() if n.block]
            assert set(here) == set(self._order), "order of use"
            self.ledger.check_integrity(
                resident=block_bytes(n for n in here if not n.queued),
                queued=block_bytes(n for n in here if n.queued) + sum(self._leaving.values()),
                reserved=self.ledger.reserved,
            )
            assert all(n.block and not n.entry and not n.queued for n in self._dirty), "dirty blocks"
            for node in [*self.tree.nodes.values(), *self.tree.roots.values()]:
                assert list(node.resident) == [c for c in node.children if c.block], "resident children"
                assert not (node.parent and not anywhere(node) and not len(node.children) and not node.pins), "husk"
