"""What a model's cache is made of: a tree of its layers' classes and settings, as JSON.

Equal trees mean that states can stand for each other, as far as classes go. `CacheList` nests; all else is a leaf.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, CacheList, KVCache

from tiered_cache.layer_kinds import kind_named, kind_of, name_of

LIST = name_of(CacheList)
Tree = Any


class Refused(Exception):
    """A state that cannot be stored. `reason` names a counter; the message says why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Quantization(NamedTuple):
    """How dense keys and values are stored: mlx's affine quantization."""

    group_size: int
    bits: int


def dump(tree: Any) -> str:
    """The one way to write a tree down."""
    return json.dumps(tree, separators=(",", ":"), sort_keys=True)


def plain(classes: str) -> str:
    """A written tree without what it says of storage: what the model's own layers are."""

    def strip(node: Tree) -> Tree:
        kept = {k: v for k, v in node.items() if k not in ("stored", "empty")}
        return {**kept, "caches": [strip(c) for c in node["caches"]]} if "caches" in node else kept

    return dump([strip(node) for node in json.loads(classes)])


def plain_of(classes: str) -> str | None:
    """`plain` of what a block or a checkpoint has written; None where it is nothing that this program knows."""
    try:
        tree = json.loads(classes)
        tree = tree["layers"] if isinstance(tree, dict) else tree
        return plain(dump(tree)) if all(kind_named(leaf["class"]) for _, leaf in leaves(tree)) else None
    except (ValueError, TypeError, KeyError):
        return None


def single(cache: Sequence[Any]) -> list[Any]:
    """Batches of one sequence as the layers of that sequence, all else as it is. Raises `Refused` for larger batches.

    The arrays stay lazy; what is given is not changed.
    """
    return [_single(layer, i) for i, layer in enumerate(cache)]


def _single(layer: Any, place: int) -> Any:
    if type(layer) is CacheList:
        return CacheList(*(_single(c, place) for c in layer.caches))
    if type(layer) not in (BatchKVCache, BatchRotatingKVCache):
        return layer
    if layer.left_padding.size != 1:
        raise Refused("batch", f"layer {place} holds {layer.left_padding.size} sequences; store them one by one")
    one = layer.extract(0)
    if isinstance(layer, BatchRotatingKVCache):
        one.keep = getattr(layer, "keep", 0)
    return one


def structure(cache: Sequence[Any], quantization: Quantization | None = None) -> list[Tree]:
    """The tree of a cache's layers: for each its class and settings. Raises `Refused` for a class that is not known."""
    if names := unsupported(cache):
        raise Refused(*unsupported_reason(names))
    return [_describe(layer, quantization) for layer in cache]


def is_cut(tree: Sequence[Tree]) -> tuple[bool, bool]:
    """Whether a cache has layers that are cut by token, and layers that are kept whole."""
    kinds = [kind_named(leaf["class"]) for _, leaf in leaves(tree)]
    return any(k and k.rows for k in kinds), any(k and not k.rows for k in kinds)


def unsupported(cache: Sequence[Any]) -> list[str]:
    """Names of the layer classes that cannot be stored, each once, in order."""
    names = [name_of(type(layer)) for _, layer in flat(cache) if kind_of(layer) is None]
    return list(dict.fromkeys(names))


def unsupported_reason(names: Sequence[str]) -> tuple[str, str]:
    """The counter and the sentence for layer classes that cannot be stored."""
    sentence = f"layers of class {', '.join(names)} are not known; see tiered_cache.layer_kinds.register"
    return "unsupported_layer", sentence


def _describe(layer: Any, quantization: Quantization | None) -> Tree:
    if type(layer) is CacheList:
        return {"class": LIST, "caches": [_describe(c, quantization) for c in layer.caches]}
    kind = kind_of(layer)
    assert kind
    tree = {"class": name_of(kind.cls), **{f: getattr(layer, f) for f in kind.fields}}
    if quantization and _can_quantize(layer, quantization):
        tree["stored"] = list(quantization)
    return tree


def _can_quantize(layer: Any, quantization: Quantization) -> bool:
    if type(layer) is not KVCache or layer.keys is None:
        return False
    return all(a.shape[-1] and a.shape[-1] % quantization.group_size == 0 for a in (layer.keys, layer.values))


def flat(cache: Sequence[Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with their places: "3", or "3.1" inside a list."""
    for i, layer in enumerate(cache):
        if type(layer) is CacheList:
            yield from flat(layer.caches, f"{at}{i}.")
        else:
            yield f"{at}{i}", layer


def leaves(tree: Sequence[Tree], at: str = "") -> Iterator[tuple[str, Tree]]:
    """Leaves of a written tree with their places."""
    for i, node in enumerate(tree):
        if node["class"] == LIST:
            yield from leaves(node["caches"], f"{at}{i}.")
        else:
            yield f"{at}{i}", node
