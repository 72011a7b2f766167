"""An index from blobs alone: each says of itself what its row said."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from functools import partial

from ssd_tier.blob import BlobInfo, read_identity
from ssd_tier.catalog import Entry
from ssd_tier.errors import BlobDamaged
from ssd_tier.files import BlobFile, Directory
from ssd_tier.index import Contents

log = logging.getLogger("ssd_tier")


def contents_of(directory: Directory, files: Iterable[BlobFile], unread: list[BlobFile]) -> Contents:
    """What an index of these files would say. Reads their headers only: the rest is verified when it is read.

    Of several files of one block the newest counts; order of use and ages are those of the files. A file that is no
    blob of ours goes to quarantine; one that cannot be read now is left, and added to `unread`. Blocks.
    """
    newest: dict[bytes, tuple[BlobFile, BlobInfo]] = {}
    for file in files:
        try:
            info = read_identity(partial(directory.read_start, file.key, file.generation))
            if info.key != file.key or not info.raw_bytes:
                raise BlobDamaged("it is another block's, or holds nothing")
        except BlobDamaged as e:
            log.warning("ssd: blob %s left out of the index (%s)", file.key.hex()[:12], str(e))
            with contextlib.suppress(OSError):
                directory.quarantine(file.key, file.generation)
            continue
        except FileNotFoundError:
            continue
        except OSError as e:
            log.warning("ssd: blob %s cannot be read now (%s)", file.key.hex()[:12], str(e))
            unread.append(file)
            continue
        if file.key not in newest or newest[file.key][0].mtime < file.mtime:
            newest[file.key] = (file, info)
    return Contents(
        _in_order(newest),
        {i.namespace: i.model for _, i in newest.values()},
        {i.namespace: (i.origin, i.classes) for _, i in newest.values()},
    )


def _in_order(found: dict[bytes, tuple[BlobFile, BlobInfo]]) -> list[Entry]:
    """Rows, least recently used first: a block was used when what hangs on it was."""
    used = {key: file.mtime for key, (file, _) in found.items()}
    for key, (_, info) in sorted(found.items(), key=lambda item: -item[1][1].start):
        if info.parent in used:
            used[info.parent] = max(used[info.parent], used[key])
    order = sorted(found, key=lambda key: (used[key], -found[key][1].start))
    rows = []
    for seq, key in enumerate(order, 1):
        file, info = found[key]
        rows.append(
            Entry(
                key, info.namespace, info.parent, file.generation, info.start, info.tokens, file.nbytes,
                info.raw_bytes, seq, 0, int(file.mtime), int(used[key]),
            )
        )  # fmt: skip
    return rows
