"""The public cache attention, and the write that goes before it."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax import sharding
from atlas_jax.kernels.backends import Backend, BackendError
from atlas_jax.kernels.cache_attention import xla
from atlas_jax.kernels.cache_attention.tiles import tile_for


def write_cache(
    pool: Float[Array, "S 2 Hkv L Dh"],
    slots: Int[Array, " N"],
    positions: Int[Array, "N K"],
    num_rows: Int[Array, " N"],
    k: Float[Array, "N K Hkv Dh"],
    v: Float[Array, "N K Hkv Dh"],
) -> Float[Array, "S 2 Hkv L Dh"]:
    """Store the live rows (`row < num_rows`) of each sequence at their positions; dead rows write nothing."""
    live = jnp.arange(positions.shape[1])[None, :] < num_rows[:, None]
    # Out of range and dropped, never negative: a negative index would wrap into a live row.
    rows = jnp.where(live, positions, pool.shape[3])
    return pool.at[slots[:, None], :, :, rows].set(jnp.stack([k, v], axis=2).astype(pool.dtype), mode="drop")


def cache_attention(
    pool: Float[Array, "S 2 Hkv L Dh"],
    slots: Int[Array, " N"],
    positions: Int[Array, "N K"],
    lengths: Int[Array, " N"],
    q: Float[Array, "N K Hq Dh"],
    *,
    backend: Backend = "xla",
    interpret: bool = False,
    capability: tuple[int, int] | None = None,
) -> Float[Array, "N K Hq Dh"]:
    """Causal attention of each row over the first `lengths[n]` entries of its own slot, this step's rows included.

    Grouped queries (`Hq / Hkv` per key-value head), scale `Dh^-0.5`, running softmax over blocks in at least float32
    (Milakov and Gimelshein, arXiv 1805.02867). Row j attends to cache positions `<= positions[n, j]`. Cost follows the
    committed length, not the capacity. Entries at or beyond `lengths` may hold anything, NaN included.

    Args:
      pool: keys, normed and rotated, and values, of any floating dtype.
      slots: row of the pool that belongs to each sequence; `S` with length 0 marks a padding sequence, which yields
        zeros. Never negative.
      positions: of the rows.
      lengths: live entries of the slot, at most L.
      q: queries, normed and rotated. A row that nobody will read may hold anything.
      backend: who computes it (`backends.choose` says what can). `interpret` runs a Pallas kernel without a GPU, for
        tests; `capability` is the chip's, `(9, 0)` for sm_90, and chooses the kernel's tiles.

    Returns outputs in the dtype of q. Raises `BackendError` for an unknown backend and for shapes that a kernel doesn't
    have.
    """
    arguments = (pool, slots, positions, lengths, q)
    if backend == "triton":
        # Imported when asked for: not every jax has it.
        from atlas_jax.kernels.cache_attention import pallas_triton

        tile = tile_for(capability, jnp.promote_types(q.dtype, pool.dtype).name)
        run = functools.partial(pallas_triton.cache_attention, tile=tile, interpret=interpret)
        return sharding.by_heads(run, arguments, heads=(2, None, None, None, 2), out=2)
    if backend != "xla":
        raise BackendError(f"cache_attention has no backend {backend!r}; it has xla, triton")
    return xla.cache_attention(*arguments)
