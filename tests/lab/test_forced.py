"""Forced acceptance: the rates asked for are the rates measured, and the tokens are plain's all the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from flax import nnx

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import Fixed
from atlas_jax.lab.forced import ForcedAcceptance, ForcedDrafter, ForcedError
from atlas_jax.model.modules import Model

TINY = dataclasses.replace(tiny_models.TINY, vocab_size=61, hidden_size=24, gdn_value_dim=4, eos_ids=(60,))
ASKED = ForcedAcceptance((0.8, 0.7, 0.6), seed=3)


@pytest.fixture(scope="module")
def served():
    """`(engine, its drafter, requests, plain's answers)`: exact arithmetic, 12 requests through 4 slots."""
    rng = np.random.default_rng(0)
    noisy = lambda x: np.asarray(x, np.float64) + rng.standard_normal(x.shape) * (0.3 if x.ndim > 1 else 0.1)
    params = jax.tree.map(noisy, Model(TINY, rngs=nnx.Rngs(0)).params())
    requests = [
        Request(tuple(rng.integers(0, 60, 1 + i % 5).tolist()), 160, Sampling((i % 3) / 2, seed=i), ignore_eos=True)
        for i in range(12)
    ]
    drafter = ForcedDrafter(ASKED, TINY.vocab_size)
    with jax.enable_x64(True):
        config = EngineConfig(
            slots=4, context=192, max_drafts=3, buckets=BucketConfig(n=(4,)), prefill=(8,), dtype=jnp.float64
        )
        engine = Engine(params, TINY, config, Fixed(3), propose=drafter)
        answers = [answer.tokens for answer in drafter.record(engine, requests)]
        assert engine.policy == Fixed(3)
        yield engine, drafter, requests, answers


def measured(engine):
    return engine.telemetry.total()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
def test_measured_acceptance_is_the_one_asked_for_and_nothing_is_lost(served, depth):
    """p1, p2_cond and p3_cond within four standard errors of a binomial, tokens per step as they imply."""
    engine, drafter, requests, answers = served
    engine.policy = Fixed(depth)
    engine.reset_telemetry()
    drafter.reset_counts()
    assert [done.tokens for done in engine.generate(requests)] == answers
    found = measured(engine)
    for j, asked in enumerate(ASKED.conditional[:depth], start=1):
        count = found.count(j, j - 1)
        assert count > 200
        assert found.conditional(j) == pytest.approx(asked, abs=4 * (asked * (1 - asked) / count) ** 0.5)
    assert found.conditional(depth + 1) is None
    assert found.tok_step == pytest.approx(ASKED.tok_step(depth), rel=0.08)
    assert drafter.off_script == 0 and drafter.proposals > 0 and drafter.seconds > 0


def test_coins_belong_to_request_and_position_not_to_the_batch(served):
    """Alone or among others, a request is offered the same drafts; another seed offers others."""
    engine, drafter, requests, _ = served
    engine.policy = Fixed(3)

    def offered(requests, which):
        ids = [engine.submit(request) for request in requests]
        found = []
        while not engine.idle:
            found += [e.drafts for e in engine.step() if e.request == ids[which]]
        return found

    together, alone = offered(requests, 5), offered(requests[5:6], 0)
    assert together == alone and len(alone) > 50
    drafter.forced = dataclasses.replace(ASKED, seed=4)
    try:
        assert offered(requests[5:6], 0) != alone
    finally:
        drafter.forced = ASKED


@pytest.mark.parametrize(("asked", "tok_step"), [((0.0,), 1.0), ((1.0, 1.0, 1.0), 4.0)])
def test_never_and_always_right(served, asked, tok_step):
    engine, drafter, requests, answers = served
    engine.policy = Fixed(len(asked))
    engine.reset_telemetry()
    drafter.forced = ForcedAcceptance(asked)
    try:
        assert [done.tokens for done in engine.generate(requests)] == answers
    finally:
        drafter.forced = ASKED
    found = measured(engine)
    assert all(found.conditional(j + 1) == p for j, p in enumerate(asked))
    assert drafter.forced is ASKED and found.tok_step == pytest.approx(tok_step, rel=0.04)


def test_a_text_that_left_the_script_is_counted_not_hidden():
    drafter = ForcedDrafter(ForcedAcceptance((1.0,)), vocab_size=10)
    drafter.learn([Request((1, 2)), Request((1, 2, 3))], [(3, 4, 5), (4, 5, 6)])
    assert drafter((1, 2, 3, 4), 1) == (5,) and drafter.off_script == 0
    assert drafter((1, 2, 3, 4, 5), 2) == (6, 0)  # the longer script goes on; a second draft was given no probability
    assert drafter((1, 2, 9), 2) == (0, 0) and (drafter.off_script, drafter.proposals) == (1, 3)
    with pytest.raises(ForcedError, match="not recorded"):
        drafter((7, 7, 7), 1)


def test_after_a_wrong_draft_none_is_right():
    drafter = ForcedDrafter(ForcedAcceptance((0.0, 1.0, 1.0)), vocab_size=7)
    drafter.learn([Request((1,))], [(2, 3, 4, 5, 6)])
    assert drafter((1, 2), 4) == (4, 5, 6, 0)


def test_what_cannot_be_forced_is_refused():
    for text in ("", "0.8,x", "1.2", "-0.1", "0.8;0.7"):
        with pytest.raises(ForcedError):
            ForcedAcceptance.parse(text)
    asked = ForcedAcceptance.parse("0.8,0.7,0.6")
    assert asked == ForcedAcceptance((0.8, 0.7, 0.6))
    assert asked.tok_step(0) == 1 and asked.tok_step(3) == pytest.approx(1 + 0.8 + 0.56 + 0.336)
    with pytest.raises(ForcedError, match="4 drafts need 4 probabilities; there are 3"):
        asked.tok_step(4)
    drafter = ForcedDrafter(asked, 10)
    with pytest.raises(ForcedError, match="requests 0 and 2 have the same prompt"):
        drafter.learn([Request((1,)), Request((2,)), Request((1,))], [(5,), (5,), (6,)])
    with pytest.raises(ForcedError, match="record the same requests first"):
        drafter((1, 5), 1)
