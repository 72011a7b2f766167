"""An explicit snapshot of the RAM tier: one file a sequence, which mlx-lm's `load_prompt_cache` reads. Model's thread.

    <folder>/index.json           format, version, model, and for each file its tokens
    <folder>/<n>.safetensors      a sequence's state, as mlx-lm writes it

It is written aside and renamed as a whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache


class Cache(Protocol):
    """What is needed of a RAM tier."""

    fingerprint: str

    @property
    def free_bytes(self) -> int:
        """RAM that is free."""

    def sequences(self) -> list[list[int]]:
        """Token ids of what is held, most recently used first."""

    def fetch(self, tokens: Sequence[int]) -> tuple[list[Any] | None, Sequence[int]]:
        """The state for all of these tokens."""

    def store(self, tokens: Sequence[int], cache: Sequence[Any]) -> bool:
        """Keep a state."""

    def __contains__(self, tokens: Sequence[int]) -> bool:
        """Whether a sequence is held."""


log = logging.getLogger("tiered_cache")

FORMAT, VERSION = "tiered-cache-snapshot", 1


def save(cache: Cache, folder: str | os.PathLike[str]) -> bool:
    """Write what RAM holds of this model, most recently used first; False, and a warning, where that fails."""
    target = Path(folder)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        if target.exists() and not (target / "index.json").exists():
            raise FileExistsError(f"{target} is there and is no snapshot")
        aside.mkdir(parents=True, mode=0o700)
        entries = []
        for number, tokens in enumerate(cache.sequences()):
            state, _ = cache.fetch(tokens)
            file = aside / f"{number}.safetensors"
            if state is None:
                continue
            save_prompt_cache(str(file), state)
            entries.append({"file": file.name, "tokens": tokens, "sha256": _digest(file)})
        index = {"format": FORMAT, "version": VERSION, "model": cache.fingerprint, "sequences": entries}
        (aside / "index.json").write_text(json.dumps(index))
        if target.exists():
            target.rename(old)
        aside.rename(target)
    except Exception as e:  # whatever the disk or a layer's own `state` raises: the host goes on
        log.warning("the snapshot %s was not written: %s", target, e)
        return False
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return True


def load(cache: Cache, folder: str | os.PathLike[str]) -> int:
    """Store what a snapshot holds, most recently used last; return how many sequences are new.

    Another version or model is refused, a damaged file passed over, with a warning. What does not fit is left out.
    """
    path = Path(folder)
    try:
        index = json.loads((path / "index.json").read_text())
        said = (index["format"], index["version"], index["model"])
        if said != (FORMAT, VERSION, cache.fingerprint):
            raise ValueError("it is of another version or model")
        entries: list[dict[str, Any]] = index["sequences"]
        fitting, room = [], cache.free_bytes
        for entry in entries:  # most recent first, as far as there is room
            room -= (path / Path(entry["file"]).name).stat().st_size
            if room < 0:
                break
            fitting.append(entry)
    except (OSError, ValueError, KeyError, TypeError) as e:
        log.warning("the snapshot %s was not loaded: %s", path, e)
        return 0
    added = 0
    for entry in reversed(fitting):
        try:
            file, tokens = path / Path(entry["file"]).name, entry["tokens"]
            if _digest(file) != entry["sha256"]:
                raise ValueError("its digest does not match")
            if tokens not in cache:
                added += cache.store(tokens, load_prompt_cache(str(file)))
        except Exception as e:  # whatever a damaged file makes mlx-lm raise
            log.warning("%s of the snapshot %s was passed over: %s", entry.get("file"), path, e)
    return added


def _digest(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
