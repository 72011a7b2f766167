"""The command line, as a person or a script meets it: real processes beside a running owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_life_cycle import contents, damage_index
from tests.models import random_tokens
from tests.states import ShapeOnlyModel, bytes_per_token, state_of
from tiered_cache import TieredCache

COMMAND = [str(Path(sys.executable).with_name("tiered-cache"))]


def run(*arguments: object, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=environment, cwd=cwd, check=False
    )
    assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done


def refused(*arguments: object) -> str:
    """The one sentence on stderr of a call that ends with exit code 2."""
    done = run(*arguments, code=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "Traceback" not in line
    return line


@pytest.fixture
def running(make_config, tmp_path):
    """An owner that is running: two sequences of 700 and 500 tokens that share 300, flushed."""
    with TieredCache.open(make_config(), model=ShapeOnlyModel(), name="my-model") as cache:
        shared = random_tokens(300, 1)
        for tokens in (shared + random_tokens(400, 2), shared + random_tokens(200, 3)):
            assert cache.store(tokens, state_of(tokens))
        assert cache.flush(20)
        yield tmp_path / "cache"


def test_ls_lists_sequences_beside_a_running_owner(running):
    rows = json.loads(run("ls", "--path", running, "--json").stdout)
    assert [r["tokens"] for r in rows] == [500, 700]
    assert [r["raw_bytes"] for r in rows] == [500 * bytes_per_token(), 700 * bytes_per_token()]
    files = sum(p.stat().st_size for p in (running / "blobs").rglob("*") if p.is_file())
    assert 0 < rows[0]["file_bytes"] < rows[1]["file_bytes"] <= files
    assert {r["model"] for r in rows} == {"my-model"}
    assert all(r["ratio"] == round(r["file_bytes"] / r["raw_bytes"], 3) and 0 <= r["age_seconds"] < 600 for r in rows)
    text = run("ls", "--path", running).stdout
    assert all(word in text for word in ("my-model", rows[0]["key"][:12], "500", "700", "2 sequences"))


def test_show_describes_one_sequence(running):
    key = json.loads(run("ls", "--path", running, "--json").stdout)[1]["key"]
    shown = json.loads(run("show", key[:8], "--path", running, "--json").stdout)
    assert shown["key"] == key
    assert [b["tokens"] for b in shown["blocks"]] == [256, 256, 188]
    assert [b["start"] for b in shown["blocks"]] == [0, 256, 512]
    assert all(Path(b["file"]).stat().st_size == b["file_bytes"] for b in shown["blocks"])
    assert shown["state"] == {
        "layers": 2,
        "classes": ["mlx_lm.models.cache.KVCache"],
        "dtypes": ["BF16"],
        "shapes": [[1, 2, 188, 16]],
    }
    assert key in run("show", key, "--path", running).stdout


def test_stats_adds_up(running):
    stats = json.loads(run("stats", "--path", running, "--json").stdout)
    blobs = [p.stat().st_size for p in (running / "blobs").rglob("*") if p.is_file()]
    assert (stats["blocks"], stats["file_bytes"]) == (len(blobs), sum(blobs))
    assert stats["sequences"] == 2
    assert stats["counters"]["blocks_written"] == len(blobs)
    assert stats["models"]["my-model"]["blocks"] == len(blobs)
    assert "my-model" in run("stats", "--path", running).stdout


def test_looking_changes_nothing(running):
    before = {k: v for k, v in contents(running).items() if "index" not in k}
    for command in (["ls"], ["stats"], ["show", json.loads(run("ls", "-p", running, "--json").stdout)[0]["key"]]):
        run(*command, "--path", running)
    assert {k: v for k, v in contents(running).items() if "index" not in k} == before


def test_config_init_writes_a_file_that_loads_and_is_never_overwritten(tmp_path):
    run("config", "init", cwd=tmp_path)
    shown = json.loads(run("config", "show", "-c", tmp_path / "tiered-cache.toml", "--json").stdout)
    assert shown["cache.block_tokens"] == {"value": 256, "origin": "default"}
    (tmp_path / "tiered-cache.toml").write_text('[ssd]\nbudget = "3GB"\npath = "here"\n')
    assert "exists already" in refused("config", "init", tmp_path / "tiered-cache.toml")
    shown = json.loads(run("config", "show", "-c", tmp_path / "tiered-cache.toml", "--json").stdout)
    assert shown["ssd.budget"] == {"value": 3 * 10**9, "origin": "tiered-cache.toml"}
    assert shown["ssd.path"]["value"] == str(tmp_path / "here")
    assert "3.0 GB" in run("config", "show", "-c", tmp_path / "tiered-cache.toml").stdout


def test_what_a_person_did_wrong_is_one_sentence_and_exit_code_2(running, tmp_path):
    typo = tmp_path / "typo.toml"
    typo.write_text('[ssd]\nbudgte = "3GB"\n')
    assert "ssd.budgte" in refused("ls", "-c", typo)
    assert "did you mean" in refused("config", "show", "-c", typo)
    assert "no-such.toml" in refused("ls", "-c", tmp_path / "no-such.toml")
    assert "is a file" in refused("ls", "-p", typo)
    assert "does not exist" in refused("ls", "-p", tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    assert "'ffffffffffff'" in refused("show", "ffffffffffff", "-p", running)


def test_a_key_that_names_several_blocks_is_refused(make_config, tmp_path):
    with TieredCache.open(make_config(), model=ShapeOnlyModel()) as cache:
        for seed in range(17):  # more blocks than there are hex digits: two keys begin alike
            tokens = random_tokens(200, seed)
            assert cache.store(tokens, state_of(tokens))
    first = [p.name[0] for p in (tmp_path / "cache" / "blobs").rglob("*.safetensors")]
    shared = next(digit for digit in first if first.count(digit) > 1)
    message = refused("show", shared, "-p", tmp_path / "cache")
    assert f"{first.count(shared)} blocks" in message
    assert "give more digits" in message


@pytest.mark.parametrize("how", ["text", "directory", "newer", "another program's"])
def test_an_unusable_index_is_one_sentence_and_nothing_is_deleted(make_config, tmp_path, how):
    with TieredCache.open(make_config(), model=ShapeOnlyModel()) as cache:
        tokens = random_tokens(300, 1)
        cache.store(tokens, state_of(tokens))
    damage_index(tmp_path / "cache" / "index.sqlite", how)
    before = contents(tmp_path / "cache")
    for command in (["ls"], ["stats"], ["show", "00"]):
        message = refused(*command, "-p", tmp_path / "cache")
        assert "index.sqlite" in message
        assert any(remedy in message for remedy in ("move it away", "install a newer", "rebuild-index"))
    after = contents(tmp_path / "cache")  # SQLite may have put its -shm beside
    assert {k: after[k] for k in before} == before


def test_ls_does_not_wait_for_mlx():
    script = "import sys, tiered_cache.cli; sys.exit('mlx' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
