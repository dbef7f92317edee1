"""Small functions that every layer shares: norms, rotary embedding, SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
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


def columns(x: Float[Array, "... D"], weight: Float[Array, "D *groups C"]) -> Float[Array, "... GC"]:
    """`x @ weight`, whatever groups the columns of the weight lie in."""
    return x @ weight.reshape(weight.shape[0], -1)


def groups(weight: Float[Array, "D *groups C"]) -> int:
    """In how many groups the columns of a fused weight lie. On one device it is one, and the weight `[D, C]`; where a
    mesh cuts heads or widths it is `[D, G, C / G]`, and each group holds its own part of everything that is fused."""
    return 1 if weight.ndim == 2 else weight.shape[1]


def apart(x: Float[Array, "... C"], sizes: Sequence[int], groups: int) -> list[Float[Array, "... part"]]:
    """What is fused in the columns of x, of these sizes; taken apart within each group, so that a group never moves."""
    if groups == 1:
        return jnp.split(x, np.cumsum(sizes)[:-1], axis=-1)
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    parts = jnp.split(grouped, np.cumsum(sizes)[:-1] // groups, axis=-1)
    return [part.reshape(*x.shape[:-1], -1) for part in parts]


def swiglu(
    x: Float[Array, "... D"], gate_up: Float[Array, "D *groups I2"], down: Float[Array, "I D"]
) -> Float[Array, "... D"]:
    """`down(silu(gate(x)) * up(x))` with gate and up fused in one `[D, 2 I]` weight."""
    gate, up = apart(columns(x, gate_up), [down.shape[0]] * 2, groups(gate_up))
    return (jax.nn.silu(gate) * up) @ down
