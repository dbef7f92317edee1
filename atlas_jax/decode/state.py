"""Everything that lives on the device between steps, one row of every pool per slot; donated and updated in place."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from atlas_jax.config import ModelConfig
from atlas_jax.model import state as model_state
from atlas_jax.model.rollback import Rollback
from atlas_jax.model.state import KvCache, LayerCache, ModelState


class DecodeState(NamedTuple):
    """The model's state, and what the sampler needs to know of each sequence.

    Attributes:
      layers, head: the model's caches.
      text: the tokens themselves, by position: what penalties count.
      ledger: what each slot holds: committed positions, pending rows, leading entries of the head's cache. A step
        compares it with its plan and leaves a slot alone where they differ.
      bias: added to scores; read for requests that have a bias.
      masks: allowed tokens by row of the next step, as bits; read for requests that have masks.
      proposals: the distributions that queued drafts were drawn from; None under the rule "match".
    """

    layers: tuple[LayerCache, ...]
    head: KvCache | None
    text: Int[Array, "S L"]
    ledger: Int[Array, "S 3"]
    bias: Float[Array, "S V"]
    masks: UInt32[Array, "S K V/32"]
    proposals: Float[Array, "S P V"] | None

    @property
    def model(self) -> ModelState:
        return ModelState(self.layers, self.head)


def init_state(
    cfg: ModelConfig,
    *,
    slots: int,
    length: int,
    max_drafts: int,
    dtype: jnp.dtype,
    head: bool,
    proposals: bool = False,
    rollback: Rollback = "deferred",
) -> DecodeState:
    """An empty state of `slots` sequences of up to `length` positions and `max_drafts` drafts.

    `proposals` keeps the drafts' distributions, which every acceptance rule but "match" needs.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    layers, head_cache = model_state.init_state(
        cfg,
        slots=slots,
        length=length,
        max_drafts=max_drafts,
        dtype=dtype,
        head=head,
        snapshots=rollback == "snapshot",
    )
    return DecodeState(
        layers,
        head_cache,
        text=jnp.zeros((slots, length), jnp.int32),
        ledger=jnp.zeros((slots, 3), jnp.int32),
        bias=jnp.zeros((slots, cfg.vocab_size), jnp.float32),
        masks=jnp.zeros((slots, max_drafts + 1, -(-cfg.vocab_size // 32)), jnp.uint32),
        proposals=jnp.zeros((slots, max_drafts, cfg.vocab_size), wide) if proposals else None,
    )
