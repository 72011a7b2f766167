"""Verified reads: a block comes back exactly as it was stored, or as a reason why not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np

from ssd_tier.blob import BlobInfo, Block, decode_blob, read_info
from ssd_tier.catalog import Entry
from ssd_tier.errors import BlobDamaged
from ssd_tier.files import Directory


def read_verified(directory: Directory, entry: Entry) -> BlobInfo:
    """Read a whole blob and compare it with its digest and its row; its parts are views that hold until this thread
    reads the next one. Blocks: for worker threads.

    Raises `BlobDamaged` for a fault of the content and OSError for one of the machine.
    """
    if entry.file_bytes > entry.most_bytes:
        raise BlobDamaged(f"{entry.file_bytes} bytes cannot hold {entry.raw_bytes}")
    info = read_info(directory.read(entry.key, entry.generation, entry.file_bytes))
    said = (info.key, info.namespace, info.parent, info.tokens, info.start, info.raw_bytes)
    if said != (entry.key, entry.namespace, entry.parent, entry.ids, entry.start, entry.raw_bytes):
        raise BlobDamaged("the blob is another one than its name and the index say")
    return info


def read_block(directory: Directory, entry: Entry, turn: AbstractContextManager[object] | None = None) -> Block:
    """Read, verify and decode one block, in one read. `turn` is held while it is decoded. Blocks, and raises, as
    `read_verified`."""
    info = read_verified(directory, entry)
    data = np.empty(info.raw_bytes, np.uint8)
    with turn or nullcontext():
        decode_blob(info, data)
    return Block(
        key=info.key,
        namespace=info.namespace,
        parent=info.parent,
        tokens=info.tokens,
        start=info.start,
        tensors=info.tensors,
        classes=info.classes,
        data=data,
        model=info.model,
        origin=info.origin,
    )
