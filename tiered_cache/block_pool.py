"""Blocks in RAM and the SSD behind them: what still has to be written, and what became of it.

A resident block is clean (on the SSD, too) or dirty. The half of RAM that would go first is kept clean: dirty blocks
there are handed to the spill queue, ancestors before descendants, so that what has to be evicted frees memory at once.
A dirty block that must go all the same is lost, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from ssd_tier import Block, Entry
from tiered_cache.prefix_tree import Node, anywhere, block_bytes
from tiered_cache.residency import Residency

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


class BlockPool(Residency):
    """Residency with an SSD tier behind it, once one is attached; its `Listener`. Any thread."""

    def __init__(self, limit: int, block_tokens: int, *, write_through: bool = False) -> None:
        super().__init__(limit, block_tokens)
        self._sink: Sink | None = None
        self._drains = int(write_through)  # > 0: everything dirty is to be written

    # -- the SSD tier's side; `on_...` are called on its loop thread

    def attach(self, sink: Sink | None, entries: Iterable[Entry] = ()) -> None:
        """Spill to `sink` from now on; `entries` are what it holds already, in any order."""
        with self.lock:
            self._sink = sink
            if sink is None:
                self._detach()
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

    def _detach(self) -> None:
        """Nothing waits for an SSD any more, and nothing is there."""
        for key in list(self._leaving):
            self._left(key)
        self._dirty.clear()
        for node in list(self.tree.nodes.values()):
            node.entry = None
            self._unqueue(node)
            self.tree.prune(node)

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
            self.discard(unwanted)
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

    def _let_go(self, node: Node, nbytes: int) -> None:
        if node.queued and not (self._sink and self._sink.cancel(node.key)):
            self._leaving[node.key] = nbytes  # the writer has it in hand
            node.queued = False
        else:
            self._unqueue(node)
            super()._let_go(node, nbytes)

    # -- use and removal, in both tiers

    def use(self, nodes: Sequence[Node], *, hit: bool = False) -> None:
        """`touch`, on the SSD as well; `hit`: to be read from there."""
        with self.lock:
            self.touch(nodes)
            stored = [n.key for n in reversed(nodes) if n.entry]
            if stored and self._sink:
                self._sink.touch(stored, hit=hit)

    def forget(self, nodes: Iterable[Node], *, include_ssd: bool = False) -> None:
        """Drop blocks from RAM, pinned or not, with what waits in the spill queue; from the SSD, too, if asked to."""
        with self.lock:
            stored = []
            for node in nodes:
                if include_ssd and node.entry:
                    stored.append(node.key)
                if node.block:
                    self._drop(node)
            self.discard(stored)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Remove blocks from the SSD, soon."""
        if keys and self._sink:
            self._sink.discard(keys)
