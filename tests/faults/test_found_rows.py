"""Found by attacks: what rows of an index can do that SQLite takes for sound."""

from __future__ import annotations

import sqlite3
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ssd_tier.keys import chain_key
from ssd_tier.rows import read_entries
from tests.models import random_tokens, same_state
from tests.states import ShapeOnlyModel, state_of
from tiered_cache import TieredCache

pytestmark = pytest.mark.faults


def index_of(config) -> Path:
    return Path(config["ssd"]["path"]) / "index.sqlite"


@pytest.mark.parametrize("place", [0, 128, 255])
def test_a_row_whose_token_ids_were_changed_leads_to_nobody_elses_state(make_config, place, caplog):
    tokens = random_tokens(768, 1)
    with TieredCache.open(make_config(), model=ShapeOnlyModel()) as cache:
        assert cache.store(tokens, state_of(tokens))
    with sqlite3.connect(index_of(make_config())) as index:
        for key, ids in index.execute("SELECT key, ids FROM block_tokens").fetchall():
            words = np.frombuffer(ids, "<i8").copy()
            if words[0] == tokens[0]:
                words[place] ^= 1
                index.execute("UPDATE block_tokens SET ids = ? WHERE key = ?", (words.tobytes(), key))
    index.close()
    other = list(tokens)
    other[place] ^= 1
    with TieredCache.open(make_config(), model=ShapeOnlyModel()) as cache:
        assert "is damaged" in caplog.text
        for asked in (other, tokens):
            promotion = cache.promote(asked)
            if promotion:
                promotion.result(30)
            cache.store(asked[:256], state_of(asked[:256]))
            promotion = cache.promote(asked)
            state, rest = promotion.result(30) if promotion else cache.fetch(asked)
            assert state
            assert same_state(state, state_of(asked), len(asked) - len(rest))
        assert len(rest) == 1  # what was stored was not lost for it
        cache.ram.pool.check_integrity()


def test_reading_long_checkpoints_takes_the_ram_of_what_is_kept(make_config):
    with TieredCache.open(make_config(), model=ShapeOnlyModel()):
        pass
    with sqlite3.connect(index_of(make_config())) as index:
        for i in range(60):
            ids = np.full(60_000, i, "<i8").tobytes()
            key = chain_key(bytes(32), bytes(32), ids)
            index.execute("INSERT INTO block_tokens VALUES (?, ?)", (key, ids))
            index.execute(
                "INSERT INTO block (key, namespace, parent, generation, start, tokens, file_bytes, raw_bytes, seq, "
                "created) VALUES (?, ?, ?, 0, 0, 60000, 100, 100, ?, 0)",
                (key, bytes(32), bytes(32), i),
            )
    tracemalloc.start()
    entries = read_entries(index)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    index.close()
    assert [e.ids for e in entries] == [np.full(60_000, i, "<i8").tobytes() for i in range(60)]
    assert peak < kept + (8 << 20)
