"""Whether to go on asking a disk that fails: after some faults in a row it is left alone for growing pauses."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("ssd_tier")

FIRST_PAUSE = 1.0  # seconds; doubled by each attempt that fails
LONGEST_PAUSE = 300.0


class Breaker:
    """One for writing, one for reading. Loop thread; `open` and `fault` may be read from any."""

    def __init__(self, what: str, faults: int) -> None:
        """`what`: for people, like "writing"; `faults`: how many in a row open it."""
        self.what = what
        self.fault: str | None = None  # why it is open
        self._limit = faults
        self._faults = 0
        self._pause = FIRST_PAUSE
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Whether the disk is being left alone. Changes nothing."""
        return self.fault is not None

    @property
    def resting(self) -> bool:
        """Whether an attempt would not be let through now. Changes nothing."""
        return self.open and time.monotonic() < self._until

    def allows(self) -> bool:
        """Whether to try: always while closed, and once after each pause while open. Begins the next pause."""
        if not self.open:
            return True
        if self.resting:
            return False
        self._until = time.monotonic() + self._pause  # others wait for the outcome of this attempt
        return True

    def try_soon(self) -> None:
        """Let the next attempt through: somebody asks for it, or the disk has just shown that it works."""
        self._until = 0.0

    def failed(self, error: BaseException) -> None:
        """An attempt met a fault of the machine. Says so once, when it opens."""
        self._faults += 1
        if self.open:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self._faults < self._limit:
            return
        else:
            told = "ssd: %s is off, after %d faults in a row (%s); RAM goes on"
            log.warning(told, self.what, self._faults, str(error))
        self.fault = str(error) or type(error).__name__
        self._until = time.monotonic() + self._pause

    def succeeded(self) -> bool:
        """An attempt went well; True where this closes the breaker, and says so."""
        was_open = self.open
        self._faults, self._pause, self.fault = 0, FIRST_PAUSE, None
        if was_open:
            log.warning("ssd: %s works again", self.what)
        return was_open
