"""How a scheduler with a step loop gets its prefixes: submit now, poll at each step, never wait.

    submit(id, tokens) -> "hit" | "pending" | "miss"       any thread
    poll() -> ready requests                               the model's thread, once a step

Every request that is submitted and not cancelled comes out of `poll` exactly once, a miss too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

from tiered_cache.promotion import Promoter, Promotion
from tiered_cache.ram_tier import RamTier

Outcome = Literal["hit", "pending", "miss"]
Source = Literal["ram", "ssd", "miss"]


class Ready(NamedTuple):
    """A request whose prefix is at hand. `state` is the caller's own, or None; `remaining` must still be computed."""

    request_id: Hashable
    state: list[Any] | None
    remaining: Sequence[int]
    source: Source


class _Request:
    """One submission. Two of the same id, one cancelled, are not to be taken for each other."""

    def __init__(self, request_id: Hashable, tokens: Sequence[int], leave: int, tenant: str | None) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.leave = leave
        self.tenant = tenant
        self.promotion: Promotion | None = None


class Handoff:
    """Requests on their way to one scheduler."""

    def __init__(self, ram: RamTier, promoter: Promoter | None, on_ready: Callable[[], object] | None) -> None:
        """`on_ready` is called, without arguments, whenever `poll` has something new; on any thread, so only let it
        wake the scheduler (`threading.Event.set`, `loop.call_soon_threadsafe`).
        """
        self._ram = ram
        self._promoter = promoter
        self._on_ready = on_ready or (lambda: None)
        self._lock = threading.Lock()
        self._requests: dict[Hashable, _Request] = {}
        self._ready: deque[_Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def submit(
        self, request_id: Hashable, tokens: Sequence[int], *, leave: int = 1, tenant: str | None = None
    ) -> Outcome:
        """Look both tiers up and begin what must be read. Touches no file; any thread.

        Raises ValueError where `request_id` is on its way already.
        """
        request = _Request(request_id, tokens, leave, tenant)
        with self._lock:
            if request_id in self._requests:
                raise ValueError(f"request {request_id!r} is on its way already; poll or cancel it first")
            self._requests[request_id] = request
        promotion = self._promoter.promote(self._ram, tokens, leave, tenant) if self._promoter else None
        if promotion is None:
            self._announce(request)
            return "hit" if self._ram.covered(tokens, leave=leave, tenant=tenant) else "miss"
        with self._lock:
            request.promotion = promotion
            kept = self._requests.get(request_id) is request
        if not kept:  # cancelled from another thread just now
            promotion.cancel()
        promotion.add_done_callback(lambda _: self._announce(request))
        return "pending"

    def poll(self, limit: int | None = None) -> list[Ready]:
        """Requests that are ready, first come first served, at most `limit`. Never waits. Model's thread."""
        ready: list[Ready] = []
        while limit is None or len(ready) < limit:
            with self._lock:
                if not self._ready:
                    break
                request = self._ready.popleft()
                if self._requests.get(request.request_id) is not request:  # cancelled meanwhile
                    continue
                del self._requests[request.request_id]
            state, remaining, source = self._take(request)
            ready.append(Ready(request.request_id, state, remaining, source))
        return ready

    def cancel(self, request_id: Hashable) -> bool:
        """Forget a request; False where it is not on its way. Any thread."""
        with self._lock:
            request = self._requests.pop(request_id, None)
        if request and request.promotion:
            request.promotion.cancel()
        return request is not None

    def close(self) -> None:
        """Forget all requests. Any thread."""
        for request_id in list(self._requests):
            self.cancel(request_id)

    def _take(self, request: _Request) -> tuple[list[Any] | None, Sequence[int], Source]:
        if request.promotion and not request.promotion.cancelled():
            state, remaining = request.promotion.result(0)
            return state, remaining, "ssd" if state else "miss"
        state, remaining = self._ram.fetch(request.tokens, leave=request.leave, tenant=request.tenant)
        return state, remaining, "ram" if state else "miss"

    def _announce(self, request: _Request) -> None:
        with self._lock:
            if self._requests.get(request.request_id) is not request:
                return
            self._ready.append(request)
        self._on_ready()
