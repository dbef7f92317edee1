"""Reading rows of a pool that is written again in the same program, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# The first jax whose CPU compiler keeps optimization barriers until after fusion.
_BARRIERS_HOLD = (0, 11)


def gather_once(pool: Float[Array, "S ..."], slots: Int[Array, " N"]) -> Float[Array, "N ..."]:
    """Rows `slots` of the pool, zeros where a slot is out of range, in memory of their own.

    Fused into each of its readers, every one of them would read the pool, and XLA then copies all of it before it is
    written.
    """
    rows = lambda pool, slots: jax.lax.optimization_barrier(pool.at[slots].get(mode="fill", fill_value=0))
    if slots.shape[0] > 1 or jax.__version_info__ >= _BARRIERS_HOLD:
        return rows(pool, slots)

    def one(pool: Array, slots: Array) -> Array:
        # One row is a slice, which an older CPU compiler fuses with the write; nothing is fused into a branch.
        zeros = jnp.zeros((1, *pool.shape[1:]), pool.dtype)
        here = lambda: jax.lax.dynamic_slice_in_dim(pool, slots[0], 1)
        return jax.lax.cond(slots[0] < pool.shape[0], here, lambda: zeros)

    return jax.lax.platform_dependent(pool, slots, cpu=one, default=rows)
