"""Blobs that are intact by their digest and made to do harm: a miss each time, and neither memory nor time is taken."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from ssd_tier import Block
from ssd_tier.blob import read_info
from ssd_tier.codec import Part, decode
from ssd_tier.errors import BlobDamaged
from tests.blocks import blob, block, chain, content, path_of, running, spill
from tests.faults.test_damaged_blobs import MB, pick, served
from tests.faults.traps import small

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

DIGEST = '{"__metadata__":{"digest":"'
HONEST = block(60)
Header = dict[str, Any]


def sealed(text: str, data: bytes) -> bytes:
    """A file with this header, whatever it says, and the digest that fits it."""
    head = text.encode()
    head = len(head).to_bytes(8, "little") + head
    cut = 8 + len(DIGEST)
    blank = head[:cut] + b"0" * 32 + head[cut + 32 :]
    return head[:cut] + xxhash.xxh3_128_hexdigest(blank + data).encode() + head[cut + 32 :] + data


def crafted(change: Callable[[Header, Header], object], data: bytes | None = None, of: Block = HONEST) -> bytes:
    """An honest blob after a change to its header and metadata, sealed."""
    file = blob(of)
    size = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + size])
    header["__metadata__"]["digest"] = "0" * 32
    change(header, header["__metadata__"])
    return sealed(json.dumps(header, separators=(",", ":")), file[8 + size :] if data is None else data)


def _tensors(shape: Any, dtype: Any = "BF16") -> Callable[[Header, Header], object]:
    return lambda h, m: m.update(tensors=json.dumps([["0.keys", dtype, shape]]))


def _pad(text: str) -> str:
    """Text with zeros where the digest goes."""
    return text + " " * (len(DIGEST) - len(text) - 1) + '"' + "0" * 32 + '"'


def _moved(by: int) -> Callable[[Header, Header], object]:
    """The last part begins and ends elsewhere; it is as long as before."""
    return lambda h, m: h["0.1"].update({SPAN: [at + by for at in h["0.1"][SPAN]]})


SPAN = "data_offsets"
HEADERS: dict[str, Callable[[Header, Header], object]] = {
    "overlap": lambda h, m: h["0.1"].update({SPAN: [h["0.1"][SPAN][0] - 8, h["0.1"][SPAN][1]]}),
    "gap": lambda h, m: h["0.1"].update({SPAN: [h["0.1"][SPAN][0] + 8, h["0.1"][SPAN][1]]}),
    "backwards": lambda h, m: h["tokens"].update({SPAN: [128, 0]}),
    "offsets of text": lambda h, m: h["tokens"].update({SPAN: ["0", "128"]}),
    "offsets of floats": lambda h, m: h["tokens"].update({SPAN: [0.0, 128.0]}),
    "one offset": lambda h, m: h["tokens"].update({SPAN: [0]}),
    "no offset": lambda h, m: h["tokens"].update({SPAN: []}),
    "huge offset": lambda h, m: h["tokens"].update({SPAN: [0, 2**63]}),
    "infinite offset": lambda h, m: h["tokens"].update({SPAN: [0, float("inf")]}),
    "tensors that are none": lambda h, m: h.update(tokens=7),
    "no metadata": lambda h, m: m.clear() or m.update(digest="0" * 32),
    "another version": lambda h, m: m.update(version="2"),
    "another format": lambda h, m: m.update(format="pt"),
    "no key": lambda h, m: m.pop("key"),
    "a short key": lambda h, m: m.update(key="00"),
    "a key that is none": lambda h, m: m.update(key=5),
    "huge shape": _tensors([2**62, 2**62]),
    "negative shape": _tensors([-1, -2048]),
    "shape of floats": _tensors([2048.0]),
    "shape of text": _tensors(["2048"]),
    "shape of truths": _tensors([True, 2048]),
    "shape that is none": _tensors(2048),
    "shape without end": _tensors([10**4000] * 100),
    "unknown dtype": _tensors([2048], "F4"),
    "dtype that is none": _tensors([2048], ["BF16"]),
    "deep": lambda h, m: m.update(tensors="[" * 100_000 + "]" * 100_000),
    "not a number": lambda h, m: m.update(tensors="NaN", raw_bytes="NaN"),
    "digits without end": lambda h, m: m.update(raw_bytes="9" * 10_000),
    "parts of nothing": lambda h, m: m.update(parts="[[]]"),
    "unknown codec": lambda h, m: m.update(parts='[[["os.system",4096]]]'),
    "negative start": lambda h, m: m.update(start="-1"),
    "huge start": lambda h, m: m.update(start=str(2**63)),
    "start that is none": lambda h, m: m.update(start=[0]),
    "model that is no text": lambda h, m: m.update(model=["rm", "-rf"]),
    "model that is null": lambda h, m: m.update(model=None),
    "half of a character": lambda h, m: m.update(model="\ud800"),
    "classes that are null": lambda h, m: m.update(classes=None),
    "origin that is no text": lambda h, m: m.update(origin={"a": 1}),
}
DATA = HONEST.tokens + blob(HONEST)[-4096:]
TEXTS = {
    "overlap, no byte too many": crafted(_moved(-8), DATA[:-8]),
    "gap, no byte too few": crafted(_moved(8), DATA + bytes(8)),
    "bytes that nobody claims": crafted(_moved(0), DATA + bytes(8)),
    "a list": sealed("[" + _pad('"') + "]", b""),
    "text": sealed(_pad('"'), b""),
    "deep": sealed(_pad('{"a":"') + "," + '"b":' + "[" * 200_000, b""),
    "length 2^63": (2**63).to_bytes(8, "little") + blob(HONEST)[8:],
    "length of all": (len(blob(HONEST)) - 8).to_bytes(8, "little") + blob(HONEST)[8:],
    "twice a key": crafted(_moved(0)).replace(b'"0.0"', b'"0.1"'),
    "no utf-8": sealed(_pad('{"a":"') + "}", b"").replace(b" ", b"\xff"),
}
CRAFTED = {k: crafted(f) for k, f in HEADERS.items()} | {f"header: {k}": v for k, v in TEXTS.items()}


@pytest.mark.parametrize("name", CRAFTED)
async def test_a_crafted_header_is_a_miss_and_an_index_made_from_blobs_leaves_it_out(tmp_path, name):
    file, others, root = CRAFTED[name], chain(3), tmp_path / "cache"
    with small(), contextlib.suppress(BlobDamaged):
        read_info(np.frombuffer(file, np.uint8))
    with small():
        assert served(file, HONEST) is None
    async with running(root) as tier:
        await spill(tier, HONEST, *others)
        path = path_of(tier, HONEST)
        path.write_bytes(file)
        tier.catalog.get(HONEST.key).file_bytes = len(file)
        await pick(tier, HONEST)
        assert tier.counters["lost_damaged"] == 1
    path.write_bytes(file)
    os.unlink(root / "index.sqlite")
    async with running(root) as tier:
        assert [content(await tier.read(b.key)) for b in others] == [content(b) for b in others]
        assert await tier.read(HONEST.key) is None


@functools.cache
def _frame(nbytes: int, declare: bool = True, window: int = 17, step: int = 16 * MB) -> bytes:
    """Zeros, packed."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window, write_content_size=declare)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj(nbytes if declare else -1)
    return b"".join([*(packer.compress(bytes(step)) for _ in range(nbytes // step)),
                     packer.compress(bytes(nbytes % step)), packer.flush()])  # fmt: skip


def _declaring(nbytes: int, frame: bytes) -> bytes:
    """A frame whose header says that it holds so much, in one segment."""
    return b"\x28\xb5\x2f\xfd\xe0" + nbytes.to_bytes(8, "little") + frame


def _window(log: int) -> bytes:
    """A frame that declares 4096 bytes, holds them, and asks for a window of 2^log."""
    return b"\x28\xb5\x2f\xfd\x40" + bytes([(log - 10) << 3]) + (4096 - 256).to_bytes(2, "little") + b"\x03\x80\0\0"


SKIP = b"\x50\x2a\x4d\x18"
BOMBS: dict[str, Callable[[], bytes]] = {
    "1 GiB, declared": lambda: _frame(1 << 30),
    "1 GiB, undeclared": lambda: _frame(1 << 30, declare=False),
    "8 GiB, declared": lambda: _declaring(8 << 30, b"\x02\x00\x10\x00" * 1000),
    "1 GiB said to be 4096": lambda: _declaring(4096, b"\x02\x00\x10\x00" * 8191 + b"\x03\x00\x10\x00"),
    "window 27": lambda: _frame(4096, declare=False, window=27),
    "window 27, declared": lambda: _window(27),
    "window 31, declared": lambda: _window(31),
    "skippable": lambda: SKIP + (4096).to_bytes(4, "little") + bytes(4096),
    "skippable, then 1 GiB": lambda: SKIP + (4096).to_bytes(4, "little") + bytes(4096) + _frame(1 << 30),
    "skippable that ends early": lambda: SKIP + (2**32 - 1).to_bytes(4, "little") + bytes(64),
    "more after it": lambda: _frame(4096) + _frame(1 << 30),
    "a window of 27 after it": lambda: _frame(4096) + _frame(1 << 28, declare=False, window=27),
    "two halves": lambda: _frame(2048) * 2,
    "many of nothing": lambda: _frame(0) * 1000 + _frame(4096),
    "half": lambda: _frame(2048),
    "cut": lambda: _frame(4096)[:-2],
}


@pytest.mark.parametrize("state", [4096, 8 << 30])
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_a_blob_is_a_miss_and_takes_no_memory(name, state):
    """`state`: what the header says the part holds. The index says 4096."""
    frame = BOMBS[name]()
    spec = [["0", "U8", [state]]]
    plain = HONEST.tensors[0]._replace(dtype="U8", shape=(4096,))
    of = replace(HONEST, tensors=(plain,), data=np.zeros(4096, np.uint8))

    def change(h: Header, m: Header) -> None:
        h["0.0"].update({"shape": [len(frame)], SPAN: [128, 128 + len(frame)]})
        m.update(tensors=json.dumps(spec), parts=json.dumps([[["zstd", state]]]), raw_bytes=str(state))

    file, start = crafted(change, of.tokens + frame, of), time.monotonic()
    with small():
        assert served(file, of) is None
        with pytest.raises(BlobDamaged):
            decode([Part("zstd", 4096, np.frombuffer(frame, np.uint8))], "U8", np.empty(4096, np.uint8))
    assert time.monotonic() - start < 5
