"""The file format: bytes come back bit for bit, and nothing but what was written is ever taken for it."""

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors
import zstandard

from ssd_tier import TensorSpec, blob
from ssd_tier.blob import decode_blob, encode_blob, read_info
from ssd_tier.codec import Part, decode, encode
from ssd_tier.errors import BlobDamaged
from ssd_tier.files import Directory
from tests import blocks
from tests.blocks import with_data

CHUNK = 1 << 17
COUNTS = [0, 1, 2, 3, 255, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5]
WIDTHS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "U32": np.uint32, "I8": np.uint8}
SPECIAL = {  # infinities, quiet and signalling NaNs with payloads, -0.0, subnormals, the largest
    "BF16": [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFD5, 0xFFFF, 0x8000, 0x0000, 0x0001, 0x807F, 0x7F7F],
    "F16": [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFD55, 0xFFFF, 0x8000, 0x0000, 0x0001, 0x83FF, 0x7BFF],
    "F32": [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFD55555, 2**32 - 1, 2**31, 0, 1, 0x807FFFFF, 0x7F7FFFFF],
}


def bits_of(dtype, count):
    """Values that compress, with the special ones among them, and some that do not."""
    rng = np.random.default_rng(count)
    values = rng.standard_normal(count, np.float32)
    bits = {"BF16": values.view(np.uint32) >> 16, "F16": values.astype(np.float16).view(np.uint16),
            "F32": values.view(np.uint32)}.get(dtype, rng.integers(0, 50, count)).astype(WIDTHS[dtype])  # fmt: skip
    special = np.array(SPECIAL.get(dtype, [0, 127, 128, 255]), WIDTHS[dtype])[:count]
    bits[: len(special)] = special
    bits[count - len(special) :] = special[::-1]
    return bits


def file_of(block, level=1):
    return np.frombuffer(blocks.blob(block, level), np.uint8)


def decoded(file):
    info = read_info(file)
    out = np.empty(info.raw_bytes, np.uint8)
    decode_blob(info, out)
    return info, out


def is_refused(file):
    try:
        decoded(np.frombuffer(file, np.uint8))
    except BlobDamaged:
        return True
    return False


@pytest.mark.parametrize("level", [None, 1, 3])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_every_bit_comes_back_whatever_the_dtype_and_the_length(dtype, level):
    for count in COUNTS:
        data = bits_of(dtype, count).view(np.uint8)
        info, out = decoded(file_of(with_data([TensorSpec("x", dtype, (count,))], data), level))
        assert bytes(out) == bytes(data), count
        assert info.tensors == (TensorSpec("x", dtype, (count,)),)
    assert [p.codec for p in info.parts[0]] == (["raw"] if level is None else ["zstd", "raw"][: len(info.parts[0])])


@pytest.mark.parametrize("pattern", ["random", "zeros", "all"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_bits_without_any_order_and_all_alike_come_back_too(dtype, pattern):
    raw = {"random": np.random.default_rng(1).bytes(1 << 18), "zeros": bytes(1 << 18),
           "all": np.arange(1 << 16, dtype=WIDTHS[dtype]).tobytes()}[pattern]  # fmt: skip
    data, out = np.frombuffer(raw, np.uint8), np.empty(len(raw), np.uint8)
    parts = encode(data, dtype, 1)
    decode(parts, dtype, out)
    assert bytes(out) == raw
    assert sum(len(p.data) for p in parts) <= len(raw)


def test_tensors_of_many_dtypes_follow_each_other_at_odd_offsets():
    stored = [("I8", 3), ("BF16", 5), ("BF16", 0), ("F32", 7), ("I8", 1), ("U32", 9), ("F16", CHUNK + 1), ("F32", 1)]
    data = np.concatenate([bits_of(dtype, n).view(np.uint8) for dtype, n in stored])
    block = with_data([TensorSpec(str(i), dtype, (n,)) for i, (dtype, n) in enumerate(stored)], data)
    for level in (None, 1):
        info, out = decoded(file_of(block, level))
        assert (info.tensors, bytes(out)) == (block.tensors, bytes(data))


def test_a_block_whose_tensors_do_not_cover_its_bytes_is_not_written():
    block = blocks.block(1)
    with pytest.raises(ValueError, match="4096 bytes with tensors of 2048"):
        encode_blob(replace(block, tensors=block.tensors[:1]), 1)


def test_the_public_parser_opens_a_blob_and_shows_what_it_holds(tmp_path):
    directory, block = Directory.own(tmp_path / "cache"), blocks.block(7, blocks.block(6))
    for generation, level in enumerate([None, 1]):
        directory.write(block.key, generation, encode_blob(block, level), "cache")
        with safetensors.safe_open(directory.blob_path(block.key, generation), "np") as file:
            shown = file.metadata()
            assert file.get_tensor("tokens").tobytes() == block.tokens
            assert file.get_tensor("tokens").dtype == np.int64
            parts = [file.get_tensor(name) for name in sorted(set(file.keys()) - {"tokens"})]
        assert [shown[k] for k in ("key", "namespace", "parent")] == [
            v.hex() for v in (block.key, block.namespace, block.parent)]  # fmt: skip
        assert [shown[k] for k in ("format", "start", "model", "classes")] == ["tiered-cache", "16", "tiny", "KVCache"]
        assert json.loads(shown["tensors"]) == [[n, d, list(s)] for n, d, s in block.tensors]
        if level is None:  # the state itself, for anyone to read
            assert b"".join(p.tobytes() for p in parts) == bytes(block.data)
    directory.close()


SMALL = blocks.block(3, nbytes=1024, data=np.random.default_rng(3).integers(0, 4, 1024, np.uint8) * 16)


@pytest.mark.parametrize("level", [None, 1])
def test_no_flipped_bit_passes(level):
    file = blocks.blob(SMALL, level)
    assert [p.codec for p in decoded(np.frombuffer(file, np.uint8))[0].parts[0]] == ["zstd", "raw"][-1 - bool(level) :]
    whole, passed = int.from_bytes(file, "little"), []
    for bit in range(8 * len(file)):
        if not is_refused((whole ^ (1 << bit)).to_bytes(len(file), "little")):
            passed.append(bit)
    assert passed == []


def test_no_cut_and_no_addition_passes():
    file = blocks.blob(SMALL)
    assert [n for n in range(len(file)) if not is_refused(file[:n])] == []
    assert [tail for tail in (b"\0", b" ", b"}", bytes(8), file) if not is_refused(file + tail)] == []


def test_no_page_of_another_file_and_no_lost_page_passes():
    ours, other = (blocks.blob(blocks.block(seed, nbytes=16384)) for seed in (1, 2))
    assert len(ours) == len(other)
    for at in range(0, len(ours), 512):
        for page in (other[at : at + 512], bytes(len(ours[at : at + 512]))):
            assert is_refused(ours[:at] + page + ours[at + 512 :]), at


@pytest.mark.parametrize("field", ["key", "namespace", "parent", "tokens"])
def test_an_intact_blob_whose_names_do_not_belong_together_is_refused(field):
    honest = blocks.block(1, blocks.block(0))
    wrong: dict[str, Any] = {field: bytes(32) if field == "namespace" else getattr(blocks.block(2), field)}
    forged = replace(honest, **wrong)
    decoded(file_of(honest))
    with pytest.raises(BlobDamaged, match="do not belong together"):
        decoded(file_of(forged))


def test_a_compressed_part_that_is_not_what_it_says_is_refused_and_takes_no_memory(monkeypatch):
    size = 1 << 16
    good = zstandard.ZstdCompressor().compress(bytes(size))
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))
    frames = {
        "a bomb": zstandard.ZstdCompressor().compress(bytes(256 << 20)),
        "a bomb without an end": b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + bytes(64),
        "no size": streamed, "cut": good[:-1], "trailing": good + b"\0", "twice": good + good, "none": b"",
        "no frame": bytes(20), "shorter": zstandard.ZstdCompressor().compress(bytes(size - 1)),
    }  # fmt: skip
    block = with_data([TensorSpec("x", "U8", (size,))], np.zeros(size, np.uint8))
    assert not is_refused(file_of(block))
    for name, frame in frames.items():
        stored = Part("zstd", size, np.frombuffer(frame, np.uint8))
        monkeypatch.setattr(blob, "encode", lambda *_, stored=stored: [stored])
        file = file_of(block)
        tracemalloc.start()
        try:
            assert is_refused(file), name
            assert tracemalloc.get_traced_memory()[1] < 1 << 20, name
        finally:
            tracemalloc.stop()


def test_attention_state_shrinks_to_what_its_exponents_allow():
    rng = np.random.default_rng(0)
    scales = np.exp(rng.normal(0, 1, (2, 4, 1, 128)))  # keys and values, heads, tokens, channels
    values = (rng.standard_normal((2, 4, 256, 128)) * scales).astype(np.float32)
    bits = ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    block = with_data([TensorSpec(n, "BF16", (4, 256, 128)) for n in "kv"], bits.reshape(-1).view(np.uint8))
    share = np.bincount((bits.reshape(-1) >> 7) & 0xFF) / bits.size
    bound = (8 - sum(p * np.log2(p) for p in share if p)) / 16
    ratio = len(blocks.blob(block)) / block.nbytes
    assert ratio <= 0.72
    assert ratio <= 1.01 * bound
