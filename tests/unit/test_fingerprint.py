"""Who the model is: any difference that makes states unlike makes fingerprints unlike, and nothing else does."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.rope_utils import initialize_rope

from tests.models import VOCABULARY, tiny_llama
from tiered_cache.fingerprint import model_fingerprint, model_label, namespace

ROOT = Path(__file__).parents[2]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def with_args(**changes: Any) -> Any:
    """The tiny llama with other arguments; every weight is the same."""
    model = llama.Model(replace(tiny_llama().args, **changes))
    model.update(tiny_llama().parameters())
    return model


def with_weight(name: str, change: Any) -> Any:
    model = tiny_llama()
    weights = dict(tree_flatten(model.parameters()))
    model.load_weights([(name, change(weights[name]))], strict=False)
    return model


class Adapted(nn.Module):
    """A linear layer with an adapter that does nothing yet."""

    def __init__(self, linear: Any, rank: int = 2, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.lora_a, self.lora_b = mx.zeros((linear.weight.shape[1], rank)), mx.zeros((rank, linear.weight.shape[0]))


def adapted(where: str = "q_proj", **options: Any) -> Any:
    model = tiny_llama()
    attention = model.layers[1].self_attn
    setattr(attention, where, Adapted(getattr(attention, where), **options))
    return model


def quantized(**options: Any) -> Any:
    model = tiny_llama()
    nn.quantize(model, **options)
    return model


def with_rope(**changes: Any) -> Any:
    model = tiny_llama()
    for layer in model.layers:
        layer.self_attn.rope = nn.RoPE(**{"dims": 32, "traditional": False, "base": 10000.0, "scale": 1.0, **changes})
    return model


QUERY, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
VARIANTS = {
    "the model itself": tiny_llama,
    "another seed": lambda: tiny_llama(seed=1),
    "one matrix": lambda: with_weight(QUERY, lambda w: w * 1.01),
    "one vector": lambda: with_weight(NORM, lambda w: w + 0.01),
    "a matrix with its rows in another order": lambda: with_weight(QUERY, lambda w: w[::-1]),
    "float16": lambda: tiny_llama(dtype=mx.float16),
    "float32": lambda: tiny_llama(dtype=mx.float32),
    "one matrix in float32": lambda: with_weight(QUERY, lambda w: w.astype(mx.float32)),
    "rope theta": lambda: with_args(rope_theta=500_000.0),
    "rope traditional": lambda: with_args(rope_traditional=True),
    "rope scaling": lambda: with_args(rope_scaling={"type": "linear", "factor": 2.0}),
    "rope scaling by 4": lambda: with_args(rope_scaling={"type": "linear", "factor": 4.0}),
    "rope base, changed in place": lambda: with_rope(base=20_000.0),
    "rope scale, changed in place": lambda: with_rope(scale=0.5),
    "rope traditional, changed in place": lambda: with_rope(traditional=True),
    "norm epsilon": lambda: with_args(rms_norm_eps=1e-6),
    "context length": lambda: with_args(max_position_embeddings=8192),
    "one layer more": lambda: tiny_llama(layers=3),
    "more heads": lambda: tiny_llama(heads=4),
    "8 bits": lambda: quantized(bits=8, group_size=64),
    "4 bits": lambda: quantized(bits=4, group_size=64),
    "4 bits in groups of 32": lambda: quantized(bits=4, group_size=32),
    "an adapter": adapted,
    "an adapter elsewhere": lambda: adapted("v_proj"),
    "an adapter of another rank": lambda: adapted(rank=4),
    "an adapter of another scale": lambda: adapted(scale=2.0),
}


def test_models_that_differ_in_anything_have_different_fingerprints():
    found = {name: model_fingerprint(make()) for name, make in VARIANTS.items()}
    alike = [pair for pair in combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    assert not alike
    assert all(len(f) == 64 and set(f) <= set("0123456789abcdef") for f in found.values())


@pytest.mark.parametrize("what", VARIANTS)
def test_the_same_model_has_the_same_fingerprint_each_time_it_is_built(what):
    model = VARIANTS[what]()
    assert model_fingerprint(model) == model_fingerprint(model) == model_fingerprint(VARIANTS[what]())


def test_using_a_model_does_not_change_who_it_is():
    model = tiny_llama()
    before = model_fingerprint(model)
    mx.eval(model(mx.array([[1, 2, 3]])))
    model.train()
    model.eval()
    model.freeze()
    assert model_fingerprint(model) == before


def test_weights_that_are_not_loaded_yet_count_the_same():
    model = tiny_llama()
    model.update({"model": {"norm": {"weight": mx.ones(64, mx.bfloat16) * 1}}})
    assert model_fingerprint(model) == model_fingerprint(tiny_llama())


def test_another_process_finds_the_same_fingerprint():
    code = ("from tests.models import tiny_llama; from tiered_cache.fingerprint import *\n"
            "print(model_fingerprint(tiny_llama(seed=3)), namespace('f', ['A', 'B'], 256, 'tenant').hex())")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "7"},
                          capture_output=True, text=True, check=True)
    mine = namespace("f", ["A", "B"], 256, "tenant").hex()
    assert done.stdout.split() == [model_fingerprint(tiny_llama(seed=3)), mine]


def test_a_model_of_50_million_parameters_takes_less_than_a_second():
    model = nn.Sequential(*(nn.Linear(2500, 2500, bias=False) for _ in range(8)))
    mx.eval(model.parameters())
    start = time.perf_counter()
    model_fingerprint(model)
    assert time.perf_counter() - start < 1


def test_a_namespace_holds_whatever_makes_states_interchangeable():
    same = namespace("f", ["A", "A"], 256, None)
    assert namespace("f", ["A", "A"], 256, None) == same
    assert len(same) == 32
    classes: Any = (["A"], ["A", "B"], ["B", "A"], ["AA"], [])
    others = [("g", ["A", "A"], 256, None), ("f", ["A", "A"], 16, None), *(("f", c, 256, None) for c in classes),
              *(("f", ["A", "A"], 256, tenant) for tenant in ("", "a", "b", "None"))]
    assert len({same, *(namespace(*other) for other in others)}) == 1 + len(others)


def test_a_label_tells_people_the_kind_of_model_and_the_head_of_its_fingerprint():
    assert model_label(tiny_llama(), "0123456789abcdef") == "llama-01234567"
    assert model_label(nn.Linear(2, 2), "0123456789abcdef") == "Linear-01234567"


def test_rope_frequencies_changed_in_place_count():
    models = [tiny_llama(), tiny_llama()]
    for model, factor in zip(models, (8.0, 32.0), strict=True):
        for layer in model.layers:
            layer.self_attn.rope = initialize_rope(32, 10000.0, False, {**LLAMA3, "factor": factor}, 8192)
    tokens = mx.arange(64)[None] % VOCABULARY
    assert not mx.array_equal(models[0](tokens), models[1](tokens))
    assert model_fingerprint(models[0]) != model_fingerprint(models[1])


def test_columns_that_differ_count():
    models = [nn.Linear(512, 512), nn.Linear(512, 512)]
    weight = mx.random.normal((512, 512))
    models[0].weight, models[1].weight = weight, mx.concatenate([weight[:, :256], 2 * weight[:, 256:]], axis=1)
    models[1].bias = models[0].bias
    assert model_fingerprint(models[0]) != model_fingerprint(models[1])


def test_a_configuration_of_any_class_counts():
    @dataclass
    class Model:
        args: Any

    assert model_fingerprint(Model({"theta": 1.0})) != model_fingerprint(Model({"theta": 2.0}))
    one, other = (SimpleNamespace(theta=theta) for theta in (1.0, 2.0))
    assert model_fingerprint(Model(one)) != model_fingerprint(Model(other))
