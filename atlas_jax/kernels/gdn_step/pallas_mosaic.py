"""The GDN step as one Pallas Mosaic GPU kernel: sm_90 and later, jax >= 0.11.2."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from atlas_jax.kernels.backends import BackendError
from atlas_jax.kernels.gdn_step.program import PARTS, Memory, Parts, run
from atlas_jax.kernels.gdn_step.tiles import DEFAULT, Tile

_WARPS = 4  # a warpgroup: the unit that Mosaic's layouts are made for
# Four neighbouring columns a thread: whole sectors of memory in float32 and in bfloat16.
_MATRIX = plgpu.Layout.WGMMA_UPCAST_2X
_DOWN, _ACROSS = _MATRIX.reduce(1), _MATRIX.reduce(0)


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
    """As the public `gdn_step`; arithmetic is float32 whatever the pool and the rows are stored in.

    Raises `BackendError` for what the register layout can't hold: Dk not a multiple of 64, blocks of columns not of 16,
    other than 4 warps, a float64 pool.
    """
    n, rows = q.shape[:2]
    total, value_heads, dv = v.shape[1:]
    columns = min(tile.columns, dv)
    if q.shape[3] % 64 or columns % 16 or dv % columns:
        raise BackendError(
            f"gdn_step: Mosaic needs Dk in multiples of 64 and Dv in blocks of {columns} columns, a multiple of 16, "
            f"not Dk {q.shape[3]} and Dv {dv}; triton takes any powers of two, xla anything"
        )
    if tile.warps != _WARPS:
        raise BackendError(f"gdn_step: Mosaic programs are one warpgroup of {_WARPS} warps, not {tile.warps}")
    if pool.dtype not in (jnp.float32, jnp.bfloat16):
        raise BackendError(f"gdn_step: the Mosaic kernel has float32 and bfloat16 pools, not {pool.dtype}")
    # A Ref is read and written in place: the pool is aliased, and nothing but its own slots is touched.
    state = jax.new_ref(pool)
    options: dict[str, Any] = {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
    out = plgpu.kernel(
        functools.partial(_kernel, folded=total - rows, columns=columns, parts=parts),
        out_type=jax.ShapeDtypeStruct((n, rows, value_heads, dv), pool.dtype),
        grid=(n, value_heads, dv // columns),
        grid_names=("n", "head", "block"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="gdn_step",
        **options,
    )(*(x.astype(jnp.int32) for x in (slots, num_pending, num_rows)), q, k, v, g, beta, state)
    return out, jax.freeze(state)


def _kernel(slots, num_pending, num_rows, q, k, v, g, beta, pool, out, *, folded: int, columns: int, parts: Parts):
    n, head = jax.lax.axis_index("n"), jax.lax.axis_index("head")
    cols = pl.ds(jax.lax.axis_index("block") * columns, columns)
    key_head = parts.key_head(head, v.shape[2] // k.shape[2])
    slot = slots[n]
    block = (slot, head, slice(None), cols)

    def read(ref: Any, layout: Any) -> Array:
        # Not `optimized`: a block of a strided array can't be read in full transactions by this layout.
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    across = lambda x: jax.lax.broadcast_in_dim(x, (k.shape[3], columns), (0,))

    def write_state(state: Array) -> None:
        _store(pool.at[block], state.astype(pool.dtype))

    def write_out(row: Array, value: Array) -> None:
        _store(out.at[n, row, head, cols], value.astype(out.dtype))

    memory = Memory(
        read_state=lambda: read(pool.at[block], _MATRIX),
        write_state=write_state,
        inputs=lambda row: (
            across(read(k.at[n, row, key_head], _DOWN)),
            read(v.at[n, row, head, cols], _ACROSS),
            g[n, row, head].astype(jnp.float32),
            beta[n, row, head].astype(jnp.float32),
        ),
        query=lambda row: across(read(q.at[n, row, key_head], _DOWN)),
        write_out=write_out,
    )
    zeros = plgpu.layout_cast(jnp.zeros(columns, jnp.float32), _ACROSS)
    counts = (slot, num_pending[n], num_rows[n])
    run(memory, *counts, slots=pool.shape[0], folded=folded, rows=q.shape[1], zeros=zeros, parts=parts)


def _store(ref: Any, value: Array) -> None:
    """A store that needn't fill whole cache lines: jax 0.12 must be told, 0.11 has no `store` and doesn't ask."""
    if store := getattr(plgpu, "store", None):
        store(ref, value, optimized=False)
    else:
        ref[...] = value
