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

from mlx_lm.models.cache import CacheList, load_prompt_cache, save_prompt_cache

from tiered_cache.layer_tree import flat


class Cache(Protocol):
    """What is needed of a RAM tier."""

    fingerprint: str

    def sequences(self) -> list[list[int]]:
        """Token ids of what is held, most recently used first."""

    def state_of(self, tokens: Sequence[int]) -> list[Any] | None:
        """The state of exactly these tokens."""

    def store(self, tokens: Sequence[int], cache: Sequence[Any], evict_prefixes: bool) -> bool:
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
        shutil.rmtree(aside, ignore_errors=True)  # what a process of this number may have left
        aside.mkdir(parents=True, mode=0o700)
        written = [_write(cache, aside / f"{n}.safetensors", t) for n, t in enumerate(cache.sequences())]
        entries = [entry for entry in written if entry]
        index = {"format": FORMAT, "version": VERSION, "model": cache.fingerprint, "sequences": entries}
        (aside / "index.json").write_text(json.dumps(index))
        if target.exists():
            target.rename(old)
        try:
            aside.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    except Exception as e:  # whatever the disk or a layer's own `state` raises: the host goes on
        log.warning("the snapshot %s was not written: %s", target, str(e))
        return False
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return True


def _write(cache: Cache, file: Path, tokens: list[int]) -> dict[str, Any] | None:
    """Write one sequence; None, and a warning, where mlx-lm could not read it back."""
    state = cache.state_of(tokens)
    if state is None:
        return None
    try:
        foreign = [type(layer).__name__ for _, layer in flat(state) if type(layer).__module__ != CacheList.__module__]
        if foreign:
            raise TypeError(f"mlx-lm's files cannot hold a {foreign[0]}")
        save_prompt_cache(str(file), state)
    except OSError:  # of the disk: nothing is written at all
        raise
    except Exception as e:  # whatever a layer's own `state` raises
        log.warning("a sequence of %d tokens was left out of the snapshot: %s", len(tokens), str(e))
        file.unlink(missing_ok=True)
        return None
    return {"file": file.name, "tokens": tokens, "sha256": _digest(file)}


def load(cache: Cache, folder: str | os.PathLike[str]) -> int:
    """Store what a snapshot holds, most recently used last; return how many of its sequences are in RAM now and were
    not.

    Another version or model is refused, a damaged or missing file passed over, with a warning.
    """
    path = Path(folder)
    try:
        index = json.loads((path / "index.json").read_text())
        if (index["format"], index["version"], index["model"]) != (FORMAT, VERSION, cache.fingerprint):
            raise ValueError("it is of another version or model")
        entries = [e for e in index["sequences"] if e["tokens"] not in cache]
    except (OSError, ValueError, KeyError, TypeError) as e:
        log.warning("the snapshot %s was not loaded: %s", path, str(e))
        return 0
    for entry in reversed(entries):
        try:
            file = path / Path(entry["file"]).name
            if _digest(file) != entry["sha256"]:
                raise ValueError("its digest does not match")
            cache.store(entry["tokens"], load_prompt_cache(str(file)), False)
        except Exception as e:  # whatever a damaged file makes mlx-lm raise
            log.warning("%s of the snapshot %s was passed over: %s", entry.get("file"), path, str(e))
    return sum(e["tokens"] in cache for e in entries)


def _digest(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
