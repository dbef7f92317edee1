"""The step in two forms that XLA compiles to few kernels: rank-1 updates for few rows, matrix (WY) form for more."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.kernels.gdn_chunk.segments import segment_decays
from atlas_jax.kernels.numerics import EXACT

# Rows, pending ones included, from which on the matrix form is faster on CPUs (measured at 1, 3 and 7 rows).
_MATRIX_FROM = 4


def fold_and_read(
    state: Float[Array, "N Hv Dk Dv"],
    q: Float[Array, "N K Hk Dk"],
    k: Float[Array, "N M Hk Dk"],
    v: Float[Array, "N M Hv Dv"],
    g: Float[Array, "N M Hv"],
    beta: Float[Array, "N M Hv"],
) -> tuple[Float[Array, "N K Hv Dv"], Float[Array, "N Hv Dk Dv"]]:
    """Outputs of the last K rows, and the state after the first `M - K + 1` (dead rows are all zero)."""
    form = by_matrix if k.shape[1] >= _MATRIX_FROM else row_by_row
    return form(state, q, k, v, g, beta)


def row_by_row(
    state: Float[Array, "N Hv Dk Dv"],
    q: Float[Array, "N K Hk Dk"],
    k: Float[Array, "N M Hk Dk"],
    v: Float[Array, "N M Hv Dv"],
    g: Float[Array, "N M Hv"],
    beta: Float[Array, "N M Hv"],
) -> tuple[Float[Array, "N K Hv Dv"], Float[Array, "N Hv Dk Dv"]]:
    """The recurrence itself, unrolled. Outputs read the state before their own row's update, so that one kernel makes
    both reductions: `o = exp(g) S^T q + (q . k) d`."""
    ratio, folded = v.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    q, k = (jnp.repeat(x, ratio, axis=2) for x in (q, k))
    out, kept = [], state
    for row in range(k.shape[1]):
        decay = jnp.exp(g[:, row])[..., None]
        delta = beta[:, row, :, None] * (v[:, row] - decay * (state * k[:, row, :, :, None]).sum(-2))
        if row >= folded:
            query = q[:, row - folded]
            through = decay * (state * query[..., None]).sum(-2)
            out.append(through + (query * k[:, row]).sum(-1, keepdims=True) * delta)
        state = decay[..., None] * state + k[:, row, :, :, None] * delta[..., None, :]
        if row == folded:
            kept = state
    return jnp.stack(out, axis=1), kept


def sequential(
    state: Float[Array, "N Hv Dk Dv"],
    q: Float[Array, "N K Hk Dk"],
    k: Float[Array, "N M Hk Dk"],
    v: Float[Array, "N M Hv Dv"],
    g: Float[Array, "N M Hv"],
    beta: Float[Array, "N M Hv"],
) -> tuple[Float[Array, "N K Hv Dv"], Float[Array, "N Hv Dk Dv"]]:
    """The recurrence as a loop: every row goes through the same machine code, so its bits don't depend on its place.

    Unrolled, the compiler contracts multiplications and additions of each row as it likes.
    """
    ratio, folded = v.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    q = jnp.pad(q, ((0, 0), (folded, 0), (0, 0), (0, 0)))
    rows = tuple(jnp.moveaxis(x, 1, 0) for x in (*(jnp.repeat(x, ratio, axis=2) for x in (q, k)), v, g, beta))

    def step(carry: tuple[Array, Array], row: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        (state, kept), (index, query, key, value, log_decay, strength) = carry, row
        state = jnp.exp(log_decay)[..., None, None] * state
        delta = strength[..., None] * (value - (state * key[..., None]).sum(-2))
        state = state + key[..., None] * delta[..., None, :]
        return (state, jnp.where(index == folded, state, kept)), (state * query[..., None]).sum(-2)

    (_, kept), out = jax.lax.scan(step, (state, state), (jnp.arange(k.shape[1]), *rows))
    return jnp.moveaxis(out[folded:], 0, 1), kept


def by_matrix(
    state: Float[Array, "N Hv Dk Dv"],
    q: Float[Array, "N K Hk Dk"],
    k: Float[Array, "N M Hk Dk"],
    v: Float[Array, "N M Hv Dv"],
    g: Float[Array, "N M Hv"],
    beta: Float[Array, "N M Hv"],
) -> tuple[Float[Array, "N K Hv Dv"], Float[Array, "N Hv Dk Dv"]]:
    """All rows at once, one pass over the state.

    With `G` the running sum of g, `A_ij = beta_i (k_i . k_j) exp(G_i - G_j)` for j < i and
    `(I + A) d = beta (v - exp(G) S^T k)`, the recurrence unrolls to
    `o_i = exp(G_i) S^T q_i + sum_{j<=i} (q_i . k_j) exp(G_i - G_j) d_j`.
    """
    n, rows, key_heads, _ = q.shape
    total, value_heads = v.shape[1], v.shape[2]
    folded = total - rows
    # [N, Hk, r, ...]: value heads grouped under their key head, so that k and q are never repeated in memory.
    group = (n, key_heads, value_heads // key_heads)
    state = state.reshape(*group, *state.shape[2:])
    q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    v = jnp.moveaxis(v, 1, 2).reshape(*group, total, -1)
    g, beta = (x.swapaxes(1, 2).reshape(*group, total) for x in (g, beta))

    keys_and_queries = jnp.concatenate([k, q], axis=2)
    through_state = jnp.einsum("nhik,nhrkv->nhriv", keys_and_queries, state, precision=EXACT)
    products = jnp.einsum("nhik,nhjk->nhij", keys_and_queries, k, precision=EXACT)[:, :, None]
    decay, since_start = segment_decays(g)
    since_start = since_start[..., None]

    residual = beta[..., None] * (v - since_start * through_state[..., :total, :])
    deltas = _solve(beta[..., None] * products[..., :total, :] * decay, residual)
    out = since_start[..., folded:, :] * through_state[..., total:, :] + jnp.einsum(
        "nhrij,nhrjv->nhriv", products[..., total:, :] * decay[..., folded:, :], deltas, precision=EXACT
    )
    last = folded + 1  # rows that the state absorbs: the pending ones and row 0
    weighted = decay[..., folded, :last, None] * deltas[..., :last, :]
    state = since_start[..., folded, :, None] * state + jnp.einsum(
        "nhjk,nhrjv->nhrkv", k[:, :, :last], weighted, precision=EXACT
    )
    out = jnp.moveaxis(out.reshape(n, value_heads, rows, -1), 2, 1)
    return out, state.reshape(n, value_heads, *state.shape[3:])


def _solve(lower: Float[Array, "... M M"], right: Float[Array, "... M Dv"]) -> Float[Array, "... M Dv"]:
    """`(I + tril(lower, -1))^-1 right` by forward substitution, unrolled: M is at most twice the rows of a step."""
    solved: list[Array] = []
    for i in range(right.shape[-2]):
        value = right[..., i, :]
        for j, earlier in enumerate(solved):
            value = value - lower[..., i, j, None] * earlier
        solved.append(value)
    return jnp.stack(solved, axis=-2)
