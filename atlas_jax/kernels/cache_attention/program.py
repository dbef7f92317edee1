"""What the programs of the attention kernel compute, on values that are already in registers.

Softmax over a cache is a sum that can be cut anywhere: with `m` the largest score seen, `l = sum exp(s - m)` and
`a = sum exp(s - m) v`, two cuts join by scaling both to the larger m (online softmax, Milakov and Gimelshein,
arXiv 1805.02867; split over the context as in flash-decoding). `[M]` are the query rows of one key-value head: a few
rows of a sequence times the heads that share the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Sums = tuple[Float[Array, " M"], Float[Array, " M"], Float[Array, "M Dh"]]  # largest score m, l, a


def span(blocks: Int[Array, ""], splits: int, split: Int[Array, ""]) -> tuple[Array, Array]:
    """First and end of the blocks of one split; the last splits of a short sequence have none."""
    each = (blocks + splits - 1) // splits
    return jnp.minimum(split * each, blocks), jnp.minimum((split + 1) * each, blocks)


def live(entries: Int[Array, "..."], length: Int[Array, ""]) -> Bool[Array, "..."]:
    """Which entries hold anything."""
    return entries < length


def seen(entries: Int[Array, "M E"], positions: Int[Array, "M E"]) -> Bool[Array, "M E"]:
    """Which live entries a row attends to."""
    return entries <= positions


def kv_head(program: Array, row_blocks: int) -> Array:
    """The key-value head of a program: the blocks of rows of one head are neighbours."""
    return program // row_blocks


def rescale(old: Array, new: Array) -> Array:
    """What brings sums from one largest score to another; 0 where there were none (`old` is -inf)."""
    # -inf - -inf would be NaN: a row that has seen nothing keeps -inf and subtracts 0 instead.
    return jnp.exp(old - jnp.where(jnp.isneginf(new), 0, new))


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a program that can be wrong and still run. A test of the tests replaces one by a wrong twin."""

    span: Callable[[Array, int, Array], tuple[Array, Array]] = span
    live: Callable[[Array, Array], Array] = live
    seen: Callable[[Array, Array], Array] = seen
    kv_head: Callable[[Array, int], Array] = kv_head
    rescale: Callable[[Array, Array], Array] = rescale


PARTS = Parts()


@dataclasses.dataclass(frozen=True)
class Memory:
    """Loads and products of a program; a block is `E` entries from `start` on, those that are not live read as 0."""

    scores: Callable[[Int[Array, ""]], Float[Array, "M E"]]  # of a block, scaled
    mix: Callable[[Float[Array, "M E"], Int[Array, ""]], Float[Array, "M Dh"]]  # weights times the values of a block


def attend(
    memory: Memory,
    positions: Int[Array, " M"],
    length: Int[Array, ""],
    first: Int[Array, ""],
    end: Int[Array, ""],
    *,
    entries: int,
    start: Sums,
    parts: Parts = PARTS,
) -> Sums:
    """The sums over blocks `first` to `end`, of `entries` each."""
    shape = (positions.shape[0], entries)
    column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    position = jax.lax.broadcast_in_dim(positions, shape, (0,))

    def sweep(block: Array, sums: Sums) -> Sums:
        top, total, mixed = sums
        at = block * entries
        where = at + column
        scores = jnp.where(parts.live(where, length) & parts.seen(where, position), memory.scores(at), -jnp.inf)
        new = jnp.maximum(top, scores.max(1))
        keep = parts.rescale(top, new)
        weights = rescale(scores, _down(new, entries))
        return new, keep * total + weights.sum(1), _down(keep, mixed.shape[1]) * mixed + memory.mix(weights, at)

    return jax.lax.fori_loop(first, end, sweep, start)


def divide(mixed: Float[Array, "M Dh"], total: Float[Array, " M"]) -> Float[Array, "M Dh"]:
    """The weighted mean; zero for a row that saw nothing."""
    return mixed / _down(jnp.where(total > 0, total, 1), mixed.shape[1])


def join(
    tops: Float[Array, " P"], totals: Float[Array, " P"], mixed: Float[Array, "P Dh"], parts: Parts = PARTS
) -> Float[Array, " Dh"]:
    """One row's mean from its sums in P splits. A split without entries has the top -inf and sums of 0."""
    weights = parts.rescale(tops, tops.max(0))
    total = (weights * totals).sum(0)
    return (_down(weights, mixed.shape[1]) * mixed).sum(0) / jnp.where(total > 0, total, 1)


def _down(x: Float[Array, " M"], columns: int) -> Float[Array, "M C"]:
    """x as a column, repeated."""
    return jax.lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))
