"""The decode state of a model: pools of slots, one entry per layer, donated to every step and updated in place.

A slot is a row of every pool and belongs to one sequence. Slots are data: no compiled shape depends on their number.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.config import ModelConfig


class GdnCache(NamedTuple):
    """One GDN layer.

    Attributes:
      state: recurrent states after the last folded row, at least float32. With snapshots `[S, K, Hv, Dk, Dv]`, one
        after each row of the last step (`rollback.py`).
      window: the last `W - 1` folded rows before the convolution, then up to `P` pending rows (drafts accepted by the
        last step, not yet folded). A row is `(q | k | v | b | a)` as projected, in the activation dtype: all that
        folding it later needs. How many of the `P` rows are live is the sequence's `pending` count.
    """

    state: Float[Array, "S *snapshots Hv Dk Dv"]
    window: Float[Array, "S W-1+P C+2Hv"]


class KvCache(NamedTuple):
    """One attention layer. Entries beyond a sequence's length are dead: masked when read, overwritten later.

    Attributes:
      kv: keys (normed and rotated) and values.
    """

    kv: Float[Array, "S 2 Hkv L Dh"]


LayerCache = GdnCache | KvCache


class ModelState(NamedTuple):
    """All layers of the trunk, and the head's own attention layer (entry t holds the pair (hidden t, token t + 1))."""

    layers: tuple[LayerCache, ...]
    head: KvCache | None


def init_state(
    cfg: ModelConfig,
    *,
    slots: int,
    length: int,
    max_drafts: int,
    dtype: jnp.dtype,
    head: bool,
    snapshots: bool = False,
) -> ModelState:
    """An empty state of `slots` sequences of up to `length` positions and `max_drafts` pending rows.

    `snapshots` keeps a recurrent state for each row of a step.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    states = (slots, max_drafts + 1) if snapshots else (slots,)

    def layer(kind: str) -> LayerCache:
        if kind == "attention":
            return KvCache(jnp.zeros((slots, 2, cfg.kv_heads, length, cfg.head_dim), dtype))
        return GdnCache(
            jnp.zeros((*states, cfg.gdn_value_heads, cfg.gdn_key_dim, cfg.gdn_value_dim), wide),
            jnp.zeros((slots, cfg.conv_width - 1 + max_drafts, cfg.conv_channels + 2 * cfg.gdn_value_heads), dtype),
        )

    return ModelState(
        layers=tuple(layer(kind) for kind in cfg.layers),
        head=layer("attention") if head else None,  # type: ignore[arg-type]
    )
