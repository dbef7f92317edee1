"""A step writes what its own sequences own and nothing else: not a neighbour, not the last slot, to which a negative
index would wrap, not the last live one, onto which a clamped index of padding would fall."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.decode.plan import Bucket, Plan, StepConfig
from atlas_jax.decode.state import init_state
from atlas_jax.decode.step import _view, step
from atlas_jax.kernels.backends import Kernels
from atlas_jax.model.state import GdnCache

SLOTS, LENGTH, QUICK = 5, 16, {"xla_backend_optimization_level": 0}
UNTOUCHED = [1, 3, 4]


def filled(cfg, rollback, live, poison):
    """A state of random numbers, in which all that no sequence of `live` owns is poison."""
    rng = np.random.default_rng(0)
    state = init_state(cfg, slots=SLOTS, length=LENGTH, max_drafts=2, dtype=jnp.float64, head=True, rollback=rollback)
    dead = [slot for slot in range(SLOTS) if slot not in live]

    def fill(leaf):
        if leaf.dtype != jnp.float64:
            return np.asarray(leaf).copy()
        held = rng.standard_normal(leaf.shape)
        held[dead] = poison
        return held

    state = jax.tree.map(fill, state)
    for slot, (length, pending) in live.items():
        state.ledger[slot] = length, pending, length
        for cache in (*state.layers, state.head):
            if not isinstance(cache, GdnCache):
                cache.kv[slot, :, :, length:] = poison
    return state


@pytest.mark.parametrize(("rollback", "rows"), [("deferred", 8), ("snapshot", 12)])
def test_a_step_writes_its_own_slots_alone(tiny, rollback, rows):
    """Slots 2 and 0 of 5 in a batch [2, padding, 0, padding]; drafts of one rejected from the first on, so that its
    accepted count less one is -1, and the other next to its slot's end. All that is not theirs holds NaN and is not
    changed by a bit; what they read and write has none (B03, B09, B10)."""
    cfg, params = tiny
    bucket, live = Bucket(4, 3, rows, True), {2: (5, 1), 0: (LENGTH - 2, 0)}
    with jax.enable_x64(True):
        plan = Plan.empty(4, 3, SLOTS)
        for i, slot in ((0, 2), (2, 0)):
            length, pending = live[slot]
            plan.slots[i], plan.lengths[i], plan.pending[i], plan.head[i] = slot, length, pending, length
            plan.num_rows[i], plan.room[i], plan.tokens[i] = (3, 9, (7, 8, 9)) if slot == 2 else (1, 1, (7, 0, 0))
        fn = functools.partial(step, cfg=cfg, bucket=bucket, config=StepConfig(rollback=rollback))
        clean = filled(cfg, rollback, live, 0.0)
        program = jax.jit(fn).lower(params, clean, plan.packed).compile(QUICK)
        _, first = program(params, clean, plan.packed)
        wrong = np.asarray(first.ints)[0, 0, 2]
        plan.tokens[0, 1:] = [t for t in (8, 9, 10) if t != wrong][:2]  # rejected at once
        answers = []
        for poison in (0.0, np.nan):
            before = filled(cfg, rollback, live, poison)
            after, result = program(params, before, plan.packed)
            ints = np.asarray(result.ints)[0]
            answers.append(ints[[0, 2]])
            assert ints[:, 0].tolist() == [1, 0, 1, 0] and not ints[:, 1].any()
            for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
                assert np.asarray(old)[UNTOUCHED].tobytes() == np.asarray(new)[UNTOUCHED].tobytes()
            for i, (slot, (length, _)) in zip((0, 2), live.items(), strict=True):
                before.text[slot, length + 1], before.ledger[slot] = ints[i, 2], (length + 1, 0, length + 1)
                for old, new in zip((*before.layers, before.head), (*after.layers, after.head), strict=True):
                    if isinstance(old, GdnCache):
                        state = new.state[slot, 0] if rollback == "snapshot" else new.state[slot]
                        assert np.isfinite(state).all() and np.isfinite(new.window[slot]).all()
                    else:
                        kept, row = np.asarray(new.kv)[slot, :, :, :length], np.asarray(new.kv)[slot, :, :, length]
                        np.testing.assert_array_equal(kept, old.kv[slot, :, :, :length])
                        assert np.isfinite(row).all()
            np.testing.assert_array_equal(after.text, before.text)
            np.testing.assert_array_equal(after.ledger, before.ledger)
        np.testing.assert_array_equal(*answers)


def test_flat_rows_and_the_grid_are_one_anothers_inverse():
    """For all row counts 0 to 3 of three sequences that fewer than nine flat rows hold: rows keep their order, none is
    lost, cells without one are zero (B12)."""
    cells = np.arange(1.0, 10.0).reshape(3, 3)

    @functools.partial(jax.jit, static_argnums=1)
    def there_and_back(packed, bucket):
        view = _view(Plan.of(packed, 3), bucket, Kernels(), "deferred")
        flat = view.to_flat(jnp.asarray(cells))
        return flat, view.to_grid(flat)

    for counts in np.ndindex(4, 4, 4):
        plan = Plan.empty(3, 3, SLOTS)
        plan.num_rows[:] = counts
        live = np.arange(3) < np.array(counts)[:, None]
        for rows in (size for size in (3, 5, 8) if size >= sum(counts)):
            flat, grid = there_and_back(plan.packed, Bucket(3, 3, rows, True))
            np.testing.assert_array_equal(flat[: sum(counts)], cells[live])
            assert not np.asarray(flat[sum(counts) :]).any()
            np.testing.assert_array_equal(grid, np.where(live, cells, 0))
