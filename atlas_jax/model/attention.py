"""Causal attention over whole sequences, without a cache: training and scoring."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.kernels.numerics import EXACT, widen

_QUERY_BLOCK = 256  # rows of one product: bounds the memory, halves the work


def causal_attention(
    q: Float[Array, "N T Hq Dh"],
    k: Float[Array, "N T Hkv Dh"],
    v: Float[Array, "N T Hkv Dh"],
    segments: Int[Array, "N T"] | None = None,
    own: Sequence[tuple[Float[Array, "N T Hkv Dh"], Float[Array, "N T Hkv Dh"]]] = (),
) -> Float[Array, "N T Hq Dh"]:
    """Row t attends to the rows up to t of its own segment (all of one, if None), scale `Dh^-0.5`, grouped queries.

    `own` holds further keys and values that row t alone sees at place t: the entries of a chain of drafts behind it.
    """
    length, kv_heads, dim = q.shape[1], k.shape[2], q.shape[3]
    q = q.reshape(*q.shape[:2], kv_heads, -1, dim) * dim**-0.5
    out = []
    for start in range(0, length, _QUERY_BLOCK):  # later keys are dead for a block: don't multiply them at all
        stop = min(start + _QUERY_BLOCK, length)
        query = q[:, start:stop]
        scores = widen(jnp.einsum("nqhgd,nkhd->nhgqk", query, k[:, :stop], precision=EXACT))
        seen = jnp.tril(jnp.ones((stop, stop), bool))[None, start:]
        if segments is not None:
            seen = seen & (segments[:, start:stop, None] == segments[:, None, :stop])
        columns = [jnp.where(seen[:, None, None], scores, -jnp.inf)]
        for key, _ in own:
            product = jnp.einsum("nqhgd,nqhd->nhgq", query, key[:, start:stop], precision=EXACT)
            columns.append(widen(product)[..., None])
        weights = jax.nn.softmax(jnp.concatenate(columns, axis=-1), axis=-1).astype(v.dtype)
        mixed = jnp.einsum("nhgqk,nkhd->nqhgd", weights[..., :stop], v[:, :stop], precision=EXACT)
        for i, (_, value) in enumerate(own):
            mixed += jnp.einsum("nhgq,nqhd->nqhgd", weights[..., stop + i], value[:, start:stop], precision=EXACT)
        out.append(mixed)
    joined = jnp.concatenate(out, axis=1)
    return joined.reshape(*joined.shape[:2], -1, dim)
