"""What a decode step leaves of a recurrent state while nobody knows yet which of its rows will be accepted.

A state can't be cut back like a cache of keys and values. One choice, three answers, the same tokens. With `p` drafts
accepted by the last step and K rows in this one, and counted per GDN layer and sequence:

| rollback | a step | the pool then holds | states moved |
|---|---|---|---|
| `deferred` | reads, folds the p drafts and row 0, writes; its drafts are run for outputs | after row 0 | 2 |
| `snapshot` | reads snapshot p, runs every row, writes the state behind each | after each row | 1 + K |
| `recompute` | reads, runs every row; when acceptance is known reads, folds, writes | after the last accepted row | 3 |

Under all three the window of pre-convolution rows lags by the p drafts (`views.align_pending`), so plans, ledger and
`pending` mean the same. The host may take accepted rows back before they are folded, so not under `recompute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlas_jax.kernels.backends import BackendError, Kernels
from atlas_jax.kernels.gdn_step import gdn_step, xla
from atlas_jax.kernels.numerics import widen
from atlas_jax.kernels.slots import gather_once
from atlas_jax.model.state import GdnCache, LayerCache

Rollback = Literal["deferred", "snapshot", "recompute"]


class Unfolded(NamedTuple):
    """A pool in the middle of a step under `recompute`: the step's rows wait to be folded (`commit`)."""

    pool: Float[Array, "S Hv Dk Dv"]
    k: Float[Array, "N K Hk Dk"]
    v: Float[Array, "N K Hv Dv"]
    g: Float[Array, "N K Hv"]
    beta: Float[Array, "N K Hv"]


def check(rollback: Rollback, kernels: Kernels) -> None:
    """Raises `BackendError` where these kernels can't roll back like this."""
    if rollback not in get_args(Rollback):
        raise BackendError(f"rollback {rollback!r} is none of {', '.join(map(repr, get_args(Rollback)))}")
    if rollback != "deferred" and kernels.gdn_step != "xla":
        raise BackendError(
            f"rollback {rollback!r} runs on the xla backend only and gdn_step is {kernels.gdn_step!r}; choose "
            "Kernels(gdn_step='xla') or rollback 'deferred'"
        )


def states_moved(rollback: Rollback, rows: int) -> int:
    """Recurrent states that a step of so many rows reads and writes per GDN layer and sequence."""
    return {"deferred": 2, "snapshot": 1 + rows, "recompute": 3}[rollback]


def advance(
    rollback: Rollback,
    pool: Float[Array, "S *snapshots Hv Dk Dv"],
    slots: Int[Array, " N"],
    q: Float[Array, "N K Hk Dk"],
    k: Float[Array, "N M Hk Dk"],
    v: Float[Array, "N M Hv Dv"],
    g: Float[Array, "N M Hv"],
    beta: Float[Array, "N M Hv"],
    pending: Int[Array, " N"],
    num_rows: Int[Array, " N"],
    kernels: Kernels,
) -> tuple[Float[Array, "N K Hv Dv"], Float[Array, "S *snapshots Hv Dk Dv"] | Unfolded]:
    """Outputs of a step's K rows, and the pool that it leaves; arguments are those of `gdn_step`.

    Only `deferred` has pending rows to fold, `M = 2 K - 1`; the others take this step's own, `M = K`. What `recompute`
    leaves is settled by `commit`. Raises `BackendError` as `check` does.
    """
    check(rollback, kernels)
    options = kernels.options("gdn_step")
    if rollback == "deferred":
        return gdn_step(pool, slots, q, k, v, g, beta, pending, num_rows, **options)
    if rollback == "recompute":
        out, _ = gdn_step(pool, slots, q, k, v, g, beta, jnp.zeros_like(pending), num_rows, **options)
        return out, Unfolded(pool, k, v, g, beta)

    flat, first = by_state(pool, slots)
    live = jnp.arange(q.shape[1])[None] < num_rows[:, None]
    state = widen(gather_once(flat, first + pending))
    rows = [x.astype(state.dtype) for x in _only(live, q, k, v, g, beta)]
    outs = []
    for j in range(q.shape[1]):
        out, state = xla.row_by_row(state, *(x[:, j : j + 1] for x in rows))
        outs.append(out)
        flat = flat.at[jnp.where(live[:, j], first + j, flat.shape[0])].set(state.astype(flat.dtype), mode="drop")
    return jnp.concatenate(outs, axis=1).astype(pool.dtype), flat.reshape(pool.shape)


def commit(layers: Sequence[LayerCache], slots: Int[Array, " N"], count: Int[Array, " N"]) -> tuple[LayerCache, ...]:
    """The caches at the end of a step in which the first `count[n]` rows of sequence n were accepted."""

    def settled(cache: LayerCache) -> LayerCache:
        if isinstance(cache, GdnCache) and isinstance(cache.state, Unfolded):
            return cache._replace(state=_fold(*cache.state, slots=slots, count=count))
        return cache

    return tuple(map(settled, layers))


def settle(
    pool: Float[Array, "S K Hv Dk Dv"], slots: Int[Array, " N"], pending: Int[Array, " N"]
) -> Float[Array, "S K Hv Dk Dv"]:
    """Snapshots with the one behind the last accepted row put first: nothing is pending any more."""
    flat, first = by_state(pool, slots)
    return flat.at[first].set(gather_once(flat, first + pending), mode="drop").reshape(pool.shape)


def by_state(
    pool: Float[Array, "S *snapshots Hv Dk Dv"], slots: Int[Array, " N"]
) -> tuple[Float[Array, "states Hv Dk Dv"], Int[Array, " N"]]:
    """A pool as one row per state, and where in it each slot's first state is; beyond its end for padding slots."""
    if pool.ndim == 4:
        return pool, slots
    return pool.reshape(-1, *pool.shape[2:]), slots * pool.shape[1]


def _fold(
    pool: Float[Array, "S Hv Dk Dv"],
    k: Float[Array, "N K Hk Dk"],
    v: Float[Array, "N K Hv Dv"],
    g: Float[Array, "N K Hv"],
    beta: Float[Array, "N K Hv"],
    slots: Int[Array, " N"],
    count: Int[Array, " N"],
) -> Float[Array, "S Hv Dk Dv"]:
    """The pool with the first `count` rows folded: all K are, but the others are made to change nothing."""
    k, v, g, beta = _only(jnp.arange(k.shape[1])[None] < count[:, None], k, v, g, beta)
    # A sequence that emits nothing is left alone. And as these slots depend on what was accepted, no compiler can take
    # this read for the one before and hold the states of all layers in between.
    slots = jnp.where(count > 0, slots, pool.shape[0])
    earlier, one = jnp.full_like(count, k.shape[1] - 1), jnp.ones_like(count)
    return gdn_step(pool, slots, jnp.zeros_like(k[:, :1]), k, v, g, beta, earlier, one)[1]


def _only(live: Bool[Array, "N K"], *rows: Float[Array, "N K ..."]) -> list[Float[Array, "N K ..."]]:
    """The rows with zeros for dead ones, whatever those hold: such a row gives zeros and changes no state."""
    return [jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), x, 0) for x in rows]
