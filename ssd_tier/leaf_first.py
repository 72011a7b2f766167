"""Which to evict: least recently used first, and nothing before what hangs on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")


def leaf_first(
    order: Iterable[T],
    nbytes: float,
    *,
    name: Callable[[T], Hashable],
    parent: Callable[[T], Hashable],
    children: Callable[[T], int],
    size: Callable[[T], int],
    free: Callable[[T], bool],
) -> list[T]:
    """The first items of `order` (least recently used first) that free `nbytes` together; may fall short.

    An item counts as a leaf once all its children are chosen; items that are not `free` are passed over. Where every
    use touches an item before its parent, one pass in order is enough. Changes nothing.
    """
    chosen: list[T] = []
    gone: dict[Hashable, int] = {}  # parent -> children among the chosen
    freed = 0
    for item in order:
        if freed >= nbytes:
            break
        if not free(item) or children(item) > gone.get(name(item), 0):
            continue
        chosen.append(item)
        gone[parent(item)] = gone.get(parent(item), 0) + 1
        freed += size(item)
    return chosen
