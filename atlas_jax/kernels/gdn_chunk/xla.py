"""Chunked (WY) gated delta rule as XLA matrix products: everything inside a chunk at once, then a scan over chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.kernels.gdn_chunk.segments import segment_decays
from atlas_jax.kernels.numerics import EXACT


def chunked(
    state: Float[Array, "N Hv Dk Dv"],
    q: Float[Array, "N T Hk Dk"],
    k: Float[Array, "N T Hk Dk"],
    v: Float[Array, "N T Hv Dv"],
    g: Float[Array, "N T Hv"],
    beta: Float[Array, "N T Hv"],
    chunk: int,
) -> tuple[Float[Array, "N T Hv Dv"], Float[Array, "N Hv Dk Dv"]]:
    """See `api.gdn_chunk`. Rows are padded to whole chunks with zeros, which are identities."""
    n, length, value_heads, value_dim = v.shape
    dtype = state.dtype
    chunk = min(chunk, length)
    count = -(-length // chunk)
    ratio = value_heads // k.shape[2]

    def split(x: Array) -> Array:  # [N, T, H, ...] -> [chunks, N, H, chunk, ...]
        x = jnp.pad(x.astype(dtype), ((0, 0), (0, count * chunk - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(n, count, chunk, *x.shape[2:]), (1, 3), (0, 2))

    q, k, v, g, beta = (split(x) for x in (q, k, v, g, beta))
    products = _product("cnhik,cnhjk->cnhij", k, k)
    scores = _product("cnhik,cnhjk->cnhij", q, k)
    q, k, products, scores = (jnp.repeat(x, ratio, axis=2) for x in (q, k, products, scores))

    decay, since_start = segment_decays(g)
    since_start = since_start[..., None]
    until_end = decay[..., -1, :, None]
    right = jnp.concatenate([v, k * since_start], axis=-1) * beta[..., None]
    lower = jnp.tril(beta[..., None] * products * decay, -1) + jnp.eye(chunk, dtype=dtype)
    solved = jax.scipy.linalg.solve_triangular(lower, right, lower=True, unit_diagonal=True)
    scores = scores * decay

    def step(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        solved, q, k, scores, total = inputs
        deltas = solved[..., :value_dim] - _product("nhik,nhkv->nhiv", solved[..., value_dim:], state)
        out = _product("nhik,nhkv->nhiv", q, state) + _product("nhij,nhjv->nhiv", scores, deltas)
        return total * state + _product("nhik,nhiv->nhkv", k, deltas), out

    state, out = jax.lax.scan(
        step, state, (solved, q * since_start, k * until_end, scores, since_start[..., -1:, :])
    )
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(n, count * chunk, value_heads, value_dim)
    return out[:, :length], state


def _product(spec: str, a: Array, b: Array) -> Array:
    """Matrix product at full float32 precision: TF32 would cost three digits of the state."""
    return jnp.einsum(spec, a, b, precision=EXACT)
