"""Sums of log decays over segments, the numerical heart of every matrix form of the delta rule."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.kernels.numerics import EXACT

# Stands for -inf inside sums: `exp` of it is 0 all the same, and it has a product with zero.
FORGET = -1e30


def segment_decays(g: Float[Array, "... T"]) -> tuple[Float[Array, "... T T"], Float[Array, "... T"]]:
    """Decays between rows and from before the first row, `exp` of sums of the log decays `g <= 0`.

    `between[i, j] = exp(g[j+1] + ... + g[i])` for j <= i (1 on the diagonal) and 0 above it;
    `since_start[i] = exp(g[0] + ... + g[i])`. Summed segment by segment, never as a difference of running sums: with g
    down to -1e4 a difference loses 6.5e-3 in float32, and with `-inf` (a state reset) it is NaN. The upper triangle is
    masked before the `exp`, so values and gradients are finite at any gate.
    """
    size = g.shape[-1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    g = jnp.maximum(g, FORGET)
    terms = jnp.where(jnp.tril(lower, -1), g[..., :, None], 0)
    sums = jnp.matmul(lower.astype(g.dtype), terms, precision=EXACT)
    return jnp.exp(jnp.where(lower, sums, -jnp.inf)), jnp.exp(jnp.cumsum(g, axis=-1))
