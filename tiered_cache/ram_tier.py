"""The RAM tier of one model: whole sequences in, the longest reusable prefix out."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

from ssd_tier import Block, TensorSpec
from ssd_tier.buffers import Bytes
from ssd_tier.keys import TOKEN_BYTES
from tiered_cache import fingerprint, layer_tree, layers
from tiered_cache.block_pool import BlockPool
from tiered_cache.layer_tree import Quantization, Refused, plain_of
from tiered_cache.look_up_log import LookUpLog
from tiered_cache.metrics import CacheStats, Rate
from tiered_cache.plans import NOTHING, Chain, Plan, Prepared, best_plan
from tiered_cache.prefix_tree import DROP, Hint, Node, hint_level, in_ram, token_bytes

log = logging.getLogger("tiered_cache")

WHOLE = -1  # stands for the checkpoint among the numbers of blocks


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
        classes: str | None = None,
        quantization: Quantization | None = None,
        min_quantize_tokens: int = 0,
        label: str | None = None,
    ) -> None:
        """`pool` may be shared with other models. `classes`: the tree of the model's own layers, where it is known.

        `quantization`: how dense keys and values of at least `min_quantize_tokens` tokens are stored.
        """
        self.pool = pool
        self.max_entries = max_entries
        self.min_prefix_tokens = min_prefix_tokens
        self.fingerprint = fingerprint.model_fingerprint(model)
        self.label = label or fingerprint.model_label(model, self.fingerprint)
        self.quantization = quantization
        self.min_quantize_tokens = min_quantize_tokens
        self.prefill = Rate()  # tokens a second that the model computes, as its host tells
        self.look_ups: LookUpLog | None = None
        self._classes = [classes] if classes else []
        self._known: dict[tuple[str | None, str, bool], Chain] = {}
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
        self.note(request)
        if request is None:
            return self._miss("miss" if not len(tokens) else "miss_short_prefix", tokens)
        pool = self.pool
        with pool.lock:
            plan = self.plan(request, in_ram)
            kind = plan.kind(len(tokens))
            if plan.tokens < self.min_prefix_tokens or plan.chain is None:
                short = "miss_short_lcp" if kind == "lcp" else "miss_short_prefix"
                return self._miss(short if plan.tokens else "miss", tokens)
            pool.use(plan.nodes)
            pool.pin(plan.nodes)
        self._stats.hits += 1
        self._stats.tokens_saved += plan.tokens
        self._last_match_type = kind
        return self._joined(plan), tokens[plan.tokens :]

    def note(self, request: Prepared | None) -> None:
        """Put a request into the log of look-ups, if there is one. Any thread."""
        if self.look_ups and request:
            self.look_ups.add(request.ids)

    def state_of(self, tokens: Sequence[int]) -> list[Any] | None:
        """The state of exactly these tokens, if RAM has it; not counted as a look-up or a use. Model's thread."""
        request = self.prepare(tokens, 0, None)
        with self.pool.lock:
            plan = self.plan(request, in_ram) if request else NOTHING
            if plan.tokens != len(tokens):
                return None
            self.pool.pin(plan.nodes)
        return self._joined(plan)

    def _joined(self, plan: Plan) -> list[Any]:
        """A plan's state. Its nodes are pinned, since no block may leave the ledger while it is copied; not so
        after."""
        try:
            assert plan.chain
            assert isinstance(plan.chain.root.layout, layers.Layout)
            pieces = [
                layers.Piece(n.block.data, n.tokens, min(n.tokens, plan.tokens - n.start))
                for n in plan.blocks
                if n.block
            ]
            checkpoint = plan.checkpoint.block if plan.checkpoint else None
            return layers.join(plan.chain.root.layout, pieces, plan.tokens, checkpoint)
        finally:
            self.pool.unpin(plan.nodes)

    def prepare(self, tokens: Sequence[int], leave: int, tenant: str | None) -> Prepared | None:
        """The request for the tree, or None where it is too short to match anything. Changes nothing. Any thread."""
        limit = len(tokens) - leave
        if limit < self.min_prefix_tokens:
            return None
        try:
            return Prepared(self._chains(tenant), token_bytes(tokens), limit)
        except (OverflowError, TypeError):  # no token ids: nothing is stored under them
            return None

    def covered(self, tokens: Sequence[int], *, leave: int = 0, tenant: str | None = None) -> int:
        """How many tokens `fetch` would cover. Changes nothing. Any thread."""
        request = self.prepare(tokens, leave, tenant)
        if request is None:
            return 0
        with self.pool.lock:
            found = self.plan(request, in_ram).tokens
        return found if found >= self.min_prefix_tokens else 0

    def plan(self, request: Prepared, usable: Callable[[Node], bool]) -> Plan:
        """The most that can be reused of what is usable (`in_ram` or `anywhere`). Changes nothing; holds the lock."""
        return best_plan(self.pool.match, request, usable)

    def _miss(self, kind: str, tokens: Sequence[int]) -> tuple[None, Sequence[int]]:
        self._stats.misses += 1
        self._last_match_type = kind
        return None, tokens

    def chain(self, tenant: str | None, classes: str, quantized: bool = False) -> Chain:
        """The namespace of states with these layers (a written tree). Any thread."""
        key = (tenant, classes, quantized)
        chain = self._known.get(key)
        if chain is None:
            with self.pool.lock:
                tree, size = self.pool.tree, self.pool.tree.block_tokens
                stored = list(self.quantization) if quantized and self.quantization else None
                root = tree.root(fingerprint.namespace(self.fingerprint, [classes, stored], size, tenant))
                is_cut, is_whole = layer_tree.is_cut(json.loads(classes))
                checkpoints = tree.root(sha256(b"checkpoints" + root.key).digest()) if is_whole else None
                root.classes = classes
                if not is_cut:
                    root.layout = layers.Layout(classes, ())  # nothing to be learnt from blocks
                if checkpoints:
                    checkpoints.classes, checkpoints.is_checkpoints = classes, True
                chain = self._known[key] = Chain(root, checkpoints, is_cut)
        return chain

    def know(self, layers_stored: Iterable[tuple[str, str]]) -> None:
        """States that an earlier run of this model stored: (fingerprint, classes), as the SSD tier has them."""
        for origin, classes in layers_stored:
            if origin == self.fingerprint and (found := plain_of(classes)) and found not in self._classes:
                self._classes.append(found)

    def _chains(self, tenant: str | None) -> list[Chain]:
        """Where states of this model may lie: its own layers' namespace first, then those that a host has stored."""
        return [
            self.chain(tenant, classes, quantized)
            for classes in self._classes
            for quantized in ([False, True] if self.quantization else [False])
        ]

    def _roots(self) -> list[Node]:
        return [n for c in list(self._known.values()) for n in (c.root, c.checkpoints) if n]

    # -- store

    def store(
        self,
        tokens: Sequence[int],
        cache: Sequence[Any],
        evict_prefixes: bool = True,
        *,
        tenant: str | None = None,
        hint: Hint = "normal",
    ) -> bool:
        """Keep a copy of the state that covers exactly `tokens`; True when it is stored, or was already.

        False, and a counter with the reason, for what is too short, too large, or cannot be restored. `evict_prefixes`
        drops the shorter tail that this sequence continues. `hint`: "drop" for what will hardly come back (the next to
        go, never written to the SSD), "keep" for what goes after all else, in both tiers. Never raises for what a model
        hands it. Model's thread.
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
            quantization = self.quantization if len(tokens) >= self.min_quantize_tokens else None
            state = layers.read_state(cache, len(tokens), quantization)
        except Refused as e:
            return self._refuse(e.reason, str(e))
        except Exception as e:  # whatever a host's layers raise: their state is not stored, and the host goes on
            if "no Stream" in str(e):
                return self._refuse("thread", "store was not called on the thread that runs the model")
            return self._refuse("error", f"{type(e).__name__}: {e}")
        classes = layer_tree.plain(state.layout.classes)
        if classes not in self._classes:
            self._classes.append(classes)
        chain = self.chain(tenant, classes, quantized='"stored"' in state.layout.classes)
        if chain.root.layout not in (None, state.layout):
            return self._refuse("layout", "the state has other shapes or dtypes than what is stored for this model")
        checkpoint = len(state.whole.data) if state.whole else 0
        if state.layout.token_bytes * len(tokens) + checkpoint > self.pool.ledger.limit:
            return self._refuse("too_large", None)
        return self._store_blocks(chain, ids, state, evict_prefixes, hint_level(hint))

    def _store_blocks(
        self, chain: Chain, ids: bytes, state: layers.State, evict_prefixes: bool, hint: int
    ) -> bool:
        pool, tree, size = self.pool, self.pool.tree, self.pool.tree.block_tokens
        chunks = tree.chunks(ids) if chain.is_cut else []
        with pool.lock:
            known = tree.walk(chain.root, ids) if chain.is_cut else []
            held = chain.checkpoints.children.get(ids) if chain.checkpoints else None
            pinned = [*known, held] if held else known
            pool.pin(pinned)
            for node in pinned:
                node.seen, node.hint = True, max(node.hint, hint)
            missing = [i for i in range(len(chunks)) if i >= len(known) or not known[i].block]
            # Quantizing anew what was quantized before would lose precision each time.
            before = self._tail(known[-1] if known else chain.root, chunks[len(known) :]) if '"stored"' in (
                state.layout.classes
            ) else None
            need = {i: state.layout.token_bytes * len(chunks[i]) // TOKEN_BYTES for i in missing}
            if state.whole and not (held and held.block):
                need[WHOLE] = len(state.whole.data)
            if not pool.reserve(sum(need.values())):
                pool.unpin(pinned)
                return self._refuse("no_room", None)
            chain.root.layout = state.layout
        owed = dict(need)  # bytes reserved and not yet handed to a block
        path: list[Node] = []
        try:
            copies = {i: layers.cut(state, i * size, min((i + 1) * size, state.tokens)) for i in missing}
            if before:
                i = before.start // size
                new, old = (len(ids) // TOKEN_BYTES for ids in (chunks[i], before.tokens))
                layers.graft(state.layout, copies[i], new, before.data, old)
            with pool.lock:
                node = chain.root
                for i, chunk in enumerate(chunks):
                    node = tree.insert(node, chunk)
                    path.append(node)
                    if i in copies:
                        node.hint = hint
                        block = self._block(node, state.layout.sized(node.tokens), state.layout.classes, copies.pop(i))
                        del owed[i]
                        pool.admit(node, block)
                end = path[-1] if path else None
                if chain.checkpoints and state.whole:
                    end = tree.insert(chain.checkpoints, ids)
                    if owed.pop(WHOLE, None) is not None:
                        end.hint = hint
                        pool.admit(end, self._block(end, state.whole.tensors, state.whole.classes, state.whole.data))
                assert end
                self._finish(path, end, evict_prefixes)
        finally:
            pool.release(sum(owed.values()))
            pool.unpin(pinned)
        while len(self) > self.max_entries and pool.retire(self._roots(), spare=end):
            pass
        return True

    def _tail(self, parent: Node, chunks: list[bytes]) -> Block | None:
        """The shorter block that the first of these chunks continues, if RAM has one."""
        tail = parent.children.longest_prefix(chunks[0]) if chunks else None
        return tail.block if tail else None

    def __len__(self) -> int:
        """How many stored sequences end in RAM, over all tenants. Any thread."""
        return sum(root.sequences for root in self._roots())

    def _block(self, node: Node, tensors: tuple[TensorSpec, ...], classes: str, data: Bytes) -> Block:
        assert node.parent
        return Block(
            key=node.key,
            namespace=node.root.key,
            parent=node.parent.key,
            tokens=node.ids,
            start=node.start,
            tensors=tensors,
            classes=classes,
            data=data,
            origin=self.fingerprint,
            model=f"{self.label} (checkpoint)" if node.root.is_checkpoints else self.label,
        )

    def _finish(self, path: list[Node], end: Node, evict_prefixes: bool) -> None:
        """Mark the end of a stored sequence, and drop the tails that it continues. Checkpoints stay: each is the only
        point at which its sequence can be resumed.
        """
        for node in path:
            if evict_prefixes and node is not end:
                self.pool.set_end(node, False)
            if evict_prefixes and node.parent:
                self._drop_tails(node.parent, node)
        self.pool.set_end(end, True)
        used = path if path and end is path[-1] else [end, *path]
        self.pool.use(used, asked=False)
        if end.hint == DROP:
            self.pool.demote([n for n in used if n.hint == DROP])
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
