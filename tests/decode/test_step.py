"""Properties of the compiled step that no token shows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.decode.accept import emitted_count, matched
from atlas_jax.decode.plan import Bucket, Plan
from atlas_jax.decode.state import init_state
from atlas_jax.decode.step import step
from atlas_jax.decode.telemetry import Acceptance


@pytest.mark.parametrize("bucket", [Bucket(1, 1, 1, False), Bucket(1, 3, 3, True)], ids=["plain", "two drafts"])
def test_a_step_touches_only_its_own_slots(tiny, bucket):
    """Temporaries do not grow with the number of slots, and the whole state is donated and updated in place."""
    cfg, params = tiny
    params = jax.tree.map(np.float32, params)
    sizes = []
    for slots in (4, 64):
        state = init_state(cfg, slots=slots, length=512, max_drafts=2, dtype=jnp.float32, head=True)
        packed = jax.ShapeDtypeStruct((bucket.n, Plan.width(bucket.k)), jnp.int32)
        fn = functools.partial(step, cfg=cfg, bucket=bucket)
        memory = jax.jit(fn, donate_argnums=1).lower(params, state, packed).compile().memory_analysis()
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert memory.alias_size_in_bytes >= state_bytes
        sizes.append((memory.temp_size_in_bytes, state_bytes))
    (few, _), (many, state_bytes) = sizes
    assert abs(many - few) < 4096 < state_bytes


def test_a_plan_survives_packing():
    """What the host writes into the views is what the program reads, floats and keys as bits of integers."""
    rng = np.random.default_rng(0)
    plan = Plan.empty(3, 4, slots=9)
    for field in jax.tree.leaves(plan._replace(packed=np.zeros(0))):
        field[:] = rng.random(field.shape) if field.dtype == np.float32 else rng.integers(0, 2**31, field.shape)
    plan.controls.keys[0] = 2**32 - 1
    read = jax.jit(lambda packed: Plan.of(packed, 4))(plan.packed)
    for there, here in zip(jax.tree.leaves(read), jax.tree.leaves(plan), strict=True):
        np.testing.assert_array_equal(there, here)
        assert there.dtype == here.dtype
    assert plan.packed.shape == (3, Plan.width(4))


def brute_force(picks, drafts, rows, room, end):
    """Emit the target's picks one by one, as a sequential decoder would."""
    emitted = 0
    for j in range(rows):
        emitted += 1
        if end[j] or emitted == room or j + 1 == rows or drafts[j] != picks[j]:
            break
    return emitted


def test_acceptance_equals_sequential_emission():
    """All drafts, cuts, limits and row counts over a tiny vocabulary, against one token at a time."""
    rng = np.random.default_rng(1)
    n, k = 4000, 4
    picks, drafts = rng.integers(0, 2, (n, k)), rng.integers(0, 2, (n, k - 1))
    rows, room, end = rng.integers(0, k + 1, n), rng.integers(1, k + 2, n), rng.random((n, k)) < 0.2
    accepted = matched(*(jnp.asarray(x) for x in (picks, drafts, rows)))
    counts = emitted_count(accepted, *(jnp.asarray(x) for x in (end, rows, room)))
    expected = [brute_force(*case) for case in zip(picks, drafts, rows, room, end, strict=True)]
    np.testing.assert_array_equal(counts, expected)


def test_rates_follow_from_the_counts():
    """A log with a known answer: conditional rates multiply to unconditional ones, all within [0, 1] (B56)."""
    log = Acceptance()
    for emitted in (1, 1, 2, 3, 4, 4):
        log.record(3, emitted)
    log.record(1, 2)  # fewer offered: counts for the first draft only
    assert log.tok_step == 17 / 7
    assert [log.unconditional(j) for j in (1, 2, 3)] == [5 / 7, 3 / 6, 2 / 6]
    assert [log.conditional(j) for j in (1, 2, 3)] == [5 / 7, 3 / 4, 2 / 3]
    assert log.conditional(4) is None
    other = Acceptance()
    other.record(4, 5)
    log.merge(other)
    assert (log.steps, log.tokens, log.conditional(4)) == (8, 22, 1.0)
