"""MLX belongs to the model's thread, the disk to all others."""

from __future__ import annotations

import sqlite3
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from ssd_tier import codec, files, index
from tests.models import prefill, random_tokens, tiny_llama
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache, cache_helpers, fingerprint, layers, pricing

MLX_ROOMS = (layers, fingerprint, pricing, cache_helpers)  # test_rooms holds that no other module imports MLX


class Guarded:
    """Stands for `mlx.core`: notes which threads use it."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        self.threads.add(threading.get_ident())
        return getattr(mx, name)


@pytest.fixture
def mlx_threads(monkeypatch) -> set[int]:
    """Idents of the threads that used MLX through the library: its name `mx`, or any function of its MLX rooms."""
    guard = Guarded()
    for room in MLX_ROOMS:
        monkeypatch.setattr(room, "mx", guard)
        for name, function in vars(room).items():
            if isinstance(function, types.FunctionType) and function.__module__ == room.__name__:
                monkeypatch.setattr(room, name, noting(function, guard))
    return guard.threads


# These compare names and shapes: the functions of these rooms that have nothing to do with arrays.
PURE = {"layout_of", "_sized", "namespace", "fits_checkpoint", "_restorable"}


def noting(function: Callable[..., Any], guard: Guarded) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if function.__name__ not in PURE:
            guard.threads.add(threading.get_ident())
        return function(*args, **kwargs)

    return call


def work(cache: TieredCache, model: Any) -> None:
    """Everything a host does: store more than RAM holds, flush, promote from several places, hand off."""
    sequences = [random_tokens(500, seed) for seed in range(8)]
    for tokens in sequences:
        assert cache.store(tokens, prefill(model, tokens)[0])
    assert cache.flush(20)
    for tokens in sequences[:3]:
        promotion = cache.promote(tokens)
        assert promotion is None or promotion.result(20)[0]
    handoff = cache.handoff()
    threads = [threading.Thread(target=handoff.submit, args=(i, t)) for i, t in enumerate(sequences)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = 0
    while got < len(sequences):
        got += len(handoff.poll())


def test_no_mlx_call_is_made_outside_the_callers_thread(make_config, mlx_threads):
    model = tiny_llama()
    for _ in range(2):  # the second time everything comes from the SSD
        with TieredCache.open(make_config(ram={"max_memory": "700kB"}), model=model) as cache:
            work(cache, model)
    assert mlx_threads == {threading.get_ident()}


def test_the_guard_sees_a_call_from_another_thread(mlx_threads):
    thread = threading.Thread(target=lambda: pricing.price([]))
    thread.start()
    thread.join()
    assert mlx_threads == {thread.ident}


class DiskWatch:
    """Notes what one thread does to files, directories and SQLite while it is told to watch."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[str] = []
        self.watched: int | None = None
        watch = self

        def wrap(owner: Any, name: str) -> None:
            original = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                watch.note(f"{owner.__name__}.{name}")
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, name, call)

        for name in ("read", "write", "remove", "blobs", "index_bytes", "free_bytes", "sync_names"):
            wrap(files.Directory, name)
        for name in ("apply", "close"):
            wrap(index.Index, name)
        for owner, name in ((index, "prepare"), (index, "read_only"), (codec, "encode"), (codec, "decode")):
            wrap(owner, name)
        wrap(sqlite3, "connect")
        sys.addaudithook(self._audit)  # cannot be taken away again: it does nothing unless told to watch

    def note(self, what: str) -> None:
        if threading.get_ident() == self.watched:
            self.seen.append(what)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in {"open", "sqlite3.connect"} or event.startswith(("os.", "shutil.", "tempfile.")):
            self.note(f"{event} {args[:1]}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.watched = threading.get_ident()
        try:
            yield
        finally:
            self.watched = None


def test_the_models_thread_touches_neither_files_nor_sqlite(make_config, monkeypatch):
    watch = DiskWatch(monkeypatch)
    model = ShapeOnlyModel()
    sequences = [random_tokens(600, seed) for seed in range(10)]
    states = [state_of(tokens) for tokens in sequences]
    for restart in range(2):
        with TieredCache.open(make_config(ram={"max_memory": "900kB"}), model=model) as cache:
            handoff = cache.handoff()
            with watch.watching():
                for i, (tokens, state) in enumerate(zip(sequences, states, strict=True)):
                    cache.fetch(tokens)
                    promotion = cache.promote(tokens)
                    if promotion:
                        promotion.result(20)
                    cache.store(tokens, state)
                    handoff.submit(i, tokens[:-20])
                    handoff.poll()
                    cache.stats()
            assert cache.flush(20)
            assert cache.stats()["ssd"]["blocks_written" if not restart else "blocks_read"] > 0
    assert watch.seen == []


def test_the_watch_sees_a_file_being_opened(monkeypatch, tmp_path):
    watch = DiskWatch(monkeypatch)
    with watch.watching():
        (tmp_path / "x").write_text("x")
    assert watch.seen


def test_a_slow_disk_does_not_slow_the_callers_thread(make_config, monkeypatch):
    import time

    def hook(operation: str, name: str) -> None:
        if operation in ("write", "read"):
            time.sleep(0.25)

    model = ShapeOnlyModel()
    sequences = [random_tokens(600, seed) for seed in range(6)]
    states = [state_of(tokens) for tokens in sequences]
    monkeypatch.setattr(files.Directory, "hook", staticmethod(hook))
    with TieredCache.open(make_config(ram={"max_memory": "500kB"}), model=model) as cache:
        longest = 0.0
        for i in range(30):
            started = time.perf_counter()
            cache.store(sequences[i % 6], states[i % 6])
            cache.fetch(sequences[(i + 1) % 6])
            cache.promote(sequences[(i + 2) % 6])
            longest = max(longest, time.perf_counter() - started)
        assert longest < 0.25, f"a step took {longest:.3f} s"
