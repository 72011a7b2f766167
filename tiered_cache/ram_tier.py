"""The RAM tier of one model: whole sequences in, the longest reusable prefix out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from ssd_tier import Block
from ssd_tier.buffers import Bytes
from ssd_tier.keys import TOKEN_BYTES
from tiered_cache import fingerprint, layers
from tiered_cache.block_pool import BlockPool
from tiered_cache.metrics import CacheStats
from tiered_cache.prefix_tree import Match, Node, in_ram, token_bytes

log = logging.getLogger("tiered_cache")


class Prepared(NamedTuple):
    """A request as the tree sees it: its namespace's root, its token ids as bytes, and how many tokens may be
    reused."""

    root: Node
    ids: bytes
    limit: int


class RamTier:
    """Attention state of one model in RAM, by the tokens it covers.

    `fetch` and `store` belong to the thread that runs the model (MLX); all else may be called from any thread. No
    method waits for a disk.
    """

    def __init__(
        self,
        model: Any,
        pool: BlockPool,
        *,
        max_entries: int,
        min_prefix_tokens: int,
        classes: Sequence[str] = (),
        label: str | None = None,
    ) -> None:
        """`pool` may be shared with other models. `classes`: of the model's layers, where they are known."""
        self.pool = pool
        self.max_entries = max_entries
        self.min_prefix_tokens = min_prefix_tokens
        self.fingerprint = fingerprint.model_fingerprint(model)
        self.label = label or fingerprint.model_label(model, self.fingerprint)
        self._classes = list(classes)
        self._roots: dict[str | None, Node] = {}
        self._stats = CacheStats()
        self._reported: set[str] = set()
        self._last_match_type = ""

    # -- look-up

    def fetch(
        self, tokens: Sequence[int], *, leave: int = 0, tenant: str | None = None
    ) -> tuple[list[Any] | None, Sequence[int]]:
        """The state of the longest stored prefix, as the caller's own, and the tokens that it does not cover.

        `(None, tokens)` on a miss. `leave`: tokens at the end that the state must not cover, since the model must still
        see them. Model's thread.
        """
        request = self.prepare(tokens, leave, tenant)
        if request is None:
            return self._miss("miss" if not len(tokens) else "miss_short_prefix", tokens)
        pool = self.pool
        with pool.lock:
            match = pool.match(request.root, request.ids, in_ram, request.limit)
            kind = self.kind(match, len(tokens))
            if match.tokens < self.min_prefix_tokens:
                short = "miss_short_lcp" if kind == "lcp" else "miss_short_prefix"
                return self._miss(short if match.tokens else "miss", tokens)
            pool.pin(match.nodes)  # a block must not leave the ledger while it is being copied
            pool.use(match.nodes)
            pieces = [
                layers.Piece(n.block.data, n.tokens, min(n.tokens, match.tokens - n.start))
                for n in match.nodes
                if n.block
            ]
            layout = request.root.layout
        try:
            assert isinstance(layout, layers.Layout)
            state = layers.join(layout, pieces)
        finally:
            del pieces
            pool.unpin(match.nodes)
        self._stats.hits += 1
        self._stats.tokens_saved += match.tokens
        self._last_match_type = kind
        return state, tokens[match.tokens :]

    def prepare(self, tokens: Sequence[int], leave: int, tenant: str | None) -> Prepared | None:
        """The request for the tree, or None where it is too short to match anything. Changes nothing. Any thread."""
        limit = len(tokens) - leave
        if limit < self.min_prefix_tokens:
            return None
        try:
            return Prepared(self.root(tenant), token_bytes(tokens), limit)
        except (OverflowError, TypeError):  # no token ids: nothing is stored under them
            return None

    def covered(self, tokens: Sequence[int], *, leave: int = 0, tenant: str | None = None) -> int:
        """How many tokens `fetch` would cover. Changes nothing. Any thread."""
        request = self.prepare(tokens, leave, tenant)
        found = self.pool.match(request.root, request.ids, in_ram, request.limit).tokens if request else 0
        return found if found >= self.min_prefix_tokens else 0

    def kind(self, match: Match, tokens: int) -> str:
        """How a match relates to what is stored: exact, supersequence, prefix, lcp or miss."""
        last = match.nodes[-1] if match.nodes else None
        if last is None:
            return "miss"
        # What came back from the SSD has no mark of an end, but a leaf is one.
        ends = match.tokens == last.start + last.tokens and (last.ends or not len(last.children))
        if match.tokens == tokens:
            return "exact" if ends else "supersequence"
        return "prefix" if ends else "lcp"

    def _miss(self, kind: str, tokens: Sequence[int]) -> tuple[None, Sequence[int]]:
        self._stats.misses += 1
        self._last_match_type = kind
        return None, tokens

    def root(self, tenant: str | None) -> Node:
        """The root of this model's namespace for a tenant. Any thread."""
        root = self._roots.get(tenant)
        if root is None:
            with self.pool.lock:
                size = self.pool.tree.block_tokens
                name = fingerprint.namespace(self.fingerprint, self._classes, size, tenant)
                root = self._roots[tenant] = self.pool.tree.root(name)
        return root

    # -- store

    def store(
        self, tokens: Sequence[int], cache: Sequence[Any], evict_prefixes: bool = True, *, tenant: str | None = None
    ) -> bool:
        """Keep a copy of the state that covers exactly `tokens`; True when it is stored, or was already.

        False, and a counter with the reason, for what is too short, too large, or cannot be restored. `evict_prefixes`
        drops the shorter tail that this sequence continues. Never raises for what a model hands it. Model's thread.
        """
        try:
            ids = token_bytes(tokens)
        except (OverflowError, TypeError) as e:
            return self._refuse("tokens", str(e))
        try:
            if not ids or cache is None or not len(cache):
                return self._refuse("empty", None)
            if len(tokens) < self.min_prefix_tokens:
                return self._refuse("too_short", None)
            state = layers.read_state(cache, len(tokens))
        except layers.Refused as e:
            return self._refuse(e.reason, str(e))
        except Exception as e:  # whatever a host's layers raise: their state is not stored, and the host goes on
            if "no Stream" in str(e):
                return self._refuse("thread", "store was not called on the thread that runs the model")
            return self._refuse("error", f"{type(e).__name__}: {e}")
        root = self.root(tenant)
        if root.layout not in (None, state.layout):
            return self._refuse("layout", "the state has other shapes or dtypes than what is stored for this model")
        if state.layout.token_bytes * len(tokens) > self.pool.ledger.limit:
            return self._refuse("too_large", None)
        return self._store_blocks(root, ids, state, evict_prefixes)

    def _store_blocks(self, root: Node, ids: bytes, state: layers.State, evict_prefixes: bool) -> bool:
        pool, tree, size = self.pool, self.pool.tree, self.pool.tree.block_tokens
        chunks = tree.chunks(ids)
        with pool.lock:
            known = tree.walk(root, ids)
            pool.pin(known)
            missing = [i for i in range(len(chunks)) if i >= len(known) or not known[i].block]
            need = {i: state.layout.token_bytes * len(chunks[i]) // TOKEN_BYTES for i in missing}
            if not pool.reserve(sum(need.values())):
                pool.unpin(known)
                return self._refuse("no_room", None)
            root.layout = state.layout
        owed = dict(need)  # bytes reserved and not yet handed to a block
        try:
            copies = {i: layers.cut(state, i * size, min((i + 1) * size, state.tokens)) for i in missing}
            with pool.lock:
                node, path = root, []
                for i, chunk in enumerate(chunks):
                    node = tree.insert(node, chunk)
                    path.append(node)
                    if i in copies:
                        pool.admit(node, self._block(root, node, state.layout, copies.pop(i)))
                        del owed[i]
                self._finish(path, evict_prefixes)
        finally:
            pool.release(sum(owed.values()))
            pool.unpin(known)
        while len(self) > self.max_entries and pool.retire(self._roots.values(), spare=path[-1]):
            pass
        return True

    def __len__(self) -> int:
        """How many stored sequences end in RAM, over all tenants. Any thread."""
        return sum(root.sequences for root in list(self._roots.values()))

    def _block(self, root: Node, node: Node, layout: layers.Layout, data: Bytes) -> Block:
        assert node.parent
        return Block(
            key=node.key,
            namespace=root.key,
            parent=node.parent.key,
            tokens=node.ids,
            start=node.start,
            tensors=layout.sized(node.tokens),
            classes=layout.classes,
            data=data,
            model=self.label,
        )

    def _finish(self, path: list[Node], evict_prefixes: bool) -> None:
        """Mark the end of a stored sequence, and drop the tails that it continues."""
        for node in path:
            if evict_prefixes and node is not path[-1]:
                self.pool.set_end(node, False)
            if evict_prefixes and node.parent:
                self._drop_tails(node.parent, node)
        self.pool.set_end(path[-1], True)
        self.pool.use(path)
        self.pool.feed()

    def _drop_tails(self, parent: Node, node: Node) -> None:
        """Drop shorter blocks that hold a part of this one."""
        while (tail := parent.children.longest_prefix(node.ids)) and not tail.pins:
            self.pool.supersede(tail, node)
            if tail.entry:
                break  # it stays in the tree until the SSD has let go of it

    def _refuse(self, reason: str, message: str | None) -> bool:
        with self.pool.lock:
            self.pool.counters[f"refused_{reason}"] += 1
        if message:
            self.report(reason, message)
        return False

    def report(self, reason: str, message: str) -> None:
        """Tell a person, once for each reason, why this model's state is not cached."""
        if reason not in self._reported:
            self._reported.add(reason)
            log.warning("%s: a state was not stored: %s (further ones: refused_%s)", self.label, message, reason)
