"""Survival, oracle and the fitted ladder against brute force over random cost tables."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from atlas_jax.depth.fit import best_drafts, fit_ladder, tokens
from atlas_jax.depth.interface import Outcome, PolicyError, Queued
from atlas_jax.depth.survival import BIN_EDGES, Oracle, Survival, best_depth, best_rows


@dataclasses.dataclass(frozen=True)
class Made:
    """Random costs that rise with rows and depth, in steps."""

    seed: int = 0
    row: float = 0.1

    def seconds(self, n, k, rows, context, head=True):
        noise = np.random.default_rng((self.seed, n, k, rows)).random()
        return n**0.5 + head * 0.05 + 0.15 * (k - 1) + self.row * (rows - n) * (0.7 + 0.6 * noise)


def curves(rng, n, depth):
    return tuple(tuple(np.cumprod(rng.random(depth)).tolist()) for _ in range(n))


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_the_best_of_all_ways(seed):
    rng = np.random.default_rng(seed)
    costs, n, propose, price = Made(seed), 3, int(rng.integers(0, 4)), float(rng.uniform(0.3, 3))
    have = tuple(curve[: rng.integers(0, 4)] for curve in curves(rng, n, 3))

    def value(way):
        gain = n + sum(sum(curve[:v]) for curve, v in zip(have, way, strict=True))
        return gain - price * costs.seconds(n, max(*way, propose) + 1, n + sum(way), 10)

    best = max(map(value, itertools.product(*(range(len(c) + 1) for c in have))))
    assert value(best_rows(costs, have, price, propose, 10)) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(30))
def test_depth_has_the_best_rate_of_all_ways(seed):
    rng = np.random.default_rng(seed)
    costs, n, have = Made(seed, 0.05 + 0.1 * seed / 30), 3, curves(rng, 3, 3)
    depth, rate = best_depth(costs, have, 3, 10)
    found = {}
    for way in itertools.product(range(4), repeat=n):
        for propose in range(max(way), 4):
            gain = n + sum(sum(curve[:v]) for curve, v in zip(have, way, strict=True))
            found[way, propose] = gain / costs.seconds(n, propose + 1, n + sum(way), 10)
    assert rate == pytest.approx(max(found.values()))
    assert depth == max(found, key=lambda key: found[key])[1]


def test_a_row_budget_holds():
    curve = (0.99, 0.98, 0.97)
    assert sum(best_rows(Made(row=0), (curve,) * 4, 0.1, 3, 10, row_budget=9)) == 5
    assert sum(best_rows(Made(row=0), (curve,) * 4, 0.1, 3, 10, row_budget=2)) == 0


@pytest.mark.parametrize("seed", range(10))
def test_estimates_become_true_whatever_the_head_says(seed):
    """A head whose word is worth nothing, and the same for all: the estimate is the acceptance that was seen."""
    rng = np.random.default_rng(seed)
    policy, truth, said = Survival(Made(), half_life=1e6), rng.uniform(0.2, 0.9, 3), float(-rng.exponential(1))
    state = policy.start()
    for _ in range(400):
        run = int(np.cumprod(rng.random(3) < truth).sum())
        state = policy.observe(state, Outcome(1, (3,), (run,), ((said,) * 3,)))
    assert policy.acceptance(state, (said,) * 3)[0] == pytest.approx(truth[0], abs=0.08)
    assert hash(state) is not None


def test_before_anything_is_seen_the_head_is_believed():
    policy = Survival(Made())
    for p in (0.05, 0.3, 0.6, 0.93):
        assert policy.acceptance(policy.start(), (math.log(p),))[0] == pytest.approx(p, abs=0.1)
    assert list(BIN_EDGES) == sorted(BIN_EDGES)


def test_it_verifies_what_is_likely_and_looks_deep_now_and_then():
    policy = Survival(Made(row=0.25), probe=50)
    state = policy.start()
    sure, hopeless = Queued(3, (-0.001,) * 3, 90, 9), Queued(3, (-5.0,) * 3, 90, 9)
    decision = policy.decide(state, [sure, hopeless])
    assert decision.verify[0] > decision.verify[1] == 0
    assert policy.decide(state, [dataclasses.replace(sure, most=1), hopeless]).verify[0] == 1
    for _ in range(30):
        state = policy.observe(state, Outcome(2, (1, 0), (1, 0), ((-0.001,), ())))
    assert policy.decide(state, [sure, hopeless]) == dataclasses.replace(decision, verify=(3, 3), propose=3)
    state = policy.observe(state, Outcome(2, (3, 3), (3, 0), ((-0.001,) * 3, (-5.0,) * 3)))
    assert state.since == 0
    assert policy.depths(16) == {0, 1, 2, 3}


def test_drafts_that_were_pruned_count_too():
    """Verifying only the likely ones of a batch must not make the text look easy."""
    policy = Survival(Made())
    state = policy.start()
    for _ in range(800):
        state = policy.observe(state, Outcome(2, (3, 0), (3, 0), ((-0.001,) * 3, (-5.0,) * 3)))
    assert state.conditional[0] == pytest.approx(0.5, abs=0.1)  # of the second sequence, nothing was ever verified
    assert state.conditional[2] > 0.9  # only the first gets that far


def test_the_oracle_knows_and_says_where_it_does_not():
    oracle = Oracle(Made(), accept=(0.99,))
    assert not oracle.needs_log_probs
    assert oracle.decide(None, [Queued(3, (), 10, 9)] * 2).verify == (3, 3)
    assert Oracle(Made(), accept=(0.01,)).decide(None, [Queued(3, (), 10, 9)] * 2) == dataclasses.replace(
        oracle.decide(None, [Queued(3, (), 10, 9)] * 2), verify=(0, 0), propose=0
    )
    with pytest.raises(PolicyError, match="must be told"):
        Oracle(Made()).decide(None, [Queued(1, (-0.1,), 10, 9)])
    with pytest.raises(PolicyError, match="probabilities"):
        Oracle(Made(), accept=(1.2,))


@pytest.mark.parametrize("seed", range(100))
def test_the_fitted_ladder_is_best_at_every_width(seed):
    """Against trying every depth, on random tables; what the grammar can't say is named."""
    rng = np.random.default_rng(seed)
    costs, p = Made(seed, float(rng.uniform(0, 0.6))), tuple(rng.uniform(0.1, 1, 3).tolist())
    fit = fit_ladder(costs, p, (1, 2, 4, 8), 10)
    for n in (1, 2, 4, 8):
        rate = [tokens(p, d) / costs.seconds(n, d + 1, n * (d + 1), 10, d > 0) for d in range(4)]
        best = int(np.argmax(rate))
        asked = fit.config.step_drafts(n, 3)
        assert best == best_drafts(costs, p, n, 10) == dict(fit.best)[n]
        assert asked == best or (best == 0 and asked == 1 and n in fit.unspeakable)
    assert ("no ladder can say" in fit.describe()) == bool(fit.unspeakable)


def test_acceptance_must_cover_the_depth():
    assert tokens((0.5, 0.5), 2) == 1.75 and tokens((0.5,), 0) == 1
    with pytest.raises(PolicyError, match="2 drafts need"):
        tokens((0.5,), 2)
