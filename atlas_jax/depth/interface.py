"""What a depth policy is told, what it answers, and what it learns from; plain numbers, no arrays, no clock.

A policy is a frozen configuration with pure functions: all that it remembers is in a state that its caller carries from
`start` through every `observe`. So a run replays exactly, and policies may be exchanged between steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class PolicyError(ValueError):
    """An unknown policy or option, or one that does not fit the engine; the message lists what there is."""


@dataclass(frozen=True, slots=True)
class Queued:
    """What a policy may know of one sequence before a step.

    Attributes:
      drafts: queued drafts.
      log_probs: of each under the head, given those before it; empty where the policy has no use for them.
      context: committed tokens.
      most: most drafts that it may verify: what its room, its request and its slot's capacity leave.
      outlook: log-probability of acceptance of the drafts that this step would propose. Nobody knows it but a
        simulator, which tells `Oracle`; else empty.
    """

    drafts: int
    log_probs: tuple[float, ...]
    context: int
    most: int
    outlook: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step does.

    Attributes:
      verify: drafts to verify per sequence, in the order given; each at most `min(drafts, most)`.
      propose: drafts that every sequence gets proposed for the next step; part of the compiled shape.
    """

    verify: tuple[int, ...]
    propose: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave, per sequence in the order of the decision.

    Attributes:
      width: active sequences.
      offered: drafts that were verified.
      accepted: those accepted, after the cut at end tokens and limits.
      log_probs: of the drafts that were queued, offered or not; empty tuples where the policy has no use for them.
    """

    width: int
    offered: tuple[int, ...]
    accepted: tuple[int, ...]
    log_probs: tuple[tuple[float, ...], ...]


State = Hashable


class Policy(Protocol):
    """How many drafts to verify and to propose.

    Attributes:
      name: unique among configurations, and what `parse_policy` reads.
      head: whether the draft head runs.
      max_drafts: most drafts that it ever verifies or proposes.
      needs_log_probs: whether `decide` and `observe` want the drafts' log-probabilities.
      ragged: whether sequences of one step may verify different numbers of drafts by its choice.
    """

    @property
    def name(self) -> str: ...

    @property
    def head(self) -> bool: ...

    @property
    def max_drafts(self) -> int: ...

    @property
    def needs_log_probs(self) -> bool: ...

    @property
    def ragged(self) -> bool: ...

    def start(self) -> Any:
        """The state before the first step: hashable, or None."""

    def decide(self, state: Any, queued: Sequence[Queued]) -> Decision:
        """What to do in the next step, with at least one sequence."""

    def observe(self, state: Any, outcome: Outcome) -> Any:
        """The state after a step."""

    def depths(self, n: int) -> frozenset[int]:
        """Every depth that it may verify or propose with n active sequences: what warm-up compiles."""


class Costs(Protocol):
    """What steps cost; the same arguments give the same answer."""

    def __hash__(self) -> int: ...

    def seconds(self, n: int, k: int, rows: int, context: float, head: bool = True) -> float:
        """Of one step over n sequences of up to k rows, `rows` in all, that proposes k - 1 drafts each.

        `context` counts committed tokens of a sequence. `head` False is plain decode: k is 1 and nothing is proposed.
        """


def uniform(queued: Sequence[Queued], depth: int) -> Decision:
    """The same depth for all sequences, as far as each can go."""
    return Decision(tuple(min(q.drafts, q.most, depth) for q in queued), depth)
