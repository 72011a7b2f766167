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
from tiered_cache.prefix_tree import DROP, KEEP, NORMAL, Node
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

    def admits(self, key: bytes) -> bool:
        """Whether a block that was not asked for since it was computed is worth writing."""

    def saw(self, key: bytes) -> None:
        """A block leaves without having been written."""


class BlockPool(Residency):
    """Residency with an SSD tier behind it, once one is attached; its `Listener`. Any thread."""

    def __init__(self, limit: int, block_tokens: int, *, write_through: bool = False) -> None:
        super().__init__(limit, block_tokens)
        self._sink: Sink | None = None
        self._through = write_through
        self._flushes: list[set[bytes]] = []  # keys that each flush under way waits for
        self._unwanted: set[bytes] = set()  # removed while being written: to be taken off the SSD

    # -- the SSD tier's side; `on_...` are called on its loop thread

    def attach(self, sink: Sink | None, entries: Iterable[Entry] = ()) -> None:
        """Spill to `sink` from now on; `entries` are what it holds already, in any order."""
        with self.lock:
            self._sink = sink
            if sink is None:
                self._detach()
            for entry in sorted(entries, key=lambda e: e.start):
                self._place(entry)
            for node in self._order:
                self._mark(node)
            self._feed()

    def _place(self, entry: Entry) -> None:
        """Note in the tree what is on the SSD. Without its ancestors it is out of reach until they are stored again."""
        parent = self.tree.nodes.get(entry.parent)
        if parent is None and entry.parent == entry.namespace:
            parent = self.tree.root(entry.namespace)
        if parent and parent.start + parent.tokens == entry.start:
            self.tree.place(parent, entry)

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
            for entry in entries:
                self._left(entry.key)
                if entry.key in self._unwanted:
                    self._unwanted.discard(entry.key)
                    self.discard([entry.key])
                    continue
                self._place(entry)  # RAM may have let go of it meanwhile
                node = self.tree.nodes.get(entry.key)
                if node is None:  # its ancestors have gone: nothing leads to it
                    self.discard([entry.key])
                    continue
                node.replaces = ()
                self._unqueue(node)
                self._mark(node)
            self._feed()

    def on_lost(self, blocks: Sequence[Block], reason: str) -> None:
        """`Listener`: blocks that were queued and will not be written. They stay in RAM until they are evicted."""
        with self.lock:
            for block in blocks:
                self._left(block.key)
                self._unwanted.discard(block.key)
                node = self.tree.nodes.get(block.key)
                if node:
                    self._unqueue(node)
                    self._mark(node)
                    node.failed = True
            self._feed()

    def on_removed(self, entries: Sequence[Entry]) -> None:
        """`Listener`: blocks that are no longer on the SSD. What RAM has of them is written again only once it is used:
        else RAM and an SSD that is smaller would push each other's blocks around for ever.
        """
        with self.lock:
            for entry in entries:
                node = self.tree.nodes.get(entry.key)
                if node and node.entry is entry:
                    node.entry = None
                    self.tree.prune(node)

    def on_back(self) -> None:
        """`Listener`: what could not be written is tried again."""
        with self.lock:
            for node in self._dirty:
                node.failed = False
            self._feed()

    def on_closed(self) -> None:
        """`Listener`: from now on RAM is alone."""
        self.attach(None)

    # -- what has to be written

    def begin_flush(self) -> set[bytes]:
        """Send everything dirty to the spill queue, most recently used first, until `end_flush`; what failed, too.

        Returns the keys that are to be written. It is kept up to date where a block is replaced by a longer one.
        """
        with self.lock:
            for node in self._order:
                if not (node.entry or node.queued or node.key in self._leaving):
                    self._dirty[node] = None  # what the SSD has had to give up, too
                    node.failed = node.declined = False
            wanted = {n.key for n in self._order if n.hint != DROP and not n.entry}
            self._flushes.append(wanted)
            self._feed()
            return wanted

    def end_flush(self, wanted: set[bytes]) -> None:
        """Undo `begin_flush`."""
        with self.lock:
            self._flushes = [f for f in self._flushes if f is not wanted]

    def unsaved(self, keys: Iterable[bytes]) -> tuple[set[bytes], set[bytes]]:
        """Which of these blocks are still to be written, and which could not be: what has left RAM meanwhile, too."""
        late, failed = set(), set()
        with self.lock:
            for key in keys:
                node = self.tree.nodes.get(key)
                if node and (node.entry or node.hint == DROP):
                    continue
                if (node and (node.queued or (node in self._dirty and not node.failed))) or key in self._leaving:
                    late.add(key)
                else:
                    failed.add(key)
        return late, failed

    def supersede(self, old: Node, new: Node) -> None:
        """Drop a block whose tokens a longer one holds, too. Its copy on the SSD goes when the longer one is there."""
        with self.lock:
            for wanted in self._flushes:
                if old.key in wanted:
                    wanted.remove(old.key)
                    wanted.add(new.key)
            stale = (*old.replaces, old.key) if old.entry else old.replaces
            if new.entry:
                self.discard(stale)
            else:
                new.replaces = tuple({*new.replaces, *stale})
            if old.block:
                self._drop(old)
                if old.key in self._leaving:
                    self._unwanted.add(old.key)

    def feed(self) -> None:
        """Hand over what is due. Never waits."""
        with self.lock:
            self._feed()

    def _mark(self, node: Node) -> None:
        """Sort a node into the dirty or the clean ones, as the most recently used."""
        node.failed = node.declined = False
        if node.block:
            self._unwanted.discard(node.key)
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
                if node.declined or node.failed:
                    continue
                path = self._unwritten(node)
                if any(n.failed for n in path):
                    node.failed = True  # nothing is written before its ancestors are
                elif not self._worth_writing(node):
                    node.declined = True
                    self.counters["not_admitted"] += 1
                elif not all(self._queue(n) for n in path):
                    return

    def _unwritten(self, node: Node) -> list[Node]:
        """A block and its ancestors that are neither on the SSD nor on their way, first one first."""
        path = [n for n in node.path() if n.block and not (n.entry or n.queued or n.key in self._leaving)]
        for n in path:
            self._dirty.setdefault(n)  # what the SSD has had to give up is needed there again
        return path

    def _worth_writing(self, node: Node) -> bool:
        """Whether a block goes to the SSD. One that does takes its ancestors with it."""
        assert self._sink
        if node.hint != NORMAL or self._flushes:
            return node.hint != DROP
        return node.seen or self._sink.admits(node.key)

    def _evicted(self, node: Node) -> None:
        if self._sink and not node.entry:
            self._sink.saw(node.key)

    def _due(self) -> Iterator[Node]:
        """Dirty blocks to be written now, in order."""
        if self._through or self._flushes:  # what was used last first: its root, then what hangs on it
            yield from list(reversed(self._dirty))
            return
        room, enough = self.ledger.free, WRITE_AHEAD * self.ledger.limit
        for node in self._order:
            if room >= enough:
                return
            if node in self._dirty:
                yield node
            if node.block:
                room += node.block.nbytes

    def _queue(self, node: Node) -> bool:
        assert node.block
        block = node.block
        if node.key in self._leaving:
            return True  # removed and stored again while the writer has it in hand: it will tell
        if node.replaces and not block.replaces:
            block = replace(block, replaces=node.replaces)  # the same bytes
        if node.hint == KEEP:
            block = replace(block, keep=True)
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

    def use(self, nodes: Sequence[Node], *, hit: bool = False, asked: bool = True) -> None:
        """`touch`, on the SSD as well; `hit`: to be read from there; `asked`: for a request, not just computed."""
        with self.lock:
            for node in nodes:
                node.seen |= asked
            self.touch(nodes)
            stored = [n.key for n in reversed(nodes) if n.entry]
            if stored and self._sink:
                self._sink.touch(stored, hit=hit)

    def forget(self, nodes: Iterable[Node], *, include_ssd: bool = False) -> None:
        """Drop blocks from RAM, pinned or not, with what waits in the spill queue; from the SSD, too, if asked to."""
        with self.lock:
            stored: list[bytes] = []
            for node in nodes:
                node.gone = True
                for wanted in self._flushes:
                    wanted.discard(node.key)
                if include_ssd:
                    stored += node.replaces
                if node.block:
                    self._drop(node)
                if include_ssd and node.entry:
                    stored.append(node.key)
                    node.entry = None  # at once: what is stored again from now on is to be written again
                    self.tree.prune(node)
                if include_ssd and node.key in self._leaving:
                    self._unwanted.add(node.key)
            self.discard(stored)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Remove blocks from the SSD, soon."""
        if keys and self._sink:
            self._sink.discard(keys)
