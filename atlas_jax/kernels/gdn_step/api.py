"""The public GDN step: fold what is committed into the state, run the drafts for outputs only."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax import sharding
from atlas_jax.kernels.backends import Backend, BackendError
from atlas_jax.kernels.gdn_step import xla
from atlas_jax.kernels.gdn_step.tiles import tile_for
from atlas_jax.kernels.numerics import widen
from atlas_jax.kernels.slots import gather_once


def gdn_step(
    pool: Float[Array, "S Hv Dk Dv"],
    slots: Int[Array, " N"],
    q: Float[Array, "N K Hk Dk"],
    k: Float[Array, "N M Hk Dk"],
    v: Float[Array, "N M Hv Dv"],
    g: Float[Array, "N M Hv"],
    beta: Float[Array, "N M Hv"],
    num_pending: Int[Array, " N"],
    num_rows: Int[Array, " N"],
    *,
    backend: Backend = "xla",
    interpret: bool = False,
    capability: tuple[int, int] | None = None,
) -> tuple[Float[Array, "N K Hv Dv"], Float[Array, "S Hv Dk Dv"]]:
    """Advance the sequences in `slots` by their committed rows and read the outputs of this step's rows.

    Rows of a sequence, in order: `F = M - K` pending rows (drafts that the previous step accepted; right-aligned, so
    row `f` is live iff `f >= F - num_pending`), then row 0 (the last emitted token), then `K - 1` drafts, of which
    `num_rows - 1` are live. The state read from the pool absorbs the live pending rows and row 0 and is written back;
    drafts see it but never reach memory. Recurrence per row (Gated DeltaNet, arXiv 2412.06464, eq. 10)::

        S' = exp(g) S;  d = beta (v - S'^T k);  S = S' + k d^T;  o = S^T q

    Args:
      pool: states; arithmetic is at least float32 whatever their dtype. Row `slots[n]` belongs to sequence n; an index
        of `S` marks a padding sequence, which writes nothing and whose outputs are zero. Indices are never negative.
      q, k: l2-normalised, q scaled by `Dk^-0.5`; key head of value head h is `h // (Hv / Hk)`. Only this step's rows
        have a q.
      v, g, beta: value rows, log decays (`<= 0`, `-inf` allowed) and write strengths per value head.
      num_pending, num_rows: live rows per sequence. `num_rows == 0` folds the pending rows alone (materialize).
      backend: who computes it (`backends.choose` says what can). `interpret` runs a Pallas kernel without a GPU, for
        tests; `capability` is the chip's, `(9, 0)` for sm_90, and chooses the kernel's tiles.

    Returns outputs (zero on dead rows) in the dtype of the state and the updated pool. Dead rows may hold anything,
    NaN included: they are selected away before any arithmetic. Drafts see the state before it is
    rounded to the pool's dtype. Raises `BackendError` for an unknown backend
    and for shapes that a kernel doesn't have.
    """
    arguments = (pool, slots, q, k, v, g, beta, num_pending, num_rows)
    if backend in ("triton", "mosaic"):
        kernel: Any
        # Imported when asked for: not every jax has both.
        if backend == "triton":
            from atlas_jax.kernels.gdn_step import pallas_triton as kernel
        else:
            from atlas_jax.kernels.gdn_step import pallas_mosaic as kernel
        run = functools.partial(kernel.gdn_step, tile=tile_for(capability), interpret=interpret)
        return sharding.by_heads(run, arguments, heads=(1, None, 2, 2, 2, 2, 2, None, None), out=(2, 1))
    if backend not in ("xla", "sequential"):
        raise BackendError(f"gdn_step has no backend {backend!r}; it has xla, sequential, triton, mosaic")

    folded = k.shape[1] - q.shape[1]
    row = jnp.arange(k.shape[1])[None, :]
    live = jnp.where(
        row < folded, row >= folded - num_pending[:, None], row - folded < num_rows[:, None]
    )
    live = live & (slots < pool.shape[0])[:, None]
    q = jnp.where(live[:, folded:, None, None], q, 0)
    k, v = (jnp.where(live[:, :, None, None], x, 0) for x in (k, v))
    g, beta = (jnp.where(live[:, :, None], x, 0) for x in (g, beta))
    state = widen(gather_once(pool, slots))
    form = xla.sequential if backend == "sequential" else xla.fold_and_read
    out, state = form(state, *(x.astype(state.dtype) for x in (q, k, v, g, beta)))
    return out.astype(pool.dtype), pool.at[slots].set(state.astype(pool.dtype), mode="drop")
