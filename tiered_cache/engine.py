"""`TieredCache`: the public face of both tiers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from mlx_lm.models.cache import make_prompt_cache

from tiered_cache import layer_tree
from tiered_cache.config import Config
from tiered_cache.handoff import Handoff
from tiered_cache.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig
from tiered_cache.metrics import losses
from tiered_cache.prefix_tree import Hint
from tiered_cache.promotion import Promotion
from tiered_cache.runtime import Runtime


class TieredCache:
    """Attention state of a model in RAM and on the SSD. See `open`.

    `fetch`, `store` and a promotion's `result` belong to the thread that runs the model; all else may be called from
    any thread. None of them touches a disk; `flush`, `close` and `result` wait for threads that do.
    """

    def __init__(self, runtime: Runtime, model: Any, *, owner: bool, label: str | None = None) -> None:
        self._runtime = runtime
        self._owner = owner
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
        self.ram.look_ups = runtime.look_ups
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

    def store(
        self, tokens: Sequence[int], state: Sequence[Any], *, tenant: str | None = None, hint: Hint = "normal"
    ) -> bool:
        """Keep a copy of the state that covers exactly `tokens`; False, and a counted reason, where it is not kept.

        `state` is a list of mlx-lm cache layers; it may be extended or dropped afterwards. `hint`: "keep" for what goes
        after all else in both tiers (a system prompt), "drop" for what will hardly come back (it is the next to go, and
        never written to the SSD). Model's thread.
        """
        return self.ram.store(tokens, state, tenant=tenant, hint=hint)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Tell how long the model took to compute so many tokens of a prompt. Any thread.

        What the SSD holds is then brought back only where that is quicker, and a promotion ends, with what has arrived,
        when computing would have been done. Until the first call everything is brought back.
        """
        self.ram.prefill.add(tokens, seconds)

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
            "promotion": {
                "prefill_rate": round(self.ram.prefill.value or 0),
                **(runtime.promoter.stats() if runtime.promoter else {}),
            },
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
        if self._owner:
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
