"""The commands that check and mend a directory, as a person meets them: real processes, real damage."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ssd_tier.inspection import Inspection
from tests.blocks import listing, on_disk
from tests.integration.test_cli import refused, run
from tests.integration.test_life_cycle import contents
from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache

MODEL = ShapeOnlyModel()
SHARED = random_tokens(512, 1)
SEQUENCES = [SHARED + random_tokens(300 + 10 * i, 2 + i) for i in range(4)]  # 2 blocks shared, 2 of each one's own
CHANGING = [["rebuild-index"], ["gc", "--to", "4MB"], ["rm", "00"], ["clear", "--yes"], ["verify", "--repair"]]


@pytest.fixture
def root(make_config, tmp_path) -> Path:
    """A directory that nobody uses: four sequences that share 512 tokens."""
    with TieredCache.open(make_config(), model=MODEL, name="my-model") as cache:
        assert all(cache.store(tokens, state_of(tokens)) for tokens in SEQUENCES)
    return tmp_path / "cache"


def served(make_config, tokens) -> int:
    """How many tokens of a sequence come back after a restart, all of them right."""
    with TieredCache.open(make_config(), model=MODEL) as cache:
        promotion = cache.promote(tokens)
        if promotion is None:
            return 0
        state, remaining = promotion.result(20)
        covered = len(tokens) - len(remaining)
        assert state is None or same_state(state, state_of(tokens), covered)
        return covered


def kept(root: Path) -> dict[str, bytes]:
    """All files but SQLite's journals, which a reader may leave."""
    return {k: v for k, v in contents(root).items() if not k.endswith(("-shm", "-wal"))}


def flip(path: Path) -> None:
    """Change one byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def own(root: Path, tokens: list[int]) -> Path:
    """The file of the block that only this sequence has in full."""
    found = Inspection(root)
    (sequence,) = [s for s in found.sequences() if s.tokens == len(tokens)]
    return found.path(sequence.blocks[2])


def test_a_sound_directory_is_told_to_be_so_and_nothing_changes(root):
    before = kept(root)
    assert "10 blocks, nothing wrong" in run("verify", "-p", root).stdout
    assert json.loads(run("verify", "-p", root, "--json").stdout) == {"findings": []}
    assert kept(root) == before


def test_verify_finds_what_is_damaged_missing_or_nobodys(root):
    flip(own(root, SEQUENCES[0]))
    own(root, SEQUENCES[1]).unlink()
    orphan = own(root, SEQUENCES[2])
    stray = orphan.with_name(re.sub("-[0-9a-f]+", "-" + "7" * 16, orphan.name))
    stray.write_bytes(orphan.read_bytes())
    os.utime(stray, (0, 0))
    before = kept(root)
    found = json.loads(run("verify", "-p", root, "--json", code=1).stdout)["findings"]
    assert sorted(f["kind"] for f in found) == ["damaged", "missing", "orphan"]
    text = run("verify", "-p", root, code=1).stdout
    assert all(word in text for word in ("1 damaged, 1 missing, 1 orphan", "verify --repair", "digest"))
    assert kept(root) == before


def test_repair_sets_aside_what_is_damaged_and_keeps_the_rest(root, make_config):
    damaged = own(root, SEQUENCES[0])
    flip(damaged)
    own(root, SEQUENCES[1]).unlink()
    told = json.loads(run("verify", "--repair", "-p", root, "--json").stdout)
    assert (told["set_aside"], told["rows_dropped"], told["files_removed"]) == (1, 1, 0)
    assert listing(root, "quarantine") == [damaged.name]
    assert "8 blocks, nothing wrong" in run("verify", "-p", root).stdout
    assert [served(make_config, t) for t in SEQUENCES] == [512, 512, *(len(t) - 1 for t in SEQUENCES[2:])]


def test_an_index_that_is_gone_or_garbage_is_made_anew_from_the_blobs(root, make_config):
    for harm in (lambda p: p.write_bytes(b"\xff" * 9999), Path.unlink, lambda p: None):
        harm(root / "index.sqlite")
        assert "10 blocks in the new index" in run("rebuild-index", "-p", root).stdout
        found = Inspection(root)
        assert sorted(s.tokens for s in found.sequences()) == [len(t) for t in SEQUENCES]
        assert set(found.models.values()) == {"my-model"}
    assert [served(make_config, t) for t in SEQUENCES] == [len(t) - 1 for t in SEQUENCES]


@pytest.mark.parametrize(("statement", "told"), [
    ("PRAGMA user_version = 99", "install a newer"), ("PRAGMA application_id = 7", "another program's")])
def test_rebuilding_leaves_alone_what_is_newer_or_not_ours(root, statement, told):
    with closing(sqlite3.connect(root / "index.sqlite")) as connection:
        connection.execute(statement)
        connection.commit()
    before = (root / "index.sqlite").read_bytes()
    assert told in refused("rebuild-index", "-p", root)
    assert (root / "index.sqlite").read_bytes() == before
    assert len(listing(root, "blobs")) == 10


def test_gc_shrinks_to_a_size_least_recently_used_first(root, make_config):
    size = sum(e.file_bytes for e in Inspection(root).entries)
    # The index, and what it may grow by, are in the size as well.
    to = on_disk(root) - (root / "lock").stat().st_size - size // 3 + (2 << 20)
    before = kept(root)
    would = run("gc", "--to", to, "--dry-run", "-p", root).stdout
    assert kept(root) == before
    did = run("gc", "--to", to, "-p", root).stdout
    count = re.search(r"removed (\d+) blocks", did)
    assert count
    assert f"would remove {count[1]} blocks" in would
    assert 3 <= int(count[1]) <= 5
    assert on_disk(root) <= to
    assert served(make_config, SEQUENCES[-1]) == len(SEQUENCES[-1]) - 1
    assert served(make_config, SEQUENCES[0]) <= 512 + 256
    assert "give --to SIZE, or --config" in refused("gc", "-p", root)


def test_gc_removes_what_was_not_used_for_as_long_as_the_configuration_says(root, tmp_path, make_config):
    with closing(sqlite3.connect(root / "index.sqlite")) as connection:
        connection.execute("UPDATE block SET used = used - 40 * 86400")
        connection.commit()
    file = tmp_path / "c.toml"
    file.write_text(f'[ssd]\npath = "{root}"\nretention = "41d"\n')
    assert "removed 0 blocks" in run("gc", "-c", file).stdout
    served(make_config, SEQUENCES[0])  # is used now
    file.write_text(f'[ssd]\npath = "{root}"\nretention = "39d"\n')
    assert "would remove 6 blocks" in run("gc", "-c", file, "-n").stdout
    assert "removed 6 blocks" in run("gc", "-c", file).stdout
    assert [s.tokens for s in Inspection(root).sequences()] == [len(SEQUENCES[0])]


def test_rm_removes_a_sequence_and_leaves_what_others_share(root, make_config):
    (victim,) = [s for s in Inspection(root).sequences() if s.tokens == len(SEQUENCES[1])]
    before = kept(root)
    assert "would remove 2 blocks" in run("rm", victim.key[:12], "--dry-run", "-p", root).stdout
    assert kept(root) == before
    assert "removed 2 blocks" in run("rm", victim.key[:12], "-p", root).stdout
    assert [served(make_config, t) for t in SEQUENCES] == [
        512 if i == 1 else len(t) - 1 for i, t in enumerate(SEQUENCES)
    ]
    root_block = Inspection(root).sequences()[0].blocks[0].key.hex()
    assert "removed 8 blocks" in run("rm", root_block[:16], "-p", root).stdout
    assert listing(root, "blobs") == []
    assert "no stored block" in refused("rm", "00", "-p", root)


def test_clear_asks_and_then_removes_everything(root, make_config):
    flip(own(root, SEQUENCES[0]))
    run("verify", "--repair", "-p", root)
    assert "say so with --yes" in refused("clear", "-p", root)
    assert len(listing(root, "blobs")) == 9
    assert "removed 9 blocks" in run("clear", "--yes", "-p", root).stdout
    assert (listing(root, "blobs"), listing(root, "quarantine"), listing(root, "tmp")) == ([], [], [])
    assert on_disk(root) < 200_000
    assert served(make_config, SEQUENCES[0]) == 0


@pytest.mark.parametrize("command", CHANGING, ids=lambda c: c[0])
def test_what_changes_a_directory_is_refused_while_a_program_uses_it(make_config, tmp_path, command):
    with TieredCache.open(make_config(), model=MODEL) as cache:
        assert cache.store(SHARED, state_of(SHARED))
        assert cache.flush(20)
        root = tmp_path / "cache"
        key = [Inspection(root).sequences()[0].key[:12]] if command[0] == "rm" else command[1:]
        told = refused(command[0], *key, "-p", root)
        assert f"in use by process {os.getpid()}" in told
        assert "nothing wrong" in run("verify", "-p", root).stdout
    assert served(make_config, SHARED) == 511


def test_the_doctor_tells_what_is_well_and_what_is_not(root, make_config):
    checks = {c["what"]: c for c in json.loads(run("doctor", "-p", root, "--json").stdout)}
    assert {c["verdict"] for c in checks.values()} <= {"ok", "note"}
    assert "schema 2, sound" in checks["index"]["told"]
    assert "free" in checks["lock"]["told"]
    assert "mlx-lm" in checks["versions"]["told"]
    with TieredCache.open(make_config(), model=MODEL):
        checks = {c["what"]: c for c in json.loads(run("doctor", "-p", root, "--json").stdout)}
        assert checks["lock"]["told"] == f"in use by process {os.getpid()}"
    (root / "index.sqlite").write_bytes(b"\xff" * 9999)
    root.chmod(0o777)
    text = run("doctor", "-p", root, code=1).stdout
    assert all(word in text for word in ("is damaged", "rebuild-index", "chmod 700"))
    root.chmod(0o700)


def test_the_doctor_of_a_directory_that_is_not_there_yet(tmp_path):
    assert "does not exist yet" in run("doctor", "-p", tmp_path / "none").stdout
    assert not (tmp_path / "none").exists()
