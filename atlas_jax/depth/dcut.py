"""D-Cut: the head proposes the ladder's depth, and the least certain of the drafts are cut before they are verified.

The method is of arXiv 2607.14647, the rules (rounding, snapping, caps, order) are the Atlas engine's. A draft's
survival is the sum of the log-probabilities up to it, which falls along a sequence, so that the best m drafts of a
batch are a prefix of every sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from atlas_jax.depth.capacity import ROW_BUDGET
from atlas_jax.depth.interface import Decision, Outcome, PolicyError, Queued, uniform
from atlas_jax.depth.ladder import LadderConfig

RATIOS = (0.25, 0.5, 0.75, 1.0)

Scores = Sequence[Sequence[float]]


def snap(ratio: float) -> float:
    """The nearest of the four ratios, the smaller one between two; `PolicyError` for what is no number."""
    if not math.isfinite(ratio):
        raise PolicyError(f"ratio must be a number from 0 to 1, got {ratio}")
    return min(RATIOS, key=lambda known: abs(known - min(max(ratio, 0.0), 1.0)))


def select(log_probs: Scores, depths: Sequence[int], row_budget: int, ratio: float) -> list[int]:
    """Drafts kept of each sequence, which has `depths[i]` of them: 1 to `depths[i]`, or 0 where it has none.

    The first draft of every sequence is kept. Of all deeper ones in the batch, `ratio` of them (half rounds up, in
    float32) survive, as many as `row_budget` rows leave room for; ties go to the earlier sequence. Log-probabilities
    that don't match the drafts in number count as certain. Source: arXiv 2607.14647, section on batch-wide selection.
    """
    kept = [min(depth, 1) for depth in depths]
    ranked = sorted(
        (-score, i, j)
        for i, (depth, each) in enumerate(zip(depths, log_probs, strict=True))
        for j, score in enumerate(accumulate(each if len(each) == depth else (0.0,) * depth))
        if j >= 1
    )
    wanted = math.floor(float(np.float32(len(ranked)) * np.float32(ratio)) + 0.5)
    mandatory = len(depths) + sum(kept)
    for _, i, j in ranked[: max(min(wanted, row_budget - mandatory), 0)]:
        kept[i] = max(kept[i], j + 1)
    return kept


def order(kept: Sequence[int], slots: Sequence[int], *, canonical: bool) -> list[tuple[int, int]]:
    """`(sequence, drafts)` in the order of dispatch.

    Deepest first, then by slot; every sequence with its own depth. Canonical: sequences by slot take the depths in
    descending order. Confidence then says how many sequences get which depth, not which ones: far fewer distinct
    launches (3 instead of 266 at 8 sequences), for an engine that captures one graph for each.
    """
    if canonical:
        by_slot = sorted(range(len(kept)), key=lambda i: (slots[i], i))
        return list(zip(by_slot, sorted(kept, reverse=True), strict=True))
    return [(i, kept[i]) for i in sorted(range(len(kept)), key=lambda i: (-kept[i], slots[i], i))]


def runs(kept: Sequence[int]) -> list[tuple[int, int]]:
    """`(drafts, sequences)` of each stretch of equal depth in an ordered batch: launches of a kernel for one depth."""
    counts = Counter(kept)
    return [(depth, counts[depth]) for depth in sorted(counts, reverse=True)]


@dataclasses.dataclass(frozen=True)
class DCut:
    """A ladder whose queued drafts are pruned up to `max_seqs` sequences.

    Attributes:
      ratio: share of the drafts behind the first that is verified; snapped to quarters, at least one.
      row_budget: verify rows of a step.
      max_seqs: most sequences at which drafts are cut; 0 never cuts.
      canonical: fewest sequences from which the canonical order assigns depths; 0 always, None never. This engine's
        shapes don't know which sequence has which depth, so here it only costs tokens; Atlas' default is 8.
    """

    config: LadderConfig = LadderConfig()
    num_drafts: int = 3
    ratio: float = 0.75
    row_budget: int = ROW_BUDGET
    max_seqs: int = 8
    canonical: int | None = 8
    name: str = "dcut"
    head: bool = True
    needs_log_probs: bool = True
    ragged: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", snap(self.ratio))
        if min(self.row_budget, self.max_seqs, self.canonical or 0) < 0:
            raise PolicyError("row_budget, max_seqs and canonical are 0 or more")

    @property
    def max_drafts(self) -> int:
        return self.num_drafts

    def start(self) -> None:
        return None

    def decide(self, state: None, queued: Sequence[Queued]) -> Decision:
        n = len(queued)
        depth = self.config.step_drafts(n, self.num_drafts)
        if depth < 2 or n > self.max_seqs:
            return uniform(queued, depth)
        ready = [min(q.drafts, q.most, depth) for q in queued]
        measured = [q.log_probs if len(q.log_probs) == q.drafts else () for q in queued]
        confidence = [each[:most] for each, most in zip(measured, ready, strict=True)]
        kept = select(confidence, ready, self.row_budget, self.ratio)
        if self.canonical is not None and n >= self.canonical:
            assigned = dict(order(kept, range(n), canonical=True))
            kept = [min(assigned[i], ready[i]) for i in range(n)]
        return Decision(tuple(kept), depth)

    def observe(self, state: None, outcome: Outcome) -> None:
        return None

    def depths(self, n: int) -> frozenset[int]:
        depth = self.config.step_drafts(n, self.num_drafts)
        return frozenset(range(1, depth + 1)) if depth >= 2 and n <= self.max_seqs else frozenset((depth,))
