"""Random rows, the answer in float64 and the distance from it: one judge for tests, gate and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.kernels.check import Gate, log_decays, relative, unit
from atlas_jax.kernels.gdn_chunk.specs import ChunkSpec
from atlas_jax.kernels.gdn_step.reference import recurrence

# What arithmetic may be off by, relative to the largest value (at least 1). The products of bfloat16 rows run in TF32
# (unit roundoff 2^-11, a few of them in sequence), and a bfloat16 result is rounded to it.
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2**-8}


class Inputs(NamedTuple):
    """The arguments of `gdn_chunk`, in its order."""

    state: Any
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


def bound(spec: ChunkSpec) -> float:
    """Largest `error` that is rounding."""
    return max(BOUNDS[spec.row_dtype], BOUNDS[spec.state_dtype])


def inputs(spec: ChunkSpec, seed: int, *, gate: Gate = "mild") -> Inputs:
    """Random inputs as a model makes them: unit keys, beta in (0, 1), log decays of the named kind, a state.

    Arrays are NumPy's, in the dtypes of `spec`; gates are float32 (float64 beside float64 rows).
    """
    rng = np.random.default_rng(seed)
    heads = (spec.n, spec.length, spec.value_heads)
    g = log_decays(gate, rng, heads, often=0.1)
    keys = (spec.n, spec.length, spec.key_heads, spec.key_dim)
    q, k = unit(rng.standard_normal(keys)) * spec.key_dim**-0.5, unit(rng.standard_normal(keys))
    v, beta = rng.standard_normal((*heads, spec.value_dim)), rng.random(heads)
    state = rng.standard_normal((spec.n, spec.value_heads, spec.key_dim, spec.value_dim))
    cast = lambda x, dtype: np.asarray(x, jnp.dtype(dtype))
    gates = "float64" if spec.row_dtype == "float64" else "float32"
    q, k, v = (cast(x, spec.row_dtype) for x in (q, k, v))
    return Inputs(cast(state, spec.state_dtype), q, k, v, cast(g, gates), cast(beta, gates))


def expected(x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Outputs `[N T Hv Dv]` and final states `[N Hv Dk Dv]`, row by row in float64."""
    with jax.enable_x64(True):
        out, end = jax.jit(recurrence)(*(jnp.asarray(a, jnp.float64) for a in x))
        return np.asarray(out), np.asarray(end)


def error(chunk: Callable[..., tuple[Any, Any]], x: Inputs) -> float:
    """Largest error of the outputs and of the final state of `chunk(*x)`, relative to the largest value (at least 1);
    NaN where NaN reached a result. So `error(...) <= bound(spec)` is the whole test."""
    actual = chunk(*(jnp.asarray(a) for a in x))
    return max_error(actual, expected(x))


def max_error(actual: tuple[Any, ...], wanted: tuple[Any, ...]) -> float:
    """The largest error of any of several results, each relative to its own largest value (at least 1)."""
    return float(np.max([relative(np.asarray(a, np.float64), w) for a, w in zip(actual, wanted, strict=True)]))
