"""Bytes in RAM: NumPy buffers, and what the libraries that take buffers want to see."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Scratch(threading.local):
    """One buffer a thread, used again and again: fresh memory costs a page fault every four kilobytes."""

    def __init__(self) -> None:
        self._buffer: Bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        """A buffer of `nbytes`, valid until this thread takes the next one from here."""
        if len(self._buffer) < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]


def view(data: Any) -> memoryview:
    """The bytes of anything contiguous, not copied. Raises TypeError where it is not contiguous."""
    return memoryview(data).cast("B")
