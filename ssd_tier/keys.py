"""Chain keys: names of blocks that stand for everything before them."""

from __future__ import annotations

from hashlib import sha256

import numpy as np

KEY_BYTES = 32
TOKEN_BYTES = 8  # token ids are int64, little-endian, wherever they are bytes


def chain_key(namespace: bytes, parent: bytes, tokens: bytes) -> bytes:
    """SHA-256(namespace, parent's chain key, the block's token ids). Pure; any thread.

    `tokens` are int64 little-endian. The parent of a sequence's first block is the namespace itself. All parts but the
    last have 32 bytes, so no two inputs share one concatenation.
    """
    return sha256(namespace + parent + tokens).digest()


def pack_ids(ids: bytes) -> bytes:
    """Token ids (int64) to keep: as int32 where all of them fit, in half the bytes. Pure."""
    if not ids:
        return ids
    words = np.frombuffer(ids, "<i8")
    narrow = words.astype("<i4")
    return narrow.tobytes() if (narrow == words).all() else ids


def unpack_ids(packed: bytes, tokens: int) -> bytes:
    """Undo `pack_ids` for so many tokens. Pure."""
    return packed if len(packed) == tokens * TOKEN_BYTES else np.frombuffer(packed, "<i4").astype("<i8").tobytes()
