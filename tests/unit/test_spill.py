"""The tier: what is spilled comes back, within the budget, and no fault on the way costs more than what it hits."""

import asyncio
import errno
import itertools
import os
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from ssd_tier import SSDTier
from ssd_tier import spill as spill_module
from ssd_tier.files import Directory, default_hook
from ssd_tier.index import read_counters, read_entries, read_only
from ssd_tier.spill import SpillQueue
from tests.blocks import Recorder, blob, block, chain, content, listing, on_disk, options, running, spill

MB = 1 << 20


def bug(reason):
    return pytest.mark.xfail(strict=True, reason=reason)


def keys(*found):
    return [f.key for f in found]


def path_of(tier, b):
    return tier._directory.blob_path(b.key, tier.catalog.get(b.key).generation)


def rows(root):
    with read_only(root / "index.sqlite") as reader:
        return read_entries(reader)


class Watch(Recorder):
    """Looks at the disk and the index from outside, whenever something has changed."""

    def __init__(self, root, index=False):
        super().__init__()
        self.root, self.index, self.peak, self.wrong = root, index, 0, []

    def on_stored(self, entries):
        super().on_stored(entries)
        self.look()
        if self.index:
            here = {e.key: e.parent for e in rows(self.root)}
            self.wrong += [e for e in entries if e.key not in here]
            self.wrong += [k for k, parent in here.items() if parent not in here and parent != entries[0].namespace]

    def on_removed(self, entries):
        super().on_removed(entries)
        self.wrong += [e for e in self.tier.catalog if e.parent in keys(*entries)]

    def look(self, *_):
        self.peak = max(self.peak, on_disk(self.root))


@pytest.mark.parametrize(("durability", "level"), [("cache", 1), ("batch", None), ("full", 3)])
async def test_blocks_come_back_bit_for_bit_also_after_a_restart(tmp_path, durability, level):
    family = chain(4)
    family.append(block(77, family[1]))
    for start in range(2):
        async with running(tmp_path, heard := Recorder(), durability=durability, level=level) as tier:
            if not start:
                await spill(tier, *family)
                assert (heard.stored, heard.lost) == (keys(*family), {})
            for b in family:
                assert content(await tier.read(b.key)) == content(b)
            assert (await tier.read(bytes(32)), tier.counters["miss_evicted"]) == (None, 1)
        assert keys(*rows(tmp_path)) == keys(family[4], *family[3:0:-1], family[0]) or start == 0


async def test_no_row_stands_without_its_ancestors_rows(tmp_path):
    heard = Watch(tmp_path, index=True)
    async with running(tmp_path, heard, budget=4 * MB) as tier:  # two blocks a batch
        await spill(tier, *chain(9, nbytes=MB // 4))
        assert len(heard.stored) == len(tier.catalog) == 9
    assert heard.wrong == []


async def test_what_hangs_on_a_failed_block_is_lost_with_its_own_reason(tmp_path):
    family, other = chain(3), chain(2, seed=1)
    async with running(tmp_path, heard := Recorder()) as tier:

        def hook(operation, name):
            if operation == "rename" and name.startswith(family[0].key.hex()):
                raise OSError(errno.EIO, "no")

        tier._directory.hook = hook
        await spill(tier, *family, *other)
        await spill(tier, chain(5, seed=2)[4])  # whose parents were never handed over
        assert heard.stored == keys(*other) == keys(*rows(tmp_path))[::-1]
        assert list(heard.lost.values()).count("parent_not_stored") == tier.counters["lost_parent_not_stored"] == 3
        assert heard.lost[family[0].key] == "write_failed"
        assert len(listing(tmp_path, "blobs")) == 2


async def test_nothing_is_written_twice_and_no_name_is_used_again(tmp_path):
    family, names = chain(3), []
    for _ in range(2):
        async with running(tmp_path, heard := Recorder()) as tier:
            for _ in range(2):
                await spill(tier, *family)
                names.append(listing(tmp_path, "blobs"))
            assert heard.stored == 2 * keys(*family)  # told all the same: they are there
    assert [len(n) for n in names] == [3, 3, 3, 3]
    assert all(n == names[0] for n in names)
    async with running(tmp_path) as tier:
        await tier.remove(keys(*family))
        await spill(tier, *family)
    assert not set(names[0]) & set(listing(tmp_path, "blobs"))


@bug("both are written, and one of the files is forgotten")
async def test_a_block_handed_over_twice_is_written_once(tmp_path):
    async with running(tmp_path) as tier:
        await spill(tier, block(0), block(0))
        assert len(listing(tmp_path, "blobs")) == 1


@pytest.mark.parametrize("kind", ["budget", "floor"])
async def test_the_disk_never_holds_more_than_it_may(tmp_path, monkeypatch, kind):
    limit = 6 * MB
    limits = {"budget": limit}
    if kind == "floor":
        monkeypatch.setattr(Directory, "free_bytes", lambda self: 9 * MB - on_disk(tmp_path))
        limits = {"min_free": 3 * MB, "budget": 12 * MB}
    async with running(tmp_path, heard := Watch(tmp_path), **limits) as heard.tier:
        heard.tier._directory.hook = heard.look
        for seed in range(30):
            await spill(heard.tier, *chain(4, seed, nbytes=MB // 4))
        assert limit / 2 < heard.peak <= limit
        assert (heard.wrong, heard.lost) == ([], {})
        assert set(heard.stored) - set(heard.removed) == set(keys(*heard.tier.catalog))
        assert len(heard.removed) == heard.tier.counters["blocks_evicted"] > 90
        assert content(await heard.tier.read(heard.stored[-1])) == content(chain(4, 29, nbytes=MB // 4)[3])
    async with running(tmp_path, budget=4 * MB):
        assert on_disk(tmp_path) <= 4 * MB
