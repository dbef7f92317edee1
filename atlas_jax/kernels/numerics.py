"""The two numerical rules that every op obeys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Full float32 products in recurrences and attention: TF32 or bfloat16 passes would cost three digits of the state.
EXACT = jax.lax.Precision.HIGHEST


def widen(x: Array) -> Array:
    """At least float32: statistics, gates and softmax are computed here. float64 stays float64 (exact tests)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
