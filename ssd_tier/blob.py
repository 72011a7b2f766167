"""The file format: one block of attention state in a valid safetensors file.

    header length   u64 little-endian
    header          JSON: "__metadata__" (strings), then the stored parts as U8 tensors and "tokens" as I64 [n]
    data            the parts, one after the other

Any safetensors parser opens it and shows, in the metadata, what it holds: `tensors` lists name, dtype and shape of each
tensor of the state in the order of its bytes. Tensors of one dtype that follow each other are coded as one stretch
(`parts` says how): per-tensor streams are no smaller and cost a call each.

The first metadata entry is an XXH3-128 digest over every byte of the file, its own 32 hex digits read as zeros. It
finds damage, not malice. What the block *is* (namespace, parent, token ids) is checked apart: their SHA-256 is the
file's name.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from ssd_tier.buffers import Bytes, view
from ssd_tier.codec import Codec, Part, decode, encode
from ssd_tier.errors import BlobDamaged
from ssd_tier.keys import TOKEN_BYTES, chain_key

FORMAT = "tiered-cache"
VERSION = "1"
MAX_HEADER = 1 << 20  # bytes; a block of 200 layers needs about 40 kB
_MAX_TOKENS = 1 << 26  # bytes of token ids in a file whose digest is not looked at
_FIRST_READ = 1 << 16  # bytes: header and token ids of most blocks
_DIGEST_AT = len('{"__metadata__":{"digest":"')
_DIGEST_LEN = 32
_NO_DIGEST = "0" * _DIGEST_LEN

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class TensorSpec(NamedTuple):
    """A tensor inside a block: safetensors' dtype name and the shape, row-contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block as it stands in RAM: `data` is uint8, the tensors' bytes one after the other.

    `tokens` are the block's own token ids (int64 little-endian), `start` how many tokens come before it, `classes` what
    the layers are (opaque here), `model` a label for people, `origin` who made it (opaque, too), `replaces` keys that
    are of no use once this one is stored, `keep` whether it is to go after all others.
    """

    key: bytes
    namespace: bytes
    parent: bytes
    tokens: bytes
    start: int
    tensors: tuple[TensorSpec, ...]
    classes: str
    data: Bytes
    model: str = ""
    replaces: tuple[bytes, ...] = ()
    origin: str = ""
    keep: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of state, as it stands in RAM."""
        return len(self.data)


class BlobInfo(NamedTuple):
    """What a blob says of itself, before its parts are decoded."""

    key: bytes
    namespace: bytes
    parent: bytes
    tokens: bytes
    start: int
    model: str
    classes: str
    origin: str
    tensors: tuple[TensorSpec, ...]
    parts: list[list[Part]]  # one list a stretch of one dtype
    raw_bytes: int


def encode_blob(block: Block, level: int | None) -> list[Bytes | bytes]:
    """The file's bytes, as parts to be written in turn. Any thread; the parts may be views of `block.data`."""
    stretches: list[list[Part]] = []
    at = 0
    for dtype, nbytes in _stretches(block.tensors):
        stretches.append(encode(block.data[at : at + nbytes], dtype, level))
        at += nbytes
    if at != block.nbytes:
        raise ValueError(f"a block of {block.nbytes} bytes with tensors of {at}")
    stored = [(f"{i}.{j}", part) for i, stretch in enumerate(stretches) for j, part in enumerate(stretch)]
    metadata = {
        "digest": _NO_DIGEST,
        "format": FORMAT,
        "version": VERSION,
        "key": block.key.hex(),
        "namespace": block.namespace.hex(),
        "parent": block.parent.hex(),
        "start": str(block.start),
        "model": block.model,
        "classes": block.classes,
        "origin": block.origin,
        "tensors": json.dumps(block.tensors, separators=(",", ":")),
        "parts": json.dumps([[(p.codec, p.raw_bytes) for p in s] for s in stretches], separators=(",", ":")),
        "raw_bytes": str(block.nbytes),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    at = len(block.tokens)
    header["tokens"] = {"dtype": "I64", "shape": [at // TOKEN_BYTES], "data_offsets": [0, at]}
    for name, part in stored:
        header[name] = {"dtype": "U8", "shape": [len(part.data)], "data_offsets": [at, at + len(part.data)]}
        at += len(part.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for aligned data
    data: list[Bytes | bytes] = [block.tokens, *(part.data for _, part in stored)]
    head = len(text).to_bytes(8, "little") + text
    digest = _digest([head, *data]).encode()
    cut = 8 + _DIGEST_AT
    return [head[:cut] + digest + head[cut + _DIGEST_LEN :], *data]


def read_info(file: Bytes) -> BlobInfo:
    """Verify a whole file (uint8 [n]) and say what it holds; `BlobDamaged` where anything is not as written.

    Every byte is covered by the digest; key, namespace, parent and tokens must belong together. The parts are views of
    `file`. Any thread; lets go of the GIL for the digest.
    """
    size = _header_bytes(file[:8].tobytes(), len(file))
    head = file[: 8 + size].tobytes()
    cut = 8 + _DIGEST_AT
    blank = head[:cut] + _NO_DIGEST.encode() + head[cut + _DIGEST_LEN :]
    if _digest([blank, file[8 + size :]]).encode() != head[cut : cut + _DIGEST_LEN]:
        raise BlobDamaged("the digest does not match")
    with _only_ours():
        return _parse(json.loads(head[8:]), file[8 + size :], len(file) - 8 - size)


def read_identity(read: Callable[[int], tuple[bytes, int]]) -> BlobInfo:
    """What a blob says of itself, by its first bytes alone; `BlobDamaged` where they are not as written.

    `read(n)` gives the first n bytes, or all there are, and the size of the file. Key, namespace, parent and tokens are
    found to belong together; the digest, which covers every byte, is not looked at, and the parts are not there.
    """
    start, nbytes = read(_FIRST_READ)
    size = _header_bytes(start[:8], nbytes)
    with _only_ours():
        if len(start) < 8 + size:
            start, _ = read(8 + size)
        header = json.loads(start[8 : 8 + size])
        head = 8 + size + int(header["tokens"]["data_offsets"][1])
        if len(start) < head <= min(nbytes, 8 + size + _MAX_TOKENS):
            start, _ = read(head)
        info = _parse(header, np.frombuffer(start[8 + size : head], np.uint8), nbytes - 8 - size)
        return info._replace(parts=[])


def _header_bytes(start: bytes, nbytes: int) -> int:
    """The length of the header of a file of `nbytes`, by its first 8 bytes."""
    if len(start) < 8:
        raise BlobDamaged("too short for a header")
    size = int.from_bytes(start, "little")
    if not 0 < size <= min(MAX_HEADER, nbytes - 8):
        raise BlobDamaged("the header's length is impossible")
    return size


@contextlib.contextmanager
def _only_ours() -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration, RecursionError, OverflowError) as e:
        raise BlobDamaged(f"the header is not one of ours ({e!r})") from e


def decode_blob(info: BlobInfo, out: Bytes) -> None:
    """Decode the state into `out` (uint8 [raw_bytes]). Raises `BlobDamaged`. Any thread; lets go of the GIL."""
    if len(out) != info.raw_bytes:
        raise BlobDamaged(f"holds {info.raw_bytes} bytes of state where {len(out)} are expected")
    at = 0
    for (dtype, nbytes), parts in zip(_stretches(info.tensors), info.parts, strict=True):
        decode(parts, dtype, out[at : at + nbytes])
        at += nbytes


def _parse(header: dict[str, Any], data: Bytes, length: int) -> BlobInfo:
    """`data`: what follows the header, `length` bytes, or its beginning with the tokens."""
    meta = cast("dict[str, str]", header.pop("__metadata__"))
    if not all(type(v) is str for v in meta.values()):
        raise BlobDamaged("metadata that is no text")
    "".join(meta.values()).encode()  # ValueError for half a character, which no index would take
    if not 0 <= int(meta["start"]) < 1 << 62 or not 0 <= int(meta["raw_bytes"]) < 1 << 62:
        raise BlobDamaged("a number is impossible")
    if meta["format"] != FORMAT or meta["version"] != VERSION:
        raise BlobDamaged(f"format {meta['format']} {meta['version']}, not {FORMAT} {VERSION}")
    spans = []
    at = 0
    for name, tensor in header.items():
        start, stop = tensor["data_offsets"]
        if start != at or stop < start:
            raise BlobDamaged("tensors overlap or leave gaps")
        at = stop
        spans.append((name, data[start:stop]))
    if at != length or not spans or spans[0][0] != "tokens":
        raise BlobDamaged("tensors do not fill the file")
    tokens = spans.pop(0)[1].tobytes()
    tensors = tuple(TensorSpec(n, d, tuple(s)) for n, d, s in json.loads(meta["tensors"]))
    if not all(type(n) is int and n >= 0 for t in tensors for n in t.shape):
        raise BlobDamaged("a shape is impossible")
    queue = iter(spans)
    parts = [[_part(next(queue), *p) for p in stretch] for stretch in json.loads(meta["parts"])]
    namespace, parent, key = (bytes.fromhex(meta[k]) for k in ("namespace", "parent", "key"))
    raw = sum(t.nbytes for t in tensors)
    # Of each stretch, too: nothing is unpacked that is larger than what comes of it.
    sizes = [sum(p.raw_bytes for p in stretch) for stretch in parts]
    if next(queue, None) or raw != int(meta["raw_bytes"]) or sizes != [n for _, n in _stretches(tensors)]:
        raise BlobDamaged("parts and tensors do not fit each other")
    if len(tokens) % TOKEN_BYTES or not tokens or chain_key(namespace, parent, tokens) != key:
        raise BlobDamaged("key, namespace, parent and tokens do not belong together")
    return BlobInfo(
        key, namespace, parent, tokens, int(meta["start"]), meta["model"], meta["classes"],
        meta.get("origin", ""), tensors, parts, raw,
    )  # fmt: skip


def _part(stored: tuple[str, Bytes], codec: Codec, raw_bytes: int) -> Part:
    if codec not in ("raw", "zstd") or type(raw_bytes) is not int or raw_bytes < 0:
        raise BlobDamaged(f"no part is {codec!r} of {raw_bytes} bytes")
    return Part(codec, raw_bytes, stored[1])


def _stretches(tensors: Sequence[TensorSpec]) -> list[tuple[str, int]]:
    """Dtype and bytes of each run of tensors that share a dtype."""
    return [(dtype, sum(t.nbytes for t in run)) for dtype, run in groupby(tensors, key=lambda t: t.dtype)]


def _digest(parts: Iterable[Bytes | bytes]) -> str:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(view(part))
    return state.hexdigest()
