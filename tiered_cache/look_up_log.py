"""A log of look-ups for `tiered-cache simulate`: hashes of prefixes, no tokens, no text."""

from __future__ import annotations

import json
import logging
import os
import threading
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue

from ssd_tier.keys import TOKEN_BYTES

log = logging.getLogger("tiered_cache")

BLOCK_TOKENS = 512  # that one hash stands for


class LookUpLog:
    """Appends a line for each request to a file, on a thread of its own: whoever looks up does not wait."""

    def __init__(self, path: Path) -> None:
        """A file that cannot be written is told once, and there is no log then."""
        self._lines: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._last = b""
        self._thread = threading.Thread(target=self._run, args=(path,), name="tiered-cache-log", daemon=True)
        self._thread.start()

    def add(self, ids: bytes) -> None:
        """Note a look-up of these tokens (int64 little-endian). The same once more, as when what was promoted is
        fetched, is one request. Any thread.
        """
        if ids != self._last:
            self._last = ids
            self._lines.put((len(ids) // TOKEN_BYTES, ids))

    def close(self) -> None:
        """Write what waits, and end the thread. Idempotent."""
        self._lines.put(None)
        self._thread.join()

    def _run(self, path: Path) -> None:
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "a") as file:
                while item := self._lines.get():
                    file.write(json.dumps({"input_length": item[0], "hash_ids": prefix_hashes(item[1])}) + "\n")
                    if self._lines.empty():
                        file.flush()
        except OSError as e:
            log.warning("the log of look-ups %s cannot be written (%s); there is none", path, str(e))
            while self._lines.get():
                pass


def prefix_hashes(ids: bytes) -> list[int]:
    """One number for each block of tokens, which stands for all tokens up to its end."""
    running, hashes = sha256(), []
    for i in range(0, len(ids), BLOCK_TOKENS * TOKEN_BYTES):
        running.update(ids[i : i + BLOCK_TOKENS * TOKEN_BYTES])
        hashes.append(int.from_bytes(running.digest()[:6], "little"))  # exact in any JSON parser
    return hashes
