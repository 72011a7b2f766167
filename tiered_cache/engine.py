"""`TieredCache`: RAM and SSD joined, with one loop thread, one ledger and one life cycle."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from mlx_lm.models.cache import make_prompt_cache

from ssd_tier import IndexUnusable, SSDTier, TierOptions
from tiered_cache import layer_tree
from tiered_cache.block_pool import BlockPool
from tiered_cache.config import Config
from tiered_cache.handoff import Handoff
from tiered_cache.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig
from tiered_cache.metrics import losses
from tiered_cache.promotion import Promoter, Promotion

T = TypeVar("T")
log = logging.getLogger("tiered_cache")

_UNCLOSED = "a TieredCache was not closed: what only RAM held is lost; use `with`, or call close()"


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
        if config.ssd.enabled:
            self._open_tier()

    def _open_tier(self) -> None:
        config = self.config
        try:
            tier = SSDTier(
                TierOptions(
                    path=Path(config.ssd_path()),
                    budget=config.ssd_budget(),
                    min_free=config.min_free(),
                    spill_queue=config.spill_queue(),
                    level=None if config.ssd.compression == "none" else int(config.ssd.compression.split(":")[1]),
                    durability=config.ssd.durability,
                    retention=config.ssd.retention,
                    daily=config.ssd.daily_writes,
                )
            )
        except IndexUnusable as e:  # a fault of data: the host starts all the same, with RAM alone
            self.ssd_off = str(e)
            log.warning("the SSD tier is off: %s", e)
            return
        thread = LoopThread()
        try:
            thread.run(tier.start(self.pool))
        except BaseException:
            tier.disown()
            thread.stop()
            raise
        self.tier, self._loop_thread = tier, thread
        self._unclosed = weakref.finalize(self, log.warning, _UNCLOSED)  # says so at the latest when Python ends
        self.pool.attach(tier, tier.catalog)
        if config.promotion.policy == "always":
            self.promoter = Promoter(self.pool, tier, thread.loop, config.promotion.deadline)

    def flush(self, timeout: float | None) -> bool:
        """Write all that RAM holds now; False where not all of it is on the SSD after `timeout` seconds."""
        if not (self.tier and self._loop_thread) or self._closed:
            return False
        return self._loop_thread.run(self._flush(self.tier, timeout))

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
        """Save what RAM holds within the deadline, then end everything. Idempotent."""
        if self._loop_thread:
            self._loop_thread.check_caller()
        with self._closing:  # a second caller waits for the first
            if not self._closed:
                self._closed = True
                self._close()

    def _close(self) -> None:
        tier, thread = self.tier, self._loop_thread
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
                tier.counters["lost_close_deadline"] += len(late)
        finally:
            try:
                thread.run(tier.close())
            finally:
                self.pool.attach(None)
                thread.stop()


class TieredCache:
    """Attention state of a model in RAM and on the SSD. See `open`.

    `fetch`, `store` and a promotion's `result` belong to the thread that runs the model; all else may be called from
    any thread. None of them touches a disk; `flush`, `close` and `result` wait for threads that do.
    """

    def __init__(self, runtime: Runtime, model: Any, *, owner: bool, label: str | None = None) -> None:
        self._runtime = runtime
        self._owner = owner
        self._pid = os.getpid()
        ram = runtime.config.ram
        classes, refused = None, None
        try:
            classes = layer_tree.dump(layer_tree.structure(make_prompt_cache(model)))
        except layer_tree.Refused as e:
            refused = e
        self.ram = MemoryAwarePrefixCache(
            model,
            MemoryCacheConfig(
                max_entries=ram.max_entries,
                min_prefix_tokens=ram.min_prefix_tokens,
                kv_quantize=ram.kv_quantize,
                kv_bits=ram.kv_bits,
                kv_group_size=ram.kv_group_size,
                kv_min_quantize_tokens=ram.kv_min_quantize_tokens,
            ),
            pool=runtime.pool,
            classes=classes,
            label=label,
        )
        if runtime.tier:
            self.ram.know(runtime.tier.layers.values())
        if refused:
            self.ram.report(refused.reason, str(refused))

    @classmethod
    def open(
        cls,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        model: Any,
        name: str | None = None,
    ) -> Self:
        """Open the cache for a model: `config` is a TOML file's path, a dict, a `Config`, or None for the defaults.

        `name` labels the model for people. On the model's thread (it looks at the weights). Raises `ConfigError` and
        `TierError`, each one sentence that says what to do; a damaged index only turns the SSD tier off, with a
        warning.
        """
        runtime = Runtime(Config.load(config))
        try:
            return cls(runtime, model, owner=True, label=name)
        except BaseException:
            runtime.close()
            raise

    def for_model(self, model: Any, *, name: str | None = None) -> TieredCache:
        """The same cache for another model: one SSD tier, one budget. It ends with this one. Model's thread."""
        return TieredCache(self._runtime, model, owner=False, label=name)

    def fetch(
        self, tokens: Sequence[int], *, leave: int = 1, tenant: str | None = None
    ) -> tuple[list[Any] | None, Sequence[int]]:
        """The state of the longest prefix in RAM, as the caller's own, and the tokens it does not cover.

        `(None, tokens)` on a miss. `leave`: how many tokens at the end the model must still see (one, for its logits).
        The state is a list of mlx-lm cache layers, one a layer of the model. Model's thread.
        """
        return self.ram.fetch(tokens, leave=leave, tenant=tenant)

    def promote(self, tokens: Sequence[int], *, leave: int = 1, tenant: str | None = None) -> Promotion | None:
        """Begin to bring back what the SSD holds of `tokens` beyond RAM; None where that is nothing. Any thread."""
        promoter = self._runtime.promoter
        return promoter.promote(self.ram, tokens, leave, tenant) if promoter else None

    def store(self, tokens: Sequence[int], state: Sequence[Any], *, tenant: str | None = None) -> bool:
        """Keep a copy of the state that covers exactly `tokens`; False, and a counted reason, where it is not kept.

        `state` is a list of mlx-lm cache layers; it may be extended or dropped afterwards. Model's thread.
        """
        return self.ram.store(tokens, state, tenant=tenant)

    def handoff(self, on_ready: Callable[[], object] | None = None) -> Handoff:
        """A queue of requests for a scheduler with a step loop; `on_ready` wakes it. Any thread."""
        return Handoff(self.ram, self._runtime.promoter, on_ready)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that is stored so far is on the SSD.

        False where it is not after `timeout` seconds, where the SSD had no room for some of it, and where there is no
        SSD tier (any more). It waits, so do not call it on the model's thread except between requests.
        """
        return self._runtime.flush(timeout)

    async def aflush(self, timeout: float | None = None) -> bool:
        """`flush`, awaited."""
        return await asyncio.to_thread(self.flush, timeout)

    def stats(self) -> dict[str, Any]:
        """Figures of this moment, for JSON: `ram`, `ssd`, `promotion` (bytes and counts) and `losses` by reason."""
        runtime, ledger = self._runtime, self._runtime.pool.ledger
        tier = runtime.tier
        return {
            "model": self.ram.label,
            "ram": {
                **self.ram.stats.to_dict(),
                "limit": ledger.limit,
                "resident": ledger.resident,
                "queued": ledger.queued,
                "reserved": ledger.reserved,
                "peak": ledger.peak,
            },
            "ssd": {"on": tier is not None, "off_because": runtime.ssd_off, **(tier.stats() if tier else {})},
            "promotion": runtime.promoter.stats() if runtime.promoter else {},
            "losses": losses(
                runtime.pool.counters,
                tier.counters if tier else {},
                runtime.promoter.counters if runtime.promoter else {},
            ),
        }

    def close(self) -> None:
        """Write what RAM holds to the SSD, most recently used first, within `ssd.close_deadline`; end all threads.

        Idempotent. A cache made by `for_model` ends with the one it came from.
        """
        if self._owner and os.getpid() == self._pid:
            self._runtime.close()

    async def aclose(self) -> None:
        """`close`, awaited."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
