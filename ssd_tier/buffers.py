"""Bytes in RAM: NumPy buffers, and what the libraries that take buffers want to see."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def view(data: Any) -> memoryview:
    """The bytes of anything contiguous, not copied. Raises TypeError where it is not contiguous."""
    return memoryview(data).cast("B")
