"""Small functions that every layer shares: norms, rotary embedding, SwiGLU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.kernels.numerics import widen


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """Zero-centred RMSNorm `x / rms(x) * (1 + weight)`, cast back once at the end. Every norm but the GDN gated one."""
    wide = widen(x)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * (1.0 + widen(weight))).astype(x.dtype)


def l2_normalise(x: Float[Array, "... Dk"]) -> Float[Array, "... Dk"]:
    """`x / sqrt(sum x^2 + 1e-6)`; the constant is the family's own, not `norm_eps`, and sits inside the root."""
    wide = widen(x)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)


def rotate(
    x: Float[Array, "... H Dh"], positions: Int[Array, "..."], rotary_dim: int, theta: float
) -> Float[Array, "... H Dh"]:
    """Rotary embedding of the first `rotary_dim` dims, pairs `(i, i + rotary_dim / 2)`; the rest passes through.

    Text only: the three M-RoPE position rows are then equal and reduce to this.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    half = rotary_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=wide) / half)
    angle = positions[..., None, None].astype(wide) * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def swiglu(x: Float[Array, "... D"], gate_up: Float[Array, "D I2"], down: Float[Array, "I D"]) -> Float[Array, "... D"]:
    """`down(silu(gate(x)) * up(x))` with gate and up fused in one `[D, 2 I]` weight."""
    gate, up = jnp.split(x @ gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down
