"""Sample-then-compare acceptance, cut at end tokens and limits before anything is counted."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def emitted_count(
    picks: Int[Array, "N K"],
    drafts: Int[Array, "N K-1"],
    num_rows: Int[Array, " N"],
    room: Int[Array, " N"],
    is_end: Bool[Array, "N K"],
) -> Int[Array, " N"]:
    """Tokens that each sequence emits in this step: its accepted drafts and one more, `picks[n, :count]`.

    `picks[n, j]` is the target's own token after rows 0..j. Draft j is accepted when it equals `picks[n, j]` and all
    drafts before it were accepted. The run then ends at the first pick that `is_end` (inclusive) and at `room[n]`, the
    tokens that the request may still emit. A sequence without rows emits nothing.
    """
    rows = jnp.arange(picks.shape[1])
    live = rows[None, :-1] < num_rows[:, None] - 1
    matched = jnp.cumprod((drafts == picks[:, :-1]) & live, axis=1).sum(axis=1)
    first_end = jnp.where(is_end, rows, picks.shape[1]).min(axis=1)
    count = jnp.minimum(jnp.minimum(matched, first_end) + 1, room)
    return jnp.where(num_rows > 0, count, 0).astype(jnp.int32)
