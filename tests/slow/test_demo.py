"""The demo's whole course, with a tiny model in place of the real one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import psutil
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ssd_tier import SSDTier, TierOptions
from ssd_tier.inspection import Inspection
from tests.models import VOCABULARY, tiny_llama
from tiered_cache.demo.conversation import AGENTS, FOLLOW_UPS, SYSTEM

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"  # <s>, <u> and <a>


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that `mlx_lm.load` loads."""
    path = tmp_path_factory.mktemp("model")
    tiny = tiny_llama(layers=4, dim=128)
    (path / "config.json").write_text(json.dumps(asdict(tiny.args) | {"max_position_embeddings": 2048}))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(tiny.parameters())))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Tokens for all ids, and of plain characters only: a random model's answer is text, and encodes to what it was.
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>", "<u>", "<a>", "</s>"])
    tokenizer.train_from_iterator([SYSTEM, *AGENTS.values(), *FOLLOW_UPS, Path(__file__).read_text()], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def start(model: Path | str, data: Path, *, as_json: bool) -> subprocess.Popen[str]:
    arguments = f"model={str(model)!r}, quick=True, as_json={as_json}, data=Path({str(data)!r})"
    code = f"from pathlib import Path; from tiered_cache.demo.run import run_demo; exit(run_demo({arguments}))"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True)


def test_every_kind_of_hit_and_equal_answers(model: Path, tmp_path: Path) -> None:
    for run in (1, 2):  # the second one finds what the first one left
        out, errors = start(model, tmp_path, as_json=True).communicate()
        assert not errors
        report = json.loads(out)
        assert report["answers"] == {"equal": 6, "unequal": 0}
        assert 0 < report["ram"]["peak"] <= report["ram"]["limit"]
        rows = {row["source"] for row in report["rows"]}
        assert rows >= {"cold", "SSD hit after restart"}
        assert rows >= {"RAM hit", "SSD hit"} or run == 2
        after = [t for t in report["turns"] if t["source"] == "SSD hit after restart"]
        assert len(after) >= 2
        assert all(t["computed"] < t["prompt"] / 10 for t in after)


def test_sigterm_closes_the_cache(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path, as_json=False) as demo:
        assert demo.stdout
        while "Ada, turn 1: cold" not in demo.stdout.readline():
            assert demo.poll() is None
        [child] = psutil.Process(demo.pid).children()
        demo.send_signal(signal.SIGTERM)
        assert demo.wait() == 128 + signal.SIGTERM
    assert not child.is_running()
    assert not (tmp_path / "conversations.json").exists()  # it was in the middle of the first stage
    SSDTier(TierOptions(tmp_path / "cache", budget=10**9, min_free=0, spill_queue=1)).disown()  # the lock is free
    assert Inspection(tmp_path / "cache").entries


@pytest.mark.parametrize("model", ["/nowhere"])
def test_a_model_that_is_not_there(model: str, tmp_path: Path) -> None:
    _, errors = (demo := start(model, tmp_path, as_json=True)).communicate()
    assert demo.returncode == 2
    assert errors.startswith("tiered-cache demo: /nowhere cannot be used as the model: ")
    assert errors.count("\n") == 1
