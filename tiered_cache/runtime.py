"""What all models of a process share: the pool, the SSD tier, the loop thread, and their life cycle."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ssd_tier import IndexUnusable, SSDTier
from tiered_cache.block_pool import BlockPool
from tiered_cache.config import Config
from tiered_cache.look_up_log import LookUpLog
from tiered_cache.promotion import Promoter

T = TypeVar("T")
log = logging.getLogger("tiered_cache")

_UNCLOSED = "a TieredCache was not closed: what only RAM held is lost; use `with`, or call close()"


def _warn_unclosed(pid: int) -> None:
    if os.getpid() == pid:
        log.warning(_UNCLOSED)


class LoopThread:
    """An asyncio loop on a thread of its own, for everything that waits."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tiered-cache-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return the result. Raises RuntimeError on the loop's own thread."""
        try:
            self.check_caller()
        except RuntimeError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def check_caller(self) -> None:
        """Raise RuntimeError on the loop's own thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of the cache must not wait for it: call flush or close on another thread")

    def stop(self) -> None:
        """End the loop and its thread, once all that runs on it has ended."""
        self.run(self._end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end_tasks(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=1)
            for task in late:
                task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())


class Forked:
    """In the place of a pool's lock in a forked child: the parent's threads are not there, and its locks may be held
    for ever."""

    def __enter__(self) -> NoReturn:
        raise RuntimeError(
            f"a TieredCache of process {os.getppid()} was used in its forked child {os.getpid()}; start processes with "
            "the method 'spawn', and open a cache there, with another ssd.path"
        )

    def __exit__(self, *_: object) -> None: ...


_live: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _refuse_all() -> None:
    for runtime in list(_live):
        runtime.pool.lock = Forked()


os.register_at_fork(after_in_child=_refuse_all)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which takes a quarter of the time in which an index of many blocks is read, and
    finds nothing: all that is made there stays."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()


class Runtime:
    """What all models of a process share: the pool, the SSD tier, the loop thread."""

    def __init__(self, config: Config) -> None:
        """Raises `TierError` for a directory that cannot be used; an unusable index only turns the SSD tier off."""
        self.config = config
        self.pool = BlockPool(
            config.ram_limit(),
            config.cache.block_tokens,
            write_through=config.ssd.enabled and config.ssd.write == "through",
        )
        self.tier: SSDTier | None = None
        self.promoter: Promoter | None = None
        self.ssd_off: str | None = None if config.ssd.enabled else "ssd.enabled is false"
        self._loop_thread: LoopThread | None = None
        self._closed = False
        self._closing = threading.Lock()
        self._idle = threading.Condition()
        self._flushing = 0  # threads that wait for the loop: it must not end before they are answered
        _live.add(self)
        path = config.cache.look_up_log
        self.look_ups = LookUpLog(Path(path).expanduser().absolute()) if path else None
        if config.ssd.enabled:
            with _uncollected():
                self._open_tier()

    def _open_tier(self) -> None:
        config = self.config
        try:
            tier = SSDTier(config.tier_options())
        except IndexUnusable as e:
            return self._go_without(e)
        thread = LoopThread()
        try:
            thread.run(tier.start(self.pool))
        except BaseException as e:
            tier.disown()
            thread.stop()
            if not isinstance(e, IndexUnusable):
                raise
            return self._go_without(e)
        self.tier, self._loop_thread = tier, thread
        self._unclosed = weakref.finalize(self, _warn_unclosed, os.getpid())  # says so at the latest when Python ends
        self.pool.attach(tier, tier.catalog)
        if config.promotion.policy != "never":
            by_cost = config.promotion.policy == "cost"
            self.promoter = Promoter(self.pool, tier, thread.loop, config.promotion.deadline, by_cost=by_cost)

    def _go_without(self, fault: IndexUnusable) -> None:
        """A fault of data or disk: the host starts all the same, with RAM alone."""
        self.ssd_off = str(fault)
        log.warning("the SSD tier is off: %s", str(fault))

    def flush(self, timeout: float | None) -> bool:
        """Write all that RAM holds now; False where not all of it is on the SSD after `timeout` seconds."""
        with self.pool.lock:  # refuses in a forked child
            pass
        with self._idle:
            if not (self.tier and self._loop_thread) or self._closed:
                return False
            self._flushing += 1
        try:
            return self._loop_thread.run(self._flush(self.tier, timeout))
        finally:
            with self._idle:
                self._flushing -= 1
                self._idle.notify_all()

    async def _flush(self, tier: SSDTier, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        # Most recently used first, so that a deadline costs the oldest; and there, too, the oldest go first.
        tier.expect([node.key for node in self.pool.resident()])
        tier.writer.breaker.try_soon()
        wanted = self.pool.begin_flush()
        try:
            while self.pool.unsaved(wanted)[0] and not tier.closed:
                tier.writer.progress.clear()
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                try:
                    await asyncio.wait_for(tier.writer.progress.wait(), left)
                except TimeoutError:
                    return False
            return not self.pool.unsaved(wanted)[1] and not tier.closed
        finally:
            self.pool.end_flush(wanted)
            await tier.save()

    def close(self) -> None:
        """Save what RAM holds within the deadline, then end everything. Idempotent; nothing in a forked child."""
        if isinstance(self.pool.lock, Forked):
            return
        if self._loop_thread:
            self._loop_thread.check_caller()
        with self._closing:  # a second caller waits for the first
            if not self._closed:
                with self._idle:
                    self._closed = True
                self._close()

    def _close(self) -> None:
        tier, thread = self.tier, self._loop_thread
        if self.look_ups:
            self.look_ups.close()
        if tier is None or thread is None:
            return
        self._unclosed.detach()
        try:
            if self.promoter:
                thread.run(self.promoter.close())
            thread.run(self._flush(tier, self.config.ssd.close_deadline))
            late, failed = self.pool.unsaved([node.key for node in self.pool.resident()])
            if late or failed:
                log.warning("closing: %d blocks did not reach the SSD in time, %d could not", len(late), len(failed))
                queued = {n.key for n in self.pool.resident() if n.queued}  # the tier counts these, if it loses them
                tier.counters["lost_close_deadline"] += len(late - queued)
        finally:
            try:
                thread.run(tier.close())
            finally:
                self.pool.attach(None)
                with self._idle:
                    self._idle.wait_for(lambda: not self._flushing)
                thread.stop()
