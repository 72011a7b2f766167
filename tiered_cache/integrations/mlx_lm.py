"""`TieredPromptCache`: both tiers under the interface of mlx-lm's `LRUPromptCache`."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from tiered_cache.cache_helpers import is_trimmable, trim_to_offset
from tiered_cache.config import Config, format_size
from tiered_cache.engine import TieredCache
from tiered_cache.prefix_tree import Hint
from tiered_cache.promotion import Promotion
from tiered_cache.runtime import Runtime

log = logging.getLogger("tiered_cache")

NO_DEADLINE = 86400.0
MOMENT = 0.05  # seconds between looks at whether a fetch may still wait

Key = Hashable
Resolve = Callable[[Any], Any]


class Known(NamedTuple):
    """What belongs to one key: its cache, the classes of the layers that its model makes, and which object that is."""

    cache: TieredCache
    classes: list[type]
    models: tuple[Callable[[], Any], ...]

    def is_of(self, models: Sequence[Any]) -> bool:
        """Whether these objects are the ones that were looked at. A key may stand for a new one later."""
        given = [m for m in models if m is not None]
        return len(given) == len(self.models) and all(m() is g for m, g in zip(self.models, given, strict=True))


class TieredPromptCache:
    """Takes the place of an `LRUPromptCache`, of mlx-lm 0.31.3 or newer, in a program that is given one.

    It has to know more than that one: the model, by `add_model` for each key, or by `resolve`; and when the program
    ends, by `close` or the end of a `with` block.

    States are kept by what the model is (its weights, adapter, draft model), not by the key that a program has for it.
    `fetch_nearest_cache`, `insert_cache` and `add_model` belong to the thread that runs the model, all else to any.
    No method but `flush` and `close` raises: a fault is a miss, is logged once for each kind, and counted in `stats`.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        resolve: Resolve | None = None,
        tenant: str | None = None,
        quantized: bool = False,
        wait: Callable[[], float] | None = None,
    ) -> None:
        """Open the directory; models come later. Raises `ConfigError` and `TierError`, as `TieredCache.open`.

        `resolve` gives the model of a key that was not added: a model, a pair of a model and its draft model, or None.
        `tenant`: programs with another one do not see these states. `quantized`: states may come back as
        QuantizedKVCache. `wait`: seconds that a fetch may now wait for the SSD (default: the promotion's deadline).
        """
        self.config = Config.load(config)
        self.counters: Counter[str] = Counter()
        self.patience = self.config.promotion.deadline or NO_DEADLINE  # seconds that a promotion may take
        self._resolve = resolve
        self._tenant = tenant
        self._quantized = quantized
        self._wait = wait or (lambda: self.patience)
        self._known: dict[Key, Known | None] = {}
        self._reported: set[str] = set()
        self._runtime = Runtime(self.config)

    # -- models

    def add_model(self, key: Key, model: Any, draft: Any = None, *, name: str | None = None) -> bool:
        """Say which model a key stands for; False, and logged, where its states cannot be kept. `name` is for people.

        With a draft model, states are lists of the model's layers and then the draft's. Keeps no reference to either.
        Model's thread.
        """
        try:
            whole = model if draft is None else Pair(model, draft)
            cache = TieredCache(self._runtime, whole, owner=False, label=name)
            models = tuple(weakref.ref(m) for m in (model, draft) if m is not None)
            self._known[key] = Known(cache, [type(layer) for layer in make_prompt_cache(whole)], models)
        except Exception as e:  # whatever a model's class raises: it is served without the cache
            self._fault("add_model", e)
            with suppress(TypeError):  # it cannot be a key at all
                self._known[key] = None
            return False
        return True

    def _of(self, key: Key) -> Known | None:
        found = self._resolve(key) if self._resolve else None
        models = found if isinstance(found, tuple) else (found,)
        known = self._known.get(key)
        if models[0] is not None and (key not in self._known or (known and not known.is_of(models))):
            self.add_model(key, *models, name=known.cache.ram.label if known else None)
        if key not in self._known:
            remedy = "call add_model(key, model), or pass resolve="
            self._count("unknown_model", f"no model is known for the key {key!r}, so nothing is kept: {remedy}")
        return self._known.get(key)

    # -- as LRUPromptCache

    def fetch_nearest_cache(self, model: Key, tokens: Sequence[int]) -> tuple[list[Any] | None, Sequence[int]]:
        """The state of the longest stored prefix, as the caller's own, and the tokens that it does not cover.

        At least the last token is left, for its logits. `(None, tokens)` on a miss. Model's thread.
        """
        try:
            known = self._of(model)
            if known is None:
                return None, tokens
            promotion = self._from_ssd(known, tokens)
            try:
                state, rest = known.cache.fetch(tokens, leave=1, tenant=self._tenant)
            finally:
                if promotion:
                    promotion.cancel()
            if state is not None and not self._fits(state, known.classes):
                self._count("other_classes", "a stored state has other layers than the model makes: a miss")
                return None, tokens
            return state, rest
        except Exception as e:  # the thread of mlx-lm's server ends for good with the first exception
            self._fault("fetch", e)
            return None, tokens

    def _from_ssd(self, known: Known, tokens: Sequence[int]) -> Promotion | None:
        """Bring back what was not promoted beforehand, as far as the program can wait now."""
        seconds = self._wait()
        promotion = known.cache.promote(tokens, leave=1, tenant=self._tenant) if seconds > 0 else None
        end, arrived = time.monotonic() + seconds, done(promotion) if promotion else None
        while arrived and not arrived.wait(MOMENT) and time.monotonic() < end and self._wait() > 0:
            pass  # until somebody else comes, who must not wait for this disk
        return promotion

    def _fits(self, state: list[Any], classes: list[type]) -> bool:
        """Whether a program that expects its model's own layers can go on with these."""
        allowed = [{c, QuantizedKVCache} if self._quantized and c is KVCache else {c} for c in classes]
        return len(state) == len(allowed) and all(type(s) in a for s, a in zip(state, allowed, strict=True))

    def insert_cache(
        self,
        model: Key,
        tokens: Sequence[int],
        prompt_cache: Sequence[Any],
        *,
        cache_type: str = "assistant",
        checkpoint: bool = False,
    ) -> None:
        """Keep a copy of the state that covers `tokens`. A "system" one goes after all others. Model's thread.

        `checkpoint` is what mlx-lm before 0.31.2 passes. States that lag behind their tokens are kept for those that
        they cover.
        """
        try:
            known = self._of(model)
            if known is not None:
                tokens, state = aligned(tokens, prompt_cache)
                hint: Hint = "keep" if cache_type == "system" else "normal"
                known.cache.store(tokens, state, tenant=self._tenant, hint=hint)
        except Exception as e:
            self._fault("insert", e)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Have RAM hold no more than this, over all models; what is being written or read is not cut short."""
        pool = self._runtime.pool
        try:
            if n_sequences is not None:
                roots = list(pool.tree.roots.values())
                while roots and len(self) > max(0, n_sequences) and pool.retire(roots, spare=roots[0]):
                    pass
            if n_bytes is not None and self.nbytes > max(0, n_bytes):
                more = self.nbytes - max(0, n_bytes) + pool.ledger.free
                if pool.reserve(more):
                    pool.release(more)
        except Exception as e:
            self._fault("trim", e)

    @property
    def nbytes(self) -> int:
        """Bytes of state in RAM."""
        return self._runtime.pool.ledger.resident + self._runtime.pool.ledger.queued

    def __len__(self) -> int:
        """How many stored sequences end in RAM."""
        with self._runtime.pool.lock:
            return sum(root.sequences for root in self._runtime.pool.tree.roots.values())

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """What each tier holds: "ram" sequences and bytes of state; "ssd, in blocks" blocks and bytes of files."""
        found = {"ram": {"n_sequences": len(self), "n_bytes": self.nbytes}}
        tier = self._runtime.tier
        try:
            if tier:
                stats = tier.stats()
                found["ssd, in blocks"] = {"n_sequences": stats["blocks"], "n_bytes": stats["file_bytes"]}
        except Exception as e:
            self._fault("stats", e)
        return found

    def log_cache_stats(self) -> None:
        """Log what each tier holds. mlx-lm 0.31.1 and older ask for it."""
        for name, held in self.stats_by_type().items():
            log.info("prompt cache: %s: %d, %.2f GB", name, held["n_sequences"], held["n_bytes"] / 1e9)

    # -- more than LRUPromptCache

    def promote(self, model: Key, tokens: Sequence[int]) -> Promotion | None:
        """Begin to bring back what the SSD holds of a prompt, before it is fetched; None where that is nothing.

        For models that were added. Hold on to the promotion until then: its blocks stay in RAM. Any thread.
        """
        try:
            known = self._known.get(model)
            return known.cache.promote(tokens, leave=1, tenant=self._tenant) if known else None
        except Exception as e:
            self._fault("promote", e)
            return None

    def prefilled(self, model: Key, tokens: int, seconds: float) -> None:
        """Tell how long computing so many tokens of a prompt took: see `TieredCache.prefilled`. Any thread."""
        try:
            if known := self._known.get(model):
                known.cache.prefilled(tokens, seconds)
        except Exception as e:
            self._fault("prefilled", e)

    def stats(self) -> dict[str, Any]:
        """`TieredCache.stats` of each model by its label, and the faults that became misses."""
        models = {known.cache.ram.label: known.cache.stats() for known in list(self._known.values()) if known}
        return {"models": models, "faults": dict(self.counters)}

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that is kept so far is on the SSD; False where it is not after `timeout` seconds."""
        return self._runtime.flush(timeout)

    def close(self) -> None:
        """Write what RAM holds to the SSD within `ssd.close_deadline`, and end all threads. Idempotent."""
        self._runtime.close()

    def __str__(self) -> str:
        """For logs: where and how much."""
        tier, limit = self._runtime.tier, format_size(self.config.ram_limit())
        if tier is None:
            return f"RAM {limit}; no SSD ({self._runtime.ssd_off})"
        blocks, budget = len(tier.catalog), format_size(tier.options.budget)
        return f"RAM {limit}; SSD {tier.options.path}, {budget}, {blocks} blocks there"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fault(self, what: str, error: Exception) -> None:
        kind = type(error).__name__
        self._count(f"{what}_{kind}", f"{what} failed, which counts as a miss: {kind}: {error}")

    def _count(self, kind: str, message: str) -> None:
        self.counters[kind] += 1
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("%s (further ones: %s in the statistics)", message, kind)


def done(promotion: Promotion) -> threading.Event:
    """Set when a promotion is done, whichever way; to be waited for on any thread."""
    event = threading.Event()
    promotion.add_done_callback(lambda _: event.set())
    return event


class Pair:
    """A model and its draft model as one: their layers one after the other, and a fingerprint of both."""

    def __init__(self, model: Any, draft: Any) -> None:
        self._parts = {"model": model, "draft": draft}
        self.args = [[type(m).__qualname__, getattr(m, "args", None)] for m in self._parts.values()]

    def make_cache(self) -> list[Any]:
        """As mlx-lm's models have it."""
        return [layer for m in self._parts.values() for layer in make_prompt_cache(m)]

    def parameters(self) -> dict[str, Any]:
        """As mlx-lm's models have it."""
        return {name: m.parameters() for name, m in self._parts.items()}

    def named_modules(self) -> list[tuple[str, Any]]:
        """As mlx-lm's models have it."""
        return [(f"{name}.{place}", module) for name, m in self._parts.items() for place, module in m.named_modules()]


def aligned(tokens: Sequence[int], state: Sequence[Any]) -> tuple[Sequence[int], Sequence[Any]]:
    """Tokens and state cut to what all layers cover. A draft model lags one token behind, and the last is not seen."""
    offsets = {o for layer in state if isinstance(o := getattr(layer, "offset", None), int) and o}
    if not offsets or offsets == {len(tokens)} or not all(map(is_trimmable, state)):
        return tokens, state
    covered = min(*offsets, len(tokens))
    return tokens[:covered], trim_to_offset(state, covered)
