"""The RAM tier under the names that programs written for `vllm_mlx.memory_cache` use.

It can be used alone, or as the upper tier of a `TieredCache`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from tiered_cache import snapshot
from tiered_cache.block_pool import BlockPool
from tiered_cache.cache_helpers import dequantize as _dequantize_cache
from tiered_cache.cache_helpers import is_trimmable as _is_cache_layer_trimmable
from tiered_cache.cache_helpers import quantize as _quantize_cache
from tiered_cache.cache_helpers import trim_offset as _trim_cache_offset
from tiered_cache.cache_helpers import trim_to_offset as _trim_to_offset
from tiered_cache.fingerprint import model_fingerprint as _compute_model_fingerprint
from tiered_cache.layer_tree import Quantization
from tiered_cache.metrics import MB, CacheStats, losses
from tiered_cache.plans import Chain
from tiered_cache.prefix_tree import Node, anywhere, in_ram
from tiered_cache.pricing import array_bytes as _array_memory
from tiered_cache.pricing import price as estimate_kv_cache_memory
from tiered_cache.ram_tier import RamTier

if TYPE_CHECKING:
    from ssd_tier import SSDTier

__all__ = [
    "CacheStats",
    "MemoryAwarePrefixCache",
    "MemoryCacheConfig",
    "_array_memory",
    "_compute_model_fingerprint",
    "_dequantize_cache",
    "_is_cache_layer_trimmable",
    "_quantize_cache",
    "_trim_cache_offset",
    "_trim_to_offset",
    "estimate_kv_cache_memory",
]

BLOCK_TOKENS = 256
MIN_LIMIT = 100 * MB
UNKNOWN_AVAILABLE = 8 * 2**30  # bytes assumed where psutil cannot tell


@dataclass(frozen=True)
class MemoryCacheConfig:
    """Limits of the RAM tier. MB = 2**20 bytes. Raises ValueError naming the field and the value it got."""

    max_memory_mb: float | None = None
    max_memory_percent: float = 0.2
    max_entries: int = 1000
    enable_memory_tracking: bool = True
    kv_quantize: bool = False
    kv_bits: int = 8
    kv_group_size: int = 64
    kv_min_quantize_tokens: int = 256
    min_prefix_tokens: int = 128

    def __post_init__(self) -> None:
        rules = {
            "max_memory_mb": (
                self.max_memory_mb is None or 1 <= self.max_memory_mb * MB < 2**63,
                "above 0 and finite, or None to detect",
            ),
            "max_memory_percent": (0 < self.max_memory_percent <= 1, "in (0, 1]"),
            "max_entries": (self.max_entries >= 1, "1 or more"),
            "kv_bits": (self.kv_bits in (2, 3, 4, 5, 6, 8), "one of 2, 3, 4, 5, 6, 8"),
            "kv_group_size": (self.kv_group_size in (32, 64, 128), "one of 32, 64, 128"),
            "kv_min_quantize_tokens": (self.kv_min_quantize_tokens >= 0, "0 or more"),
            "min_prefix_tokens": (self.min_prefix_tokens >= 1, "1 or more"),
        }
        for field, (good, allowed) in rules.items():
            if not good:
                raise ValueError(f"{field} must be {allowed}, got {getattr(self, field)!r}")

    def quantization(self) -> Quantization | None:
        """How dense keys and values are stored; None as they are."""
        return Quantization(self.kv_group_size, self.kv_bits) if self.kv_quantize else None

    def compute_memory_limit(self) -> int:
        """The limit in bytes: the explicit one, else the share of what is available now, at least 100 MB."""
        if self.max_memory_mb is not None:
            return int(self.max_memory_mb * MB)
        try:
            available = psutil.virtual_memory().available
        except Exception:  # psutil raises whatever the platform does
            return int(UNKNOWN_AVAILABLE * self.max_memory_percent)
        return max(int(available * self.max_memory_percent), MIN_LIMIT)


class MemoryAwarePrefixCache(RamTier):
    """Attention state of one model in RAM, by the tokens it covers.

    `fetch` and `store` belong to the thread that runs the model (MLX); all else may be called from any thread. No
    method waits for a disk.
    """

    def __init__(
        self,
        model: Any,
        config: MemoryCacheConfig | None = None,
        *,
        pool: BlockPool | None = None,
        classes: str | None = None,
        label: str | None = None,
    ) -> None:
        """`pool`: share RAM with other models' caches; then its limit counts, not the one of `config`."""
        self.config = config or MemoryCacheConfig()
        super().__init__(
            model,
            pool or BlockPool(self.config.compute_memory_limit(), BLOCK_TOKENS),
            max_entries=self.config.max_entries,
            min_prefix_tokens=self.config.min_prefix_tokens,
            classes=classes,
            quantization=self.config.quantization(),
            min_quantize_tokens=self.config.kv_min_quantize_tokens,
            label=label,
        )
        self._host_reserved = 0

    def remove(self, tokens: Sequence[int], *, include_ssd: bool = False, tenant: str | None = None) -> bool:
        """Forget the named sequence, but not what others share; False where it is not stored. Any thread."""
        request = self.prepare(tokens, 0, tenant)
        if request is None:
            return False
        with self.pool.lock:
            removed = [self._remove(chain, request.ids, include_ssd) for chain in request.chains]
            return any(removed)

    def _remove(self, chain: Chain, ids: bytes, include_ssd: bool) -> bool:
        end = self._end(chain, ids)
        if end is None or not (end.ends or (include_ssd and end.entry)):
            return False
        self.pool.set_end(end, False)
        path = self.pool.tree.walk(chain.root, ids) if chain.is_cut else []
        shared = 0  # tokens that other checkpoints need blocks of
        if chain.checkpoints:
            others = chain.checkpoints.children.nearest(ids, lambda n: n is not end)
            shared = others[1]
        alone: list[Node] = []
        for node in reversed(path):
            stale = sum(child.key in end.replaces for child in node.children)  # tails that it has taken the place of
            if node.ends or node.start < shared or len(node.children) - stale > len(alone[-1:]):
                break
            alone.append(node)
        self.pool.forget([*alone, end] if chain.checkpoints else alone, include_ssd=include_ssd)
        return True

    def _end(self, chain: Chain, ids: bytes) -> Node | None:
        """The node at which exactly this sequence ends: its checkpoint, or its last block."""
        if chain.checkpoints:
            return chain.checkpoints.children.get(ids)
        path = self.pool.tree.walk(chain.root, ids)
        return path[-1] if sum(len(n.ids) for n in path) == len(ids) and anywhere(path[-1]) else None

    def sequences(self) -> list[list[int]]:
        """Token ids of the sequences that end in RAM, of no tenant, most recently used first. Any thread."""
        with self.pool.lock:
            mine = {n for c in self._chains(None) for n in (c.root, c.checkpoints) if n}
            ends = [n for n in reversed(self.pool.resident()) if n.ends and n.root in mine]
            chains = [b"".join(n.ids for n in end.path()) for end in ends]
        return [array("q", ids).tolist() for ids in chains]

    def save_to_disk(self, folder: str | os.PathLike[str]) -> bool:
        """Write an explicit snapshot of RAM, files that mlx-lm's `load_prompt_cache` reads; False where that fails.

        It has nothing to do with the SSD tier. Writes files: model's thread, between requests.
        """
        return snapshot.save(self, folder)

    def load_from_disk(self, folder: str | os.PathLike[str]) -> int:
        """Store what a snapshot of this model holds; how many sequences are new. Model's thread, between requests."""
        return snapshot.load(self, folder)

    def clear(self) -> None:
        """Forget everything of this model in RAM, statistics included; what is on the SSD stays. Any thread."""
        with self.pool.lock:
            mine = set(self._roots())
            self.pool.forget([n for n in self.pool.resident() if n.root in mine])
            self.reset_stats()

    def reset_stats(self) -> None:
        """Counters to zero, contents kept. Any thread."""
        self._stats = CacheStats()
        with self.pool.lock:
            for root in self._roots():
                root.evictions = 0

    @property
    def stats(self) -> CacheStats:
        """The figures of this moment. Any thread."""
        ledger = self.pool.ledger
        self._stats.current_memory_bytes = ledger.resident + ledger.queued
        self._stats.max_memory_bytes = ledger.limit
        self._stats.entry_count = len(self)
        self._stats.evictions = sum(r.evictions for r in self._roots())
        return self._stats

    def get_stats(self) -> dict[str, Any]:
        """`CacheStats.to_dict()`, and `losses` by reason. Any thread."""
        return {**self.stats.to_dict(), "losses": losses(self.pool.counters)}

    @property
    def memory_usage_mb(self) -> float:
        """MB (2**20 bytes) of state held. Any thread."""
        return self.stats.current_memory_bytes / MB

    @property
    def memory_limit_mb(self) -> float:
        """The limit in MB (2**20 bytes). Any thread."""
        return self.pool.ledger.limit / MB

    def try_reserve_memory(self, nbytes: int) -> bool:
        """Set bytes aside, evicting least recently used state where they are short. Any thread."""
        with self.pool.lock:
            reserved = self.pool.reserve(nbytes)
            self._host_reserved += nbytes * reserved
            return reserved

    def release_reserved_memory(self, nbytes: int) -> None:
        """Give back what `try_reserve_memory` set aside, and never more. Any thread."""
        with self.pool.lock:
            nbytes = max(0, min(nbytes, self._host_reserved))
            self._host_reserved -= nbytes
            self.pool.release(nbytes)

    def set_ssd_tier(self, tier: SSDTier | None) -> None:
        """Attach the tier that takes what is evicted, or None. Before the tier is used by others."""
        self.pool.attach(tier, tier.catalog if tier else ())

    def check_ssd(self, tokens: Sequence[int], *, tenant: str | None = None) -> dict[str, Any] | None:
        """What the SSD holds for these tokens beyond RAM, or None. Reads no file. Any thread.

        `match_type` is exact, prefix or lcp; `matched_tokens` what both tiers cover together; `memory_bytes` what would
        have to be read, in bytes of state; `num_tokens` how many tokens the matched blocks hold.
        """
        request = self.prepare(tokens, 0, tenant)
        if request is None:
            return None
        with self.pool.lock:
            here, both = self.plan(request, in_ram), self.plan(request, anywhere)
            if both.tokens <= here.tokens or both.tokens < self.min_prefix_tokens:
                return None
            kind, last = both.kind(len(tokens)), both.nodes[-1]
            return {
                "match_type": "lcp" if kind == "supersequence" else kind,
                "matched_tokens": both.tokens,
                "memory_bytes": sum(n.entry.raw_bytes for n in both.nodes if n.entry and not n.block),
                "num_tokens": last.start + last.tokens,
            }

    def __contains__(self, tokens: Sequence[int]) -> bool:
        request = self.prepare(tokens, 0, None)
        if request is None:
            return False
        with self.pool.lock:
            ends = [self._end(chain, request.ids) for chain in request.chains]
            return any(end is not None and end.ends and in_ram(end) for end in ends)
