"""Tiny models on disk, as `mlx_lm.load` takes them: random weights, a tokenizer of single bytes, a chat template."""

from __future__ import annotations

import json
import string
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama, qwen3_next
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.zoo import BASE, DELTA, MOE

SPECIAL = ["<s>", "<u>", "<a>", "</s>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = len(SPECIAL) + len(ALPHABET)
WINDOW = 64  # of the sliding kind
BATCHED_KINDS = ("llama", "sliding", "hybrid")


def build(kind: str, seed: int = 0, width: int = 64) -> Any:
    """A model of one kind: KVCache, KVCache and RotatingKVCache, or KVCache and ArraysCache. In float32, so that a
    prompt computed in pieces does not change the answer.
    """
    mx.random.seed(seed)
    base = {**BASE, "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "hidden_size": width, "head_dim": 32}
    if kind == "hybrid":
        dense = {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]}
        config = {**base, **DELTA, **MOE, **dense, "model_type": "qwen3_next"}
        model = qwen3_next.Model(qwen3_next.ModelArgs.from_dict(config))
    else:
        layers = ["full_attention", "sliding_attention"] if kind == "sliding" else ["full_attention"] * 2
        config = {**base, "model_type": "llama", "layer_types": layers, "sliding_window": WINDOW}
        model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(tree_map(lambda w: w + 0.3 * mx.random.normal(w.shape), model.parameters()))
    # It answers in letters, which are the same tokens again when a client sends them back.
    letters = [len(SPECIAL) + ALPHABET.index(c) for c in string.ascii_letters]
    model.lm_head.weight = (
        mx.zeros_like(model.lm_head.weight).at[mx.array(letters)].add(mx.random.normal((len(letters), width)))
    )
    model.eval()
    mx.eval(model.parameters())
    return model


def write(path: Path, kind: str, seed: int = 0, width: int = 64) -> Path:
    """Such a model's directory."""
    path.mkdir(parents=True, exist_ok=True)
    model = build(kind, seed, width)
    config = {k: v for k, v in asdict(model.args).items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
