"""Threads that touch the disk and code blocks, always after what the host's own threads want to do."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

CODERS = min(4, os.cpu_count() or 1)  # that decode at once: more would only make other threads wait
READERS = CODERS + 1  # one waits for the disk while the others decode
WRITERS = 2
_NICE = 10  # beyond what the host has: a thread of its own that wakes up runs at once, whatever these are doing


def workers(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of so many threads of low priority (on Linux, where threads have one of their own)."""
    return ThreadPoolExecutor(count, name, initializer=_step_back)


def _step_back() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
