"""Random inputs of a step's attention, the answer in float64 and the distance from it: one judge for tests, gate and
device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from atlas_jax.kernels.cache_attention.specs import AttentionSpec
from atlas_jax.kernels.check import relative

# What float32 arithmetic may be off by, relative to the largest value (at least 1); a bfloat16 result is rounded to it.
BOUNDS = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2**-8}

Scores = Literal["mild", "flat", "rising", "falling", "spiky"]
SCORES: tuple[Scores, ...] = get_args(Scores)


class Inputs(NamedTuple):
    """The arguments of `cache_attention`, in its order, and which rows count."""

    pool: Any
    slots: Any
    positions: Any
    lengths: Any
    q: Any
    num_rows: Any


def inputs(
    spec: AttentionSpec,
    seed: int,
    *,
    scores: Scores = "mild",
    lengths: tuple[int, ...] = (),
    block: int = 32,
    padding: int = 0,
    poison: float = np.nan,
) -> Inputs:
    """Random inputs as a step makes them, with scores of the named kind.

    Slots are in random order and the last `padding` sequences are padding. `lengths` are dealt out in turn; by default
    those around blocks of `block`, the capacity, none and a random one. Each sequence has its own number of rows, at
    most its length. Entries beyond a length, free slots and the queries of dead rows hold `poison`. Arrays are NumPy's,
    in the dtypes of `spec`.
    """
    rng = np.random.default_rng(seed)
    n, dim, used = spec.n, spec.head_dim, spec.n - padding
    some = int(rng.integers(1, spec.context + 1))
    edges = lengths or (block + 1, spec.context, 1, block, some, block - 1, 0, spec.context - 1)
    length = np.minimum(np.resize(edges, n), spec.context)
    length[used:] = 0
    slots = np.concatenate([rng.permutation(spec.slots)[:used], np.full(padding, spec.slots)])
    # Offset by the sequence: whatever the seed, small batches meet every number of rows.
    rows = np.minimum(1 + (np.arange(n) + rng.integers(spec.rows)) % spec.rows, length)

    pool = rng.standard_normal((spec.slots, 2, spec.kv_heads, spec.context, dim))
    q = rng.standard_normal((n, spec.rows, spec.q_heads, dim))
    keys = pool[:, 0]
    if scores in ("rising", "falling"):  # the largest score is always the newest entry's, or always the first's
        slope = np.linspace(0, 20, spec.context) * (1 if scores == "rising" else -1)
        keys[..., 0], q[..., 0] = slope, dim**0.5
    elif scores == "flat":
        keys[:] = 0
    elif scores == "spiky":  # a few entries take nearly all the weight
        keys[rng.random(keys.shape[:-1]) < 0.02] *= 8
    dead = np.arange(spec.context) >= _by_slot(spec, slots[:used], length[:used])[:, None]
    pool = np.where(dead[:, None, None, :, None], poison, pool)
    q = np.where((np.arange(spec.rows) < rows[:, None])[:, :, None, None], q, poison)
    positions = (length - rows)[:, None] + np.arange(spec.rows)
    cast = lambda x, dtype: np.asarray(x, jnp.dtype(dtype))
    slots, positions, length, rows = (cast(x, "int32") for x in (slots, positions, length, rows))
    return Inputs(cast(pool, spec.cache_dtype), slots, positions, length, cast(q, spec.row_dtype), rows)


def expected(x: Inputs) -> np.ndarray:
    """Outputs `[N K Hq Dh]` by a plain softmax in float64, row by row; zero where nothing is live."""
    out = np.zeros(x.q.shape)
    kv_heads, dim = x.pool.shape[2], x.pool.shape[4]
    for n, slot in enumerate(x.slots):
        for row in range(x.num_rows[n]):
            upto = x.positions[n, row] + 1
            keys, values = x.pool[slot, :, :, :upto].astype(np.float64)
            query = x.q[n, row].astype(np.float64).reshape(kv_heads, -1, dim)
            scores = np.einsum("hgd,hld->hgl", query, keys) * dim**-0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mean = np.einsum("hgl,hld->hgd", weights / weights.sum(-1, keepdims=True), values)
            out[n, row] = mean.reshape(-1, dim)
    return out


def error(attend: Callable[..., Any], x: Inputs) -> float:
    """Largest error of the live rows of `attend(*x)`, relative to the largest value (at least 1).

    Infinite where a sequence without entries gives anything but zeros; NaN where NaN reached a row. So
    `error(...) <= bound` is the whole test. Raises `ValueError` for inputs without a live row: they check nothing.
    """
    if not x.num_rows.any():
        raise ValueError("no row of these inputs is live")
    out = np.asarray(attend(*(jnp.asarray(a) for a in x[:5])))
    if out.shape != x.q.shape or out[x.lengths == 0].any():
        return float("inf")
    live = np.arange(x.q.shape[1]) < x.num_rows[:, None]
    return float(relative(out[live].astype(np.float64), expected(x)[live]))


def _by_slot(spec: AttentionSpec, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`[S]`: live entries of every slot, none in a free one."""
    found = np.zeros(spec.slots, int)
    found[slots] = lengths
    return found
