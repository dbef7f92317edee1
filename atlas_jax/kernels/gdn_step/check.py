"""Random inputs of a step, the answer in float64 and the distance from it: one judge for tests, gate and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.kernels.check import Gate, log_decays, relative, unit
from atlas_jax.kernels.gdn_step.reference import recurrence
from atlas_jax.kernels.gdn_step.specs import StepSpec

# What float32 arithmetic may be off by, relative to the largest value (at least 1); a bfloat16 result is rounded to it.
BOUNDS = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2**-8}


class Inputs(NamedTuple):
    """The arguments of `gdn_step`, in its order."""

    pool: Any
    slots: Any
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    num_pending: Any
    num_rows: Any


def inputs(
    spec: StepSpec, seed: int, *, gate: Gate = "mild", padding: int = 0, full: bool = False, poison: float = np.nan
) -> Inputs:
    """Random inputs as a model makes them: unit keys, beta in (0, 1), log decays of the named kind.

    Slots are in random order and the last `padding` sequences are padding. Every sequence has its own number of rows
    and of pending rows, none among them, unless `full`. Dead rows, free slots and the rows of padding sequences hold
    `poison`. Arrays are NumPy's, in the dtypes of `spec`.
    """
    rng = np.random.default_rng(seed)
    n, fold, total = spec.n, spec.folded, spec.rows + spec.folded
    heads = (n, total, spec.value_heads)
    g = log_decays(gate, rng, heads, often=0.2)
    q = unit(rng.standard_normal((n, spec.rows, spec.key_heads, spec.key_dim))) * spec.key_dim**-0.5
    k = unit(rng.standard_normal((n, total, spec.key_heads, spec.key_dim)))
    v, beta = rng.standard_normal((*heads, spec.value_dim)), rng.random(heads)
    pool = rng.standard_normal((spec.slots, spec.value_heads, spec.key_dim, spec.value_dim))

    used = n - padding
    slots = np.concatenate([rng.permutation(spec.slots)[:used], np.full(padding, spec.slots)])
    # Offset by the sequence: whatever the seed, small batches meet zero rows, zero pending and the most of both.
    pending, rows = (
        (np.full(n, most) if full else (np.arange(n) + rng.integers(most + 1)) % (most + 1))
        for most in (fold, spec.rows)
    )
    live = _live(spec, pending, rows) & (np.arange(n) < used)[:, None]
    k, v, g, beta = (np.where(live.reshape(n, total, *[1] * (x.ndim - 2)), x, poison) for x in (k, v, g, beta))
    q = np.where(live[:, fold:, None, None], q, poison)
    pool[np.setdiff1d(np.arange(spec.slots), slots)] = poison
    cast = lambda x, dtype: np.asarray(x, jnp.dtype(dtype))
    counts = (cast(x, "int32") for x in (pending, rows))
    q, k, v = (cast(x, spec.row_dtype) for x in (q, k, v))
    gates = "float64" if spec.row_dtype == "float64" else "float32"
    g, beta = (cast(x, gates) for x in (g, beta))
    return Inputs(cast(pool, spec.state_dtype), cast(slots, "int32"), q, k, v, g, beta, *counts)


def expected(spec: StepSpec, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Outputs `[N K Hv Dv]` and states `[N Hv Dk Dv]` after the step, row by row in float64; zero where padding."""
    used = x.slots < spec.slots
    row = np.arange(spec.rows + spec.folded)
    live = _live(spec, x.num_pending, x.num_rows) & used[:, None]
    state = np.where(used[:, None, None, None], x.pool[np.where(used, x.slots, 0)], 0)
    q = np.concatenate([np.zeros((spec.n, spec.folded, *x.q.shape[2:])), x.q], axis=1)

    def run(live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Rows of zeros are identities: g = 0 and beta = 0.
        rows = (np.where(live.reshape(*live.shape, *[1] * (a.ndim - 2)), a, 0) for a in (q, x.k, x.v, x.g, x.beta))
        with jax.enable_x64(True):
            out, end = jax.jit(recurrence)(*(jnp.asarray(a, jnp.float64) for a in (state, *rows)))
            return np.asarray(out), np.asarray(end)

    out, _ = run(live)
    _, end = run(live & (row <= spec.folded))
    return out[:, spec.folded :], end


def error(step: Callable[..., tuple[Any, Any]], spec: StepSpec, x: Inputs) -> float:
    """Largest error of the outputs and states of `step(*x)`, relative to the largest value (at least 1).

    Infinite where a free slot isn't bit-identical, or the output of a dead row or padding sequence isn't zero; NaN
    where NaN reached a result. So `error(...) <= bound` is the whole test.
    """
    out, pool = (np.asarray(a) for a in step(*(jnp.asarray(a) for a in x)))
    used = x.slots < spec.slots
    free = np.setdiff1d(np.arange(spec.slots), x.slots)
    dead = ~(_live(spec, x.num_pending, x.num_rows)[:, spec.folded :] & used[:, None])
    if pool[free].tobytes() != x.pool[free].tobytes() or out[dead].any():
        return float("inf")
    wanted_out, wanted_state = expected(spec, x)
    pairs = ((out, wanted_out), (pool[x.slots[used]], wanted_state[used]))
    return float(np.max([relative(actual.astype(np.float64), wanted) for actual, wanted in pairs]))


def _live(spec: StepSpec, num_pending: np.ndarray, num_rows: np.ndarray) -> np.ndarray:
    """`[N M]`: pending rows are right-aligned before row 0, drafts left-aligned behind it."""
    place = np.arange(spec.rows + spec.folded) - spec.folded
    return np.where(place < 0, place >= -num_pending[:, None], place < num_rows[:, None])
