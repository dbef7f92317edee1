"""The other two ways to roll a recurrent state back, as kernels to time beside deferred commit. Nothing serves them.

| design | kernels of a step | states moved |
|---|---|---|
| deferred (`kernels.gdn_step`) | one: read, fold what was accepted, write, run the drafts from registers | 2 |
| snapshot | one: read the snapshot that was accepted, run every row, write the state behind each | 1 + T |
| recompute | two: read and run every row; after acceptance read, fold the accepted rows, write | 3 |

Same arithmetic and tiles as `gdn_step`'s Triton kernel, so that a difference in time is a difference in design.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from atlas_jax.kernels.gdn_step.program import fold_row
from atlas_jax.kernels.gdn_step.tiles import DEFAULT, Tile
from atlas_jax.kernels.numerics import widen


def snapshot_step(
    pool: Float[Array, "S P Hv Dk Dv"],
    slots: Int[Array, " N"],
    start: Int[Array, " N"],
    q: Float[Array, "N T Hk Dk"],
    k: Float[Array, "N T Hk Dk"],
    v: Float[Array, "N T Hv Dv"],
    g: Float[Array, "N T Hv"],
    beta: Float[Array, "N T Hv"],
    into: Float[Array, "N T Hv Dv"] | None = None,
    *,
    write: bool = True,
    tile: Tile = DEFAULT,
    interpret: bool = False,
) -> tuple[Float[Array, "N T Hv Dv"], Float[Array, "S P Hv Dk Dv"]]:
    """Run T rows from snapshot `start[n]` of each slot; with `write` store the state behind row t as snapshot t.

    Without `write` it is the verify half of the recompute design (P = 1, start 0) and the pool comes back as it was.
    Every row is live, every slot is real: a comparison, not an op to serve with. The outputs take the place of `into`,
    if given: calls that only read are chained by it, and none is dropped because nobody looks at what it gave.
    """
    n, rows, key_heads, dk = q.shape
    value_heads, dv = v.shape[2:]
    columns = min(tile.columns, dv)
    ratio = value_heads // key_heads

    def per_head(*size: int, shared: bool = False) -> pl.BlockSpec:
        def index(i: Array, h: Array, j: Array) -> tuple[Any, ...]:
            return (i, 0, h // ratio if shared else h, *((0 if shared else j,) if size else ()))

        return pl.BlockSpec((None, rows, None, *size), index)

    one = pl.BlockSpec((None,), lambda i, h, j: (i,))
    whole = pl.BlockSpec(pool.shape, lambda i, h, j: (0,) * 5)
    shape = (n, rows, value_heads, dv)
    in_specs = [
        *(one, one, per_head(dk, shared=True), per_head(dk, shared=True)),
        *(per_head(columns), per_head(), per_head(), whole, per_head(columns)),
    ]
    found = pl.pallas_call(
        functools.partial(_kernel, columns=columns),
        grid=(n, value_heads, dv // columns),
        in_specs=in_specs,
        out_specs=[per_head(columns), *([whole] if write else [])],
        out_shape=[
            jax.ShapeDtypeStruct(shape, pool.dtype),
            *([jax.ShapeDtypeStruct(pool.shape, pool.dtype)] if write else []),
        ],
        input_output_aliases={8: 0, 7: 1} if write else {8: 0},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="snapshot_step" if write else "verify_step",
    )(
        *(slots.astype(jnp.int32), start.astype(jnp.int32), q, k, v, g, beta, pool),
        jnp.zeros(shape, pool.dtype) if into is None else into,
    )
    return found[0], found[1] if write else pool


def _kernel(slots, start, q, k, v, g, beta, pool, into, out, *new_pool, columns: int) -> None:
    rows, dk, dtype = k.shape[0], k.shape[1], widen(jnp.zeros((), pool.dtype)).dtype
    slot, head, block = slots[...], pl.program_id(1), pl.ds(pl.program_id(2) * columns, columns)
    across = lambda x: jax.lax.broadcast_in_dim(x.astype(dtype), (dk, columns), (0,))
    state = pool[slot, start[...], head, slice(None), block].astype(dtype)
    for row in range(rows):
        state = fold_row(state, across(k[row, :]), *(x.astype(dtype) for x in (v[row, :], g[row], beta[row])))
        out[row, :] = (state * across(q[row, :])).sum(0).astype(out.dtype)
        if new_pool:
            new_pool[0][slot, row, head, slice(None), block] = state.astype(pool.dtype)
