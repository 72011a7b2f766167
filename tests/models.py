"""Tiny models with random weights, built from mlx-lm's own classes, and the states they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from ssd_tier.buffers import view

VOCABULARY = 512


def tiny_llama(seed: int = 0, dtype: Any = mx.bfloat16, layers: int = 2, heads: int = 2, dim: int = 64) -> Any:
    """A llama of `layers` layers; 2 * layers * heads * (dim / heads) values of state a token."""
    mx.random.seed(seed)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=dim,
        num_hidden_layers=layers,
        intermediate_size=2 * dim,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    model = llama.Model(args)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def prefill(model: Any, tokens: Sequence[int], state: list[Any] | None = None) -> tuple[list[Any], mx.array]:
    """Run `tokens` through the model on top of `state`; the state, and the last position's logits."""
    state = make_prompt_cache(model) if state is None else state
    logits = model(mx.array([list(tokens)]), cache=state)[0, -1]
    mx.eval(logits, [c.state[:2] for c in state])
    return state, logits


def greedy(
    model: Any, tokens: Sequence[int], count: int, state: list[Any] | None = None
) -> tuple[list[int], list[Any]]:
    """The next `count` tokens after `tokens` (which `state` does not cover), and the state of all but the last."""
    state, logits = prefill(model, tokens, state)
    answer = [int(mx.argmax(logits))]
    while len(answer) < count:
        state, logits = prefill(model, answer[-1:], state)
        answer.append(int(mx.argmax(logits)))
    return answer, state


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids that another seed does not share."""
    mx.random.seed(seed)
    return [int(t) for t in np.asarray(mx.random.randint(0, VOCABULARY, (count,)))]


def same_state(a: Sequence[Any], b: Sequence[Any], tokens: int | None = None) -> bool:
    """Whether two KVCache states hold the same bits for the first `tokens` tokens (default: both in whole)."""
    if tokens is None:
        if [c.offset for c in a] != [c.offset for c in b]:
            return False
        tokens = a[0].offset
    return len(a) == len(b) and all(
        bytes_of(getattr(x, n)[..., :tokens, :]) == bytes_of(getattr(y, n)[..., :tokens, :])
        for x, y in zip(a, b, strict=True)
        for n in ("keys", "values")
    )


def bytes_of(array: mx.array) -> bytes:
    """An array's bit pattern."""
    array = mx.contiguous(array)
    mx.eval(array)
    return bytes(view(array))


def used_rows(layer: Any) -> tuple[Any, Any]:
    """Keys and values as far as they are used. (mlx-lm has a method for this, but not in all versions.)"""

    def head(value: Any) -> Any:
        return value[..., : layer.offset, :] if isinstance(value, mx.array) else tuple(head(v) for v in value)

    return head(layer.keys), head(layer.values)
