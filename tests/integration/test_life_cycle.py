"""Opening, closing, and what must not be left behind or broken on the way."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ssd_tier import DirectoryInUse, DirectoryUnusable
from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import ConfigError, TieredCache

MODEL = ShapeOnlyModel()
ROOT = Path(__file__).parents[2]


def open_files() -> set[str]:
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc to count open files in")
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{fd.name} {fd.readlink()}")
        except FileNotFoundError:
            continue
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_opening_and_closing_leaves_no_thread_and_no_file_open(make_config):
    tokens = random_tokens(600, 1)
    for i in range(3):
        if i == 1:
            before = open_files(), threading.active_count()
        with TieredCache.open(make_config(), model=MODEL) as cache:
            cache.store(tokens, state_of(tokens))
            if promotion := cache.promote(tokens):
                promotion.result(10)
    assert (open_files(), threading.active_count()) == before


def test_closing_twice_and_using_a_closed_cache_does_no_harm(make_config):
    tokens = random_tokens(600, 1)
    cache = TieredCache.open(make_config(), model=MODEL)
    assert cache.store(tokens, state_of(tokens))
    cache.close()
    cache.close()
    assert not cache.flush(1), "nothing can be written any more"
    state, remaining = cache.fetch(tokens)  # RAM still answers
    assert remaining == tokens[-1:]
    assert same_state(state, state_of(tokens), 599)
    assert cache.promote(tokens) is None
    json.dumps(cache.stats())


def test_an_exception_in_the_with_block_still_saves(make_config):
    tokens = random_tokens(600, 1)


    def host() -> None:
        with TieredCache.open(make_config(), model=MODEL) as cache:
            assert cache.store(tokens, state_of(tokens))
            raise RuntimeError("host")

    with pytest.raises(RuntimeError, match="host"):
        host()
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.promote(tokens).result(10)[1] == tokens[-1:]


def test_everything_stored_is_private_whatever_the_umask(make_config, tmp_path):
    old = os.umask(0)
    try:
        with TieredCache.open(make_config(), model=MODEL) as cache:
            tokens = random_tokens(600, 1)
            cache.store(tokens, state_of(tokens))
            assert cache.flush(10)
            for path in (tmp_path / "cache").rglob("*"):
                assert path.stat().st_mode & 0o077 == 0, path
    finally:
        os.umask(old)


def run_owner(config: dict, script: str) -> subprocess.Popen:
    head = (
        "import sys; sys.path.insert(0, sys.argv[1]); import json, time, signal\n"
        "from tests.states import ShapeOnlyModel, state_of\n"
        "from tests.models import random_tokens\n"
        "from tiered_cache import TieredCache\n"
        "config = json.loads(sys.argv[2])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + script, str(ROOT), json.dumps(config)], stdout=subprocess.PIPE, text=True
    )


def test_a_second_process_is_told_who_owns_the_directory(make_config, tmp_path):
    owner = run_owner(
        make_config(),
        "with TieredCache.open(config, model=ShapeOnlyModel()) as cache:\n"
        "    tokens = random_tokens(600, 1); cache.store(tokens, state_of(tokens)); cache.flush(10)\n"
        "    print('ready', flush=True); time.sleep(60)\n",
    )
    try:
        assert owner.stdout
        assert owner.stdout.readline() == "ready\n"
        before = contents(tmp_path / "cache" / "blobs")
        with pytest.raises(DirectoryInUse, match=f"in use by process {owner.pid}"):
            TieredCache.open(make_config(), model=MODEL)
        assert contents(tmp_path / "cache" / "blobs") == before
    finally:
        owner.kill()
        owner.communicate()
    with TieredCache.open(make_config(), model=MODEL) as cache:  # free at once, and what was flushed is there
        tokens = random_tokens(600, 1)
        assert cache.promote(tokens).result(10)[1] == tokens[-1:]


def test_sigterm_that_ends_the_with_block_saves(make_config):
    owner = run_owner(
        make_config(),
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "with TieredCache.open(config, model=ShapeOnlyModel()) as cache:\n"
        "    for i in range(5): tokens = random_tokens(600, i); assert cache.store(tokens, state_of(tokens))\n"
        "    print('ready', flush=True); time.sleep(60)\n",
    )
    assert owner.stdout
    assert owner.stdout.readline() == "ready\n"
    owner.send_signal(signal.SIGTERM)
    owner.communicate(timeout=20)
    assert owner.returncode == 143
    with TieredCache.open(make_config(), model=MODEL) as cache:
        for i in range(5):
            tokens = random_tokens(600, i)
            assert cache.promote(tokens).result(10)[1] == tokens[-1:]


@pytest.mark.parametrize("what", ["file", "no write permission", "writable by all", "other files"])
def test_an_unusable_directory_is_one_clear_sentence_and_left_alone(make_config, tmp_path, what):
    path = tmp_path / "cache"
    if what == "file":
        path.write_text("mine")
    else:
        path.mkdir(mode=0o700)
        if what == "other files":
            (path / "thesis.txt").write_text("mine")
        path.chmod({"no write permission": 0o500, "writable by all": 0o777}.get(what, 0o700))
    before = contents(tmp_path)
    with pytest.raises(DirectoryUnusable) as caught:
        TieredCache.open(make_config(), model=MODEL)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert any(word in message for word in ("choose", "chmod"))
    path.chmod(0o700)
    assert contents(tmp_path) == before


def damage_index(path: Path, how: str) -> None:
    if how == "text":
        path.write_text("not a database at all, but long enough to be one" * 100)
    elif how == "directory":
        path.rename(path.with_name("elsewhere"))
        path.mkdir()
    else:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99" if how == "newer" else "PRAGMA application_id = 42")
        connection.commit()
        connection.close()


@pytest.mark.parametrize("how", ["directory", "newer", "another program's"])
def test_an_unusable_index_turns_the_ssd_off_with_one_warning_and_is_left_alone(make_config, tmp_path, caplog, how):
    tokens = random_tokens(600, 1)
    with TieredCache.open(make_config(), model=MODEL) as cache:
        cache.store(tokens, state_of(tokens))
    damage_index(tmp_path / "cache" / "index.sqlite", how)
    before = contents(tmp_path / "cache")
    del before["lock"]  # it names the last owner's process
    with caplog.at_level(logging.WARNING), TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(tokens, state_of(tokens))  # RAM goes on
        assert cache.fetch(tokens)[1] == tokens[-1:]
        assert "index.sqlite" in cache.stats()["ssd"]["off_because"]
        assert cache.promote(random_tokens(600, 2)) is None
    (warning,) = [r.getMessage() for r in caplog.records if "SSD tier is off" in r.getMessage()]
    assert any(word in warning for word in ("move it away", "install a newer"))
    after = contents(tmp_path / "cache")
    del after["lock"]
    assert after == before


def test_a_config_with_a_typo_is_refused_before_anything_is_made(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"ssd\.budgte"):
        TieredCache.open(make_config(ssd={"budgte": "1GB"}), model=MODEL)
    assert not (tmp_path / "cache").exists()


def test_a_model_whose_layers_are_not_supported_is_reported_once_and_served_without_cache(make_config, caplog):
    from mlx_lm.models.cache import RotatingKVCache

    class Unheard(RotatingKVCache):
        pass

    class Sliding(ShapeOnlyModel):
        def make_cache(self) -> list[RotatingKVCache]:
            return [Unheard(64), Unheard(64)]

    tokens = random_tokens(600, 1)
    with caplog.at_level(logging.WARNING), TieredCache.open(make_config(), model=Sliding()) as cache:
        for _ in range(5):
            assert not cache.store(tokens, Sliding().make_cache())
            assert cache.fetch(tokens) == (None, tokens)
        assert cache.stats()["losses"] == {"refused_unsupported_layer": 5}
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1
    assert "Unheard" in warnings[0]


def test_the_budget_holds_when_it_shrinks_between_two_runs(make_config, tmp_path):
    sequences = [random_tokens(1024, seed) for seed in range(40)]
    shape = {"layers": 4, "heads": 4, "dim": 64}  # 8 kB a token, 2 MB a block
    with TieredCache.open(make_config(ram={"max_memory": "1GB"}), model=ShapeOnlyModel(layers=4)) as cache:
        for tokens in sequences[:8]:
            assert cache.store(tokens, state_of(tokens, **shape))
    size = sum(p.stat().st_size for p in (tmp_path / "cache").rglob("*") if p.is_file())
    assert size > 18e6
    with TieredCache.open(make_config(ssd={"budget": "16MB"}), model=ShapeOnlyModel(layers=4)) as cache:
        size = sum(p.stat().st_size for p in (tmp_path / "cache").rglob("*") if p.is_file())
        assert size <= 16e6
        assert cache.promote(sequences[7]).result(10)[0]  # what was used last stays
