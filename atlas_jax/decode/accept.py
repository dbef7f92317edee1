"""How many drafts a step keeps, by three rules; then the cut at end tokens and limits, before anything is counted.

`match` compares each draft with the target's own pick there: the same tokens as plain decode, draw for draw. The
other two take drafts sampled from the head's distribution and are exact in law (arXiv 2211.17192; 2403.10444).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Rule = Literal["match", "rejection", "block"]


def matched(picks: Int[Array, "N K"], drafts: Int[Array, "N K-1"], num_rows: Int[Array, " N"]) -> Int[Array, " N"]:
    """Drafts accepted: the longest run that equals the target's picks. `picks[n, j]` follows rows 0..j."""
    return _run(drafts == picks[:, :-1], num_rows)


def rejection(
    target: Float[Array, "N K V"],
    proposed: Float[Array, "N K-1 V"],
    drafts: Int[Array, "N K-1"],
    num_rows: Int[Array, " N"],
    chance: Float[Array, "N K-1"],
) -> tuple[Int[Array, " N"], Float[Array, "N V"]]:
    """Drafts accepted, and the distribution of the token after them (Leviathan et al., arXiv 2211.17192, algorithm 1).

    Draft j is accepted where `chance < target(d) / proposed(d)`, strictly: a chance of 0 must not accept what the
    target excludes. After a rejection the token follows `max(target - proposed, 0)`, normalised.

    Args:
      target: what each row's token is drawn from, all filters applied.
      proposed: what each draft was drawn from; exact only if it was.
      chance: uniform in [0, 1), independent of the draw of the drafts.
    """
    p, q = _of_drafts(target[:, :-1], drafts), _of_drafts(proposed, drafts)
    accepted = _run(chance * q < p, num_rows)
    last = _row(target, accepted)
    rejected = accepted < num_rows - 1
    rest = jnp.maximum(last - _row(proposed, jnp.minimum(accepted, proposed.shape[1] - 1)), 0)
    return accepted, _normalised(jnp.where(rejected[:, None], rest, last), last)


def block(
    target: Float[Array, "N K V"],
    proposed: Float[Array, "N K-1 V"],
    drafts: Int[Array, "N K-1"],
    num_rows: Int[Array, " N"],
    chance: Float[Array, "N K-1"],
) -> tuple[Int[Array, " N"], Float[Array, "N V"]]:
    """As `rejection`, all drafts of a sequence judged together (Sun et al., arXiv 2403.10444, algorithm 2).

    With `w_0 = 1`, `w_j = min(1, w_{j-1} p_j / q_j)` and `Z_j = sum_x max(w_j p(x | d_1..d_j) - q(x | d_1..d_j), 0)`,
    j drafts are kept with probability `Z_j / (Z_j + 1 - w_j)`, and the last one with `w`; the largest j that its
    chance accepts wins. The token after them follows `max(w_j p - q, 0)`, or the target after the last draft.
    """
    p, q = _of_drafts(target[:, :-1], drafts), _of_drafts(proposed, drafts)
    offered = num_rows - 1
    kept = jnp.zeros_like(num_rows)
    ratio = weight = jnp.ones(num_rows.shape, target.dtype)
    for j in range(1, drafts.shape[1] + 1):
        ratio = jnp.minimum(1, ratio * jnp.where(q[:, j - 1] > 0, p[:, j - 1] / jnp.where(q > 0, q, 1)[:, j - 1], 0))
        holds = ratio
        if j < drafts.shape[1]:
            rest = jnp.maximum(ratio[:, None] * target[:, j] - proposed[:, j], 0).sum(axis=-1)
            among = rest / jnp.maximum(rest + 1 - ratio, jnp.finfo(target.dtype).tiny)
            holds = jnp.where(j == offered, ratio, jnp.where((ratio >= 1) & (rest <= 0), 0, among))
        taken = (j <= offered) & (chance[:, j - 1] < holds)
        kept, weight = jnp.where(taken, j, kept), jnp.where(taken, ratio, weight)
    last = _row(target, kept)
    rest = jnp.maximum(weight[:, None] * last - _row(proposed, jnp.minimum(kept, proposed.shape[1] - 1)), 0)
    return kept, _normalised(jnp.where((kept < offered)[:, None], rest, last), last)


def emitted_count(
    accepted: Int[Array, " N"],
    is_end: Bool[Array, "N K"],
    num_rows: Int[Array, " N"],
    room: Int[Array, " N"],
) -> Int[Array, " N"]:
    """Tokens that each sequence emits in this step: its accepted drafts and one more.

    The run ends at the first token that `is_end` (inclusive) and at `room[n]`, the tokens that the request may still
    emit. A sequence without rows emits nothing.
    """
    width = is_end.shape[1]
    first_end = jnp.where(is_end, jnp.arange(width), width).min(axis=1)
    count = jnp.minimum(jnp.minimum(accepted, first_end) + 1, room)
    return jnp.where(num_rows > 0, count, 0).astype(jnp.int32)


def _run(accepted: Bool[Array, "N K-1"], num_rows: Int[Array, " N"]) -> Int[Array, " N"]:
    live = jnp.arange(accepted.shape[1])[None] < num_rows[:, None] - 1
    return jnp.cumprod(accepted & live, axis=1).sum(axis=1)


def _of_drafts(chances: Float[Array, "N P V"], drafts: Int[Array, "N P"]) -> Float[Array, "N P"]:
    return jnp.take_along_axis(chances, drafts[..., None], axis=-1)[..., 0]


def _row(values: Float[Array, "N K V"], index: Int[Array, " N"]) -> Float[Array, "N V"]:
    return jnp.take_along_axis(values, index[:, None, None], axis=1)[:, 0]


def _normalised(rest: Float[Array, "N V"], otherwise: Float[Array, "N V"]) -> Float[Array, "N V"]:
    """`rest` to sum 1; where it is nothing but rounding, the target itself."""
    total = rest.sum(axis=-1, keepdims=True)
    return jax.lax.select(
        jnp.broadcast_to(total > 0, rest.shape), rest / jnp.where(total > 0, total, 1), otherwise
    )
