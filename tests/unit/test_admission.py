"""What is worth writing: the table of keys that were seen lately, and the two policies."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest

from ssd_tier.admission import Admission, Ghosts

SLOTS = 1 << 12


def keys(count: int, seed: int = 0) -> list[bytes]:
    """Chain keys that another seed does not share."""
    return [sha256(f"{seed} {i}".encode()).digest() for i in range(count)]


@pytest.mark.parametrize("slots", [1 << 8, SLOTS, 1 << 16])
def test_the_last_quarter_as_many_keys_as_slots_are_remembered_but_for_a_few(slots):
    ghosts, added = Ghosts(slots), keys(3 * slots)
    for key in added:
        ghosts.add(key)
    lately = added[-(slots // 4) :]
    found = [key in ghosts for key in lately]
    assert sum(found) >= 0.85 * len(found)
    assert sum(found[-len(found) // 4 :]) >= 0.92 * (len(found) // 4), "the later, the surer"
    assert all(key in ghosts for key in added[-1:])


def test_older_keys_are_forgotten():
    ghosts, old = Ghosts(SLOTS), keys(SLOTS // 4, seed=1)
    for key in old:
        ghosts.add(key)
    left = [sum(key in ghosts for key in old)]
    for seed in range(2, 10):
        for key in keys(SLOTS, seed):
            ghosts.add(key)
        left.append(sum(key in ghosts for key in old))
    assert left == sorted(left, reverse=True)
    assert left[1] < 0.45 * left[0]
    assert left[-1] <= 5


def test_what_was_never_added_is_not_there():
    ghosts = Ghosts(SLOTS)
    assert not any(key in ghosts for key in [bytes(32), b"\xff" * 32, *keys(1000)])
    for key in keys(4 * SLOTS):
        ghosts.add(key)
    assert not any(key in ghosts for key in keys(100_000, seed=1))


def test_a_key_that_is_added_again_stays():
    ghosts, (dear, *others) = Ghosts(SLOTS), keys(20 * SLOTS)
    for i, key in enumerate(others):
        if i % (SLOTS // 64) == 0:
            ghosts.add(dear)
            assert dear in ghosts
        ghosts.add(key)


def test_a_key_that_is_discarded_is_gone_and_others_stay():
    ghosts, (gone, never, *others) = Ghosts(SLOTS), keys(SLOTS // 8)
    for key in (*others, gone):
        ghosts.add(key)
    before = [key in ghosts for key in others]
    ghosts.discard(gone)
    ghosts.discard(never)
    assert gone not in ghosts
    assert [key in ghosts for key in others] == before


def test_until_the_budget_is_full_everything_is_admitted_then_what_was_seen():
    admission, (seen, unseen, *others) = Admission("second-touch"), keys(500)
    assert all(admission.admits(key) for key in others)
    admission.fill(1000)
    assert not any(admission.admits(key) for key in [seen, unseen, *others]), "asking leaves no trace"
    admission.saw(seen)
    assert [admission.admits(seen), admission.admits(seen), admission.admits(unseen)] == [True, True, False]
    admission.full = False
    assert admission.admits(unseen)


def test_what_was_written_must_show_its_worth_anew():
    admission, (key, *_) = Admission("second-touch"), keys(1)
    admission.fill(1000)
    admission.saw(key)
    admission.wrote(key)
    assert not admission.admits(key)
    admission.saw(key)
    assert admission.admits(key)


@pytest.mark.parametrize("blocks", [0, 1, 5, 1000, 5000])
def test_as_many_keys_are_remembered_as_there_are_blocks_but_for_a_few(blocks):
    admission = Admission("second-touch")
    admission.fill(blocks)
    added = keys(blocks)
    for key in added:
        admission.saw(key)
    assert sum(admission.admits(key) for key in added) >= 0.5 * blocks
    for key in keys(20 * blocks, seed=1):
        admission.saw(key)
    assert sum(admission.admits(key) for key in added) <= 0.02 * blocks + 1


def test_the_other_policy_admits_all():
    admission, rng = Admission("all"), random.Random(0)
    for key in keys(500):
        admission.fill(100)
        if rng.random() < 0.5:
            admission.saw(key)
        if rng.random() < 0.5:
            admission.wrote(key)
        assert admission.admits(key)
