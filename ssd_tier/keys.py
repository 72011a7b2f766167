"""Chain keys: names of blocks that stand for everything before them."""

from __future__ import annotations

from hashlib import sha256

KEY_BYTES = 32
TOKEN_BYTES = 8  # token ids are int64, little-endian, wherever they are bytes


def chain_key(namespace: bytes, parent: bytes, tokens: bytes) -> bytes:
    """SHA-256(namespace, parent's chain key, the block's token ids). Pure; any thread.

    `tokens` are int64 little-endian. The parent of a sequence's first block is the namespace itself. All parts but the
    last have 32 bytes, so no two inputs share one concatenation.
    """
    return sha256(namespace + parent + tokens).digest()
