"""The rollback designs that are only timed give the outputs and states of the recurrence: else time means nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.kernels.gdn_step.reference import recurrence
from atlas_jax.lab.rollback_kernels import snapshot_step

N, T, HK, HV, DK, DV, SLOTS = 2, 3, 1, 2, 16, 32, 4


@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
@pytest.mark.parametrize("write", [True, False])
def test_snapshots_are_the_states_behind_each_row(write):
    rng = np.random.default_rng(0)
    unit = lambda *shape: (x := rng.standard_normal(shape)) / np.linalg.norm(x, axis=-1, keepdims=True)
    inputs = (
        *(unit(N, T, HK, DK), unit(N, T, HK, DK), rng.standard_normal((N, T, HV, DV))),
        *(-rng.random((N, T, HV)), rng.random((N, T, HV))),
    )
    pool = rng.standard_normal((SLOTS, T if write else 1, HV, DK, DV))
    slots, start = np.array([3, 1]), np.array([2, 0] if write else [0, 0])
    step = jax.jit(functools.partial(snapshot_step, write=write, interpret=True))
    single = lambda x: jnp.asarray(x, jnp.float32)
    out, new = step(single(pool), jnp.asarray(slots), jnp.asarray(start), *map(single, inputs))
    expected = pool.astype(np.float32).copy()
    with jax.enable_x64(True):
        states = jnp.asarray(pool[slots, start])
        for row in range(T):
            behind = recurrence(states, *(jnp.asarray(x[:, : row + 1]) for x in inputs))
            np.testing.assert_allclose(out[:, row], behind[0][:, row], atol=2e-6)
            if write:
                expected[slots, row] = behind[1]
    np.testing.assert_allclose(new, expected, atol=2e-6)
    untouched = [s for s in range(SLOTS) if s not in slots]
    assert (np.asarray(new)[untouched] == pool.astype(np.float32)[untouched]).all()
