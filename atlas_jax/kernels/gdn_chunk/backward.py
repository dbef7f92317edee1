"""The gradient of the chunked rule in bounded memory: recomputed in XLA, a span of rows at a time, the last first."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.kernels.gdn_chunk import xla
from atlas_jax.kernels.numerics import widen

Rows = tuple[Array, ...]  # q, k, v, g, beta


def pull_back(
    starts: Float[Array, "N G Hv Dk Dv"],
    rows: Rows,
    d_out: Float[Array, "N T Hv Dv"],
    d_end: Float[Array, "N Hv Dk Dv"],
    *,
    span: int,
    chunk: int,
) -> tuple[Float[Array, "N Hv Dk Dv"], Rows]:
    """Gradients of the initial state and of the rows from those of the outputs and of the final state.

    `starts[:, i]` is the state before row `i * span`. The reference is differentiated over one span at a time, so what
    autodiff saves, the state before every chunk among it, is bounded by a span, whatever T.
    """
    count, length = starts.shape[1], d_out.shape[1]
    span = min(span, length)

    def split(x: Array) -> Array:  # [N, T, ...] -> [G, N, span, ...]; rows of zeros are identities
        x = jnp.pad(x, ((0, 0), (0, count * span - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, span, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], count * span, *x.shape[3:])[:, :length]

    def one_span(d_end: Array, inputs: tuple[Array, Rows, Array]) -> tuple[Array, Rows]:
        start, rows, d_out = inputs
        _, pull = jax.vjp(functools.partial(xla.chunked, chunk=chunk), start, *rows)
        d_start, *d_rows = pull((d_out, d_end))
        return d_start, tuple(d_rows)

    spans = (jnp.moveaxis(starts, 1, 0), tuple(map(split, rows)), split(widen(d_out)))
    d_start, d_rows = jax.lax.scan(one_span, widen(d_end), spans, reverse=True)
    return d_start, tuple(map(join, d_rows))
