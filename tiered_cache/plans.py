"""What of a request can be reused: the longest chain of blocks, and where layers are kept whole, a checkpoint on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ssd_tier.keys import TOKEN_BYTES
from tiered_cache.prefix_tree import Match, Node, in_ram

Usable = Callable[[Node], bool]
Matcher = Callable[[Node, bytes, Usable, int], Match]


class Chain(NamedTuple):
    """One namespace of a model: the root of its blocks, and the root of its checkpoints where it has layers kept whole.

    A checkpoint is a block of its own kind: all of its tokens are its name, and it hangs on nothing.
    """

    root: Node
    checkpoints: Node | None
    is_cut: bool  # it has layers that are cut by token, so blocks


class Prepared(NamedTuple):
    """A request as the tree sees it: where to look, its token ids as bytes, how many of them may be reused."""

    chains: list[Chain]
    ids: bytes
    limit: int


class Plan(NamedTuple):
    """What a request can reuse: blocks, first one first, and a checkpoint; together they cover `tokens` tokens."""

    chain: Chain | None
    blocks: list[Node]
    checkpoint: Node | None
    tokens: int

    @property
    def nodes(self) -> list[Node]:
        """Everything that must be in RAM. The checkpoint comes first, so that it is used last, and kept longest."""
        return [self.checkpoint, *self.blocks] if self.checkpoint else self.blocks

    def kind(self, tokens: int) -> str:
        """How this relates to a request of so many tokens: exact, supersequence, prefix, lcp or miss."""
        if not self.tokens:
            return "miss"
        # What came back from the SSD has no mark of an end, but a leaf is one.
        last = self.checkpoint or self.blocks[-1]
        ends = self.tokens == last.start + last.tokens and (last.ends or not len(last.children))
        if self.tokens == tokens:
            return "exact" if ends else "supersequence"
        return "prefix" if ends else "lcp"


NOTHING = Plan(None, [], None, 0)


def best_plan(match: Matcher, request: Prepared, usable: Usable) -> Plan:
    """The plan that covers most tokens, over all namespaces of the request. Changes nothing."""
    plans = [_plan(match, chain, request, usable) for chain in request.chains]
    return max(plans, key=lambda p: p.tokens, default=NOTHING)


def _plan(match: Matcher, chain: Chain, request: Prepared, usable: Usable) -> Plan:
    limit = request.limit
    if chain.checkpoints is None:
        found = match(chain.root, request.ids, usable, limit)
        return Plan(chain, found.nodes, None, found.tokens)
    checkpoints = chain.checkpoints.resident if usable is in_ram else chain.checkpoints.children
    while limit > 0:
        node = checkpoints.longest(request.ids[: limit * TOKEN_BYTES], usable)
        if node is None:
            break
        if not chain.is_cut:
            return Plan(chain, [], node, node.tokens)
        found = match(chain.root, request.ids, usable, node.tokens)
        if found.tokens == node.tokens:
            return Plan(chain, found.nodes, node, node.tokens)
        limit = min(node.tokens - 1, found.tokens)
    return NOTHING
