"""Breaches that an evaluation found in the command line: what it says, its exit codes, the files it leaves."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from ssd_tier import maintenance
from ssd_tier.files import Directory
from ssd_tier.folders import Folders, default_hook
from ssd_tier.inspection import Inspection
from ssd_tier.migrations import scripts
from tests.blocks import listing, on_disk
from tests.integration.test_cli import refused, run
from tests.integration.test_cli_mend import CHANGING, MODEL, SEQUENCES, kept, own, served
from tests.models import random_tokens
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache, cli

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
WHOLE = [len(t) - 1 for t in SEQUENCES]


@pytest.fixture
def root(make_config, tmp_path) -> Path:
    """A directory that nobody uses: ten blocks of four sequences that share 512 tokens."""
    with TieredCache.open(make_config(), model=MODEL, name="my-model") as cache:
        assert all(cache.store(tokens, state_of(tokens)) for tokens in SEQUENCES)
    return tmp_path / "cache"


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def here(monkeypatch, capsys) -> Callable[..., Done]:
    """A command in this process, where calls can be made to fail."""

    def command(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["tiered-cache", *map(str, arguments)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as e:
            code = e.code or 0
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return command


def undeletable(monkeypatch, error: int = errno.EACCES) -> None:
    """Blobs cannot be removed."""

    def hook(operation: str, name: str) -> None:
        if operation == "unlink" and name.endswith(".safetensors"):
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Directory, "hook", staticmethod(hook))


def deletable(monkeypatch) -> None:
    monkeypatch.setattr(Directory, "hook", staticmethod(default_hook))


def key_of(root: Path, tokens: list[int]) -> str:
    """The key of a sequence, as its last block's file has it."""
    (found,) = [s for s in Inspection(root).sequences() if s.tokens == len(tokens)]
    return found.key


def age(root: Path, how: str) -> None:
    """Take the index away, damage it, or make it one of the first version."""
    path = root / "index.sqlite"
    if how == "damaged":
        path.write_bytes(b"\xff" * 9999)
        return
    old = sqlite3.connect(path)
    with closing(old):
        rows = {
            t: (columns, old.execute(f"SELECT {columns} FROM {t}").fetchall())
            for t, columns in {
                "block": "key, namespace, parent, generation, start, tokens, file_bytes, raw_bytes, seq, hits, created",
                "block_tokens": "key, ids",
                "namespace": "digest, model",
                "layers": "namespace, origin, classes",
            }.items()
        }
        (program,) = old.execute("PRAGMA application_id").fetchone()
    path.unlink()
    if how == "older":
        with closing(sqlite3.connect(path, isolation_level=None)) as new:
            new.execute("PRAGMA journal_mode = WAL")
            new.executescript(scripts()[0])
            for table, (columns, values) in rows.items():
                marks = ", ".join("?" * (columns.count(",") + 1))
                new.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", values)
            new.execute(f"PRAGMA application_id = {program}")
            new.execute("PRAGMA user_version = 1")


# -- files that cannot be removed


@pytest.mark.parametrize("command", ["rm", "clear", "gc"])
def test_what_could_not_be_removed_is_told_and_does_not_come_back(root, make_config, monkeypatch, here, command):
    arguments = {"rm": ["rm", key_of(root, SEQUENCES[1])], "clear": ["clear", "--yes"], "gc": ["gc", "--to", "1MB"]}
    count = 2 if command == "rm" else 10
    undeletable(monkeypatch)
    done = here(*arguments[command], "-p", root)
    assert done.code == 1
    assert re.search(rf"\b{count} files could not be removed", done.stdout + done.stderr)
    assert "Traceback" not in done.stderr
    assert len(listing(root, "blobs")) == 10
    deletable(monkeypatch)
    assert here("verify", "--repair", "-p", root).code == 0
    assert [served(make_config, t) for t in SEQUENCES] == ([WHOLE[0], 512, *WHOLE[2:]] if count == 2 else [0] * 4)
    assert len(listing(root, "blobs")) == 10 - count


def hybrid(tokens: list[int]) -> list[object]:
    """The state of a layer that can be cut and one that cannot."""
    whole = ArraysCache(1)
    whole[0] = mx.full((1, 4, 8), float(len(tokens)))
    mx.eval(whole[0])
    return [state_of(tokens)[0], whole]


@pytest.mark.parametrize("shared", [0, 300])
def test_rm_of_a_sequence_with_a_checkpoint_removes_its_blocks_as_well(make_config, tmp_path, shared):
    """`shared`: tokens that another sequence has in common."""
    root, gone = tmp_path / "cache", random_tokens(600, 1)
    other = gone[:shared] + random_tokens(700, 2)
    with TieredCache.open(make_config(), model=ShapeOnlyModel(2, "hybrid"), name="hybrid") as cache:
        assert cache.store(other, hybrid(other))
        assert cache.flush(5)
        alone = listing(root, "blobs")
        assert cache.store(gone, hybrid(gone))
    rows = json.loads(run("ls", "-p", root, "--json").stdout)
    (key,) = [r["key"] for r in rows if "checkpoint" in r["model"] and r["tokens"] == 600]
    run("rm", key, "-p", root)
    assert listing(root, "blobs") == alone
    with TieredCache.open(make_config(), model=ShapeOnlyModel(2, "hybrid"), name="hybrid") as cache:
        promotion = cache.promote([*other, 1])
        assert promotion
        assert promotion.result(10)[1] == [1]
        assert cache.promote([*gone, 1]) is None


# -- what is printed


@pytest.mark.parametrize("label", ["[bold]me[/bold]", "[/x] a [link=b]", "m[0]:1 \\[red]"])
def test_labels_with_brackets_are_printed_as_they_are(make_config, tmp_path, label):
    with TieredCache.open(make_config(), model=MODEL, name=label) as cache:
        assert cache.store(SEQUENCES[0], state_of(SEQUENCES[0]))
    root = tmp_path / "cache"
    key = key_of(root, SEQUENCES[0])
    for command in (["ls"], ["stats"], ["show", key]):
        assert label in run(*command, "-p", root).stdout
    own(root, SEQUENCES[0]).unlink()
    assert "1 missing" in run("verify", "-p", root, code=1).stdout


def test_verify_works_where_there_is_no_folder_of_blobs(root, make_config, tmp_path):
    shutil.rmtree(root / "blobs")
    told = run("verify", "-p", root, code=1)
    assert ("10 missing" in told.stdout, told.stderr) == (True, "")
    run("clear", "--yes", "-p", root)
    shutil.rmtree(root / "blobs", ignore_errors=True)
    assert "0 blocks, nothing wrong" in run("verify", "-p", root).stdout


FAULTS = [OSError(errno.EIO, "Input/output error"), sqlite3.OperationalError("database or disk is full")]


@pytest.mark.parametrize("error", FAULTS, ids=["os", "sqlite"])
@pytest.mark.parametrize(("command", "of", "name"), [
    (["ls"], cli.look, "Inspection"), (["stats"], cli.look, "Inspection"), (["verify"], maintenance, "check"),
    (["verify", "--repair"], maintenance, "check"), (["rebuild-index"], maintenance, "prepare")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_a_fault_of_disk_or_database_is_one_sentence(root, monkeypatch, here, command, of, name, error):
    def fail(*_: object, **__: object) -> None:
        raise error

    before = listing(root, "blobs")
    with monkeypatch.context() as patched:
        patched.setattr(of, name, fail)
        done = here(*command, "-p", root)
    assert (done.code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert str(error.args[-1]) in done.stderr
    assert listing(root, "blobs") == before
    assert here("verify", "--repair", "-p", root).code == 0, "the directory was given back"


def test_gc_to_a_size_does_not_mind_how_full_the_disk_is(root, monkeypatch, here):
    monkeypatch.setattr(Folders, "free_bytes", lambda self: 4 << 20)
    for more in (["-n"], []):
        assert re.search(r"remove[d]? 0 blocks", here("gc", "--to", "100MB", "-p", root, *more).stdout)
    assert len(listing(root, "blobs")) == 10


def test_gc_to_nothing_removes_all_and_says_so(root):
    assert "removed 10 blocks" in run("gc", "--to", "0", "-p", root).stdout
    assert [listing(root, name) for name in ("blobs", "quarantine", "tmp")] == [[], [], []]


# -- an index that is damaged, missing or older


@pytest.mark.parametrize("how", ["damaged", "missing", "older"])
def test_rm_works_whatever_the_index_is_like(root, make_config, how):
    key = key_of(root, SEQUENCES[1])
    age(root, how)
    assert "removed 2 blocks" in run("rm", key, "-p", root).stdout
    assert [served(make_config, t) for t in SEQUENCES] == [WHOLE[0], 512, *WHOLE[2:]]


@pytest.mark.parametrize("how", ["damaged", "missing", "older"])
def test_gc_works_whatever_the_index_is_like(root, how):
    size = sum(e.file_bytes for e in Inspection(root).entries)
    to = on_disk(root) - size // 2 + (2 << 20)
    age(root, how)
    assert "removed " in run("gc", "--to", to, "-p", root).stdout
    assert 2 <= len(listing(root, "blobs")) <= 8
    assert on_disk(root) <= to
    assert f"{len(listing(root, 'blobs'))} blocks, nothing wrong" in run("verify", "-p", root).stdout


@pytest.mark.parametrize("how", ["damaged", "missing", "older"])
def test_clear_removes_everything_whatever_the_index_is_like(root, make_config, how):
    age(root, how)
    assert "removed 10 blocks" in run("clear", "--yes", "-p", root).stdout
    assert [listing(root, name) for name in ("blobs", "quarantine", "tmp")] == [[], [], []]
    assert [served(make_config, t) for t in SEQUENCES] == [0] * 4


# -- a directory that is not there; what repair did


@pytest.mark.parametrize("command", CHANGING, ids=lambda command: command[0])
def test_a_path_that_does_not_exist_is_refused_and_not_made(tmp_path, command):
    before = kept(tmp_path)
    assert "no directory" in refused(*command, "-p", tmp_path / "no" / "such")
    assert "no directory" in refused(*command, "-p", tmp_path / "nowhere")
    assert (kept(tmp_path), list(tmp_path.iterdir())) == (before, [])


def test_repair_says_how_many_rows_went_and_how_many_files_were_taken_in(root, make_config):
    lost, found = own(root, SEQUENCES[0]), own(root, SEQUENCES[1])
    row = bytes.fromhex(found.name[:64])
    lost.unlink()
    with closing(sqlite3.connect(root / "index.sqlite")) as connection, connection:
        connection.execute("DELETE FROM block WHERE key = ?", (row,))
        connection.execute("DELETE FROM block_tokens WHERE key = ?", (row,))
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    told = run("verify", "--repair", "-p", root).stdout
    assert all(words in told for words in ("rows dropped: 1", "files taken in: 1"))
    assert "nothing wrong" not in told
    told = json.loads(run("verify", "--repair", "-p", copy, "--json").stdout)
    assert (told["rows_dropped"], told["files_taken_in"], told["set_aside"]) == (1, 1, 0)
    assert "9 blocks, nothing wrong" in run("verify", "--repair", "-p", root).stdout
    assert [served(make_config, t) for t in SEQUENCES] == [512, *WHOLE[1:]]
