"""Blocks in RAM: which are here, which must go, which still have to be written to the SSD.

One pool serves all models and tenants of a process. Its lock is held for dictionary work only, never for a copy or a
file.

A resident block is clean (on the SSD, too) or dirty. The half of RAM that would go first is kept clean: dirty blocks
there are handed to the spill queue, ancestors before descendants, so that what has to be evicted frees memory at once.
A dirty block that must go all the same is lost, and counted.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from ssd_tier import Block, Entry
from ssd_tier.leaf_first import leaf_first
from tiered_cache.ledger import Ledger
from tiered_cache.prefix_tree import Match, Node, PrefixTree, anywhere, block_bytes, in_ram

WRITE_AHEAD = 0.5  # of the limit: free, or holding clean blocks that may go


class Sink(Protocol):
    """Where dirty blocks go: the SSD tier. No method waits."""

    def put(self, block: Block) -> bool:
        """Queue a block; False where the queue is full."""

    def cancel(self, key: bytes) -> bool:
        """Take a queued block back; False where it is being written already."""

    def touch(self, keys: Sequence[bytes], *, hit: bool = False) -> None:
        """These were used, leaf first."""

    def discard(self, keys: Sequence[bytes]) -> None:
        """Remove these."""


class BlockPool:
    """The tree, the ledger and the order of use, under one lock. Any thread; methods named `_...` hold the lock."""

    def __init__(self, limit: int, block_tokens: int, *, write_through: bool = False) -> None:
        self.lock = threading.RLock()
        self.tree = PrefixTree(block_tokens)
        self.ledger = Ledger(limit)
        self.counters: Counter[str] = Counter()
        self._order: OrderedDict[Node, None] = OrderedDict()  # resident blocks, least recently used first
        self._dirty: OrderedDict[Node, None] = OrderedDict()  # of these, what is not on the SSD nor queued
        self._leaving: dict[bytes, int] = {}  # removed while being written: bytes that are still held
        self._sink: Sink | None = None
        self._drains = int(write_through)  # > 0: everything dirty is to be written

    # -- the SSD tier's side; called on its loop thread

    def attach(self, sink: Sink | None, entries: Iterable[Entry] = ()) -> None:
        """Spill to `sink` from now on; `entries` are what it holds already, in any order."""
        with self.lock:
            self._sink = sink
            for entry in sorted(entries, key=lambda e: e.start):
                parent = self.tree.nodes.get(entry.parent)
                if parent is None and entry.parent == entry.namespace:
                    parent = self.tree.root(entry.namespace)
                if parent is None or parent.start + parent.tokens != entry.start:
                    continue  # its ancestors are gone: out of reach until they are stored again
                self.tree.insert(parent, entry.ids, entry.key).entry = entry
            for node in self._order:
                self._mark(node)
            self._feed()

    def on_stored(self, entries: Sequence[Entry]) -> None:
        """`Listener`: blocks that are on the SSD now."""
        with self.lock:
            unwanted = []
            for entry in entries:
                self._left(entry.key)
                node = self.tree.nodes.get(entry.key)
                if node is None or not anywhere(node):  # removed or cleared while it was being written
                    unwanted.append(entry.key)
                    continue
                node.entry = entry
                node.replaces = ()
                self._unqueue(node)
                self._mark(node)
            if unwanted and self._sink:
                self._sink.discard(unwanted)
            self._feed()

    def on_lost(self, blocks: Sequence[Block], reason: str) -> None:
        """`Listener`: blocks that were queued and will not be written. They stay in RAM until they are evicted."""
        with self.lock:
            for block in blocks:
                self._left(block.key)
                node = self.tree.nodes.get(block.key)
                if node:
                    self._unqueue(node)
            self._feed()

    def on_removed(self, entries: Sequence[Entry]) -> None:
        """`Listener`: blocks that are no longer on the SSD."""
        with self.lock:
            for entry in entries:
                node = self.tree.nodes.get(entry.key)
                if node and node.entry is entry:
                    node.entry = None
                    self._mark(node)
                    self.tree.prune(node)

    # -- what has to be written

    def drain(self, on: bool) -> None:
        """While on, everything dirty goes to the spill queue, most recently used first."""
        with self.lock:
            self._drains += 1 if on else -1
            self._feed()

    def unsaved(self) -> set[bytes]:
        """Keys of blocks in RAM that are not on the SSD yet and are to be."""
        with self.lock:
            return {n.key for n in self._order if n.queued or n in self._dirty}

    def feed(self) -> None:
        """Hand over what is due. Never waits."""
        with self.lock:
            self._feed()

    def _mark(self, node: Node) -> None:
        """Sort a node into the dirty or the clean ones, as the most recently used."""
        if node in self._dirty:
            if node.entry or not node.block or node.queued:
                del self._dirty[node]
            else:
                self._dirty.move_to_end(node)
        elif node.block and not node.entry and not node.queued and self._sink:
            self._dirty[node] = None

    def _feed(self) -> None:
        """Queue the dirty blocks that are due, until the queue is full."""
        if self._sink and self._dirty:
            for node in self._due():
                if not all(self._queue(n) for n in node.path() if n in self._dirty):
                    return

    def _due(self) -> Iterator[Node]:
        """Dirty blocks to be written now, in order."""
        if self._drains:  # what was used last first: its root, then what hangs on it
            yield from list(reversed(self._dirty))
            return
        room = self.ledger.free
        for node in self._order:
            if room >= WRITE_AHEAD * self.ledger.limit:
                return
            if node in self._dirty:
                yield node
            room += block_bytes([node])

    def _queue(self, node: Node) -> bool:
        assert node.block
        block = node.block
        if node.key in self._leaving:
            return True  # removed and stored again while the writer has it in hand: it will tell
        if node.replaces and not block.replaces:
            block = replace(block, replaces=node.replaces)  # the same bytes
        if not (self._sink and self._sink.put(block)):
            return False
        node.queued = True
        self.ledger.queue(block.nbytes)
        del self._dirty[node]
        return True

    def _unqueue(self, node: Node) -> None:
        if node.queued and node.block:
            node.queued = False
            self.ledger.unqueue(node.block.nbytes)

    def _left(self, key: bytes) -> None:
        nbytes = self._leaving.pop(key, 0)
        self.ledger.unqueue(nbytes)
        self.ledger.drop(nbytes)

    # -- room

    def reserve(self, nbytes: int) -> bool:
        """Set bytes aside, evicting what they are short of and no more; False where that cannot be."""
        with self.lock:
            short = nbytes - self.ledger.free
            if short > 0 and not self._evict(short):
                return False
            return self.ledger.reserve(nbytes)

    def release(self, nbytes: int) -> None:
        """Give back what `reserve` set aside."""
        with self.lock:
            self.ledger.release(nbytes)

    def _evict(self, nbytes: int, roots: Collection[Node] | None = None) -> bool:
        """Free `nbytes`, clean blocks first; False, and nothing evicted, where not enough may go."""

        def free(node: Node) -> bool:
            return not node.pins and not node.queued and (roots is None or node.root in roots)

        clean = self._victims(nbytes, lambda n: n not in self._dirty and free(n))
        short = nbytes - block_bytes(clean)
        if short > 0 and block_bytes(self._victims(nbytes, free)) < nbytes:
            return False
        self._evict_all(clean)
        if short > 0:
            dirty = self._victims(short, free)
            self.counters["lost_spill_behind"] += sum(n in self._dirty for n in dirty)
            self._evict_all(dirty)
        return True

    def _evict_all(self, victims: list[Node]) -> None:
        for node in victims:
            node.root.evictions += node.ends
            self._drop(node)
        self.counters["evicted_blocks"] += len(victims)

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

    def evict_one(self, roots: Collection[Node]) -> bool:
        """Evict the least recently used block below these roots that may go; False where none may."""
        with self.lock:
            return self._evict(1, roots)

    def _drop(self, node: Node) -> None:
        """Take a node's block out of RAM."""
        assert node.block
        self.set_end(node, False)
        del self._order[node]
        if node.queued and not (self._sink and self._sink.cancel(node.key)):
            self._leaving[node.key] = node.block.nbytes  # the writer has it in hand
            node.queued = False
        else:
            self._unqueue(node)
            self.ledger.drop(node.block.nbytes)
        self._dirty.pop(node, None)
        node.block = None
        if node.parent:
            node.parent.resident.remove(node)
        self.tree.prune(node)

    # -- blocks in and out

    def admit(self, node: Node, block: Block) -> bool:
        """Put a block into RAM against bytes reserved for it. False where it is there already: they are given back."""
        with self.lock:
            if node.block:
                self.ledger.release(block.nbytes)
                return False
            node.block = block
            self.ledger.admit(block.nbytes)
            if node.parent:
                node.parent.resident.add(node)
            self._order[node] = None
            for n in reversed(node.path()):  # what hangs on a block is never more recent than it
                if n.block:
                    self._order.move_to_end(n)
            self._mark(node)
            return True

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

    def touch(self, nodes: Sequence[Node], *, hit: bool = False) -> None:
        """Mark a path (first block first) as just used: the leaf first, so that the root is the last to go."""
        with self.lock:
            for node in reversed(nodes):
                if node.block:
                    self._order.move_to_end(node)
                    self._mark(node)
            stored = [n.key for n in reversed(nodes) if n.entry]
            if stored and self._sink:
                self._sink.touch(stored, hit=hit)

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

    def forget(self, nodes: Iterable[Node], *, include_ssd: bool = False) -> None:
        """Drop blocks from RAM, with what waits in the spill queue; from the SSD, too, if asked to. Leaves first."""
        with self.lock:
            stored = []
            for node in nodes:
                if include_ssd and node.entry:
                    stored.append(node.key)
                if node.block and not node.pins:
                    self._drop(node)
            if stored and self._sink:
                self._sink.discard(stored)

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

