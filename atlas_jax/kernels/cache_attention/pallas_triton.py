"""Cache attention as Pallas Triton kernels: sm_80 and later, every supported jax.

`cache_attention` sweeps the cache, one program per sequence, key-value head and split of the context, and reads every
live entry once, where it lies; `cache_attention_join` makes one row of the splits. Without splits there is no join.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from atlas_jax.kernels.backends import BackendError
from atlas_jax.kernels.cache_attention.program import PARTS, Memory, Parts, attend, divide, join
from atlas_jax.kernels.cache_attention.tiles import Tile, tile_for
from atlas_jax.kernels.numerics import EXACT, widen

_LEAST = 16  # rows of the smallest matrix product that Triton has


def cache_attention(
    pool: Float[Array, "S 2 Hkv L Dh"],
    slots: Int[Array, " N"],
    positions: Int[Array, "N K"],
    lengths: Int[Array, " N"],
    q: Float[Array, "N K Hq Dh"],
    *,
    tile: Tile | None = None,
    interpret: bool = False,
    parts: Parts = PARTS,
) -> Float[Array, "N K Hq Dh"]:
    """As the public `cache_attention`; `tile` None is the default for the dtypes.

    Scores, softmax and sums are at least float32. Products of bfloat16 caches and queries run on bfloat16 operands,
    which is exact for the scores; weights enter the second one as two bfloat16 parts, 16 bits. Anything else runs in
    three passes of TF32, whose sum has float32's precision. Raises `BackendError` unless Dh is a power of two from 16
    on.
    """
    n, rows, q_heads, dim = q.shape
    kv_heads, capacity = pool.shape[2:4]
    if dim & (dim - 1) or dim < _LEAST:
        raise BackendError(
            f"cache_attention: Triton needs Dh to be a power of two from {_LEAST} on, not {dim}; xla takes any"
        )
    tile = tile_for(None, jnp.promote_types(q.dtype, pool.dtype).name) if tile is None else tile
    group, dtype = q_heads // kv_heads, widen(q).dtype
    packed = rows * group
    height = min(max(_LEAST, pl.next_power_of_2(packed)), tile.rows)  # rows of a program
    row_blocks = -(-packed // height)
    splits = count_splits(tile, n * kv_heads * row_blocks, capacity)

    # All rows of a sequence that share a key-value head, [N, Hkv, M, Dh]. Rows that pad the tile see nothing.
    spare = row_blocks * height - packed
    query = jnp.moveaxis(q.reshape(n, rows, kv_heads, group, dim), 2, 1).reshape(n, kv_heads, packed, dim)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, spare), (0, 0)))
    seen_up_to = jnp.pad(jnp.repeat(positions, group, axis=1), ((0, 0), (0, spare)), constant_values=-1)
    slots, lengths, seen_up_to = (x.astype(jnp.int32) for x in (slots, lengths, seen_up_to))
    # Clamped, so that nothing beyond a slot is ever read; a padding sequence has no entries, whatever its length.
    lengths = jnp.where(slots < pool.shape[0], jnp.minimum(lengths, capacity), 0)

    one = pl.BlockSpec((None,), lambda i, h, s: (i,))
    head = lambda h: h // row_blocks
    per_row = pl.BlockSpec((None, height), lambda i, h, s: (i, h % row_blocks))
    block = pl.BlockSpec((None, None, height, dim), lambda i, h, s: (i, head(h), h % row_blocks, 0))
    split_rows = lambda *width: pl.BlockSpec(
        (None, None, None, height, *width), lambda i, h, s: (i, head(h), s, h % row_blocks, *(0 for _ in width))
    )
    sums = lambda *width: jax.ShapeDtypeStruct((n, kv_heads, splits, row_blocks * height, *width), dtype)
    # All slots and entries of one head: nothing is fetched before the program indexes it.
    cached = lambda which: pl.BlockSpec(
        (pool.shape[0], None, None, capacity, dim), lambda i, h, s: (0, which, parts.kv_head(h, row_blocks), 0, 0)
    )
    found = pl.pallas_call(
        functools.partial(_sweep, tile=tile, splits=splits, scale=dim**-0.5, interpret=interpret, parts=parts),
        grid=(n, kv_heads * row_blocks, splits),
        in_specs=[one, one, per_row, block, cached(0), cached(1)],
        out_specs=[block] if splits == 1 else [split_rows(), split_rows(), split_rows(dim)],
        out_shape=[jax.ShapeDtypeStruct(query.shape, q.dtype)] if splits == 1 else [sums(), sums(), sums(dim)],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="cache_attention",
    )(slots, lengths, seen_up_to, query, pool, pool)
    if splits == 1:
        out = found[0][:, :, :packed].reshape(n, kv_heads, rows, group, dim)
        return jnp.moveaxis(out, 1, 2).reshape(q.shape)

    one = pl.BlockSpec((None,), lambda i, h, r: (i,))
    of_row = lambda *width: pl.BlockSpec(
        (None, None, splits, None, *width), lambda i, h, r: (i, h, 0, r, *(0 for _ in width))
    )
    place = pl.BlockSpec((None, None, None, dim), lambda i, h, r: (i, r // group, h * group + r % group, 0))
    return pl.pallas_call(
        functools.partial(_join, entries=tile.entries, parts=parts),
        grid=(n, kv_heads, packed),
        in_specs=[one, of_row(), of_row(), of_row(dim)],
        out_specs=place,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="cache_attention_join",
    )(lengths, *found)


def count_splits(tile: Tile, programs: int, capacity: int) -> int:
    """Programs to share each one's entries, a power of two: enough to fill the chip, none with hardly any entries."""
    return pl.next_power_of_2(max(1, min(-(-tile.programs // programs), capacity // tile.least)))


def _sweep(slot, length, positions, query, keys, values, *out, tile: Tile, splits, scale, interpret, parts) -> None:
    slot, length, positions, q = slot[...], length[...], positions[...], query[...]
    dtype, entries, (height, dim) = widen(jnp.zeros((), q.dtype)).dtype, tile.entries, q.shape
    product = _product(q.dtype, keys.dtype, interpret)

    def read(cache, start: Array) -> Array:
        at = start + jax.lax.broadcasted_iota(jnp.int32, (entries, dim), 0)
        return plt.load(cache.at[slot, pl.ds(start, entries), :], mask=parts.live(at, length), other=0)

    memory = Memory(
        scores=lambda start: product(q, read(keys, start), 1) * scale,
        mix=lambda weights, start: product(weights, read(values, start), 0),
    )
    first, end = parts.span((length + entries - 1) // entries, splits, pl.program_id(2))
    zeros = jnp.zeros((height,), dtype)
    nothing = (jnp.full((height,), -jnp.inf, dtype), zeros, jnp.zeros((height, dim), dtype))
    top, total, mixed = attend(memory, positions, length, first, end, entries=entries, start=nothing, parts=parts)
    if splits == 1:
        out[0][...] = divide(mixed, total).astype(out[0].dtype)
        return

    @pl.when(first < end)  # what a split without entries leaves in memory, nobody reads
    def _() -> None:
        out[0][...], out[1][...], out[2][...] = top, total, mixed


def _join(length, tops, totals, mixed, out, *, entries: int, parts: Parts) -> None:
    splits, dim = mixed.shape
    blocks = (length[...] + entries - 1) // entries
    first, end = parts.span(blocks, splits, jax.lax.broadcasted_iota(jnp.int32, (splits,), 0))
    used = first < end
    top = plt.load(tops, mask=used, other=-jnp.inf)
    total = plt.load(totals, mask=used, other=0)
    both = jax.lax.broadcast_in_dim(used, (splits, dim), (0,))
    out[...] = join(top, total, plt.load(mixed, mask=both, other=0), parts).astype(out.dtype)


def _product(query: jnp.dtype, cache: jnp.dtype, interpret: bool) -> Callable[[Array, Array, int], Array]:
    """`(a, block, axis of the block) -> a times the block`, summed over the last axis of a, in at least float32."""
    narrow = query == cache == jnp.bfloat16
    wide = jnp.promote_types(query, jnp.float32)
    tensor_cores = wide == jnp.float32 and not interpret
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if tensor_cores else EXACT

    def dot(a: Array, b: Array, axis: int) -> Array:
        axes = (((1,), (axis,)), ((), ()))
        return jax.lax.dot_general(
            a, b, axes, precision=None if narrow else precision, preferred_element_type=wide
        )

    def product(a: Array, b: Array, axis: int) -> Array:
        if not narrow:
            return dot(a.astype(wide), b.astype(wide), axis)
        if a.dtype == jnp.bfloat16:
            return dot(a, b, axis)
        high = a.astype(jnp.bfloat16)
        return dot(high, b, axis) + dot((a - high.astype(wide)).astype(jnp.bfloat16), b, axis)

    return product
