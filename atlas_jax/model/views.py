"""Three ways for rows to see their sequence: whole sequences, a prefill chunk, a decode step over slots.

The trunk is one function; a view is what it is told about time. Each is a small frozen dataclass, built inside the
program, with the same two methods: `recur` (the delta rule) and `attend`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.config import ModelConfig
from atlas_jax.kernels.backends import Kernels
from atlas_jax.kernels.cache_attention import cache_attention, write_cache
from atlas_jax.kernels.gdn_chunk import gdn_chunk
from atlas_jax.kernels.gdn_step import gdn_step
from atlas_jax.model import rollback
from atlas_jax.model.attention import causal_attention
from atlas_jax.model.mixers import Params, delta_inputs
from atlas_jax.model.rollback import Rollback
from atlas_jax.model.state import GdnCache, KvCache


@dataclasses.dataclass(frozen=True)
class Full:
    """Whole sequences from their beginning, no cache: training and scoring. Rows are `[N, T]`.

    Attributes:
      positions: `[N, T]` rotary positions.
      segments: `[N, T]` document of each row where several are packed; documents see nothing of each other.
      kernels: backend of each op, as in every view.
    """

    positions: Int[Array, "N T"]
    segments: Int[Array, "N T"] | None = None
    kernels: Kernels = Kernels()

    def recur(
        self, params: Params, cfg: ModelConfig, rows: Float[Array, "N T C+2Hv"], cache: None
    ) -> tuple[Float[Array, "N T Hv Dv"], None]:
        history = jnp.pad(rows, ((0, 0), (cfg.conv_width - 1, 0), (0, 0)))
        q, k, v, g, beta = delta_inputs(params, cfg, history, self.segments)
        if self.segments is not None:
            first = jnp.diff(self.segments, axis=1, prepend=self.segments[:, :1]) != 0
            g = jnp.where(first[..., None], -jnp.inf, g)  # a document starts by forgetting the one before
        state = jnp.zeros((rows.shape[0], *v.shape[2:3], k.shape[-1], v.shape[-1]), v.dtype)
        return gdn_chunk(state, q, k, v, g, beta, **self.kernels.options("gdn_chunk"))[0], None

    def attend(
        self,
        q: Float[Array, "N T Hq Dh"],
        k: Float[Array, "N T Hkv Dh"],
        v: Float[Array, "N T Hkv Dh"],
        cache: None,
    ) -> tuple[Float[Array, "N T Hq Dh"], None]:
        return causal_attention(q, k, v, self.segments), None


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A chunk of T prompt tokens for each of N slots, of which `num_rows[n]` are live. Rows are `[N, T]`.

    The sequences must have nothing pending. `start == 0` begins a sequence: whatever the slot held is ignored.
    """

    slots: Int[Array, " N"]
    start: Int[Array, " N"]
    num_rows: Int[Array, " N"]
    width: int
    kernels: Kernels = Kernels()

    @property
    def positions(self) -> Int[Array, "N T"]:
        return self.start[:, None] + jnp.arange(self.width)[None, :]

    def recur(
        self, params: Params, cfg: ModelConfig, rows: Float[Array, "N T C+2Hv"], cache: GdnCache
    ) -> tuple[Float[Array, "N T Hv Dv"], GdnCache]:
        taps = cfg.conv_width - 1
        live = jnp.arange(self.width)[None, :] < self.num_rows[:, None]
        fresh = self.start == 0
        window = cache.window.at[self.slots].get(mode="fill", fill_value=0)
        pool, first = rollback.by_state(cache.state, self.slots)
        state = pool.at[first].get(mode="fill", fill_value=0)
        state = jnp.where(fresh[:, None, None, None], 0, state)
        before = jnp.where(fresh[:, None, None], 0, window[:, :taps])
        history = jnp.concatenate([before, jnp.where(live[..., None], rows, 0)], axis=1)
        q, k, v, g, beta = delta_inputs(params, cfg, history)
        out, state = gdn_chunk(state, q, k, v, g, beta, live, **self.kernels.options("gdn_chunk"))
        # The newest `W - 1` live rows: the slice that starts `num_rows` into history.
        newest = jax.vmap(lambda h, n: jax.lax.dynamic_slice_in_dim(h, n, taps))(history, self.num_rows)
        pool = pool.at[first].set(state, mode="drop")
        return out, GdnCache(pool.reshape(cache.state.shape), _store_window(cache.window, self.slots, newest))

    def attend(
        self,
        q: Float[Array, "N T Hq Dh"],
        k: Float[Array, "N T Hkv Dh"],
        v: Float[Array, "N T Hkv Dh"],
        cache: KvCache,
    ) -> tuple[Float[Array, "N T Hq Dh"], KvCache]:
        cache = self.write(cache, k, v)
        lengths = self.start + self.num_rows
        return cache_attention(cache.kv, self.slots, self.positions, lengths, q), cache

    def write(self, cache: KvCache, k: Float[Array, "N T Hkv Dh"], v: Float[Array, "N T Hkv Dh"]) -> KvCache:
        """The cache with the entries of the live rows."""
        return KvCache(write_cache(cache.kv, self.slots, self.positions, self.num_rows, k, v))


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step: up to K rows for each of N slots, as R flat rows (dense work) on an `[N, K]` grid (mixers).

    Attributes:
      slots: slot of each sequence; the number of slots itself marks a padding sequence.
      lengths: committed positions before this step (row 0 is written there).
      num_rows: live rows per sequence.
      pending: accepted drafts of the last step that the window (deferred: the GDN state too) has not absorbed, at most
        `K - 1`.
      grid_to_flat: `[N, K]` flat row of each grid cell, `R` for cells that no row fills.
      flat_to_grid: `[R]` grid cell `n * K + j` of each flat row, `N * K` for padding rows.
      ragged: false where `R == N * K`, then flat rows are the grid and nothing is gathered.
      rollback: what becomes of the GDN state; what `recur` returns under "recompute" still needs `rollback.commit`.
    """

    slots: Int[Array, " N"]
    lengths: Int[Array, " N"]
    num_rows: Int[Array, " N"]
    pending: Int[Array, " N"]
    grid_to_flat: Int[Array, "N K"]
    flat_to_grid: Int[Array, " R"]
    ragged: bool
    kernels: Kernels = Kernels()
    rollback: Rollback = "deferred"

    @property
    def grid_positions(self) -> Int[Array, "N K"]:
        return self.lengths[:, None] + jnp.arange(self.grid_to_flat.shape[1])[None, :]

    @property
    def positions(self) -> Int[Array, " R"]:
        return self.to_flat(self.grid_positions)

    def to_grid(self, flat: Array) -> Array:
        """`[R, ...] -> [N, K, ...]`; cells without a row are zero."""
        if not self.ragged:
            return flat.reshape(*self.grid_to_flat.shape, *flat.shape[1:])
        return flat.at[self.grid_to_flat].get(mode="fill", fill_value=0)

    def to_flat(self, grid: Array) -> Array:
        """`[N, K, ...] -> [R, ...]`; padding rows are zero."""
        merged = grid.reshape(-1, *grid.shape[2:])
        return merged.at[self.flat_to_grid].get(mode="fill", fill_value=0) if self.ragged else merged

    def recur(
        self, params: Params, cfg: ModelConfig, rows: Float[Array, "R C+2Hv"], cache: GdnCache
    ) -> tuple[Float[Array, "R Hv Dv"], GdnCache]:
        grid = self.to_grid(rows)
        width = grid.shape[1]
        live = jnp.arange(width)[None, :] < self.num_rows[:, None]
        window = cache.window.at[self.slots].get(mode="fill", fill_value=0)
        history = jnp.concatenate(
            [align_pending(window, cfg.conv_width - 1, width - 1, self.pending), jnp.where(live[..., None], grid, 0)],
            axis=1,
        )
        # Made once: fused into each of its readers, they would all read the pool, and XLA then copies the whole pool
        # before it is written.
        history = jax.lax.optimization_barrier(history)
        # Only a deferred state still needs the pending rows themselves.
        needed = history if self.rollback == "deferred" else history[:, width - 1 :]
        q, k, v, g, beta = delta_inputs(params, cfg, needed)
        inputs, counts = (q[:, -width:], k, v, g, beta), (self.pending, self.num_rows)
        out, state = rollback.advance(self.rollback, cache.state, self.slots, *inputs, *counts, self.kernels)
        # The window ends with row 0; the drafts behind it become the next pending rows.
        flat = self.to_flat(out)
        window = _store_window(cache.window, self.slots, history[:, width:])
        return flat, GdnCache(state, window)  # type: ignore[arg-type]  # `Unfolded` until the step commits

    def attend(
        self,
        q: Float[Array, "R Hq Dh"],
        k: Float[Array, "R Hkv Dh"],
        v: Float[Array, "R Hkv Dh"],
        cache: KvCache,
    ) -> tuple[Float[Array, "R Hq Dh"], KvCache]:
        cache = self.write(cache, k, v)
        lengths = self.lengths + self.num_rows
        options = self.kernels.options("cache_attention")
        out = cache_attention(cache.kv, self.slots, self.grid_positions, lengths, self.to_grid(q), **options)
        return self.to_flat(out), cache

    def write(self, cache: KvCache, k: Float[Array, "R Hkv Dh"], v: Float[Array, "R Hkv Dh"]) -> KvCache:
        """The cache with the entries of the live rows."""
        k, v = self.to_grid(k), self.to_grid(v)
        return KvCache(write_cache(cache.kv, self.slots, self.grid_positions, self.num_rows, k, v))


def align_pending(
    window: Float[Array, "N W-1+P C"], taps: int, fold: int, pending: Int[Array, " N"]
) -> Float[Array, "N W-1+F C"]:
    """The last `taps + fold` committed rows of each sequence, newest last, zeros where there are fewer.

    `window` holds `taps` folded rows and then `pending[n]` live ones out of its P; with `p` pending the result is rows
    `p - fold ... p + taps - 1` of the window. This one shift is both the conv offset and the right-alignment of the
    rows to fold.
    """
    if fold == 0:
        return window[:, :taps]
    padded = jnp.pad(window[:, : taps + fold], ((0, 0), (fold, 0), (0, 0)))
    return jax.vmap(lambda w, p: jax.lax.dynamic_slice_in_dim(w, p, taps + fold))(padded, pending)


def materialize(
    params: Params,
    cfg: ModelConfig,
    cache: GdnCache,
    slots: Int[Array, " N"],
    pending: Int[Array, " N"],
    fold: int,
    kernels: Kernels = Kernels(),
    how: Rollback = "deferred",
) -> GdnCache:
    """Fold the pending rows (at most `fold`) of `slots` into their states; afterwards nothing is pending."""
    taps = cfg.conv_width - 1
    window = cache.window.at[slots].get(mode="fill", fill_value=0)
    history = align_pending(window, taps, fold, pending)
    if how != "deferred":
        state = rollback.settle(cache.state, slots, pending) if how == "snapshot" else cache.state
        return GdnCache(state, _store_window(cache.window, slots, history[:, fold:]))
    padded = jnp.pad(history, ((0, 0), (0, 1), (0, 0)))  # gdn_step expects a row 0; it is dead here
    q, k, v, g, beta = delta_inputs(params, cfg, padded)
    rows = jnp.zeros_like(pending)
    options = kernels.options("gdn_step")
    _, state = gdn_step(cache.state, slots, q[:, fold:], k, v, g, beta, pending, rows, **options)
    return GdnCache(state, _store_window(cache.window, slots, history[:, fold:]))


def _store_window(
    pool: Float[Array, "S W-1+P C+2Hv"], slots: Int[Array, " N"], rows: Float[Array, "N H C+2Hv"]
) -> Float[Array, "S W-1+P C+2Hv"]:
    """Write the newest rows of each sequence. The places behind them are dead and cleared: keeping them would read the
    pool in the very kernel that writes it, and XLA then copies the pool."""
    padded = jnp.pad(rows, ((0, 0), (0, pool.shape[1] - rows.shape[1]), (0, 0)))
    return pool.at[slots].set(padded.astype(pool.dtype), mode="drop")
