"""The README's examples run as they stand, with a tiny model in the place of a real one."""

from __future__ import annotations

import re
import threading
import tomllib
from pathlib import Path

from tests.models import prefill, random_tokens, tiny_llama
from tiered_cache import Config, TieredCache
from tiered_cache.cli import app

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def example(word: str) -> str:
    """The one of Python that says this."""
    (found,) = [b for b in blocks("python") if word in b]
    return found


def test_the_example_of_a_prompt_cache_reuses_what_it_stored(make_config):
    model, tokens = tiny_llama(), random_tokens(400, 1)
    code = example("TieredPromptCache").replace('"tiered-cache.toml"', "config")
    for run in range(2):
        state, _ = prefill(model, tokens)
        names = {"model": model, "config": make_config(), "tokens": tokens, "state_of_tokens": state}
        exec(code, names)
        assert len(names["rest"]) == (1 if run else 400)


def test_the_embedding_example_reuses_what_it_stored(make_config):
    model, tokens = tiny_llama(), random_tokens(400, 1)
    code = re.sub(r"^(model, tokenizer = load|tokens = tokenizer).*$", "", example("generate_step"), flags=re.M)
    code = code.replace('"tiered-cache.toml"', "config").replace("max_tokens=100", "max_tokens=8")
    for run in range(2):
        names = {"model": model, "config": make_config(), "tokens": tokens}
        exec(code, names)
        assert len(names["remaining"]) == (1 if run else 400)
        assert names["promotion"] if run else names["promotion"] is None


def test_the_scheduler_example_gets_its_request(make_config):
    started = []
    with TieredCache.open(make_config(), model=tiny_llama()) as cache:
        wake = threading.Event()
        names = {
            "cache": cache, "wake": wake.set, "request_id": 7, "tokens": random_tokens(400, 1),
            "start": lambda *request: started.append(request),
        }  # fmt: skip
        exec(example("handoff"), names)
    assert [(r[0], r[1], len(r[2])) for r in started] == [(7, None, 400)]
    assert wake.is_set()


def test_the_configuration_example_loads():
    config = Config.load(tomllib.loads(blocks("toml")[0]))
    assert config.ssd_budget() == 100 * 10**9


def test_the_commands_exist():
    """Every command is in the README, and every command in the README is one."""
    named = set(re.findall(r"(?:^|^    |`)tiered-cache ([a-z-]+)", README, re.M))
    known = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    assert named == known - {"demo"} | {"config"}
