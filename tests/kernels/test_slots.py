"""Rows read from a pool that the same program writes: the values, and that no pool is copied for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.kernels.gdn_step import check, gdn_step
from atlas_jax.kernels.gdn_step.specs import StepSpec
from atlas_jax.kernels.slots import gather_once


@pytest.mark.parametrize("slots", [[2], [5], [4, 0], [5, 1]])
def test_out_of_range_is_zero_and_nothing_else(slots):
    pool = np.arange(1, 11, dtype=np.float32).reshape(5, 2)
    wanted = [pool[slot] if slot < 5 else [0, 0] for slot in slots]
    np.testing.assert_array_equal(jax.jit(gather_once)(pool, np.int32(slots)), wanted)


@pytest.mark.parametrize(("n", "rows"), [(1, 1), (1, 2), (1, 4), (3, 1)])
def test_a_step_does_not_copy_its_pool(n, rows):
    """Temporaries of a step over 4 slots and over 400 are the same: whoever reads the pool does so before the write."""
    sizes = []
    for slots in (4, 400):
        spec = StepSpec("tiny", n, rows, rows - 1, 1, 2, 8, 8, slots=slots)
        compiled = jax.jit(gdn_step, donate_argnums=0).lower(*spec.arguments()).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert abs(sizes[1] - sizes[0]) < 1024 < 400 * 2 * 8 * 8


def test_a_single_padding_sequence_gives_zeros_and_keeps_every_slot():
    """One sequence alone takes a path of its own on an older jax."""
    spec = StepSpec("tiny", 1, 2, 1, 1, 2, 8, 8, slots=3)
    for padding in (0, 1):
        x = check.inputs(spec, 0, padding=padding)
        assert check.error(jax.jit(gdn_step), spec, x) <= check.BOUNDS["float32"]
    out, pool = gdn_step(*map(jnp.asarray, x))
    assert not np.asarray(out).any() and np.asarray(pool).tobytes() == x.pool.tobytes()
