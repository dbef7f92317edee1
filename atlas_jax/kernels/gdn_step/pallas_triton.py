"""The GDN step as one Pallas Triton kernel: sm_80 and later, every supported jax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from atlas_jax.kernels.backends import BackendError
from atlas_jax.kernels.gdn_step.program import PARTS, Memory, Parts, run
from atlas_jax.kernels.gdn_step.tiles import DEFAULT, Tile
from atlas_jax.kernels.numerics import widen


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
    tile: Tile = DEFAULT,
    interpret: bool = False,
    parts: Parts = PARTS,
) -> tuple[Float[Array, "N K Hv Dv"], Float[Array, "S Hv Dk Dv"]]:
    """As the public `gdn_step`; the pool is aliased, so that a donated one is updated in place.

    Arithmetic is float32 whatever the pool and the rows are stored in (float64 with a float64 pool); a bfloat16 pool is
    rounded once, where it is written: drafts see the state before rounding. Raises `BackendError` unless Dk and Dv are
    powers of two (Triton has no other block sizes).
    """
    n, rows, key_heads, dk = q.shape
    total, value_heads, dv = v.shape[1:]
    if any(size & (size - 1) for size in (dk, dv)):
        raise BackendError(f"gdn_step: Triton needs Dk and Dv to be powers of two, not {dk} and {dv}; xla takes any")
    columns = min(tile.columns, dv)

    def per_head(rows: int, *size: int, shared: bool = False) -> pl.BlockSpec:
        """The rows of one sequence and head; of the last axis the program's columns, or all where heads share it."""

        def index(i: Array, h: Array, j: Array) -> tuple[Array | int, ...]:
            head = parts.key_head(h, value_heads // key_heads) if shared else h
            return (i, 0, head, *((0 if shared else j,) if size else ()))

        return pl.BlockSpec((None, rows, None, *size), index)

    one = pl.BlockSpec((None,), lambda i, h, j: (i,))
    whole = pl.BlockSpec(pool.shape, lambda i, h, j: (0, 0, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, folded=total - rows, parts=parts),
        grid=(n, value_heads, dv // columns),
        in_specs=[
            *(one, one, one),
            per_head(rows, dk, shared=True),
            per_head(total, dk, shared=True),
            per_head(total, columns),
            per_head(total),
            per_head(total),
            whole,
        ],
        out_specs=[per_head(rows, columns), whole],
        out_shape=[
            jax.ShapeDtypeStruct((n, rows, value_heads, dv), pool.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={8: 1},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="gdn_step",
    )(*(x.astype(jnp.int32) for x in (slots, num_pending, num_rows)), q, k, v, g, beta, pool)


def _kernel(slots, num_pending, num_rows, q, k, v, g, beta, pool, out, new_pool, *, folded: int, parts: Parts) -> None:
    rows, columns = out.shape
    dk, dtype = k.shape[1], widen(jnp.zeros((), pool.dtype)).dtype
    slot, head = slots[...], pl.program_id(1)
    block = (slot, head, slice(None), pl.ds(pl.program_id(2) * columns, columns))
    across = lambda x: jax.lax.broadcast_in_dim(x.astype(dtype), (dk, columns), (0,))

    def write_state(state: Array) -> None:
        new_pool[block] = state.astype(pool.dtype)

    def write_out(row: Array, value: Array) -> None:
        out[row, :] = value.astype(out.dtype)

    memory = Memory(
        read_state=lambda: pool[block].astype(dtype),
        write_state=write_state,
        inputs=lambda row: (across(k[row, :]), *(x.astype(dtype) for x in (v[row, :], g[row], beta[row]))),
        query=lambda row: across(q[row, :]),
        write_out=write_out,
    )
    counts = (slot, num_pending[...], num_rows[...])
    zeros = jnp.zeros(columns, dtype)
    run(memory, *counts, slots=pool.shape[0], folded=folded, rows=rows, zeros=zeros, parts=parts)
