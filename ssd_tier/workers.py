"""Threads that touch the disk and code blocks, always after what the host's own threads want to do."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

_CODERS = min(4, max(2, os.cpu_count() or 2))  # more than the cores would only make other threads wait
READERS = _CODERS + 1  # one waits for the disk while the others decode
WRITERS = 2
decoding = threading.Semaphore(_CODERS)
_NICE = 10  # a thread that wakes up runs at once, whatever these are doing


def workers(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of so many threads of low priority (on Linux, where threads have one of their own)."""
    return ThreadPoolExecutor(count, name, initializer=_step_back)


def _step_back() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
