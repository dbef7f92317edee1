"""The adaptive rung: its arithmetic, the dynamics it must show, and what it must not do without capacity or data."""

import dataclasses
import math

import numpy as np
import pytest

from atlas_jax.depth.adaptive import (
    AdaptiveRung,
    Rung,
    RungConfig,
    observe_flush,
    p2_cond_from,
    probing,
    token_ratio,
)
from atlas_jax.depth.interface import Outcome, PolicyError, Queued
from atlas_jax.depth.ladder import LadderConfig

CONFIG = RungConfig()
PROSE, TOOLS = (0.773, 0.539), (0.917, 0.877)  # published: decode of 128 tokens, tool-shaped traffic


class Flushes:
    """The reducer under flushes of a text; the depth is what the controller asks for."""

    def __init__(self, seed):
        self.rng, self.rung, self.probes = np.random.default_rng(seed), Rung(), 0

    @property
    def deep(self):
        return self.rung.at_depth or probing(CONFIG, self.rung)

    def flush(self, text, sigma=0.0):
        deep = self.deep
        self.probes += deep and not self.rung.at_depth
        p1 = float(np.clip(text[0] + sigma * self.rng.standard_normal(), 0.01, 0.99))
        p2 = float(np.clip(text[1] + sigma * self.rng.standard_normal(), 0.0, 1.0))
        self.rung = observe_flush(CONFIG, self.rung, 16, 2 if deep else 1, p1, p1 * (1 + p2) if deep else p1)

    def until(self, wanted, text, most):
        for count in range(most + 1):
            if wanted():
                return count
            self.flush(text)
        raise AssertionError(f"not within {most} flushes")


@pytest.mark.parametrize("seed", range(8))
def test_dynamics_of_a_day(seed):
    """Prose probes once and settles; noise starts no probe; tool calls do, latch, hold; prose leaves depth again."""
    it = Flushes(seed)
    assert it.deep
    it.rung = observe_flush(CONFIG, it.rung, 16, 2, PROSE[0], PROSE[0] * (1 + PROSE[1]))
    assert not it.deep
    for _ in range(200):
        it.flush(PROSE, sigma=0.053)  # as published for 16 sequences
    assert it.probes == 0 and not it.deep
    assert it.until(lambda: it.deep, TOOLS, 8) >= 1
    it.flush(TOOLS)
    assert it.rung.at_depth and it.probes == 1
    for _ in range(60):
        it.flush(TOOLS, sigma=0.053)
        assert it.rung.at_depth
    assert it.until(lambda: not it.rung.at_depth, PROSE, 4) >= 1


def test_arithmetic_of_a_flush():
    assert token_ratio(0.84, 0.542) == pytest.approx(1.247, abs=1e-3)
    assert [token_ratio(p, 0.5) for p in (0.0, -1.0, math.nan, math.inf)] == [1.0] * 4
    assert p2_cond_from(0.8, 1.2) == pytest.approx(0.5) and p2_cond_from(0.8, 2.0) == 1 and p2_cond_from(0.8, 0.1) == 0
    assert p2_cond_from(0.0, 0.0) is None
    # The first sample seeds each average; then they move at their own pace. Outside the band nothing does.
    one = observe_flush(CONFIG, Rung(), 9, 1, 0.6, 0.6)
    two = observe_flush(CONFIG, one, 16, 2, 0.8, 1.4)
    assert (one.p1_fast, one.p1_slow, one.p2_fast, one.tick) == (0.6, 0.6, None, 1)
    assert (two.p1_fast, two.p1_slow, two.p2_fast) == pytest.approx((0.7, 0.63, 0.75))
    assert two.p1_at_decision == two.p1_slow and two.last_probe == two.tick == 2
    assert all(observe_flush(CONFIG, two, n, 2, 0.1, 0.1) is two for n in (8, 17))


@pytest.mark.parametrize(("at_depth", "bound"), [(False, CONFIG.enter), (True, CONFIG.leave)])
def test_both_boundaries_belong_to_depth(at_depth, bound):
    """p1 = 1: the token ratio is 1 + p2 / 2, exactly representable near the bound."""
    p2 = 2 * (bound - 1)
    while token_ratio(1.0, p2) < bound:
        p2 = math.nextafter(p2, 2)
    while token_ratio(1.0, math.nextafter(p2, 0)) >= bound:
        p2 = math.nextafter(p2, 0)
    for value, wanted in ((p2, True), (p2 - 1e-9, False)):
        rung = dataclasses.replace(Rung(), at_depth=at_depth, p1_fast=1.0, p1_slow=1.0, p2_fast=value)
        exact = dataclasses.replace(CONFIG, alpha=1.0)
        assert observe_flush(exact, rung, 16, 2, 1.0, 1 + value).at_depth is wanted


def test_probes_are_due_by_rise_and_by_count_only():
    settled = Rung(p1_fast=0.7, p1_slow=0.7, p2_fast=0.5, tick=5000, last_probe=4000, p1_at_decision=0.7)
    due = lambda **changed: probing(CONFIG, dataclasses.replace(settled, **changed))
    assert not due() and due(p2_fast=None)
    assert due(p1_slow=0.781) and not due(p1_slow=0.77) and not due(p1_slow=0.3)
    assert due(last_probe=5000 - 2048) and not due(last_probe=5000 - 2047)


def step(policy, state, n, p1=1.0, room=9):
    """One step in which every first draft is accepted and no second one."""
    decision = policy.decide(state, [Queued(3, (), 100, room)] * n)
    accepted = tuple(min(v, 1) if p1 else 0 for v in decision.verify)
    return decision, policy.observe(state, Outcome(n, decision.verify, accepted, ((),) * n))


def test_a_policy_probes_for_one_flush_and_then_follows_the_ladder():
    policy, depths = AdaptiveRung(), []
    state = policy.start()
    for _ in range(20):
        decision, state = step(policy, state, 16)
        depths.append(decision.propose)
    assert depths == [2] * 8 + [1] * 12  # 8 steps of 16 are a flush
    assert policy.decide(state, [Queued(3, (), 0, 9)] * 8).propose == 3
    assert policy.depths(16) == {1, 2} and policy.depths(8) == {3} and policy.depths(40) == {0}


@pytest.mark.parametrize(
    "policy",
    [
        AdaptiveRung(LadderConfig(static_rung=True)),
        AdaptiveRung(LadderConfig(enabled=False, cap=32)),
        AdaptiveRung(num_drafts=1),
        AdaptiveRung(LadderConfig(cap=8)),
    ],
)
def test_pinned_it_is_the_static_ladder(policy):
    state = policy.start()
    for n in (1, 8, 9, 16, 17, 33):
        decision, state = step(policy, state, n)
        assert decision.propose == policy.config.step_drafts(n, policy.num_drafts)
        assert policy.depths(n) == {decision.propose}


def test_without_capacity_for_two_it_neither_probes_nor_waits():
    policy = AdaptiveRung()
    state = policy.start()
    for _ in range(50):
        decision, state = step(policy, state, 16, room=1)
        assert decision.propose == 1 and set(decision.verify) == {1}
    assert step(policy, state, 16)[0].propose == 2  # and with it, at once


def test_windows_are_of_one_width_and_depth_and_are_dropped_when_stale():
    """A width that is visited now and then must not decide on what was true long ago."""
    policy = AdaptiveRung()
    state = policy.start()
    for _ in range(5):  # 75 of 128 verifies at 15
        _, state = step(policy, state, 15)
    for _ in range(policy.rung.stale // 16 + 1):
        _, state = step(policy, state, 16)
    ticks = state.rung.tick
    for _ in range(5):  # would be 150 with the old ones
        _, state = step(policy, state, 15)
    assert state.rung.tick == ticks
    for _ in range(4):
        _, state = step(policy, state, 15)
    assert state.rung.tick == ticks + 1


def test_sequences_cut_short_are_not_counted():
    """Near its end a sequence verifies fewer drafts; counting it would read as a fall of p2."""
    policy = AdaptiveRung(rung=RungConfig(flush=8))
    outcome = Outcome(9, (2,) * 8 + (1,), (2,) * 8 + (0,), ((),) * 9)
    rung = policy.observe(policy.start(), outcome).rung
    assert (rung.p1_fast, rung.p2_fast) == (1.0, 1.0)
    assert policy.observe(policy.start(), Outcome(9, (), (), ())).rung == Rung()


def test_thresholds_are_checked():
    for bad in ({"enter": math.nan}, {"alpha": 0}, {"alpha_slow": 1.5}, {"probe_ticks": -1}, {"leave": 1.4}):
        with pytest.raises(PolicyError, match=next(iter(bad))):
            RungConfig(**bad)
