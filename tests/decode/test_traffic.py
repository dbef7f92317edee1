"""Random traffic, every answer judged by a full forward and a sampler that share nothing with the engine; in float64,
where nothing is excused. 2,000 requests in all; `scripts/soak.py` runs longer ones."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.decode.sequence import random_key
from atlas_jax.depth.policies import Fixed, Ladder, Off
from atlas_jax.lab.oracle import Oracle, pick
from atlas_jax.lab.soak import Traffic, soak

POLICIES = [Off(), Fixed(0), Fixed(1), Fixed(2), Fixed(3), Ladder()]
EXAMPLES, REQUESTS = 10, 200


@pytest.fixture(scope="module")
def made(tiny):
    cfg, params = tiny
    config = EngineConfig(
        slots=7, context=48, max_drafts=3, buckets=BucketConfig(n=(8,), k=(1, 4)), prefill=(4, 16), prefill_tokens=24,
        keep=3, rounds=4, end_ids=4, dtype=jnp.float64,
    )  # fmt: skip
    with jax.enable_x64(True):
        oracle = Oracle(params, cfg, length=48, batch=16, tie=1e-9)
        oracle.warmup()
        engine = Engine(params, cfg, config)
        engine.warmup(POLICIES)
        yield engine, oracle


@pytest.mark.slow
@hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**16),
    cancels=st.sampled_from([0.0, 0.05, 0.3]),
    switches=st.sampled_from([0.0, 0.1, 0.6]),
    burst=st.integers(1, 12),
    sampled=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_every_answer_is_the_samplers(made, seed, cancels, switches, burst, sampled):
    engine, oracle = made
    traffic = Traffic(REQUESTS, 24, 20, cancels, switches, burst, sampled, seed)
    texts = np.random.default_rng(seed).integers(0, 60, (5, 60)).tolist()
    found = soak(engine, oracle, POLICIES, traffic, texts)
    assert found.requests == found.equal == REQUESTS, found.first_wrong
    assert (found.excused, found.unexcused, found.violations, found.plain_different) == (0, 0, 0, 0)
    assert found.compiles_after_warmup == 0
    assert engine.idle and engine._slots._free != [] and not engine._completed


def test_the_oracle_sees_what_is_wrong(made):
    """The test of the test: one token changed, one appended behind the end, another seed: all are found."""
    engine, oracle = made
    request = Request((3, 9, 4), 12, Sampling(0.8, presence_penalty=0.5, seed=3), ignore_eos=True)
    (good,) = engine.generate([request])
    key = random_key(3, 0, 0)
    judge = lambda done, key=key: oracle.judge([request], [done], [key])[0]
    assert (judge(good).unexcused, judge(good).wrong, judge(good).tokens) == (0, "", 12)
    for at in (0, 5, 11):
        tokens = [*good.tokens]
        tokens[at] = (tokens[at] + 1) % 60
        assert judge(dataclasses.replace(good, tokens=tuple(tokens))) == dataclasses.replace(
            judge(good), tokens=at + 1, unexcused=1
        )
    assert judge(good, random_key(4, 0, 0)).unexcused == 1
    ended = dataclasses.replace(request, stop_ids=(good.tokens[4],))
    assert "goes on behind" in oracle.judge([ended], [good], [key])[0].wrong


def test_the_numpy_sampler_on_cases_worked_by_hand():
    scores, none = np.array([1.0, 2.0, 3.0, 0.5]), np.zeros(4)
    best = lambda sampling, text=(0,), noise=none: pick(scores, list(text), 1, sampling, noise)
    assert best(Sampling())[0] == 2
    assert best(Sampling(repetition_penalty=2.0), (2,))[0] == 1  # 3 / 2 < 2; the prompt counts
    assert best(Sampling(presence_penalty=1.5), (0, 2))[0] == 1 and best(Sampling(presence_penalty=1.5), (2,))[0] == 2
    assert best(Sampling(frequency_penalty=0.6), (0, 2, 2))[0] == 1
    assert best(Sampling(bias={3: 9.0}))[0] == 3
    kept = lambda sampling: np.isfinite(best(sampling)[1]).tolist()
    assert kept(Sampling(1.0, top_k=2)) == [False, True, True, False]
    assert kept(Sampling(1.0, top_p=0.6)) == [False, False, True, False]  # softmax: .087 .237 .644 .053
    assert kept(Sampling(1.0, top_p=0.65)) == [False, True, True, False]
    assert kept(Sampling(1.0, min_p=0.3)) == [False, True, True, False]
    assert kept(Sampling(0.1, min_p=0.3)) == [False, False, True, False]  # colder: the threshold moves
