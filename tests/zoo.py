"""Small models with random weights, one or more of each model type, built from mlx-lm's own classes.

`ZOO` maps a name (the model type, plus a suffix for a variant) to what builds the model and to the family of its
caches; `build(name)` gives the model ready to run. Windows are 8 to 12 tokens and chunks 16, so that a prompt of
40 tokens crosses all of them. A model type that the installed mlx-lm does not have raises ImportError.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

VOCABULARY = 128


class Entry(NamedTuple):
    """What builds a model, unevaluated, and the family of the caches it uses."""

    build: Callable[[], Any]
    family: str


def same(value: Any, names: str) -> dict[str, Any]:
    """Each of the fields `names` with one value: model types call the same thing by different names."""
    return dict.fromkeys(names.split(), value)


# A module picks the fields it knows.
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **same(256, "max_position_embeddings n_positions n_ctx block_size"),
    **same(64, "hidden_size n_embd d_model model_dim hidden_dim"),
    **same(64, "intermediate_size n_inner ffn_hidden_size intermediate_size_mlp ff_intermediate_size"),
    **same(2, "num_hidden_layers n_layer n_layers num_layers num_transformer_layers"),
    **same(4, "num_attention_heads n_head n_heads num_heads"),
    **same(2, "num_key_value_heads n_kv_heads num_kv_heads num_attention_groups n_shared_head"),
    **same(16, "head_dim kv_channels hidden_size_per_head"),
    **same(1e-5, "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps"),
    **same(10000.0, "rope_theta rope_local_base_freq swa_rope_theta"),
    "rope_scaling": None,
    "rotary_dim": 8,
    "partial_rotary_factor": 0.5,
    **same(False, "tie_word_embeddings attention_bias mlp_bias use_bias"),
    "use_qk_norm": True,
}
GPT = {"num_key_value_heads": None}  # their own default
GRANITE = {
    **same(2.0, "logits_scaling embedding_multiplier"),
    **same(0.5, "attention_multiplier residual_multiplier"),
}
MINICPM = {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0}
MOE: dict[str, Any] = {
    **same(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **same(2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts"),
    **same(1, "n_shared_experts num_shared_experts num_shared_expert"),
    **same(32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
    **same(32, "share_expert_dim expert_ffn_hidden_size"),
    **same(1, "first_k_dense_replace num_dense_layers decoder_sparse_step moe_layer_freq n_group topk_group"),
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
# Attention over one latent vector a token: keys and values differ in width.
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    **same(8, "qk_rope_head_dim qk_nope_head_dim"),
    "v_head_dim": 16,
}
# An index that keeps fewer tokens than the prompt has, so that the choice depends on the cache
INDEX = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
WINDOW = 8
S, F = "sliding_attention", "full_attention"
SLIDING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 4,
    "layer_types": [S, S, S, F],
}
ROPES = {S: {"rope_theta": 10000.0}, F: {"rope_theta": 100000.0}}
MINISTRAL: dict[str, Any] = {
    "rope_theta": 10000.0,
    "rope_type": "default",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
}
YARN: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}
LONGROPE: dict[str, Any] = {
    "type": "longrope",
    **same([1.0] * 8, "short_factor long_factor"),
    **same(1.2, "short_mscale long_mscale"),
}
GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": [S, F, S, F, S, F],
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0, 0.0],
    **{"altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0},
    "laurel_rank": 8,
}
GEMMA4: dict[str, Any] = {
    **SLIDING,
    "num_hidden_layers": 6,
    "layer_types": [S, F, S, F, S, F],
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
}
# Gated delta rule
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    **same(4, "linear_num_value_heads linear_conv_kernel_dim full_attention_interval"),
    **same(16, "linear_key_head_dim linear_value_head_dim"),
}
KDA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "linear_attn_config": {
        "kda_layers": [1, 2],
        "full_attn_layers": [3],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
}
BAILING: dict[str, Any] = {"num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2}
# State space layers, in the words of mamba 1, mamba 2 and the hybrids
MAMBA: dict[str, Any] = {
    **same(8, "state_size ssm_state_size mamba_d_state"),
    **same(4, "conv_kernel mamba_d_conv time_step_rank"),
    **same(8, "num_heads mamba_n_heads mamba_num_heads"),
    **same(16, "mamba_d_head mamba_head_dim"),
    **same(2, "n_groups mamba_n_groups mamba_expand"),
    **same(True, "use_conv_bias mamba_conv_bias"),
    "mamba_proj_bias": False,
    "time_step_limit": (0.001, 100.0),
}
JAMBA = {
    "num_hidden_layers": 4,
    **same(1, "attn_layer_offset expert_layer_offset"),
    **same(2, "attn_layer_period expert_layer_period"),
}
LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", F, "conv"],
    "conv_L_cache": 3,
    **same(64, "block_dim block_ff_dim"),
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    **same(True, "conv_bias block_auto_adjust_ff_dim use_expert_bias"),
}
LONGCAT: dict[str, Any] = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    **same(True, "mla_scale_q_lora mla_scale_kv_lora"),
    "ngram_vocab_size_ratio": 3,
    "emb_neighbor_num": 3,
    "emb_split_num": 2,
}
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attention_chunk_size": 16,
    "interleave_moe_layer_step": 2,
    "num_experts_per_tok": 1,
}
DEEPSEEK_V41: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": WINDOW,
    "compress_ratios": (0, 3, 3, 7),  # 13 and 40 tokens leave a group open
    "kv_source_layer_ids": (1, 3),
    "index_source_layer_ids": (1, 3),
    "scoring_func": "sqrtsoftplus",
}


def entry(family: str, module: str, *parts: dict[str, Any], nested: bool = False, **values: Any) -> Entry:
    """A model of `mlx_lm.models.<module>`; later parts override earlier ones. `nested`: the values that describe the
    text model lie in a dictionary of their own."""

    def make() -> Any:
        found = import_module(f"mlx_lm.models.{module}")
        config: dict[str, Any] = {"model_type": module, **BASE}
        for part in (*parts, values):
            config |= deepcopy(part)  # some modules change what they are given
        if nested:
            config = {"model_type": module, "vocab_size": VOCABULARY, "text_config": config}
        return found.Model(found.ModelArgs.from_dict(config))

    return Entry(make, family)


ZOO: dict[str, Entry] = {
    # KVCache in every layer
    **{
        name: entry("kv", name)
        for name in (
            *("llama", "qwen2", "qwen3", "gemma", "gemma2", "cohere", "phi3", "olmo2", "starcoder2", "glm", "glm4"),
            *("hunyuan_v1_dense", "ernie4_5", "seed_oss", "internlm2", "internlm3", "mimo", "nanochat", "telechat3"),
            *("talkie", "helium", "plamo", "qwen", "exaone"),
        )
    },
    **{
        name: entry("kv", name, MOE)
        for name in (
            *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek", "dots1", "olmoe", "glm4_moe", "bailing_moe", "minimax"),
            *("Klear", "solar_open", "ernie4_5_moe"),
        )
    },
    **{name: entry("kv", name, MOE, MLA) for name in ("deepseek_v3", "glm4_moe_lite", "youtu_llm")},
    **{name: entry("kv", name, GPT) for name in ("gpt2", "gpt_bigcode", "gptj")},
    "lille-130m": entry("kv", "lille-130m"),
    # text parts of models that also see
    **{name: entry("kv", name, nested=True) for name in ("mistral3", "pixtral", "qwen2_vl", "qwen3_vl")},
    **{name: entry("kv", name, MOE, MLA, nested=True) for name in ("qwen3_vl_moe", "kimi_vl", "kimi_k25")},
    "llama-bf16": entry("kv", "llama"),
    "llama-f16": entry("kv", "llama"),
    "llama-one-head": entry("kv", "llama", num_key_value_heads=1, tie_word_embeddings=True),
    "deepseek_v2": entry("kv", "deepseek_v2", MOE, MLA, topk_method="greedy", rope_scaling=YARN),
    "mistral4": entry("kv", "mistral4", MOE, MLA, rope_parameters=MINISTRAL),
    "minicpm": entry("kv", "minicpm", MINICPM),
    "minicpm3": entry("kv", "minicpm3", MLA, MINICPM, rope_scaling={"type": "longrope"}),
    "granite": entry("kv", "granite", GRANITE),
    "granitemoe": entry("kv", "granitemoe", GRANITE, MOE),
    "phimoe": entry("kv", "phimoe", MOE, rope_scaling=LONGROPE),
    "phi": entry("kv", "phi", num_key_value_heads=4),
    "stablelm": entry("kv", "stablelm", use_qkv_bias=True, qk_layernorm=True),
    "gpt_neox": entry("kv", "gpt_neox", rotary_emb_base=10000, rotary_pct=0.5),
    "smollm3": entry("kv", "smollm3", num_hidden_layers=4),
    "nemotron": entry("kv", "nemotron", hidden_act="relu2"),
    "apertus": entry("kv", "apertus", post_norm=False, qk_norm=True),
    "llama4_text": entry("kv", "llama4_text", no_rope_layers=[1, 0]),
    "openelm": entry(
        "kv",
        "openelm",
        ffn_dim_divisor=8,
        num_query_heads=[4, 8],
        num_kv_heads=[1, 2],  # not the same in all layers
        ffn_multipliers=[1.0, 2.0],
    ),
    "dbrx": entry(
        "kv",
        "dbrx",
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "hunyuan": entry(
        "kv",
        "hunyuan",
        MOE,
        **same(True, "use_mixed_mlp_moe use_cla"),
        cla_share_factor=2,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    ),
    # KVCache, but not one a layer: several loops over the layers, shared keys, layers without attention
    "nanbeige": entry("kv", "nanbeige", num_loops=2),
    "afm7": entry("kv", "afm7", num_layers=4, num_kv_reuse_layers=1),
    "nemotron-nas": entry(
        "kv",
        "nemotron-nas",
        num_hidden_layers=3,
        block_configs=[
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        ],
    ),
    # KVCache and RotatingKVCache
    "llama-sliding": entry("sliding", "llama", SLIDING),
    "llama-sliding-bf16": entry("sliding", "llama", SLIDING),
    "llama-sliding-12": entry("sliding", "llama", SLIDING, layer_types=[F, S, F, S], sliding_window=12),
    "ministral3": entry("sliding", "ministral3", SLIDING, rope_parameters=MINISTRAL),
    "gemma3_text": entry("sliding", "gemma3_text", SLIDING, query_pre_attn_scalar=16),
    "gemma3": entry("sliding", "gemma3", SLIDING, nested=True, query_pre_attn_scalar=16),
    "gemma3-bf16": entry("sliding", "gemma3", SLIDING, nested=True, query_pre_attn_scalar=16),
    "gemma3n": entry("sliding", "gemma3n", GEMMA3N, nested=True),
    "gemma4_text": entry("sliding", "gemma4_text", GEMMA4),
    "gemma4_text-moe": entry("sliding", "gemma4_text", GEMMA4, MOE, enable_moe_block=True, attention_k_eq_v=True),
    "gemma4": entry("sliding", "gemma4", GEMMA4, nested=True),
    "gpt_oss": entry("sliding", "gpt_oss", SLIDING, MOE, layer_types=[S, F, S, F]),
    "cohere2": entry("sliding", "cohere2", SLIDING),
    "exaone4": entry("sliding", "exaone4", SLIDING, sliding_window_pattern="LLLG"),
    "exaone_moe": entry("sliding", "exaone_moe", SLIDING, MOE, is_moe_layer=[False, True, True, True]),
    "olmo3": entry("sliding", "olmo3", SLIDING),
    "afmoe": entry("sliding", "afmoe", SLIDING, MOE),
    "laguna": entry("sliding", "laguna", SLIDING, MOE),
    "mellum": entry("sliding", "mellum", SLIDING, MOE, rope_parameters=ROPES),
    "mimo_v2_flash": entry(
        "sliding",
        "mimo_v2_flash",
        MOE,
        num_hidden_layers=4,
        hybrid_layer_pattern=[0, 1, 1, 0],
        moe_layer_freq=[0, 1, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        **same(4, "swa_num_attention_heads swa_num_key_value_heads"),
        **same(8, "v_head_dim swa_v_head_dim"),
        swa_head_dim=16,
    ),
    "muse_glimmer": entry("sliding", "muse_glimmer", SLIDING),
    "plamo3": entry("sliding", "plamo3", SLIDING),
    "spark2_5": entry("sliding", "spark2_5", SLIDING, rope_parameters=ROPES),
    "step3p5": entry("sliding", "step3p5", SLIDING, MOE),
    # A full cache and a window for each layer, in one list after the other
    "iquestloopcoder": entry("sliding", "iquestloopcoder", loop_num=2, loop_window_size=WINDOW),
    # ArraysCache and KVCache
    "qwen3_next": entry("hybrid", "qwen3_next", DELTA, MOE),
    "qwen3_next-bf16": entry("hybrid", "qwen3_next", DELTA, MOE, num_experts=0, mlp_only_layers=[0, 1, 2, 3]),
    "qwen3_5": entry("hybrid", "qwen3_5", DELTA, nested=True),
    "qwen3_5-bf16": entry("hybrid", "qwen3_5", DELTA, nested=True),
    "qwen3_5_moe": entry("hybrid", "qwen3_5_moe", DELTA, MOE, nested=True),
    "kimi_linear": entry("hybrid", "kimi_linear", MOE, MLA, KDA, model_max_length=256),
    "kimi_k3": entry("hybrid", "kimi_k3", MOE, MLA, KDA, nested=True, attn_res_block_size=2),
    "bailing_moe_linear": entry("hybrid", "bailing_moe_linear", MOE, BAILING, num_key_value_heads=4),
    "bailing_hybrid": entry("hybrid", "bailing_hybrid", MOE, MLA, BAILING),
    "bailing_moe_v3": entry("hybrid", "bailing_moe_v3", MOE, MLA, BAILING),
    "granitemoehybrid": entry("hybrid", "granitemoehybrid", GRANITE, MOE, MAMBA, layer_types=["mamba", "attention"]),
    "jamba": entry("hybrid", "jamba", MAMBA, MOE, JAMBA),
    "nemotron_h": entry("hybrid", "nemotron_h", MAMBA, hybrid_override_pattern=["M", "*", "-", "M"]),
    "plamo2": entry("hybrid", "plamo2", MAMBA, num_hidden_layers=4),
    "lfm2": entry("hybrid", "lfm2", LFM2),
    "lfm2-bf16": entry("hybrid", "lfm2", LFM2),
    "lfm2-vl": entry("hybrid", "lfm2-vl", LFM2, nested=True),
    "lfm2_moe": entry("hybrid", "lfm2_moe", LFM2, MOE),
    "olmo_hybrid": entry("hybrid", "olmo_hybrid", DELTA, linear_allow_neg_eigval=True),
    # with RotatingKVCache too, or instead
    "gear": entry("hybrid", "gear", SLIDING, layer_types=["conv_mixer", S, F, "conv_mixer"]),
    "recurrent_gemma": entry(
        "hybrid",
        "recurrent_gemma",
        num_hidden_layers=3,
        num_key_value_heads=1,
        block_types=["recurrent", "recurrent", "attention"],
        conv1d_width=4,
        attention_window_size=WINDOW,
        logits_soft_cap=30.0,
    ),
    # ArraysCache only
    "mamba": entry("recurrent", "mamba", MAMBA),
    "mamba-bf16": entry("recurrent", "mamba", MAMBA),
    "mamba-falcon": entry("recurrent", "mamba", MAMBA, model_type="falcon_mamba"),
    "mamba2": entry("recurrent", "mamba2", MAMBA, intermediate_size=128),
    "rwkv7": entry(
        "recurrent", "rwkv7", **same(8, "a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim")
    ),
    # CacheList
    "deepseek_v32": entry("list", "deepseek_v32", MOE, MLA, INDEX),
    "glm_moe_dsa": entry("list", "glm_moe_dsa", MOE, MLA, INDEX, rope_parameters={"rope_theta": 1e4}),
    "longcat_flash": entry("list", "longcat_flash", MOE, MLA, LONGCAT),
    "longcat_flash_ngram": entry("list", "longcat_flash_ngram", MOE, MLA, LONGCAT),
    "falcon_h1": entry("list", "falcon_h1", MAMBA, mamba_d_ssm=128),
    "baichuan_m1": entry("list", "baichuan_m1", sliding_window=WINDOW, sliding_window_layers=[1], conv_window=2),
    "minimax_m3_vl": entry(
        "list",
        "minimax_m3_vl",
        MOE,
        nested=True,
        layer_types=["full_attention", "sparse_attention"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=4,
        index_topk_blocks=2,
        moe_layer_freq=[0, 1],
    ),
    # ChunkedKVCache and KVCache
    "llama4": entry("chunked", "llama4", MOE, LLAMA4, nested=True),
    "llama4-bf16": entry("chunked", "llama4", MOE, LLAMA4, nested=True, interleave_moe_layer_step=8),  # no experts
    "llama4-wide": entry("chunked", "llama4", MOE, LLAMA4, nested=True, attention_chunk_size=8192),  # not crossed
    "llama4-6-layers": entry("chunked", "llama4", MOE, LLAMA4, nested=True, num_hidden_layers=6),
    # A cache class of the model's own: a window, closed groups of several tokens, and the tokens of the open group
    "deepseek_v41": entry("layer_cache", "deepseek_v41", MOE, MLA, INDEX, DEEPSEEK_V41),
    "deepseek_v41-shared": entry(
        "layer_cache",
        "deepseek_v41",
        *(MOE, MLA, INDEX, DEEPSEEK_V41),
        compress_ratios=(1, 3, 3, 3),
        kv_source_layer_ids=(0, 1, 2),
        index_source_layer_ids=(0, 1, 2, 3),
        candidate_source_layer_id=1,
        candidate_topk_blocks=4,
        candidate_block_size=2,
    ),
}


def build(name: str) -> Any:
    """The model `name`, the same in every process, with its parameters evaluated."""
    mx.random.seed(zlib.crc32(name.encode()))
    model = ZOO[name].build()
    # The CPU backend multiplies matrices of experts in float32 only.
    dtype = {"bf16": mx.bfloat16, "f16": mx.float16}.get(name.rpartition("-")[2], mx.float32)

    def vary(weights: mx.array) -> mx.array:
        # Constants (norms, decays, gates that start as zeros) would hide what a wrong cache does to the output.
        if not mx.issubdtype(weights.dtype, mx.floating):
            return weights
        return (weights + 0.1 * mx.random.normal(weights.shape)).astype(dtype)

    model.update(tree_map(vary, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model
