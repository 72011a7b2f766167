"""vllm-mlx's engine on both of our tiers: call `install` in the process that runs it, before its engine is made.

Works, tested with vllm-mlx 0.6.0: its text scheduler (continuous batching) with its memory-aware cache, the default.
What RAM has no room for goes to our SSD tier, and comes back while other requests compute: one whose state is being
read waits in the queue, and the model's thread goes on without it. All engines of a process share one SSD tier and one
RAM limit: that of `ram` in our configuration if it is set there, else that of the engine that comes first.

The SSD tier is flushed and closed in `Scheduler.close_ssd_tier`, which its engine calls when it stops; in
`Scheduler.reset`, which `EngineCore.close` calls; and at the latest when Python ends. An engine that goes on opens it
again. At its server's shutdown `save_cache_to_disk` flushes to the SSD tier, instead of writing a second copy to
~/.cache/vllm-mlx; `load_cache_from_disk` has nothing left to do. (Without an SSD tier, both are snapshots.)

Does not: its paged and entry-counting caches (`--use-paged-cache`, `--no-memory-aware-cache`) remain its own;
`--ssd-cache-dir` and `--ssd-cache-max-gb` are not heeded (`ssd.path` and `ssd.budget` are); after a change of
`--max-kv-size` it may discard what the cache hands out, and compute anew. Its multimodal scheduler gets our cache too,
untested: there a look-up waits for the SSD, and what cannot be rewound (hybrid models) is not kept.
Its log has every request as `[cache_fetch]` MISS, since it asks before its turn has come; `[schedule]` is right.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import logging
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from ssd_tier import TierError
from tiered_cache import memory_cache
from tiered_cache.config import Config, SsdSection
from tiered_cache.engine import TieredCache
from tiered_cache.memory_cache import MemoryCacheConfig
from tiered_cache.runtime import Runtime

log = logging.getLogger("tiered_cache")

TESTED = "0.6.0"
PENDING = "pending"  # `cache_hit_type` of a request whose turn to look up has not come
MOMENT = 0.01  # seconds to wait for the SSD where there is nothing else to do; its loop would only spin
MODULES = ("vllm_mlx.memory_cache", "vllm_mlx.ssd_cache", "vllm_mlx.scheduler")
HOOKS = ("_schedule_waiting", "_store_prompt_only_cache", "close_ssd_tier", "reset")


class _Tiers:
    """What all engines of the process share. Any thread."""

    def __init__(self) -> None:
        self.config = Config()
        self._lock = threading.RLock()
        self._runtime: Runtime | None = None
        self._users: WeakSet[PrefixCache] = WeakSet()

    def join(self, user: PrefixCache) -> Runtime:
        """The runtime, opened for the first that needs it; RAM alone where the directory cannot be used."""
        with self._lock:
            if self._runtime is None:
                config = merged(self.config, user.config)
                try:
                    self._runtime = Runtime(config)
                except TierError as e:  # a server that loads its model again in the middle of a day must go on
                    log.error("the SSD tier is off: %s", e)
                    self._runtime = Runtime(config.model_copy(update={"ssd": SsdSection(enabled=False)}))
            self._users.add(user)
            return self._runtime

    def leave(self, user: PrefixCache | None = None) -> None:
        """Save what RAM holds; the last one to leave closes, as does None."""
        with self._lock:
            others = [u for u in self._users if u is not user] if user is not None else []
            self._users = WeakSet(others)
            if self._runtime and others:
                self._runtime.flush(self._runtime.config.ssd.close_deadline)
            elif self._runtime:
                self._runtime.close()
                self._runtime = None


_tiers = _Tiers()


def merged(config: Config, host: MemoryCacheConfig) -> Config:
    """Our configuration, with the engine's own limits where ours leaves them open. Pure."""
    given = {name: getattr(config.ram, name) for name in config.ram.model_fields_set}
    theirs = {n: v for n, v in vars(host).items() if n in type(config.ram).model_fields and n != "max_memory_percent"}
    if not given.keys() & {"max_memory", "max_memory_percent"}:
        theirs["max_memory"] = host.compute_memory_limit()
    return config.model_copy(update={"ram": type(config.ram)(**{**theirs, **given})})


def _nothing(*_: object, **__: object) -> None:
    """What an engine calls that has nothing to do or to tell here."""


class PrefixCache:
    """What vllm-mlx calls its `MemoryAwarePrefixCache`, on both tiers. All but `close` and figures is for the thread
    that runs the model. No method raises for what a model, a disk or a file does.
    """

    def __init__(self, model: Any, config: MemoryCacheConfig | None = None) -> None:
        """Opens the SSD tier, if no other engine has. Looks at the weights: on a thread that may."""
        self.config = config or MemoryCacheConfig()
        self._model = model
        self._last_match_type: str | None = None
        self._closed = True
        self._use()

    def _use(self) -> TieredCache:
        """The cache, opened again where its engine goes on after it was closed. Model's thread."""
        if self._closed:
            self._runtime = _tiers.join(self)
            self._tiered = TieredCache(self._runtime, self._model, owner=False)
            self._closed = False
        return self._tiered

    def __getattr__(self, name: str) -> Any:
        """All that is as in `tiered_cache.memory_cache.MemoryAwarePrefixCache`."""
        return getattr(vars(self)["_tiered"].ram, name)

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, Sequence[int]]:
        """The state, and what it does not cover: one token at least, for its logits. Waits where the SSD has more."""
        tiered = self._use()
        try:
            promotion = tiered.promote(tokens)
            state, remaining = promotion.result() if promotion else tiered.fetch(tokens)
        except Exception as e:  # cancelled by a close
            log.warning("a look-up failed: %r", e)
            state, remaining = None, tokens
        self._last_match_type = tiered.ram._last_match_type
        return state, remaining

    def store(self, tokens: list[int], cache: Sequence[Any], evict_prefixes: bool = True) -> bool:
        """Keep a copy of the state that covers exactly `tokens`; False, and a counted reason, where it is not kept."""
        return self._use().ram.store(tokens, cache, evict_prefixes)

    def get_stats(self) -> dict[str, Any]:
        """The figures its `/v1/status` and metrics show, and ours of both tiers under `tiers`. Any thread."""
        stats = self._tiered.ram.get_stats()
        refused = sum(n for reason, n in stats["losses"].items() if reason.startswith("refused_"))
        return {**stats, "store_rejections": refused, "tiers": self._tiered.stats()}

    def save_to_disk(self, folder: str | os.PathLike[str]) -> bool:
        """Flush to the SSD tier, which finds it all again; a snapshot in `folder` where there is none."""
        if not self._runtime.tier:
            return self._tiered.ram.save_to_disk(folder)
        return not self._closed and self._runtime.flush(self._runtime.config.ssd.close_deadline)

    def load_from_disk(self, folder: str | os.PathLike[str]) -> int:
        """0 with an SSD tier, which knows what it holds; else how many sequences of a snapshot are new."""
        return 0 if self._runtime.tier else self._tiered.ram.load_from_disk(folder)

    def close(self) -> None:
        """Flush, and close the SSD tier if no other engine uses it. Idempotent. Waits for the disk."""
        if not self._closed:
            self._closed = True
            _tiers.leave(self)

    # Our SSD tier is open, `fetch` has asked it, and no logits are kept beside a state.
    set_ssd_tier = check_ssd = prepare_store = fetch_exact_auxiliary = _nothing
    clone_for_replay = staticmethod(list[Any])  # what `fetch` hands out is the caller's own
    _entries = property(lambda self: self)  # its log lines ask for the length of this, and for bytes
    _current_memory = property(lambda self: self._runtime.pool.ledger.resident)

    def __len__(self) -> int:
        return len(self._tiered.ram)


class ScheduledCache(PrefixCache):
    """For its text scheduler: looked up when a request's turn comes, on the model's thread, where its engine may admit
    it on another. What the SSD holds is read while others run, and no state waits in a queue.
    """

    def fetch(self, tokens: list[int]) -> tuple[None, list[int]]:
        """Nothing yet: `admit` looks up. Any thread."""
        self._last_match_type = PENDING
        return None, tokens

    def admit(self, waiting: deque[Any], free: int, idle: bool) -> list[Any]:
        """Give their states to the next `free` requests; take out and return those whose state is still being read."""
        ready: list[Any] = []
        held: list[Any] = []
        for _ in range(len(waiting)):
            if len(ready) >= free or len(held) >= 2 * free:  # a promotion holds RAM: none for the far end of the queue
                break
            (ready if self._serve(request := waiting.popleft()) else held).append(request)
        if idle and held and not ready and self._serve(held[0], MOMENT):
            ready.append(held.pop(0))
        waiting.extendleft(reversed(ready))
        return held

    def _serve(self, request: Any, wait: float = 0.0) -> bool:
        """Look up for a request; False where the SSD is not done yet."""
        if request.cache_hit_type != PENDING:
            return True
        tokens, promotion = request.prompt_token_ids, vars(request).get("_promotion")
        kind, state, remaining = "miss", None, tokens
        try:
            tiered = self._use()
            if promotion is None:
                promotion = request._promotion = tiered.promote(tokens)
            if promotion and not promotion.done() and not wait:
                return False
            state, remaining = promotion.result(wait) if promotion else tiered.fetch(tokens)
            kind = "ssd_hit" if promotion and state else tiered.ram._last_match_type
        except TimeoutError:
            return False
        except Exception as e:  # cancelled by a close; whatever else it is, the request can be computed
            log.warning("a look-up failed: %r", e)
        request._promotion = None
        request.cache_hit_type, request.prompt_cache, request.remaining_tokens = kind, state, remaining
        request.cached_tokens = len(tokens) - len(remaining)
        return True

    def mixed(self, running: Iterable[Any]) -> None:
        """Note which requests share a batch of prompts, where that spoils their states: the padding of the shorter
        ones runs through recurrent layers (mlx-lm 0.31.3). That answer is wrong too, but those that follow need not be.
        """
        prompts = [r for r in running if not r.num_output_tokens]
        if len(prompts) > 1 and any("ArraysCache" in classes for classes in self._tiered.ram._classes):
            for request in prompts:
                request._mixed = True


class _NoTier:
    """In the place of vllm-mlx's own SSD tier, which it would open beside ours."""

    start_writer = reconcile = close = _nothing

    def __init__(self, config: object) -> None:
        log.warning("--ssd-cache-dir is not used: states go to the directory of tiered-cache's own configuration")


def install(config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Let vllm-mlx's engines that are made from now on keep their states in our tiers.

    `config`: a TOML file's path, a dict, a `Config`, or None for the defaults; a second call only changes it. vllm-mlx
    may have been imported before, or not. Raises `ConfigError`, and ImportError where vllm-mlx is missing or is not
    what this is made for; warns of another version than was tested. Main thread.
    """
    loaded = Config.load(config)
    try:
        version = importlib.metadata.version("vllm-mlx")
        memory, ssd, scheduler = map(importlib.import_module, MODULES)
    except ImportError as e:
        raise ImportError(f"vllm-mlx cannot be imported ({e}): install vllm-mlx=={TESTED}") from e
    ours = {name: getattr(memory_cache, name) for name in memory_cache.__all__}
    ours["MemoryAwarePrefixCache"] = PrefixCache
    wanted: list[tuple[Any, str]] = [(memory, n) for n in ours] + [(ssd, "SSDCacheTier"), (scheduler, "Scheduler")]
    wanted += [(getattr(scheduler, "Scheduler", None), name) for name in HOOKS]
    if missing := [name for owner, name in wanted if not hasattr(owner, name)]:
        raise ImportError(f"vllm-mlx {version} has no {missing[0]}: install vllm-mlx=={TESTED}")
    if version != TESTED:
        warnings.warn(f"vllm-mlx {version}: tiered-cache was tested with {TESTED}", RuntimeWarning, stacklevel=2)
    _tiers.config = loaded
    if memory.MemoryAwarePrefixCache is not PrefixCache:
        # Under whatever names its modules have bound them already; later imports find them replaced.
        table = {id(getattr(memory, name)): value for name, value in ours.items()} | {id(ssd.SSDCacheTier): _NoTier}
        for module in [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "vllm_mlx" and m]:
            for name, value in [(n, table[id(v)]) for n, v in vars(module).items() if id(v) in table]:
                setattr(module, name, value)
        vars(scheduler)["MemoryAwarePrefixCache"] = ScheduledCache
        _hook(scheduler.Scheduler)
        # atexit's own comes after the end of all executors, and our writer needs one.
        getattr(threading, "_register_atexit", atexit.register)(_tiers.leave)


def _hook(scheduler: Any) -> None:
    """Wrap what its scheduler does when a request's turn comes, with its prompt's state, and at the end."""
    schedule, keep, close, reset = (getattr(scheduler, name) for name in HOOKS)

    def schedule_waiting(self: Any) -> Any:
        if not isinstance(cache := self.memory_aware_cache, ScheduledCache):
            return schedule(self)
        held = cache.admit(self.waiting, self.config.max_num_seqs - len(self.running), idle=not self.running)
        try:
            return schedule(self)
        finally:
            self.waiting.extendleft(reversed(held))
            cache.mixed(self.running.values())

    def store_prompt_only_cache(self: Any, request: Any, response: Any) -> None:
        if "_mixed" not in vars(request):
            keep(self, request, response)

    def close_ssd_tier(self: Any) -> None:
        close(self)
        getattr(self.memory_aware_cache, "close", _nothing)()

    def reset_all(self: Any) -> None:
        close_ssd_tier(self)  # first: a reset empties RAM
        reset(self)

    for name, hook in zip(HOOKS, (schedule_waiting, store_prompt_only_cache, close_ssd_tier, reset_all), strict=True):
        setattr(scheduler, name, hook)
