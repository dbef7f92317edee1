"""The public chunked gated delta rule."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from atlas_jax import sharding
from atlas_jax.kernels.backends import Backend, BackendError
from atlas_jax.kernels.gdn_chunk import xla
from atlas_jax.kernels.gdn_chunk.tiles import tile_for

CHUNK = 32  # of 16, 32 and 64 the fastest forward plus backward on CPUs


def gdn_chunk(
    state: Float[Array, "N Hv Dk Dv"],
    q: Float[Array, "N T Hk Dk"],
    k: Float[Array, "N T Hk Dk"],
    v: Float[Array, "N T Hv Dv"],
    g: Float[Array, "N T Hv"],
    beta: Float[Array, "N T Hv"],
    live: Bool[Array, "N T"] | None = None,
    *,
    chunk: int = CHUNK,
    backend: Backend = "xla",
    interpret: bool = False,
    capability: tuple[int, int] | None = None,
) -> tuple[Float[Array, "N T Hv Dv"], Float[Array, "N Hv Dk Dv"]]:
    """Fold T rows into the state, chunk by chunk in matrix form, and return every output and the final state.

    Same recurrence and conventions as `gdn_step`; differentiable in every float argument. Any `g <= 0` is finite in
    value and gradient, `-inf` included: it forgets the state, which is how packed documents are kept apart. Rows where
    `live` is false are exact identities whatever they hold, NaN included. T need not be a multiple of `chunk`.

    Args:
      chunk: rows of a chunk of the xla form; a kernel's are in its tile.
      backend: who computes it (`backends.choose` says what can). `interpret` runs a Pallas kernel without a GPU, for
        tests; `capability` is the chip's, `(9, 0)` for sm_90, and chooses the kernel's tiles.

    Results have the dtype of the state. Raises `BackendError` for shapes that a kernel doesn't have.

    Source: Gated DeltaNet (arXiv 2412.06464), section 3.3, with all decays as segment sums.
    """
    if live is not None:
        q, k, v = (jnp.where(live[:, :, None, None], x, 0) for x in (q, k, v))
        g, beta = (jnp.where(live[:, :, None], x, 0) for x in (g, beta))
    if backend == "xla":
        return xla.chunked(state, q, k, v, g, beta, chunk)
    if backend != "triton":
        raise BackendError(f"gdn_chunk has no {backend!r} kernel; it has triton and xla")
    from atlas_jax.kernels.gdn_chunk import pallas_triton  # when asked for: a later jax may not have it

    tile = tile_for(capability, k.dtype.name)
    run = functools.partial(pallas_triton.gdn_chunk, tile=tile, interpret=interpret)
    return sharding.by_heads(run, (state, q, k, v, g, beta), heads=(1, 2, 2, 2, 2, 2), out=(2, 1), rows=True)
