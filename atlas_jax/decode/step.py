"""One step, one program: verify, accept, commit, refill and propose, for every n and every depth.

The host says what runs in one small integer array, the program answers in another; what lives on the device between
steps is the model state, donated and updated in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from atlas_jax.config import ModelConfig
from atlas_jax.decode.accept import emitted_count
from atlas_jax.decode.sampling import pick
from atlas_jax.kernels.backends import Kernels
from atlas_jax.model import mtp
from atlas_jax.model.mixers import Params
from atlas_jax.model.state import GdnCache, ModelState
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Prefill, Step, materialize

HostOrDevice = Any  # a plan is NumPy on the host and traced arrays in the program


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape.

    Attributes:
      n: sequences, padded.
      k: most rows of one sequence; also bounds the pending rows of the last step, and `k - 1` drafts are proposed.
      rows: flat rows of the whole batch, padded; `n * k` where every sequence may be full.
      head: whether the draft head runs. False is plain decode and takes k = 1.
    """

    n: int
    k: int
    rows: int
    head: bool

    def __post_init__(self) -> None:
        if not (self.n >= 1 and self.k >= 1 and self.n <= self.rows <= self.n * self.k):
            raise ValueError(f"no such bucket: {self}; rows must lie between n and n * k")
        if not self.head and self.k > 1:
            raise ValueError(f"{self} verifies drafts without a head to propose them")


class Plan(NamedTuple):
    """What the host asks of a step, one entry per sequence. Padding sequences have `num_rows` 0 and the slot `S`.

    Attributes:
      slots: slot of the sequence.
      lengths: committed positions (row 0 is written there; its token is `tokens[:, 0]`).
      pending: drafts accepted by the last step, still to be folded.
      num_rows: rows to verify, `1 + drafts`.
      room: tokens the request may still emit, at least `num_rows`.
      stops: whether the engine's end tokens end this request (0 for `ignore_eos`).
      tokens: the last emitted token, then the queued drafts.
      temperature: sampling temperature, float32.
      keys: the request's random key.
    """

    slots: Int[HostOrDevice, " N"]
    lengths: Int[HostOrDevice, " N"]
    pending: Int[HostOrDevice, " N"]
    num_rows: Int[HostOrDevice, " N"]
    room: Int[HostOrDevice, " N"]
    stops: Int[HostOrDevice, " N"]
    tokens: Int[HostOrDevice, "N K"]
    temperature: Float[HostOrDevice, " N"]
    keys: UInt32[HostOrDevice, "N 2"]

    @classmethod
    def empty(cls, n: int, k: int, slots: int) -> Plan:
        """A plan of n padding sequences of up to k rows, to be filled in; `slots` is the number of slots."""
        ints = lambda value: np.full(n, value, np.int32)
        return cls(
            slots=ints(slots),
            lengths=ints(0),
            pending=ints(0),
            num_rows=ints(0),
            room=ints(1),
            stops=ints(1),
            tokens=np.zeros((n, k), np.int32),
            temperature=np.zeros(n, np.float32),
            keys=np.zeros((n, 2), np.uint32),
        )

    def pack(self) -> np.ndarray:
        """All fields as one int32 `[N, 9 + K]` array: a step pays for every array it is handed."""
        columns = [self.slots, self.lengths, self.pending, self.num_rows, self.room, self.stops]
        ints = np.stack(columns, axis=1, dtype=np.int32)
        temperature = np.asarray(self.temperature, np.float32).view(np.int32)[:, None]
        keys = np.asarray(self.keys, np.uint32).view(np.int32)
        return np.concatenate([ints, temperature, keys, np.asarray(self.tokens, np.int32)], axis=1)

    @classmethod
    def unpack(cls, packed: Int[Array, "N 9+K"]) -> Plan:
        """The inverse of `pack`, inside the program."""
        temperature = jax.lax.bitcast_convert_type(packed[:, 6], jnp.float32)
        keys = jax.lax.bitcast_convert_type(packed[:, 7:9], jnp.uint32)
        slots, lengths, pending, num_rows, room, stops = (packed[:, i] for i in range(6))
        return cls(slots, lengths, pending, num_rows, room, stops, packed[:, 9:], temperature, keys)


class Result(NamedTuple):
    """What a step answers.

    Attributes:
      ints: `[N, 1 + K + P]`: tokens emitted, the target's picks (the first `count` are the emitted ones), the drafts
        for the next step.
      draft_log_probs: log-probability of each proposed draft under the head; of width 0 unless asked for.
    """

    ints: Int[Array, "N 1+K+P"]
    draft_log_probs: Float[Array, "N P"]


def step(
    params: Params,
    state: ModelState,
    packed: Int[Array, "N 9+K"],
    cfg: ModelConfig,
    bucket: Bucket,
    ends: tuple[int, ...],
    log_probs: bool = False,
    kernels: Kernels = Kernels(),
) -> tuple[ModelState, Result]:
    """Run one step of `bucket` on a packed plan; the state comes back updated (donate it).

    `ends` are the end tokens; `log_probs` asks for `draft_log_probs`. Jit with all but the first three static.
    """
    plan = Plan.unpack(packed)
    n, k = bucket.n, bucket.k
    view = _view(plan, bucket, kernels)
    row_tokens, row_temperature = view.to_flat(plan.tokens), view.to_flat(_per_row(plan.temperature, k))
    row_keys = view.to_flat(_per_row(plan.keys, k))

    # Verify. The token after row j stands at position lengths + j + 1.
    hidden, layers = trunk(params, cfg, row_tokens, view, state.layers)
    picked = pick(logits(params, hidden), row_temperature, row_keys, view.positions + 1)
    picks = view.to_grid(picked)
    is_end = (picks[:, :, None] == jnp.asarray(ends, jnp.int32)).any(axis=-1) & (plan.stops[:, None] > 0)
    count = emitted_count(picks, plan.tokens[:, 1:], plan.num_rows, plan.room, is_end)
    if not bucket.head:
        ints = jnp.concatenate([count[:, None], picks], axis=1)
        return state._replace(layers=layers), Result(ints, jnp.zeros((n, 0)))

    if state.head is None:
        raise ValueError(f"{bucket} runs a draft head and the state was made without one")
    # Refill: the committed rows enter the head's own cache, made of the trunk's true hiddens and the tokens after them.
    # The head is one layer, so this takes no attention and no FFN.
    entries = mtp.head_entries(params, cfg, picked, hidden, view.positions)
    cache: Any = dataclasses.replace(view, num_rows=count).write(state.head, *entries)

    # Propose: a chain of single rows that begins with the last committed one.
    last = jnp.maximum(count - 1, 0)[:, None]
    draft = jnp.take_along_axis(picks, last, axis=1)[:, 0]
    recycled = jnp.take_along_axis(view.to_grid(hidden), last[:, :, None], axis=1)[:, 0]
    drafts: list[Array] = []
    chances: list[Array] = []
    for j in range(k - 1):
        row = _single(plan, plan.lengths + count - 1 + j, count > 0)
        recycled, cache = mtp.head(params, cfg, draft, recycled, row, cache)
        scores = logits(params, recycled)
        draft = pick(scores, plan.temperature, plan.keys, plan.lengths + count + j + 1)
        drafts.append(draft)
        if log_probs:
            chances.append(jnp.take_along_axis(jax.nn.log_softmax(scores, axis=-1), draft[:, None], axis=1)[:, 0])
    ints = jnp.concatenate([count[:, None], picks, *(draft[:, None] for draft in drafts)], axis=1)
    return ModelState(layers, cache), Result(ints, jnp.stack(chances, axis=1) if chances else jnp.zeros((n, 0)))


def prefill(
    params: Params,
    state: ModelState,
    packed: Int[Array, " 4+T"],
    *,
    cfg: ModelConfig,
    width: int,
    kernels: Kernels = Kernels(),
) -> ModelState:
    """Consume up to `width` prompt tokens of one sequence.

    `packed` is `(slot, start, count, tokens[0] ... tokens[width])`; the token after the last live one is needed too,
    because the head's own cache pairs each hidden with the token that follows it.
    """
    slots, start, count, tokens = packed[0:1], packed[1:2], packed[2:3], packed[None, 3:]
    view = Prefill(slots, start, count, width, kernels)
    hidden, layers = trunk(params, cfg, tokens[:, :-1], view, state.layers)
    if state.head is None:
        return ModelState(layers, None)
    entries = mtp.head_entries(params, cfg, tokens[:, 1:], hidden, view.positions)
    return ModelState(layers, view.write(state.head, *entries))


def fold_pending(
    params: Params,
    state: ModelState,
    packed: Int[Array, "2 N"],
    *,
    cfg: ModelConfig,
    fold: int,
    kernels: Kernels = Kernels(),
) -> ModelState:
    """Fold the pending rows (at most `fold`) of slots `packed[0]`, `packed[1]` of them each, into their GDN states:
    for tests, saving, prefix reuse."""
    slots, pending = packed
    layers = tuple(
        materialize(params["layers"][i]["mixer"], cfg, cache, slots, pending, fold, kernels)
        if isinstance(cache, GdnCache)
        else cache
        for i, cache in enumerate(state.layers)
    )
    return state._replace(layers=layers)


def _view(plan: Plan, bucket: Bucket, kernels: Kernels) -> Step:
    n, k, rows = bucket.n, bucket.k, bucket.rows
    cells = jnp.arange(n * k, dtype=jnp.int32).reshape(n, k)
    if rows == n * k:
        return Step(plan.slots, plan.lengths, plan.num_rows, plan.pending, cells, cells.reshape(-1), False, kernels)
    offsets = jnp.cumsum(plan.num_rows) - plan.num_rows
    column = jnp.arange(k)[None, :]
    to_flat = jnp.where(column < plan.num_rows[:, None], offsets[:, None] + column, rows)
    to_grid = jnp.full(rows, n * k, jnp.int32).at[to_flat].set(cells, mode="drop")
    return Step(plan.slots, plan.lengths, plan.num_rows, plan.pending, to_flat, to_grid, True, kernels)


def _single(plan: Plan, lengths: Int[Array, " N"], active: Array) -> Step:
    cells = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    return Step(plan.slots, lengths, active.astype(jnp.int32), jnp.zeros_like(lengths), cells[:, None], cells, False)


def _per_row(values: Array, k: int) -> Array:
    return jnp.repeat(values[:, None], k, axis=1)
