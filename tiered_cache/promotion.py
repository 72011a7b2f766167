"""Promotion: what the SSD holds beyond RAM is read back, while the model's thread goes on.

    match both tiers -> reserve (evicts what it is short of) -> read, verify, decode in threads -> tree -> result

One read a block, however many promotions want it: each missing block has one `Read`, which owns its reservation and
settles it exactly once, as resident bytes or given back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any
from weakref import WeakSet, ref

from ssd_tier import Block, SSDTier
from tiered_cache import layer_tree, layers
from tiered_cache.block_pool import BlockPool
from tiered_cache.metrics import Rate
from tiered_cache.prefix_tree import Node, anywhere, in_ram
from tiered_cache.ram_tier import RamTier

log = logging.getLogger("tiered_cache")

READ_RATE = 500e6  # bytes of state a second, until it has been measured
MEASURE_EVERY = 256 << 20  # bytes, where reads never come to an end
SETUP = 0.002  # seconds that a promotion costs whatever its size


class Promotion:
    """A prefix on its way from the SSD to RAM. Like `concurrent.futures.Future`, and awaitable on the model's thread.

    While it lives, its blocks stay in RAM for it: call `result` or `cancel`, or drop it.
    """

    def __init__(
        self,
        ram: RamTier,
        tokens: Sequence[int],
        leave: int,
        tenant: str | None,
        path: list[Node],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._ram = ram
        self._loop = loop
        self._request = (tokens, leave, tenant)
        self._path = path
        self._ready: Future[None] = Future()
        self._waiting: set[bytes] = set()  # keys of blocks that have not arrived
        ram.pool.pin(path)

    def done(self) -> bool:
        """Whether `result` would return at once. Any thread."""
        return self._ready.done()

    def cancelled(self) -> bool:
        """Whether `cancel` came before the end. Any thread."""
        return self._ready.cancelled()

    def cancel(self) -> bool:
        """Give up; False where it is done already. Reads that nobody else waits for are not made. Any thread."""
        cancelled = self._ready.cancel()
        if cancelled:
            with self._ram.pool.lock:
                self._waiting.clear()
        self._unpin()
        return cancelled

    def result(self, timeout: float | None = None) -> tuple[list[Any] | None, Sequence[int]]:
        """The state and the tokens it does not cover, as `fetch` gives them; `(None, tokens)` where it failed.

        Waits up to `timeout` seconds (None: until it is done) and raises TimeoutError; raises CancelledError after
        `cancel`. Every call gives a state of its own. Model's thread.
        """
        if not self._ready.done() and on_loop(self._loop):
            raise RuntimeError("result() would wait for itself here: do not wait in a callback of the cache")
        self._ready.result(timeout)
        tokens, leave, tenant = self._request
        try:
            return self._ram.fetch(tokens, leave=leave, tenant=tenant)
        finally:
            self._unpin()

    def add_done_callback(self, function: Callable[[Promotion], object]) -> None:
        """Call `function(self)` when it is done, on the cache's own thread; at once where it is done already."""
        self._ready.add_done_callback(lambda _: function(self))

    def __await__(self) -> Generator[Any, None, tuple[list[Any] | None, Sequence[int]]]:
        yield from asyncio.wrap_future(self._ready).__await__()
        return self.result()

    def __del__(self) -> None:
        # The collector may run in the middle of anything, the pool's own work included: unpin later.
        if path := self.__dict__.get("_path"):
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._ram.pool.unpin, path)

    def _finish(self) -> None:
        with suppress(InvalidStateError):
            self._ready.set_result(None)

    def _unpin(self) -> None:
        path, self._path = self._path, []
        self._ram.pool.unpin(path)


class Read:
    """One block on its way, for all promotions that wait for it."""

    __slots__ = ("nbytes", "node", "promotions")

    def __init__(self, node: Node, nbytes: int) -> None:
        self.node = node
        self.nbytes = nbytes  # reserved, until `_settle`
        self.promotions: list[Promotion] = []

    def wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return any(not p.done() for p in self.promotions)


class Promoter:
    """Starts promotions and settles their reads. One for all models of a process."""

    def __init__(
        self, pool: BlockPool, tier: SSDTier, loop: asyncio.AbstractEventLoop, deadline: float, *, by_cost: bool = False
    ) -> None:
        """`deadline`: seconds after which a promotion is done with what has arrived; 0 means none. `by_cost`: promote
        only what computing would not bring sooner."""
        self._by_cost = by_cost
        self._rate = Rate()  # bytes of state a second
        self._busy_since = 0.0
        self._busy_bytes = 0
        self.counters: Counter[str] = Counter()
        self._pool = pool
        self._tier = tier
        self._loop = loop
        self._deadline = deadline
        self._reads: dict[bytes, Read] = {}
        self._live: WeakSet[Promotion] = WeakSet()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def promote(self, ram: RamTier, tokens: Sequence[int], leave: int, tenant: str | None) -> Promotion | None:
        """Begin to bring back what the SSD holds of `tokens` beyond RAM; None where that is nothing, or does not fit.

        Reserves, but reads nothing: no file is touched here. Any thread.
        """
        request = ram.prepare(tokens, leave, tenant)
        ram.note(request)
        if request is None:
            return None
        pool = self._pool
        with pool.lock:
            if self._closed or self._tier.reading.resting:
                return None
            here, both = ram.plan(request, in_ram), ram.plan(request, anywhere)
            if both.tokens <= here.tokens or both.tokens < ram.min_prefix_tokens:
                return None
            missing = [n for n in both.nodes if not n.block]
            computing = ram.prefill.seconds(both.tokens - here.tokens) if self._by_cost else None
            if computing and self._takes(missing) > computing:
                self.counters["not_worth_it"] += 1
                return None
            promotion = Promotion(ram, tokens, leave, tenant, both.nodes, self._loop)  # pins what it stands on
            new, reads = self._claim(missing)
            if len(reads) == len(missing):
                reach = both.tokens
            else:  # of blocks, the head is of use; not so if a checkpoint stands at the end
                reach = reads[-1].node.start + reads[-1].node.tokens if reads and not both.checkpoint else 0
            if reach <= here.tokens or reach < ram.min_prefix_tokens:
                for read in new:
                    self._settle(read, None)
                promotion.cancel()
                self.counters["lost_no_memory"] += 1
                return None
            if reach < both.tokens:
                self.counters["lost_no_memory"] += 1  # of a part
            for read in reads:
                read.promotions.append(promotion)
                promotion._waiting.add(read.node.key)
            pool.use(both.nodes, hit=True)
            self.counters["started"] += 1
            self._live.add(promotion)
        longest = min(self._deadline or computing, computing) if computing else self._deadline
        self._loop.call_soon_threadsafe(self._launch, new, promotion, longest)
        return promotion

    def _takes(self, missing: list[Node]) -> float:
        """Seconds until these blocks are in RAM, after what is being read already. Holds the lock."""
        new = sum(n.entry.raw_bytes for n in missing if n.entry and n.key not in self._reads)
        nbytes = new + sum(r.nbytes for r in self._reads.values())
        return SETUP + (self._rate.seconds(nbytes) or nbytes / READ_RATE)

    def _claim(self, missing: list[Node]) -> tuple[list[Read], list[Read]]:
        """Reads for as many leading blocks as RAM can take: (new ones, all of them)."""
        sizes = {n.key: n.entry.raw_bytes for n in missing if n.entry and n.key not in self._reads}
        whole = self._pool.reserve(sum(sizes.values()))
        new, reads = [], []
        for node in missing:
            read = self._reads.get(node.key)
            if read is None:
                if not whole and not self._pool.reserve(sizes[node.key]):
                    break
                if not self._reads:
                    self._busy_since, self._busy_bytes = time.monotonic(), 0
                read = self._reads[node.key] = Read(node, sizes[node.key])
                node.gone = False  # a removal stops the reads that it finds, not later ones
                new.append(read)
            reads.append(read)
        return new, reads

    def _launch(self, reads: list[Read], promotion: Promotion, longest: float) -> None:
        for read in reads:
            task = self._loop.create_task(self._read(read))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if longest:
            self._loop.call_later(longest, self._expire, ref(promotion))

    async def _read(self, read: Read) -> None:
        block = None
        try:
            while True:
                declined = False

                def wanted() -> bool:
                    nonlocal declined
                    declined = not read.wanted()
                    return not declined

                block = await self._tier.read(read.node.key, wanted)
                if not (declined and read.wanted()):
                    break  # else somebody came to want it after all had given up
        finally:  # whatever happens, the reservation is settled here and nowhere else
            with self._pool.lock:
                finished = self._settle(read, block)
            for promotion in finished:  # not under the lock: it runs the host's callbacks
                promotion._finish()

    def _settle(self, read: Read, block: Block | None) -> list[Promotion]:
        """Turn a read's reservation into a resident block, or give it back; say who waits no longer. Holds the lock."""
        if self._reads.pop(read.node.key, None) and block:
            self._busy_bytes += block.nbytes
            if not self._reads or self._busy_bytes > MEASURE_EVERY:
                now = time.monotonic()
                self._rate.add(self._busy_bytes, now - self._busy_since)
                self._busy_since, self._busy_bytes = now, 0
        if block and fits(read.node, block) and block.nbytes == read.nbytes:
            self._pool.admit(read.node, block, promoted=True)
        else:
            self._pool.release(read.nbytes)
            if block:
                self.counters["lost_layout"] += 1
                self._pool.discard([block.key])
        for promotion in read.promotions:
            promotion._waiting.discard(read.node.key)
        return [p for p in read.promotions if not p._waiting]

    def _expire(self, reference: ref[Promotion]) -> None:
        promotion = reference()
        if promotion and not promotion.done():
            self.counters["lost_deadline"] += 1
            promotion._finish()

    def stats(self) -> dict[str, int]:
        """Counts since the start, reads under way, and the measured bytes of state a second. Any thread."""
        counts = {name: self.counters[name] for name in ("started", "not_worth_it", "lost_deadline")}
        return {**counts, "reading": len(self._reads), "read_rate": round(self._rate.value or 0)}

    async def close(self) -> None:
        """Cancel what is under way and wait for the reads at hand. Loop thread."""
        with self._pool.lock:
            self._closed = True
            live = list(self._live)
        for promotion in live:
            promotion.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def on_loop(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this is the loop's own thread."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def fits(node: Node, block: Block) -> bool:
    """Whether a block from the SSD looks like this model's state: classes, shapes, dtypes.

    The first one that is seen of a namespace says what shapes there are.
    """
    root = node.root
    if root.is_checkpoints:
        return layers.fits_checkpoint(block, root.classes)
    layout = layers.layout_of(block.classes, block.tensors, node.tokens)
    if layout is None or layer_tree.plain(layout.classes) != root.classes:
        return False
    if root.layout is None:
        root.layout = layout
    return root.layout == layout
