"""Files that are larger than any disk, and an index used as a weapon: no other block is lost, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from ssd_tier import Block, SSDTier
from tests.blocks import Recorder, block, on_disk, path_of, running, spill
from tests.faults.traps import (
    BUDGET,
    FAMILY,
    INDEX,
    MB,
    closed_cache,  # noqa: F401  the fixture `root`
    guarded,
    live,
    precious_files,  # noqa: F401  the fixture `precious`
    small,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]

SPARSE = 10 << 40


def change(root: Path, statement: str, *values: object) -> None:
    """Somebody's SQL, which the schema's checks do not hold up."""
    with contextlib.closing(sqlite3.connect(root / "index.sqlite", isolation_level=None)) as c:
        c.execute("PRAGMA ignore_check_constraints = ON")
        c.execute(statement, values)


def file_of(root: Path, b: Block) -> Path:
    """Where a closed cache keeps the block."""
    (path,) = (root / "blobs" / b.key.hex()[:2]).glob(f"{b.key.hex()}-*.safetensors")
    return path


@pytest.mark.parametrize("claim", ["no row", "row of the old size", "row of this size", "row of this state, too"])
@pytest.mark.parametrize("use", ["first", "last"])
async def test_a_sparse_blob_costs_no_other_block(root, precious, claim, use):
    victim, path = FAMILY[3], file_of(root, FAMILY[3])
    os.truncate(path, SPARSE)
    change(root, "UPDATE block SET seq = ? WHERE key = ?", {"first": 0, "last": 10**6}[use], victim.key)
    if claim == "no row":
        change(root, "DELETE FROM block WHERE key = ?", victim.key)
    if "this" in claim:
        change(root, "UPDATE block SET file_bytes = ? WHERE key = ?", SPARSE, victim.key)
    if claim == "row of this state, too":
        change(root, "UPDATE block SET raw_bytes = ? WHERE key = ?", SPARSE, victim.key)
    with guarded(root), small():
        assert await live(root, but={victim.key}) == "open"
    assert on_disk(root) <= BUDGET


@pytest.mark.parametrize("name", ["tmp/1-0", "tmp/17-3", "quarantine/index-5.sqlite", *INDEX[:2]])
async def test_sparse_files_elsewhere_cost_no_block(root, precious, name):
    (root / name).touch()
    os.truncate(root / name, SPARSE)
    with guarded(root), small():
        await live(root, but=set())


@pytest.mark.parametrize("size", [4952, SPARSE])
async def test_a_sparse_blob_under_a_running_tier_is_a_miss(root, precious, size):
    def harm(tier: SSDTier) -> None:
        os.truncate(path_of(tier, FAMILY[3]), 0)
        os.truncate(path_of(tier, FAMILY[3]), size)
        tier.catalog.get(FAMILY[3].key).file_bytes = size

    with guarded(root), small():
        assert await live(root, but={FAMILY[3].key}, harm=harm) == "open"


# -- the index as a weapon

PATHS = ("../../x", "/etc/passwd", "", "\0", "a\0b", "x" * 300, "../" * 90, "%s%n", "\n")
COLUMNS = [("block", c) for c in ("key", "namespace", "parent")] + [
    ("block_tokens", "key"), ("block_tokens", "ids"), ("namespace", "digest"), ("namespace", "model"),
    ("layers", "namespace"), ("layers", "origin"), ("layers", "classes"), ("counter", "name"),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("table", "column"), COLUMNS)
async def test_no_path_in_the_index_leads_anywhere(root, precious, table, column, path):
    text = (table, column) in [("namespace", "model"), ("layers", "origin"), ("layers", "classes"), ("counter", "name")]
    which = f"(SELECT min({column}) FROM {table})"
    change(root, f"UPDATE {table} SET {column} = ? WHERE {column} = {which}", path if text else path.encode())
    with guarded(root), small():
        assert await live(root, but=set()) == "open"


HUGE = 2**63 - 1
NUMBERS = [(c, n) for c in ("generation", "start", "file_bytes", "raw_bytes", "seq", "hits", "created", "used")
           for n in (-HUGE - 1, -1, 0, HUGE)]  # fmt: skip


@pytest.mark.parametrize(("column", "number"), NUMBERS)
async def test_no_number_in_a_row_costs_another_block(root, precious, column, number):
    change(root, f"UPDATE block SET {column} = ? WHERE key = ?", number, FAMILY[3].key)
    with guarded(root), small():
        async with running(root, heard := Recorder(), budget=BUDGET) as tier:
            await spill(tier, block(80))
        assert heard.stored == [block(80).key]
        assert await live(root, but={FAMILY[3].key}) == "open"


@pytest.mark.parametrize("number", [HUGE, -HUGE - 1])
async def test_counters_that_are_full_do_not_stop_the_writing(root, precious, number):
    change(root, "UPDATE counter SET value = ?", number)
    change(root, "UPDATE written SET bytes = ?", number)
    with guarded(root):
        async with running(root, heard := Recorder(), budget=BUDGET) as tier:
            await spill(tier, block(80))
    assert heard.stored == [block(80).key]


class Counted(OrderedDict[bytes, Any]):
    """Entries of a catalog that give out after so many look-ups: for what would go on without end."""

    looked = 0

    def get(self, key: bytes, default: Any = None) -> Any:
        self.looked += 1
        assert self.looked < 10_000, "a walk that does not end"
        return super().get(key, default)


@pytest.mark.parametrize("parents", [{3: 3}, {0: 2}, {0: 1}, {3: 5, 4: 3}])
async def test_rows_that_are_their_own_ancestors_hang_nothing(root, precious, parents):
    """By number in FAMILY: whose child becomes whose."""
    for child, parent in parents.items():
        change(root, "UPDATE block SET parent = ? WHERE key = ?", FAMILY[parent].key, FAMILY[child].key)
    with guarded(root), small():
        async with running(root, budget=BUDGET) as tier:
            entries = tier.catalog._entries = Counted(tier.catalog._entries)
            for n, above in enumerate(FAMILY):
                await spill(tier, block(90 + n, above))
            tier.touch([b.key for b in FAMILY])
            await tier._store.make_room(BUDGET - 3 * MB, set())
    assert entries.looked < 10_000
