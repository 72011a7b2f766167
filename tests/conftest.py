"""Shared by all suites: a private cache directory per test, and a check that nothing is left running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MAKE_CONFIG = Callable[..., dict[str, Any]]


@pytest.fixture
def make_config(tmp_path: Path) -> MAKE_CONFIG:
    """A configuration whose cache lies in the test's own directory; sections are given as keywords."""

    def make(**sections: dict[str, Any]) -> dict[str, Any]:
        ssd = {"path": str(tmp_path / "cache"), "budget": "200MB", "min_free": "1MB", **sections.pop("ssd", {})}
        return {"ram": {"max_memory": "8MB"}, **sections, "ssd": ssd}

    return make


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Every thread of the library ends with the cache that started it."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and t.is_alive() and "tiered-cache" in t.name]
    assert not left, f"threads left running: {left}"
