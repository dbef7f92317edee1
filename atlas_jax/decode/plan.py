"""What the host asks of a step and what the step answers: a compiled shape, one packed array in, a few arrays out."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from atlas_jax.decode.accept import Rule
from atlas_jax.decode.sampling import Controls, HostOrDevice
from atlas_jax.model.rollback import Rollback


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape.

    Attributes:
      n: sequences, padded.
      k: most rows of one sequence; also bounds the pending rows of the last step, and `k - 1` drafts are proposed.
      rows: flat rows of the whole batch, padded; `n * k` where every sequence may be full.
      head: whether the draft head runs. False is plain decode and takes k = 1.
      log_probs: whether the step also answers the log-probability of each draft under the head.
    """

    n: int
    k: int
    rows: int
    head: bool
    log_probs: bool = False

    def __post_init__(self) -> None:
        if not (self.n >= 1 and self.k >= 1 and self.n <= self.rows <= self.n * self.k):
            raise ValueError(f"no such bucket: {self}; rows must lie between n and n * k")
        if not self.head and (self.k > 1 or self.log_probs):
            raise ValueError(f"{self} verifies drafts without a head to propose them")


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What all steps of an engine share; a change means other programs.

    Attributes:
      acceptance: the rule. Anything but "match" keeps the drafts' distributions in the state.
      top_log_probs: how many of the likeliest tokens are answered with each emitted one.
      rounds: most steps in one call.
      end_ids: end tokens that a request may have.
      rollback: how recurrent states go back to the last accepted row.
    """

    acceptance: Rule = "match"
    top_log_probs: int = 0
    rounds: int = 1
    end_ids: int = 8
    rollback: Rollback = "deferred"


_INTS = (
    *("slots", "lengths", "pending", "head", "num_rows", "room", "limit", "prompts", "rounds", "wants", "scripted"),
    *("top_k", "biased", "masked"),
)
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_FIXED = len(_INTS) + len(_FLOATS) + 2


class Plan(NamedTuple):
    """One entry per sequence, all in the columns of one int32 array: a step pays for every array it is handed.

    On the host the fields are views: writing them writes `packed`. Padding sequences have `num_rows` 0 and the slot
    `S`.

    Attributes:
      packed: everything, as the program takes it.
      slots: slot of the sequence.
      lengths: committed positions (row 0 is written there; its token is `tokens[:, 0]`).
      pending: drafts accepted by the last step, still to be folded (into the window at least, see `model.rollback`).
      head: leading entries of the head's own cache that are the sequence's.
      num_rows: rows to verify, `1 + drafts`.
      room: tokens the request may still emit, at least `num_rows`.
      limit: most rows of this request in the rounds after the first.
      prompts: tokens of the prompt; what stands behind them is answer.
      rounds: steps that this call may take, the same for all.
      wants: whether log-probabilities of emitted tokens are wanted.
      scripted: whether the drafts are given rather than drawn by the head.
      controls: how tokens are picked.
      ends: end tokens of the request, -1 where there are fewer.
      tokens: the last emitted token, then the queued drafts.
    """

    packed: Int[HostOrDevice, "N W"]
    slots: Int[HostOrDevice, " N"]
    lengths: Int[HostOrDevice, " N"]
    pending: Int[HostOrDevice, " N"]
    head: Int[HostOrDevice, " N"]
    num_rows: Int[HostOrDevice, " N"]
    room: Int[HostOrDevice, " N"]
    limit: Int[HostOrDevice, " N"]
    prompts: Int[HostOrDevice, " N"]
    rounds: Int[HostOrDevice, " N"]
    wants: Int[HostOrDevice, " N"]
    scripted: Int[HostOrDevice, " N"]
    controls: Controls
    ends: Int[HostOrDevice, "N E"]
    tokens: Int[HostOrDevice, "N K"]

    @staticmethod
    def width(k: int, end_ids: int = StepConfig.end_ids) -> int:
        """Columns of a packed plan."""
        return _FIXED + end_ids + k

    @classmethod
    def empty(cls, n: int, k: int, slots: int, end_ids: int = StepConfig.end_ids) -> Plan:
        """A plan of n padding sequences of up to k rows, to be filled in; `slots` is the number of slots."""
        plan = cls.of(np.zeros((n, cls.width(k, end_ids)), np.int32), k)
        plan.slots[:], plan.ends[:] = slots, -1
        plan.room[:] = plan.rounds[:] = 1
        plan.limit[:] = k
        plan.controls.top_p[:] = plan.controls.repetition[:] = 1
        return plan

    @classmethod
    def of(cls, packed: HostOrDevice, k: int) -> Plan:
        """The fields of a packed plan: views on the host, columns in a program."""
        floats: HostOrDevice
        words: HostOrDevice
        if isinstance(packed, np.ndarray):
            floats, words = packed.view(np.float32), packed.view(np.uint32)
        else:
            floats, words = (jax.lax.bitcast_convert_type(packed, kind) for kind in (jnp.float32, jnp.uint32))
        columns = {name: packed[:, i] for i, name in enumerate(_INTS)}
        columns |= {name: floats[:, len(_INTS) + i] for i, name in enumerate(_FLOATS)}
        controls = Controls(**{f: columns.pop(f) for f in Controls._fields[:-1]}, keys=words[:, _FIXED - 2 : _FIXED])
        end = packed.shape[1] - k
        return cls(packed=packed, controls=controls, ends=packed[:, _FIXED:end], tokens=packed[:, end:], **columns)


class Result(NamedTuple):
    """What a call answers, one entry per round of it (those that were not run are zero).

    Attributes:
      ints: `[M, N, 2 + K + P]`: tokens emitted, whether the sequence's state is not what the plan says (it was then
        left alone), the tokens of the rows (the first `count` are the emitted ones), the drafts for the next step.
      log_probs: of the rows' tokens under the model's own distribution; zero where nobody wants them.
      draft_log_probs: of each proposed draft under the head; of width 0 unless the bucket asks for it.
      top_ids, top_log_probs: the likeliest tokens of each row; of width 0 unless the engine asks for them.
    """

    ints: Int[Array, "M N 2+K+P"]
    log_probs: Float[Array, "M N K"]
    draft_log_probs: Float[Array, "M N P"]
    top_ids: Int[Array, "M N K A"]
    top_log_probs: Float[Array, "M N K A"]


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a result, on the host."""

    k: int
    ints: np.ndarray
    chances: np.ndarray | None
    draft_chances: np.ndarray | None
    ids: np.ndarray | None
    values: np.ndarray | None

    @property
    def ran(self) -> bool:
        return bool(self.ints[:, :2].any())

    def tokens(self, i: int) -> list[int]:
        """What sequence i emitted."""
        return self.ints[i, 2 : 2 + self.ints[i, 0]].tolist()

    def fault(self, i: int) -> bool:
        return bool(self.ints[i, 1])

    def drafts(self, i: int) -> tuple[int, ...]:
        return tuple(self.ints[i, 2 + self.k :].tolist())

    def log_probs(self, i: int, count: int) -> list[float]:
        """Of the first `count` tokens; none where nobody wanted any."""
        return [] if self.chances is None else self.chances[i, :count].tolist()

    def draft_log_probs(self, i: int) -> tuple[float, ...]:
        return () if self.draft_chances is None else tuple(self.draft_chances[i].tolist())

    def top(self, i: int, count: int) -> list[tuple[tuple[int, float], ...]]:
        """The likeliest tokens at the first `count` places."""
        if self.ids is None or self.values is None:
            return []
        pairs = zip(self.ids[i, :count].tolist(), self.values[i, :count].tolist(), strict=True)
        return [tuple(zip(ids, values, strict=True)) for ids, values in pairs]


def fetch(result: Result, k: int, log_probs: bool) -> list[Round]:
    """The rounds of an answer, brought to the host: integers always, floats where somebody wants them."""
    bring = lambda x, wanted: np.asarray(x) if wanted and x.shape[-1] else None
    parts = (
        bring(result.log_probs, log_probs),
        bring(result.draft_log_probs, True),
        bring(result.top_ids, True),
        bring(result.top_log_probs, True),
    )
    ints = np.asarray(result.ints)
    return [Round(k, ints[m], *(None if x is None else x[m] for x in parts)) for m in range(len(ints))]
