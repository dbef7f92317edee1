"""The gated delta rule row by row, as the paper writes it: the oracle of every other form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def recurrence(
    state: Float[Array, "N Hv Dk Dv"],
    q: Float[Array, "N T Hk Dk"],
    k: Float[Array, "N T Hk Dk"],
    v: Float[Array, "N T Hv Dv"],
    g: Float[Array, "N T Hv"],
    beta: Float[Array, "N T Hv"],
) -> tuple[Float[Array, "N T Hv Dv"], Float[Array, "N Hv Dk Dv"]]:
    """All rows folded in order (Gated DeltaNet, arXiv 2412.06464, eq. 10); outputs and the final state."""
    ratio = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, ratio, axis=2) for x in (q, k))

    def row(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta = inputs
        decayed = jnp.exp(g)[..., None, None] * state
        delta = beta[..., None] * (v - jnp.einsum("nhkv,nhk->nhv", decayed, k))
        state = decayed + k[..., None] * delta[..., None, :]
        return state, jnp.einsum("nhkv,nhk->nhv", state, q)

    state, out = jax.lax.scan(row, state, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)))
    return jnp.moveaxis(out, 0, 1), state
