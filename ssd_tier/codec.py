"""Lossless compression of attention state: byte planes, and zstandard where that pays.

Of a 16-bit float of attention state the exponent compresses well and the mantissa not at all, and interleaved they hide
this from an entropy coder. So the bits are rotated left by one (the sign goes to the end, the exponent fills whole
bytes), the plane of exponents is compressed, the rest is stored as it is. Nothing but the exponents' frequencies can be
gained, so the search for repeats is cut to a minimum: a third of level 1's time, and no larger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from ssd_tier.buffers import Bytes, Scratch, view
from ssd_tier.errors import BlobDamaged

Codec = Literal["raw", "zstd"]

_SMALL_WINDOW = 1 << 20  # bytes
PAYS = 0.95  # a plane that keeps more than this share of its bytes is stored as it is
_CHUNK = 1 << 19  # elements per pass: fewer would trade the GIL more often, more would leave the last-level cache
_WIDTH = {"BF16": 2, "F16": 2, "F32": 4}  # dtypes that are split into planes, and their bytes


class Part(NamedTuple):
    """One stored stretch of bytes: how it is coded, what it decodes to (bytes), and the bytes in the file."""

    codec: Codec
    raw_bytes: int
    data: Bytes


class _Coders(threading.local):
    """zstandard's contexts must not be shared between threads."""

    def __init__(self) -> None:
        self.compressors: dict[tuple[int, bool], zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()

    def compressor(self, level: int, entropy_only: bool) -> zstandard.ZstdCompressor:
        coder = self.compressors.get((level, entropy_only))
        if coder is None:
            if entropy_only:
                parameters = zstandard.ZstdCompressionParameters.from_level(
                    level,
                    strategy=zstandard.STRATEGY_FAST,
                    min_match=7,
                    hash_log=6,
                    chain_log=6,
                    search_log=1,
                    window_log=17,
                    target_length=0,
                )
                coder = zstandard.ZstdCompressor(compression_params=parameters)
            else:
                coder = zstandard.ZstdCompressor(level=level)
            self.compressors[level, entropy_only] = coder
        return coder


_coders = _Coders()
_scratch = Scratch()  # for a piece of a compressed plane: there is at most one in what `encode` makes


def encode(data: Bytes, dtype: str, level: int | None) -> list[Part]:
    """Code a stretch of one dtype (safetensors' names) at zstandard `level`, or uncompressed where that is None.

    `data` is uint8, contiguous; parts may be views of it. Any thread; lets go of the GIL.
    """
    width = _WIDTH.get(dtype)
    if level is None:
        return [Part("raw", len(data), data)]
    if width is None:
        return [_compress(data, level, entropy_only=False)]
    exponents, rest = _split16(data.view(np.uint16)) if width == 2 else _split32(data.view(np.uint32))
    return [_compress(exponents, level, entropy_only=level == 1), Part("raw", len(rest), rest)]


def decode(parts: list[Part], dtype: str, out: Bytes) -> None:
    """Undo `encode` into `out` (uint8, contiguous, of the exact length).

    Raises `BlobDamaged` where a part does not hold what it says. Any thread; lets go of the GIL.
    """
    if sum(p.raw_bytes for p in parts) != len(out):
        raise BlobDamaged("parts do not add up to the stated length")
    if sum(p.codec == "zstd" for p in parts) > 1:
        raise BlobDamaged("more than one compressed plane")
    width, sizes = _WIDTH.get(dtype), [p.raw_bytes for p in parts]
    if len(parts) == 1:
        for at, piece in zip(range(0, len(out), _CHUNK), _pieces(parts[0], _CHUNK), strict=True):
            out[at : at + _CHUNK] = piece
    elif len(parts) == 2 and width == 2 and sizes[0] == sizes[1]:
        _join(parts, 1, out.view(np.uint16), _join16)
    elif len(parts) == 2 and width == 4 and 3 * sizes[0] == sizes[1]:
        _join(parts, 3, out.view(np.uint32), _join32)
    else:
        raise BlobDamaged(f"{len(parts)} planes do not make {dtype}")


def _compress(data: Bytes, level: int, *, entropy_only: bool) -> Part:
    packed = _coders.compressor(level, entropy_only).compress(view(data))
    if len(packed) > PAYS * len(data):
        return Part("raw", len(data), data)
    return Part("zstd", len(data), np.frombuffer(packed, np.uint8))


def _pieces(part: Part, size: int) -> Iterator[Bytes]:
    """What a part decodes to, `size` bytes at a time; each piece holds until the next is asked for."""
    if part.codec == "raw":
        if len(part.data) != part.raw_bytes:
            raise BlobDamaged("a stored part has another length than stated")
        for at in range(0, part.raw_bytes, size):
            yield part.data[at : at + size]
        return
    try:
        # The frame's own word comes first: max_output_size does not bound a frame that declares its size.
        frame = zstandard.get_frame_parameters(view(part.data))
        if frame.content_size != part.raw_bytes:
            raise BlobDamaged("a compressed part declares another length than stated")
        if frame.window_size > max(part.raw_bytes, _SMALL_WINDOW):
            raise BlobDamaged("a compressed part asks for more memory than it can need")
        scratch = _scratch.take(size)
        with _coders.decompressor.stream_reader(view(part.data), read_across_frames=True) as reader:
            for at in range(0, part.raw_bytes, size):
                piece = scratch[: min(size, part.raw_bytes - at)]
                done = 0
                while done < len(piece) and (n := reader.readinto(piece[done:])):
                    done += n
                if done < len(piece):  # stream readers accept what has been cut short
                    raise BlobDamaged("a compressed part ends too early")
                yield piece
            if reader.read(1):
                raise BlobDamaged("a compressed part is longer than stated")
    except zstandard.ZstdError as e:
        raise BlobDamaged(f"a compressed part cannot be read ({e})") from e


def _join(parts: list[Part], ratio: int, out: npt.NDArray[Any], join: Callable[[Bytes, Bytes, Any, Any], None]) -> None:
    """Put two planes together, a piece at a time: the second has `ratio` bytes for each one of the first."""
    places, scratch = range(0, len(out), _CHUNK), np.empty((2, min(len(out), _CHUNK)), out.dtype)
    for at, high, low in zip(places, _pieces(parts[0], _CHUNK), _pieces(parts[1], ratio * _CHUNK), strict=True):
        join(high, low, out[at : at + _CHUNK], scratch[:, : len(high)])


def _split16(x: npt.NDArray[np.uint16]) -> tuple[Bytes, Bytes]:
    high, low = np.empty(x.size, np.uint8), np.empty(x.size, np.uint8)
    scratch, sign = np.empty(_CHUNK, np.uint16), np.empty(_CHUNK, np.uint16)
    for i in range(0, x.size, _CHUNK):
        c = x[i : i + _CHUNK]
        s, t = scratch[: c.size], sign[: c.size]
        np.right_shift(c, 7, out=s)
        high[i : i + _CHUNK] = s  # the cast keeps the low byte
        np.left_shift(c, 1, out=s)
        np.right_shift(c, 15, out=t)
        np.bitwise_or(s, t, out=s)
        low[i : i + _CHUNK] = s
    return high, low


def _join16(high: Bytes, low: Bytes, out: npt.NDArray[np.uint16], scratch: npt.NDArray[np.uint16]) -> None:
    s, t = scratch
    out[...] = high
    np.left_shift(out, 7, out=out)
    s[...] = low
    np.right_shift(s, 1, out=t)
    np.bitwise_or(out, t, out=out)
    np.left_shift(s, 15, out=s)
    np.bitwise_or(out, s, out=out)


def _split32(x: npt.NDArray[np.uint32]) -> tuple[Bytes, Bytes]:
    high, rest = np.empty(x.size, np.uint8), np.empty(3 * x.size, np.uint8)
    for at in range(0, x.size, _CHUNK):
        c = x[at : at + _CHUNK]
        rotated = c << np.uint32(1)
        np.bitwise_or(rotated, c >> np.uint32(31), out=rotated)
        planes = rotated.view(np.uint8).reshape(-1, 4)  # little-endian: exponent last
        high[at : at + _CHUNK] = planes[:, 3]
        for i in range(3):  # NumPy is slow where the innermost dimension is short
            rest[3 * at + i : 3 * (at + _CHUNK) : 3] = planes[:, i]
    return high, rest


def _join32(high: Bytes, rest: Bytes, out: npt.NDArray[np.uint32], scratch: npt.NDArray[np.uint32]) -> None:
    planes = out.view(np.uint8).reshape(-1, 4)
    planes[:, 3] = high
    for i in range(3):
        planes[:, i] = rest[i::3]
    sign = np.left_shift(out, 31, out=scratch[0])
    np.right_shift(out, 1, out=out)
    np.bitwise_or(out, sign, out=out)
