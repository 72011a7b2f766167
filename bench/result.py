"""What a measurement is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Result(NamedTuple):
    """One line of the table.

    `key` names it for peers' figures and plots; `aim` is what the project wants to hold, as text; `met` whether it did,
    None where there is no aim.
    """

    key: str
    what: str
    value: str
    aim: str
    met: bool | None
    figures: dict[str, float]


@dataclass(frozen=True)
class Options:
    """`quick`: less of everything; `full`: the sizes that aims are for, where they take minutes; `traces`: a folder."""

    quick: bool = False
    full: bool = False
    traces: Path | None = None


class Skipped(Exception):
    """This cannot be measured here; the text says why."""


Measurement = Callable[[Path, Options], list[Result]]


def config(folder: Path, **ram: Any) -> dict[str, Any]:
    """A cache of its own for one measurement."""
    return {
        "ram": {"max_memory": "4GiB", **ram},
        "ssd": {"path": str(folder / "cache"), "budget": "20GB", "min_free": "100MB", "close_deadline": "60s"},
    }


def ram_only(max_memory: int | str, **ram: Any) -> dict[str, Any]:
    """A cache without an SSD tier."""
    return {"ram": {"max_memory": max_memory, **ram}, "ssd": {"enabled": False}}
