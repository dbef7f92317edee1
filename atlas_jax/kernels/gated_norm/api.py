"""The public gated norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.kernels.numerics import widen


def gated_norm(
    x: Float[Array, "... Dv"], gate: Float[Array, "... Dv"], weight: Float[Array, " Dv"], eps: float
) -> Float[Array, "... Dv"]:
    """`x / rms(x) * weight * silu(gate)`, norm before gate, in the gate's dtype.

    The one norm of the family whose weight is plain, not zero-centred. One weight serves all heads.
    """
    wide = widen(x)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scaled = weight.astype(gate.dtype) * normed.astype(gate.dtype)
    return (scaled * jax.nn.silu(widen(gate))).astype(gate.dtype)
