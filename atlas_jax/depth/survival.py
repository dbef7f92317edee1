"""Survival: verify the drafts whose expected tokens outweigh what their rows cost, batch-wide, by a table of costs.

A draft's survival is the probability that it and all before it are accepted. `Survival` estimates it from the head's
log-probabilities, corrected by what became of earlier drafts; `Oracle` is told it. Both then do the same: the rate of
the batch (tokens per second at the best depth) is the price of a second, and a row is worth verifying while its
survival exceeds the price of the time it adds. Maximising tokens minus price times seconds, step by step, maximises
tokens per second over all steps (Dinkelbach 1967), which maximising each step's own ratio does not.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from itertools import accumulate

from atlas_jax.depth.interface import Costs, Decision, Outcome, PolicyError, Queued

Curve = tuple[float, ...]  # survival of drafts 1, 2, ... of one sequence

# Bins of a draft's probability under the head. Fine near 1, where heads put most of their drafts.
BIN_EDGES = tuple(math.log(p) for p in (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995))
_CENTRES = (0.03, 0.07, 0.15, 0.27, 0.42, 0.57, 0.72, 0.85, 0.93, 0.965, 0.99, 0.999)
_PRIOR = 8.0  # verifies that the head's own word counts for, per bin
_MEMORY = 256  # verifies over which the mean acceptance is taken


@functools.lru_cache(1 << 14)
def best_depth(
    costs: Costs, curves: tuple[Curve, ...], deepest: int, context: float, row_budget: int | None = None
) -> tuple[int, float]:
    """How many drafts to propose for these survivals, and tokens per second where steps verify the best of them.

    Ties go to fewer drafts. No drafts leave the head running, so that a policy can come back.
    """
    n, found = len(curves), (0, 0.0)
    for depth in range(deepest + 1):
        ranked = sorted((s for curve in curves for s in curve[:depth]), reverse=True)[: _spare(row_budget, n)]
        tokens = float(n)
        for rows, gain in enumerate([0.0, *ranked], start=n):
            tokens += gain
            rate = tokens / costs.seconds(n, depth + 1, rows, context)
            if rate > found[1]:
                found = depth, rate
    return found


def best_rows(
    costs: Costs, curves: Sequence[Curve], price: float, propose: int, context: float, row_budget: int | None = None
) -> tuple[int, ...]:
    """Drafts to verify of each sequence: those that maximise tokens minus `price` (tokens a second) times seconds.

    Exact: among drafts up to a common depth, the cost of a step sees only their number.
    """
    n, deepest = len(curves), max(map(len, curves), default=0)
    best, kept = -math.inf, (0,) * n
    # Up to what is proposed anyway, depth is free.
    for depth in range(min(propose, deepest), deepest + 1):
        ranked = sorted([(-s, i) for i, curve in enumerate(curves) for s in curve[:depth]])[: _spare(row_budget, n)]
        k, tokens, most = max(depth, propose) + 1, float(n), -1
        for rows, (gain, _) in enumerate([(0.0, 0), *ranked]):
            tokens -= gain
            value = tokens - price * costs.seconds(n, k, n + rows, context)
            if value > best:
                best, most = value, rows
        if most >= 0:
            counts = [0] * n
            for _, i in ranked[:most]:
                counts[i] += 1
            kept = tuple(counts)
    return kept


def _outlook(
    costs: Costs, curves: tuple[Curve, ...], deepest: int, context: float, row_budget: int | None
) -> tuple[int, float]:
    """`best_depth` at the context rounded up to 64 tokens, where it has often been worked out before."""
    return best_depth(costs, curves, deepest, 64 * math.ceil(context / 64), row_budget)


def _spare(row_budget: int | None, n: int) -> int | None:
    """Drafts that a batch of n sequences may verify; None: any number."""
    return None if row_budget is None else max(row_budget - n, 0)


def _survival(conditional: Sequence[float]) -> Curve:
    return tuple(accumulate(conditional, lambda a, b: a * b))


@dataclasses.dataclass(frozen=True)
class SurvivalState:
    """Calibration so far.

    Attributes:
      accepted, reached: per draft position and bin of log-probability, decayed counts.
      conditional: acceptance of each draft given those before it, a running mean of the estimates.
      since: verifies since the deepest drafts were last all verified.
    """

    accepted: tuple[tuple[float, ...], ...]
    reached: tuple[tuple[float, ...], ...]
    conditional: tuple[float, ...]
    since: int = 0


@dataclasses.dataclass(frozen=True)
class Survival:
    """Depth by estimated survival and measured cost.

    Attributes:
      row_budget: most rows of a step; None: any number.
      half_life: verifies after which an observation counts half in the calibration.
      probe: verifies without one at full depth after which a step proposes, and the next one verifies, all drafts: so
        that drafts that don't pay now are known when they do.
      prior: acceptance per position before anything was seen; the last one goes on for deeper drafts.
    """

    costs: Costs
    num_drafts: int = 3
    row_budget: int | None = None
    half_life: float = 4096
    probe: int = 2048
    prior: tuple[float, ...] = (0.7,)
    name: str = "survival"
    head: bool = True
    needs_log_probs: bool = True
    ragged: bool = True

    def __post_init__(self) -> None:
        if self.num_drafts < 0 or (self.row_budget or 0) < 0 or self.half_life <= 0 or self.probe <= 0:
            raise PolicyError("num_drafts and row_budget are 0 or more, half_life and probe more than 0")
        _check_probabilities("prior", self.prior)

    @property
    def max_drafts(self) -> int:
        return self.num_drafts

    def start(self) -> SurvivalState:
        empty = ((0.0,) * len(_CENTRES),) * self.num_drafts
        return SurvivalState(empty, empty, _extended(self.prior, self.num_drafts))

    def acceptance(self, state: SurvivalState, log_probs: Sequence[float]) -> tuple[float, ...]:
        """Estimated acceptance of each draft given those before it, from its log-probability and its position."""
        found = []
        for accepted, reached, log_prob in zip(state.accepted, state.reached, log_probs, strict=False):
            b = bisect.bisect(BIN_EDGES, log_prob)
            found.append((accepted[b] + _PRIOR * _CENTRES[b]) / (reached[b] + _PRIOR))
        return tuple(found)

    def decide(self, state: SurvivalState, queued: Sequence[Queued]) -> Decision:
        if state.since >= self.probe:
            return Decision(tuple(min(q.drafts, q.most) for q in queued), self.num_drafts)
        context = max(q.context for q in queued)
        estimates = [self.acceptance(state, q.log_probs) for q in queued]
        # Not from the drafts at hand: a depth that goes up and down with each step's luck pays for the deeper shape
        # twice, when drafts are proposed and when they are verified.
        curve = _survival(tuple(round(p, 2) for p in state.conditional))
        propose, price = _outlook(self.costs, (curve,) * len(queued), self.num_drafts, context, self.row_budget)
        curves = [_survival(each[: min(q.drafts, q.most)]) for each, q in zip(estimates, queued, strict=True)]
        return Decision(best_rows(self.costs, curves, price, propose, context, self.row_budget), propose)

    def observe(self, state: SurvivalState, outcome: Outcome) -> SurvivalState:
        n = len(outcome.offered)
        keep = 0.5 ** (n / self.half_life)
        accepted, reached = ([[x * keep for x in row] for row in rows] for rows in (state.accepted, state.reached))
        conditional = list(state.conditional)
        for offered, a, log_probs in zip(outcome.offered, outcome.accepted, outcome.log_probs, strict=True):
            for j in range(min(offered, a + 1)):
                b = bisect.bisect(BIN_EDGES, log_probs[j])
                reached[j][b] += 1
                accepted[j][b] += j < a
            # Over all that were queued: those that were verified are the likely ones, and would flatter depth.
            weight = 1 / _MEMORY
            for j, estimate in enumerate(self.acceptance(state, log_probs)):
                conditional[j] += weight * (estimate - conditional[j])
                weight *= estimate  # of reaching the next
        full = max(map(len, outcome.log_probs), default=0) >= self.num_drafts
        return SurvivalState(
            tuple(map(tuple, accepted)), tuple(map(tuple, reached)), tuple(conditional), 0 if full else state.since + n
        )

    def depths(self, n: int) -> frozenset[int]:
        return frozenset(range(self.num_drafts + 1))


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Knows every draft's true chance of acceptance, and the costs; not the outcomes. The bar for the other policies.

    A simulator tells it the truth as `Queued.log_probs` and `outlook`. With `accept`, the acceptance of drafts 1, 2,
    ... given those before, it knows that instead: true for drafts of forced acceptance in the engine.
    """

    costs: Costs
    num_drafts: int = 3
    row_budget: int | None = None
    accept: tuple[float, ...] = ()
    name: str = "oracle"
    head: bool = True
    ragged: bool = True

    def __post_init__(self) -> None:
        if self.num_drafts < 0 or (self.row_budget or 0) < 0:
            raise PolicyError("num_drafts and row_budget are 0 or more")
        if self.accept:
            _check_probabilities("accept", self.accept)

    @property
    def max_drafts(self) -> int:
        return self.num_drafts

    @property
    def needs_log_probs(self) -> bool:
        return not self.accept

    def start(self) -> None:
        return None

    def decide(self, state: None, queued: Sequence[Queued]) -> Decision:
        known = _extended(self.accept, self.num_drafts) if self.accept else ()
        context = max(q.context for q in queued)
        curves, outlooks = [], []
        for q in queued:
            conditional = known or tuple(map(math.exp, q.log_probs))
            curves.append(_survival(conditional[: min(q.drafts, q.most)]))
            outlook = known or tuple(map(math.exp, q.outlook))
            if len(outlook) != self.num_drafts:
                raise PolicyError(
                    "the oracle must be told what its next drafts are worth: simulate it, or give accept=p1,p2,..."
                )
            outlooks.append(_survival(outlook))
        propose, price = _outlook(self.costs, tuple(sorted(outlooks)), self.num_drafts, context, self.row_budget)
        return Decision(best_rows(self.costs, curves, price, propose, context, self.row_budget), propose)

    def observe(self, state: None, outcome: Outcome) -> None:
        return None

    def depths(self, n: int) -> frozenset[int]:
        return frozenset(range(self.num_drafts + 1))


def _extended(values: tuple[float, ...], count: int) -> tuple[float, ...]:
    """The last value goes on."""
    return (*values, *[values[-1]] * (count - len(values)))[:count]


def _check_probabilities(name: str, values: Sequence[float]) -> None:
    if not values or not all(0 <= p <= 1 for p in values):
        raise PolicyError(f"{name} must be one or more probabilities, got {values}")
