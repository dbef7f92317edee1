"""Temperatures from nothing to one, streams of noise that share no draw, rates that follow from any counts."""


import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import ACCEPT, DRAFT, RESIDUAL, Controls, Places, Sampling, Tables, noise_keys, pick
from atlas_jax.decode.sampling import probabilities as eager_probabilities
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.depth.policies import Fixed, Off

TEMPERATURES = (0.0, 1e-12, 1e-8, 1e-6, 1e-4, 1.0)


pytestmark = pytest.mark.usefixtures("quick")


def test_no_temperature_overflows():
    """In float32, scores up to 1e6, with and without truncation: a token that is one, a distribution that sums to one;
    one-hot at the first of the two best scores wherever that is greedy (B25)."""
    heats = np.repeat(np.float32((*TEMPERATURES, 1e-38)), 2)
    n, vocab = len(heats), 64
    scores = np.float32(np.random.default_rng(0).standard_normal((n, vocab)) * np.logspace(0, 6, n)[:, None])
    scores[:, [7, 40]] = scores.max(axis=1, keepdims=True) + 1  # noise of any size would tell them apart
    whole, number = lambda x: jnp.full(n, x, jnp.int32), lambda x: jnp.full(n, x, jnp.float32)
    cut = np.tile([0, 1], n // 2)
    rows = Controls(
        temperature=jnp.asarray(heats), top_k=jnp.where(cut, 20, 0), top_p=jnp.where(cut, 0.9, 1.0),
        min_p=jnp.where(cut, 0.01, 0.0), repetition=number(1.1), presence=number(0.5), frequency=number(0.1),
        biased=whole(0), masked=whole(0), keys=jnp.ones((n, 2), jnp.uint32),
    )  # fmt: skip
    places = Places(
        slots=whole(0), positions=whole(1), lengths=whole(1), prompts=whole(0), more=jnp.zeros((n, 1), jnp.int32),
        live=jnp.ones((n, 1), bool), mask=whole(-1),
    )  # fmt: skip
    tables = Tables(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, vocab)), jnp.zeros((1, 1, 2), jnp.uint32))
    found = np.asarray(jax.jit(eager_probabilities)(scores, rows, places, tables))
    assert np.isfinite(found).all() and (found >= 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    picked = np.asarray(jax.jit(pick)(scores, rows, rows, places, tables))
    greedy = heats < 1e-5
    assert (found[greedy, 7] == 1).all() and (picked[greedy] == 7).all()
    assert (found[np.arange(n), picked] > 0).all()


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_drafts_are_greedy_where_picks_are(engine, temperature):
    """Below 1e-5 drafts and tokens are those of temperature 0, truncation or not; above it they are plain decode's, and
    every log-probability is a number (B25)."""
    engine.cancel_all()

    def run(policy, sampling):
        engine.policy, engine._propose = policy, None
        asked = [Request(p, 20, sampling, ignore_eos=True, log_probs=True) for p in ((3,), (1, 4), (9, 2, 6))]
        heard = [(e.tokens, e.drafts, e.log_probs) for e in engine.stream(asked)]
        assert np.isfinite([p for _, _, log_probs in heard for p in log_probs]).all()
        return [heard[:2] for heard in heard], [e for e, _, _ in heard]

    mine, _ = run(Fixed(4), Sampling(temperature, top_p=0.5, seed=1))
    if temperature < 1e-5:
        assert mine == run(Fixed(4), Sampling())[0]
    sampling = Sampling(temperature, seed=1)
    done = []
    for policy in (Off(), Fixed(4)):
        engine.policy = policy
        done.append([c.tokens for c in engine.generate([Request(p, 20, sampling) for p in ((3,), (1, 4), (9, 2, 6))])])
    assert done[0] == done[1]


def test_no_two_uses_of_noise_share_a_draw():
    """By request, absolute position and purpose: all keys differ, and their uniforms are uncorrelated (B30)."""
    requests = np.stack([np.arange(8, dtype=np.uint32), np.full(8, 7, np.uint32)], axis=1)
    grid = np.array([(r, p) for r in range(8) for p in range(64)])
    keys = np.stack([
        np.asarray(jax.random.key_data(noise_keys(jnp.asarray(requests[grid[:, 0]]), jnp.asarray(grid[:, 1]), purpose)))
        for purpose in (0, DRAFT, ACCEPT, RESIDUAL)
    ])  # fmt: skip
    assert len({tuple(key) for key in keys.reshape(-1, 2).tolist()}) == 4 * len(grid)
    draw = jax.vmap(lambda key: jax.random.uniform(jax.random.wrap_key_data(key, impl="threefry2x32")))
    uniform = np.stack([np.asarray(draw(jnp.asarray(part))) for part in keys])
    assert np.abs(np.corrcoef(uniform) - np.eye(4)).max() < 4 / len(grid) ** 0.5


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(
    depth=st.integers(1, 5), steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=60)
)
def test_rates_of_any_log_are_those_of_their_definitions(depth, steps):
    """Where every step offered the same: the unconditional rates sum to the mean accepted, and conditional ones
    multiply to them. Steps cut short near a limit are in the denominator of what they offered alone (B56)."""
    even, ragged = Acceptance(), Acceptance()
    for offered, accepted in steps:
        even.record(depth, min(accepted, depth) + 1)
        ragged.record(offered, min(accepted, offered) + 1)
    u = [even.unconditional(j) for j in range(1, depth + 1)]
    p = [even.conditional(j) for j in range(1, depth + 1)]
    assert sum(u) == pytest.approx(even.tok_step - 1)
    for j in range(depth):
        if None not in p[: j + 1]:
            assert np.prod(p[: j + 1]) == pytest.approx(u[j])
        else:
            assert u[j] == 0
    assert ragged.tok_step == pytest.approx(1 + np.mean([min(a, k) for k, a in steps]))
    for j in range(1, 6):
        offers = [min(a, k) for k, a in steps if k >= j]
        want = np.mean([a >= j for a in offers]) if offers else None
        reached = [a >= j for a in offers if a >= j - 1]
        assert ragged.unconditional(j) == (None if want is None else pytest.approx(want))
        assert ragged.conditional(j) == (pytest.approx(np.mean(reached)) if reached else None)
