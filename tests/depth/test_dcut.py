"""D-Cut against its worked examples and a slow, obvious version; capacities and chunks beside it."""

import itertools
import math
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest

from atlas_jax.depth.capacity import StatePool, chunk_ranges, slot_drafts, state_slots
from atlas_jax.depth.dcut import DCut, order, runs, select, snap
from atlas_jax.depth.interface import PolicyError, Queued
from atlas_jax.depth.ladder import LadderConfig


def test_worked_examples():
    confident = [[-0.1, -0.1, -0.1], [-0.5, -0.5, -0.5]]
    assert select(confident, [3, 3], 96, 0.75) == [3, 2]
    eight = select([[-0.1 * (i + 1)] * 3 for i in range(8)], [3] * 8, 96, 0.75)
    assert sum(eight) + 8 == 28 and eight == sorted(eight, reverse=True)
    assert select(confident, [3, 3], 96, 0.0) == [1, 1] and select(confident, [3, 3], 96, 1.0) == [3, 3]
    assert select(confident, [3, 3], 5, 1.0) == [2, 1] and select(confident, [3, 3], 3, 1.0) == [1, 1]
    assert select([[], []], [1, 0], 96, 0.5) == [1, 0]


@pytest.mark.parametrize(
    ("ratio", "snapped"), [(0, 0.25), (0.3, 0.25), (0.375, 0.25), (0.4, 0.5), (0.9, 1.0), (7, 1.0)]
)
def test_ratios_snap_to_quarters(ratio, snapped):
    assert snap(ratio) == snapped
    with pytest.raises(PolicyError, match="ratio"):
        snap(math.nan)


@pytest.mark.parametrize("count", range(1, 40))
def test_half_rounds_up(count):
    """Python rounds half to even, D-Cut away from zero: 2 candidates at 0.25 keep 1."""
    for ratio in (0.25, 0.5, 0.75, 1.0):
        wanted = int((Decimal(count) * Decimal(ratio)).quantize(Decimal(1), ROUND_HALF_UP))
        assert sum(select([[-1.0, -1.0]] * count, [2] * count, 1000, ratio)) - count == wanted


@pytest.mark.parametrize("seed", range(20))
def test_selection_is_the_best_prefix_closed_set(seed):
    """Compared with trying every way to keep as many drafts, on log-probabilities without ties."""
    rng = np.random.default_rng(seed)
    depths = rng.integers(1, 4, 4).tolist()
    scores = [(-rng.random(depth)).tolist() for depth in depths]
    kept = select(scores, depths, 96, 0.5)
    worth = lambda ways: sum(sum(scores[i][: j + 1]) for i, way in enumerate(ways) for j in range(1, way))
    same_count = [w for w in itertools.product(*(range(1, d + 1) for d in depths)) if sum(w) == sum(kept)]
    # Maximal sum of survivals among sets of that size: shifting all survivals up keeps the order and makes more better.
    assert worth(kept) == pytest.approx(max(map(worth, same_count)))


def test_unmeasured_drafts_are_certain_and_ties_go_to_the_earlier_sequence():
    assert select([[-0.2] * 3, [], [-0.1] * 2], [3, 3, 3], 96, 0.5) == [1, 3, 2]
    assert select([[-1.0, -1.0]] * 4, [2] * 4, 96, 0.5) == [2, 2, 1, 1]


def test_canonical_order_gives_few_launches():
    kept, slots = [1, 3, 2, 3], [7, 0, 3, 2]
    assert order(kept, slots, canonical=False) == [(1, 3), (3, 3), (2, 2), (0, 1)]
    assert order(kept, slots, canonical=True) == [(1, 3), (3, 3), (2, 2), (0, 1)]
    assert order([3, 1], [4, 2], canonical=True) == [(1, 3), (0, 1)]  # the depths stay, their owners change
    assert runs([3, 3, 2, 1]) == [(3, 2), (2, 1), (1, 1)]
    ways = list(itertools.product((1, 2, 3), repeat=6))
    launches = lambda canonical: {tuple(order(way, range(6), canonical=canonical)) for way in ways}
    assert len(launches(True)) == math.comb(6 + 2, 2) < len(launches(False)) == 3**6


def test_the_policy_prunes_up_to_its_width_and_leaves_the_rest_alone():
    ladder = LadderConfig(((32, 3),))
    queued = [Queued(3, (-0.11 * i, -0.1, -0.1), 50, 9) for i in range(1, 5)]
    pruned = DCut(ladder).decide(None, queued)
    assert pruned.propose == 3 and pruned.verify == (3, 3, 3, 1)
    assert DCut(ladder, max_seqs=3).decide(None, queued).verify == (3,) * 4
    assert DCut(ladder, ratio=1.0).decide(None, queued).verify == (3,) * 4
    assert DCut(LadderConfig(((32, 1),))).decide(None, queued).verify == (1,) * 4
    assert DCut(ladder, canonical=0).decide(None, queued[::-1]).verify == (3, 3, 3, 1)
    # Fresh, short and unmeasured sequences.
    mixed = [Queued(0, (), 1, 9), Queued(3, (-0.1,) * 3, 50, 1), Queued(3, (), 50, 9)]
    assert DCut(ladder).decide(None, mixed).verify == (0, 1, 3)
    assert DCut(ladder).depths(8) == {1, 2, 3} and DCut(ladder).depths(9) == {3} and DCut(ladder).depths(33) == {0}


def test_slots_hold_what_the_ladder_can_ask_of_them():
    default = LadderConfig()
    assert [slot_drafts(default, 3, slot) for slot in (0, 7, 8, 31, 32, 127)] == [3, 3, 1, 1, 1, 1]
    assert [slot_drafts(LadderConfig(((4, 1), (8, 2))), 3, slot) for slot in (0, 7)] == [2, 2]
    assert slot_drafts(default, 0, 0) == 0
    assert [state_slots(default, 128, full_width=full) for full in (False, True)] == [32, 128]
    assert state_slots(LadderConfig(cap=64), 128) == 64 and state_slots(default, 8) == 8
    pool = StatePool(100, 10)
    tiers = 8 * (4 * 100 + 4 * 10) + 24 * (2 * 100 + 4 * 10)
    assert pool.reserve(default, 128, 3) == 128 * 110 + tiers + 32 * 110
    assert pool.reserve(default, 128, 3, full_width=True) == 128 * (110 + 4 * 100 + 4 * 10 + 110)


@pytest.mark.parametrize(("rows", "sequences"), [(4, 24), (3, 32), (2, 48), (200, 1)])
def test_chunks_hold_the_budget_and_every_sequence(rows, sequences):
    chunks = chunk_ranges([rows] * 100)
    assert {len(chunk) for chunk in chunks[:-1]} == {sequences}
    assert [i for chunk in chunks for i in chunk] == list(range(100))
    assert chunk_ranges([]) == [] and chunk_ranges([4, 4, 3, 2, 1], 10) == [range(0, 2), range(2, 5)]
