"""The delta rule: chunked and step forms against the recurrence in float64, at any gate, with poisoned padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.kernels.gdn_chunk import gdn_chunk
from atlas_jax.kernels.gdn_step import gdn_step
from atlas_jax.kernels.gdn_step.reference import recurrence

chunk_fn = jax.jit(gdn_chunk, static_argnames="chunk")
step_fn = jax.jit(gdn_step)
recurrence_fn = jax.jit(recurrence)


def rows(rng, n, length, hk, hv, dk, dv, gate="mild"):
    """Random inputs as the model makes them: unit keys, beta in (0, 1), log decays of the named kind."""
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    g = {
        "mild": -rng.gamma(1.0, 0.2, (n, length, hv)),
        "none": np.zeros((n, length, hv)),
        "spiky": np.where(rng.random((n, length, hv)) < 0.1, -1e4, -0.01),
        "strong": np.full((n, length, hv), -20.0),
        "forget": np.where(rng.random((n, length, hv)) < 0.1, -np.inf, -0.1),
        "all forgotten": np.full((n, length, hv), -np.inf),
    }[gate]
    return (
        unit(rng.standard_normal((n, length, hk, dk))) * dk**-0.5,
        unit(rng.standard_normal((n, length, hk, dk))),
        rng.standard_normal((n, length, hv, dv)),
        g,
        rng.random((n, length, hv)),
    )


def exact(state, *inputs):
    with jax.enable_x64(True):
        out, state = recurrence_fn(jnp.asarray(state, jnp.float64), *(jnp.asarray(x, jnp.float64) for x in inputs))
        return np.asarray(out), np.asarray(state)


def assert_close(actual, expected, bound):
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(actual), expected, atol=bound * scale, rtol=0)


def single(*arrays):
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


@pytest.mark.parametrize("gate", ["mild", "none", "spiky", "strong", "forget", "all forgotten"])
@pytest.mark.parametrize(
    ("length", "heads"), [(1, (1, 1)), (2, (2, 4)), (63, (3, 3)), (64, (2, 2)), (65, (1, 4)), (200, (2, 4))]
)
def test_chunk_equals_the_recurrence(gate, length, heads):
    rng = np.random.default_rng(length)
    inputs = rows(rng, 2, length, *heads, 8, 12, gate)
    state = rng.standard_normal((2, heads[1], 8, 12))
    out, end = chunk_fn(*single(state, *inputs), chunk=32)
    expected_out, expected_end = exact(state, *inputs)
    assert_close(out, expected_out, 1e-5)
    assert_close(end, expected_end, 1e-5)


@pytest.mark.parametrize("gate", ["mild", "spiky", "forget"])
def test_chunk_gradients_are_finite_and_right(gate):
    """Every input's gradient equals the recurrence's in float64; nothing turns NaN at `-inf`, padding included."""
    rng = np.random.default_rng(3)
    inputs = rows(rng, 2, 37, 2, 4, 8, 12, gate)
    state = rng.standard_normal((2, 4, 8, 12))
    weigh = rng.standard_normal((2, 37, 4, 12))

    def loss(fn, weigh, *args):
        out, end = fn(*args)
        return (out * weigh).sum() + (end * end).sum()

    ours = jax.jit(jax.grad(functools.partial(loss, lambda *a: gdn_chunk(*a, chunk=16)), argnums=range(1, 7)))
    actual = ours(*single(weigh, state, *inputs))
    with jax.enable_x64(True):
        theirs = jax.jit(jax.grad(functools.partial(loss, recurrence), argnums=range(1, 7)))
        expected = theirs(*(jnp.asarray(x, jnp.float64) for x in (weigh, state, *inputs)))
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        finite = np.isfinite((state, *inputs)[index])  # at g = -inf the recurrence's own gradient is 0 * inf
        assert np.isfinite(a).all() and not np.asarray(a)[~finite].any()
        assert_close(np.asarray(a)[finite], np.asarray(e)[finite], 1e-5)


@pytest.mark.parametrize("poison", [0.0, np.nan, 1e4])
def test_dead_rows_of_a_chunk_are_identities(poison):
    """Rows where `live` is false change neither outputs nor state, bit for bit, whatever they hold."""
    rng = np.random.default_rng(5)
    inputs = single(*rows(rng, 3, 40, 2, 4, 8, 12))
    state = single(rng.standard_normal((3, 4, 8, 12)))[0]
    lengths = jnp.array([5, 0, 40])
    live = jnp.arange(40)[None] < lengths[:, None]
    dirty = [jnp.where(live.reshape(3, 40, *[1] * (x.ndim - 2)), x, poison) for x in inputs]
    clean = [jnp.where(live.reshape(3, 40, *[1] * (x.ndim - 2)), x, 0) for x in inputs]
    out, end = chunk_fn(state, *dirty, live)
    clean_out, clean_end = chunk_fn(state, *clean, live)
    np.testing.assert_array_equal(out, clean_out)
    np.testing.assert_array_equal(end, clean_end)
    np.testing.assert_array_equal(end[1], state[1])
    short_out, short_end = chunk_fn(state[:1], *(x[:1, :5] for x in inputs))
    assert_close(out[0, :5], np.asarray(short_out[0]), 1e-6)
    assert_close(end[0], np.asarray(short_end[0]), 1e-6)


@pytest.mark.parametrize("gate", ["mild", "none", "spiky", "forget"])
@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (3, 3), (1, 4)])
@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_step_folds_what_is_committed_and_only_reads_the_rest(width, heads, gate):
    """For every number of pending and live rows: outputs as if all rows were folded, state after row 0 alone."""
    rng = np.random.default_rng(width)
    hk, hv = heads
    fold = width - 1
    cases = [(p, r) for p in range(fold + 1) for r in range(1, width + 1)]
    n = len(cases)
    pending, live = np.array(cases).T
    q, k, v, g, beta = rows(rng, n, fold + width, hk, hv, 8, 12, gate)
    pool = rng.standard_normal((n + 3, hv, 8, 12))
    slots = rng.permutation(n + 3)[:n]
    out, after = step_fn(
        *single(pool), jnp.asarray(slots), *single(q[:, fold:], k, v, g, beta), jnp.asarray(pending), jnp.asarray(live)
    )
    for i, (p, r) in enumerate(cases):
        used = slice(fold - p, fold + r)
        expected, _ = exact(pool[slots[i]][None], *(x[i : i + 1, used] for x in (q, k, v, g, beta)))
        assert_close(out[i, :r], expected[0, p:], 2e-6)
        assert not np.asarray(out[i, r:]).any()
        committed = slice(fold - p, fold + 1)
        _, expected = exact(pool[slots[i]][None], *(x[i : i + 1, committed] for x in (q, k, v, g, beta)))
        assert_close(after[slots[i]], expected[0], 2e-6)
    untouched = np.setdiff1d(np.arange(n + 3), slots)
    np.testing.assert_array_equal(after[untouched], np.float32(pool)[untouched])


@pytest.mark.parametrize("poison", [np.nan, 1e4])
def test_step_ignores_dead_rows_free_slots_and_padding_sequences(poison):
    rng = np.random.default_rng(9)
    n, width, fold = 4, 3, 2
    q, k, v, g, beta = single(*rows(rng, n, fold + width, 2, 4, 8, 12))
    pool = single(rng.standard_normal((6, 4, 8, 12)))[0]
    slots = jnp.array([4, 1, 6, 0])  # the third sequence is padding: its slot is the number of slots
    pending, live = jnp.array([1, 0, 0, 2]), jnp.array([3, 1, 0, 2])
    row = jnp.arange(fold + width)[None]
    alive = jnp.where(row < fold, row >= fold - pending[:, None], row - fold < live[:, None])
    fill = lambda x, value: jnp.where(alive.reshape(n, -1, *[1] * (x.ndim - 2)), x, value)
    results = []
    for value in (0.0, poison):
        held = pool.at[jnp.array([2, 3, 5])].set(value)
        k2, v2, g2, b2 = (fill(x, value) for x in (k, v, g, beta))
        q2 = jnp.where(alive[:, fold:, None, None], q[:, fold:], value)
        out, after = step_fn(held, slots, q2, k2, v2, g2, b2, pending, live)
        results.append((out, after[jnp.array([4, 1, 0])]))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_zero_rows_fold_the_pending_alone():
    rng = np.random.default_rng(11)
    q, k, v, g, beta = rows(rng, 2, 4, 2, 4, 8, 12)
    pool = rng.standard_normal((2, 4, 8, 12))
    pending = jnp.array([2, 0])
    _, after = step_fn(*single(pool), jnp.arange(2), *single(q[:, 3:], k, v, g, beta), pending, jnp.zeros(2, int))
    _, expected = exact(pool[:1], *(x[:1, 1:3] for x in (q, k, v, g, beta)))
    assert_close(after[0], expected[0], 2e-6)
    np.testing.assert_array_equal(after[1], np.float32(pool[1]))
