"""Attention over the pooled cache against a plain softmax in float64, with everything that is dead poisoned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.kernels.cache_attention import write_cache, xla

SLOTS, CAPACITY, KV, DIM, GROUP = 5, 37, 2, 8, 3
attend = jax.jit(xla.cache_attention, static_argnames="block")
write = jax.jit(write_cache)


def plain(keys, values, queries, position):
    """One row: softmax over positions 0..position of one sequence; `[Hq, Dh]`."""
    out = []
    for head, query in enumerate(queries):
        scores = keys[head // GROUP, : position + 1] @ query * DIM**-0.5
        weights = np.exp(scores - scores.max())
        out.append(weights @ values[head // GROUP, : position + 1] / weights.sum())
    return np.array(out)


@pytest.mark.parametrize("block", [1, 8, 16, 64])
@pytest.mark.parametrize("poison", [0.0, np.nan, 1e4])
def test_rows_see_their_own_past_and_nothing_else(block, poison):
    """Lengths from 1 to the capacity, a padding sequence, blocks that do not divide the capacity."""
    rng = np.random.default_rng(block)
    pool = np.full((SLOTS, 2, KV, CAPACITY, DIM), poison, np.float32)
    slots, lengths, rows = np.array([3, 0, SLOTS, 1]), np.array([0, 34, 0, 15]), np.array([1, 3, 0, 2])
    for slot, length in zip(slots, lengths, strict=True):
        if slot < SLOTS:
            pool[slot, :, :, :length] = rng.standard_normal((2, KV, length, DIM))
    k, v = rng.standard_normal((2, 4, 3, KV, DIM)).astype(np.float32)
    live = np.arange(3) < rows[:, None]
    k[~live], v[~live] = poison, poison
    q = rng.standard_normal((4, 3, KV * GROUP, DIM)).astype(np.float32)
    positions = lengths[:, None] + np.arange(3)
    written = write(pool, slots, positions, rows, k, v)
    out = attend(written, slots, positions, lengths + rows, q, block=block)
    for n, slot in enumerate(slots):
        if slot == SLOTS:
            assert not np.asarray(out[n]).any()
            continue
        known = np.asarray(written[slot], np.float64)
        np.testing.assert_array_equal(known[:, :, : lengths[n]], pool[slot, :, :, : lengths[n]])
        for j in range(rows[n]):
            expected = plain(known[0], known[1], np.float64(q[n, j]), positions[n, j])
            np.testing.assert_allclose(out[n, j], expected, atol=2e-6)
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    np.testing.assert_array_equal(np.asarray(written)[untouched], pool[untouched])


def test_rows_beyond_the_capacity_are_dropped():
    """Neither clamped onto the last row nor wrapped onto the first."""
    pool = jnp.zeros((1, 2, 1, 4, 2))
    ones = jnp.ones((1, 3, 1, 2))
    written = write(pool, jnp.array([0]), jnp.array([[3, 4, 5]]), jnp.array([3]), ones, ones)
    assert np.asarray(written).sum(axis=(0, 1, 2, 4)).tolist() == [0, 0, 0, 4]
