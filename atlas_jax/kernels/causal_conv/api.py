"""The public causal convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.kernels.numerics import widen


def causal_conv(
    inputs: Float[Array, "N H C"],
    weight: Float[Array, "W C"],
    segments: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T C"]:
    """`silu(sum_j weight[j] * inputs[t + j])`: each row sees itself and the `W - 1` rows before it.

    Args:
      inputs: the history of `W - 1` rows (zeros at the start of a sequence), then the T rows themselves: `H = W-1+T`.
      weight: taps, oldest first.
      segments: document of each of the T rows, for packed training rows with an empty history: taps never reach into
        another document.
    """
    taps = weight.shape[0]
    length = inputs.shape[1] - taps + 1
    wide = widen(weight)
    if segments is None:
        total = sum(wide[j] * inputs[:, j : j + length] for j in range(taps))
    else:
        # History rows belong to no document (-1); they are zero anyway.
        padded = jnp.pad(segments, ((0, 0), (taps - 1, 0)), constant_values=-1)
        total = sum(
            jnp.where((padded[:, j : j + length] == segments)[..., None], wide[j] * inputs[:, j : j + length], 0)
            for j in range(taps)
        )
    return jax.nn.silu(total).astype(inputs.dtype)
