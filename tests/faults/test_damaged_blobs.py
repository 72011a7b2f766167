"""Blobs damaged in every way that a disk, a kill or a stray hand can do it: a miss each time, never wrong bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from ssd_tier import Block
from ssd_tier.blob import read_identity
from ssd_tier.errors import BlobDamaged
from ssd_tier.files import Directory
from ssd_tier.reader import read_block
from tests.blocks import blob, block, chain, content, entry, listing, on_disk, path_of, running, spill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

MB = 1 << 20
SMALL = block(1, nbytes=512)
LARGE = block(2, nbytes=4 * MB, tokens=256)


class Memory:
    """In the place of `Directory`: one file, in RAM."""

    def __init__(self, file: bytes | bytearray) -> None:
        self.file = file
        self.view = np.frombuffer(file, np.uint8)

    def read(self, key: bytes, generation: int, nbytes: int) -> Any:
        if nbytes != len(self.file):
            raise BlobDamaged("another size")
        return self.view

    def read_start(self, nbytes: int) -> tuple[bytes, int]:
        return bytes(self.file[:nbytes]), len(self.file)


def served(file: Memory | bytes, of: Block, **changes: Any) -> Block | None:
    """What a read of block `of` gives where its file is this; any exception but `BlobDamaged` is a fault."""
    memory = file if isinstance(file, Memory) else Memory(file)
    row = entry(of, **{"file_bytes": len(memory.file)} | changes)
    try:
        return read_block(cast(Directory, memory), row)
    except BlobDamaged:
        return None


def identified(memory: Memory) -> bytes | None:
    """The key that an index made from blobs would give to the file; its row is one that an index can hold."""
    try:
        info = read_identity(memory.read_start)
    except BlobDamaged:
        return None
    assert 0 <= info.start < 2**63 > info.raw_bytes > 0
    assert all(isinstance(text, str) and text.encode() is not None for text in (info.model, info.classes, info.origin))
    return info.key


def bits(file: bytearray, step: int = 1, flip: Callable[[int], int] = lambda i: i % 8) -> Iterator[int]:
    """Flips one bit in each `step`-th byte in turn, and flips it back."""
    for i in range(0, len(file), step):
        mask = 1 << flip(i)
        file[i] ^= mask
        yield i
        file[i] ^= mask


@pytest.mark.parametrize(("nbytes", "dtype", "level"), [
    (1024, "BF16", 1), (1024, "F32", 1), (1024, "U8", 3), (1024, "BF16", None)])
def test_no_bit_of_a_small_blob_can_flip_unseen(nbytes, dtype, level):
    width = {"BF16": 2, "F32": 4, "U8": 1}[dtype]
    spec = SMALL.tensors[0]._replace(dtype=dtype, shape=(nbytes // width,))
    data = np.random.default_rng(3).integers(0, 40, nbytes, np.uint8)  # compresses, but not to nothing
    b = block(1, tensors=(spec,), data=data)
    file = bytearray(blob(b, level))
    assert 1_125 <= len(file) <= 2_500
    assert content(served(bytes(file), b)) == content(b)
    memory, cases, found = Memory(file), 0, set()
    for bit in range(8):
        for i in bits(file, flip=lambda _, bit=bit: bit):
            assert served(memory, b) is None, f"bit {bit} of byte {i}"
            found.add(identified(memory))
            cases += 1
    assert cases == 8 * len(file) >= 9_000
    assert found <= {None, b.key}, "an index made from a damaged blob may hold its key or nothing"
    assert content(served(bytes(file), b)) == content(b)


def test_no_byte_of_a_large_blob_can_change_unseen():
    file, rng = bytearray(blob(LARGE)), random.Random(5)
    memory, cases = Memory(file), 0
    for i in bits(file, 97, lambda _: rng.randrange(8)):
        assert served(memory, LARGE) is None, i
        cases += 1
    assert cases > 43_000
    for _ in range(2_000):
        at, length = rng.randrange(len(file)), rng.randrange(2, 600)
        good = bytes(file[at : at + length])
        burst = rng.choice([rng.randbytes(len(good)), b"\0" * len(good), b"\xff" * len(good)])
        file[at : at + length] = burst
        assert (served(memory, LARGE) is None) == (burst != good), at
        file[at : at + length] = good
    assert content(served(memory, LARGE)) == content(LARGE)


def test_what_is_cut_lengthened_or_emptied_is_not_served_whatever_the_index_says_of_its_size():
    rng = random.Random(7)
    for b, cuts in ((SMALL, None), (LARGE, 200)):
        file = blob(b)
        lengths = range(len(file)) if cuts is None else sorted(rng.sample(range(len(file)), cuts))
        for n in lengths:
            cut = Memory(file[:n])
            assert served(cut, b) is served(cut, b, file_bytes=len(file)) is None
            assert identified(cut) in (None, b.key)
        for n in [*range(1, 33), 100, 511, 512, 1000, 4095, 4096]:
            for tail in (b"\0" * n, b" " * n, rng.randbytes(n), file[:n]):
                longer = Memory(file + tail)
                assert served(longer, b) is served(longer, b, file_bytes=len(file)) is None
                assert identified(longer) is None
        for n in (1, 2, 8, 64, 100, 512, 4096, len(file) // 2, len(file) - 8, len(file)):
            zeros = file[: max(0, len(file) - n)] + b"\0" * min(n, len(file))
            assert (served(zeros, b) is None) == (zeros != file)
        for empty in (b"", b"\0", b"\0" * 8, b"\xff" * 8, b"\xff" * len(file), b"{}" * (len(file) // 2)):
            assert served(empty, b) is None
            assert identified(Memory(empty)) is None


async def pick(tier: Any, b: Block) -> None:
    """A damaged blob is asked for, twice."""
    assert await tier.read(b.key) is None
    assert await tier.read(b.key) is None


async def test_a_running_tier_sets_each_damaged_blob_aside_once_and_serves_all_others(tmp_path):
    victim, others, rng = SMALL, [*chain(3, seed=3), block(50, nbytes=MB)], random.Random(11)
    harms: list[Callable[[bytearray], bytearray]] = []
    for _ in range(140):
        i, bit = rng.randrange(1_000), rng.randrange(8)
        harms.append(lambda f, i=i, bit=bit: f[:i] + bytes([f[i] ^ 1 << bit]) + f[i + 1 :])
    harms += [lambda f, n=n: f[: len(f) * n // 20] for n in range(20)]
    harms += [lambda f, n=n: f + bytes(n) for n in (1, 7, 512, 4096)]
    harms += [lambda f, n=n: f[:-n] + bytes(n) for n in (30, 100, 512)]
    harms += [lambda f: bytearray(len(f)), lambda f: f[::-1]]
    async with running(tmp_path) as tier:
        await spill(tier, *others)
        for n, harm in enumerate(harms, 1):
            await spill(tier, victim)
            path, kept = path_of(tier, victim), listing(tmp_path, "quarantine")
            harmed = bytes(harm(bytearray(path.read_bytes())))
            path.write_bytes(harmed)
            await pick(tier, victim)
            assert (tier.counters["lost_damaged"], tier.counters["miss_evicted"]) == (n, n)
            assert sorted(listing(tmp_path, "quarantine")) == sorted([*kept, path.name])
            assert (tmp_path / "quarantine" / path.name).read_bytes() == harmed
            other = others[n % 4]
            assert content(await tier.read(other.key)) == content(other)
        assert len(listing(tmp_path, "blobs")) == len(tier.catalog) == 4
        assert tier.counters["blocks_read"] == len(harms)
        assert not {k for k in tier.counters if k.startswith("lost_")} - {"lost_damaged", "lost_missing"}
    async with running(tmp_path) as tier:
        assert [content(await tier.read(b.key)) for b in others] == [content(b) for b in others]
        assert (tier.counters["lost_damaged"], tier.counters["lost_missing"]) == (0, 0)
        assert len(listing(tmp_path, "quarantine")) == len(harms)


async def test_what_is_set_aside_stays_within_its_share_of_the_budget(tmp_path):
    many = [block(i, nbytes=MB // 4) for i in range(12)]
    async with running(tmp_path, budget=32 * MB) as tier:
        await spill(tier, *many)
        for n, b in enumerate(many, 1):
            os.truncate(path_of(tier, b), 200_000)
            await pick(tier, b)
            assert tier.counters["lost_damaged"] == n
            assert on_disk(tmp_path / "quarantine") <= 32 * MB // 64
            assert on_disk(tmp_path) <= 32 * MB
        assert len(listing(tmp_path, "quarantine")) == 2
    async with running(tmp_path, budget=6 * MB) as tier:  # there is no room for what is larger than that share
        await spill(tier, many[0])
        os.truncate(path_of(tier, many[0]), 200_000)
        await pick(tier, many[0])
        assert on_disk(tmp_path / "quarantine") <= 6 * MB // 64


def _strangers(b: Block) -> list[Block]:
    """Intact blocks of the same size as `b` that are something else, though some have its key or its tokens."""
    other_space = bytes(32)
    return [
        block(91),
        block(92, chain(1)[0]),
        replace(b, namespace=other_space),  # its key no longer belongs to it
        replace(b, key=block(91).key),
        replace(b, parent=other_space),
        replace(b, start=17),
        replace(b, tensors=(b.tensors[0],) * 4, data=np.concatenate([b.data, b.data])),
    ]


async def test_an_intact_blob_in_another_ones_place_is_damaged_there(tmp_path):
    a, b, c = (block(i) for i in (1, 2, 3))
    assert a.nbytes == 4096
    async with running(tmp_path) as tier:
        await spill(tier, a, b, c)
        first, second = path_of(tier, a), path_of(tier, b)
        assert first.stat().st_size == second.stat().st_size
        aside = first.with_suffix(".aside")
        first.rename(aside)
        second.rename(first)
        aside.rename(second)
        assert [await tier.read(x.key) for x in (a, b)] == [None, None]
        assert (tier.counters["lost_damaged"], len(listing(tmp_path, "quarantine"))) == (2, 2)
        assert content(await tier.read(c.key)) == content(c)
        for n, stranger in enumerate(_strangers(a), 3):
            await spill(tier, a)
            path = path_of(tier, a)
            path.write_bytes(strange := blob(stranger))
            tier.catalog.get(a.key).file_bytes = len(strange)  # as if the index agreed
            assert await tier.read(a.key) is None, n
            assert (tier.counters["lost_damaged"], len(listing(tmp_path, "quarantine"))) == (n, n)
            assert content(await tier.read(c.key)) == content(c)


async def test_more_layers_or_another_model_make_another_block_and_never_pass_for_this_one(tmp_path):
    """Layer count and classes are part of the namespace; a file that keeps the key but changes them has other sizes."""
    a, c = block(1), block(3)
    spec = a.tensors[0]
    fewer = block(1, tensors=(spec,), data=a.data[:2048])
    more = block(1, tensors=(*a.tensors, spec, spec), data=np.concatenate([a.data, a.data]))
    another_space = block(1, namespace=bytes(range(32)))
    async with running(tmp_path) as tier:
        for n, stranger in enumerate((fewer, more, another_space), 1):
            await spill(tier, a, c)
            path = path_of(tier, a)
            path.write_bytes(blob(stranger))
            tier.catalog.get(a.key).file_bytes = path.stat().st_size
            assert await tier.read(a.key) is None
            assert tier.counters["lost_damaged"] == n
            assert content(await tier.read(c.key)) == content(c)


async def test_a_stale_generation_is_not_read_and_goes_at_the_next_open(tmp_path):
    a, c = block(1), block(3)
    async with running(tmp_path) as tier:
        await spill(tier, a, c)
        path = path_of(tier, a)
        stale = path.with_name(f"{a.key.hex()}-{5:016x}.safetensors")
        path.rename(stale)  # intact, of the right block, and not the file that the row names
        assert await tier.read(a.key) is None
        assert (tier.counters["lost_missing"], tier.counters["lost_damaged"]) == (1, 0)
        await spill(tier, a)
        assert content(await tier.read(a.key)) == content(a)
        stale.write_bytes(blob(block(1, data=block(2).data)))  # another content under the same key
        assert content(await tier.read(a.key)) == content(a)
        now_at = path_of(tier, a).name
    async with running(tmp_path) as tier:
        assert content(await tier.read(a.key)) == content(a)
        assert sorted(listing(tmp_path, "blobs")) == sorted([now_at, path_of(tier, c).name])
