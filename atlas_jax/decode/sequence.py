"""A request in a slot, as the host sees it: what is committed, what is pending, what is queued."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from atlas_jax.decode.plan import Bucket, Plan
from atlas_jax.decode.requests import Completion, FinishReason, Request
from atlas_jax.decode.telemetry import Acceptance

Top = tuple[tuple[int, float], ...]


@dataclasses.dataclass
class Active:
    """A sequence in a slot. `text` is prompt and answer; once `ready`, its last token alone is not consumed yet.

    Attributes:
      stop_at: most tokens, prompt included.
      ends: tokens that end it.
      key: of its noise, two words.
      length: committed positions.
      pending: drafts accepted by the last step, not folded yet.
      head: leading entries of the head's own cache that are this sequence's.
      blank: whether the slot still holds what its last sequence left.
      kept: whether its prompt's state has been offered for reuse.
      reused: prompt tokens whose state was at hand.
      drafts, draft_log_probs: queued for the next step.
    """

    id: int
    request: Request
    slot: int
    text: list[int]
    stop_at: int
    ends: frozenset[int]
    key: np.ndarray
    length: int = 0
    pending: int = 0
    head: int = 0
    blank: bool = True
    kept: bool = False
    reused: int = 0
    drafts: tuple[int, ...] = ()
    draft_log_probs: tuple[float, ...] = ()
    log_probs: list[float] = dataclasses.field(default_factory=list)
    top: list[Top] = dataclasses.field(default_factory=list)
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)

    @property
    def ready(self) -> bool:
        """Whether it decodes; else its prompt is still being consumed."""
        return not self.blank and self.length == len(self.text) - 1

    @property
    def room(self) -> int:
        """Tokens that it may still emit."""
        return self.stop_at - len(self.text)

    @property
    def emitted(self) -> list[int]:
        return self.text[len(self.request.prompt) :]

    @property
    def most_drafts(self) -> int:
        """Drafts that its room and its request leave."""
        limit = self.request.max_drafts
        return self.room - 1 if limit is None else min(self.room - 1, limit)

    def begin_anew(self, slot: int) -> None:
        """Its state is gone; the text stands."""
        self.slot, self.blank = slot, True
        self.length = self.pending = self.head = 0
        self.drafts, self.draft_log_probs = (), ()

    def fill(self, plan: Plan, i: int, rows: int, bucket: Bucket, scripted: bool) -> None:
        """Write its entry of a plan."""
        request, sampling, controls = self.request, self.request.sampling, plan.controls
        plan.slots[i], plan.lengths[i], plan.pending[i], plan.head[i] = self.slot, self.length, self.pending, self.head
        plan.num_rows[i], plan.room[i], plan.prompts[i] = rows, self.room, len(request.prompt)
        plan.limit[i] = bucket.k if request.max_drafts is None else min(bucket.k, request.max_drafts + 1)
        plan.wants[i], plan.scripted[i] = request.log_probs, scripted
        plan.ends[i, : len(self.ends)] = list(self.ends)
        plan.tokens[i, :rows] = (self.text[-1], *self.drafts[: rows - 1])
        controls.temperature[i], controls.keys[i] = sampling.temperature, self.key
        controls.top_k[i], controls.top_p[i], controls.min_p[i] = sampling.top_k, sampling.top_p, sampling.min_p
        controls.repetition[i] = sampling.repetition_penalty
        controls.presence[i], controls.frequency[i] = sampling.presence_penalty, sampling.frequency_penalty
        controls.biased[i], controls.masked[i] = bool(sampling.bias), sampling.allowed is not None

    def violation(
        self, rows: int, tokens: Sequence[int], verified: tuple[int, ...], fault: bool, compared: bool
    ) -> str | None:
        """What is wrong with a step's answer; None if nothing is. Cheap, and always asked.

        Args:
          rows: that the step ran; `verified` are the drafts among them.
          fault: whether the device found another state in the slot than the plan said.
          compared: whether accepted drafts must be the emitted tokens, letter by letter.
        """
        where = f"request {self.id} at position {self.length} (slot {self.slot})"
        if fault:
            return (
                f"{where}: the slot does not hold {self.length} committed positions, {self.pending} pending rows and "
                f"{self.head} entries of the head's cache"
            )
        if not 1 <= len(tokens) <= min(rows, self.room):
            return f"{where}: {rows} rows with room for {self.room} emitted {len(tokens)} tokens"
        if compared and tuple(tokens[:-1]) != verified[: len(tokens) - 1]:
            return f"{where}: emitted {list(tokens)} from drafts {verified}"
        if self.length != len(self.text) - 1 or not 0 <= self.pending <= self.length or self.head > self.length:
            return f"{where}: {len(self.text)} tokens, {self.pending} pending, {self.head} head entries don't fit"
        return None

    def completion(self, finished: FinishReason, by: int | str | None, error: str) -> Completion:
        return Completion(
            tuple(self.emitted),
            finished,
            self.acceptance,
            tuple(self.log_probs),
            tuple(self.top),
            by,
            error,
            self.reused,
        )


def random_key(seed: int | None, engine_seed: int, id: int) -> np.ndarray:
    """A request's random key, two words; made on the host so that admission compiles nothing."""
    if seed is None:
        return np.random.SeedSequence((engine_seed, id)).generate_state(2, np.uint32)
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
