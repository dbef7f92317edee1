"""The sweep as XLA compiles it: one loop over blocks for all sequences, up to the longest of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.kernels.numerics import EXACT

FEW_ROWS = 16  # more than any step has of a sequence, fewer than a prefill chunk


def cache_attention(
    pool: Float[Array, "S 2 Hkv L Dh"],
    slots: Int[Array, " N"],
    positions: Int[Array, "N K"],
    lengths: Int[Array, " N"],
    q: Float[Array, "N K Hq Dh"],
    *,
    block: int | None = None,
) -> Float[Array, "N K Hq Dh"]:
    """As the public `cache_attention`, `block` entries of every sequence at a time.

    The number of blocks is data, not a shape. Each block of a sequence is copied out of the pool before it is
    multiplied, and on a GPU the host waits for every turn of the loop. Scaled queries are rounded to their own dtype,
    which changes nothing where `Dh^-0.5` is a power of two.
    """
    n, rows, q_heads, dim = q.shape
    _, _, kv_heads, capacity, _ = pool.shape
    # A turn costs some kernels whatever its size, so blocks are long: not for many sequences, since a block of each of
    # them is held at once, nor for many rows, where what a block has beyond the last of them costs more than turns do.
    longest = 512 if rows <= FEW_ROWS else 128
    block = min(block or min(longest, max(128, 8192 // n)), capacity)
    group = q_heads // kv_heads
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # [N, Hkv, K * group, Dh]: all rows of a sequence share one product per key-value head.
    query = (q * dim**-0.5).reshape(n, rows, kv_heads, group, dim)
    query = jnp.moveaxis(query, 2, 1).reshape(n, kv_heads, rows * group, dim)
    row_position = jnp.repeat(positions, group, axis=1)[:, None, :, None]

    def read(slot: Array, start: Array) -> Array:
        # The slot of a padding sequence is clamped to the last one; what it reads there is masked by its length of 0.
        zero = jnp.zeros_like(slot)
        at = (slot, zero, zero, start.astype(slot.dtype), zero)
        return jax.lax.dynamic_slice(pool, at, (1, 2, kv_heads, block, dim))[0]

    def sweep(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        # The last block is shifted back to fit; the entries that it repeats are masked.
        start = jnp.minimum(index * block, capacity - block)
        where = start + jnp.arange(block)
        live = ((where >= index * block)[None, :] & (where[None, :] < lengths[:, None]))[:, None, None, :]
        k, v = jnp.moveaxis(jax.vmap(lambda slot: read(slot, start))(slots), 1, 0)
        v = jnp.where(live[:, :, 0, :, None], v, 0)
        scores = jnp.einsum("nhqd,nhbd->nhqb", query, k, precision=EXACT, preferred_element_type=wide)
        seen = live & (where[None, None, None, :] <= row_position)
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
        # A row that has seen nothing yet keeps -inf; subtracting 0 instead of -inf keeps exp(-inf - x) finite.
        anchor = jnp.where(jnp.isneginf(new_top), 0, new_top)
        weight = jnp.exp(scores - anchor)
        scale = jnp.exp(top - anchor)
        new_acc = acc * scale + jnp.einsum("nhqb,nhbd->nhqd", weight, v.astype(wide), precision=EXACT)
        return new_top, total * scale + weight.sum(axis=-1, keepdims=True), new_acc

    shape = (n, kv_heads, rows * group)
    start = (jnp.full((*shape, 1), -jnp.inf, wide), jnp.zeros((*shape, 1), wide), jnp.zeros((*shape, dim), wide))
    blocks = (lengths.max() + block - 1) // block
    _, total, acc = jax.lax.fori_loop(0, blocks, sweep, start)
    out = jnp.where(total > 0, acc / jnp.where(total > 0, total, 1), 0).astype(q.dtype)
    out = out.reshape(n, kv_heads, rows, group, dim)
    return jnp.moveaxis(out, 1, 2).reshape(n, rows, q_heads, dim)
