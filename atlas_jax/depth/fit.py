"""The best ladder that a table of costs and an acceptance allow: what `auto` runs, and what an ablation is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from atlas_jax.depth.interface import Costs, PolicyError
from atlas_jax.depth.ladder import LadderConfig, Steps, format_ladder


@dataclass(frozen=True)
class Fit:
    """A fitted ladder.

    Attributes:
      steps, cap: the ladder. Beyond the cap nothing is drafted. The grammar has no step of 0 drafts: a width below the
        cap at which none would be best gets 1.
      unspeakable: those widths.
      best: `(n, drafts)` where the best depth, 0 included, was looked up.
    """

    steps: Steps
    cap: int
    unspeakable: tuple[int, ...]
    best: tuple[tuple[int, int], ...]

    @property
    def config(self) -> LadderConfig:
        return LadderConfig(self.steps, cap=self.cap)

    def describe(self) -> str:
        """The ladder in the seed's grammar, and what it could not say."""
        told = f"{format_ladder(self.steps)} with cap {self.cap}"
        if self.unspeakable:
            told += f"; at n = {', '.join(map(str, self.unspeakable))} 0 drafts would be best, which no ladder can say"
        return told


def tokens(conditional: Sequence[float], depth: int) -> float:
    """Expected tokens of a sequence-step that verifies `depth` drafts: `1 + p1 + p1 p2 + ...`."""
    if depth > len(conditional):
        raise PolicyError(f"{depth} drafts need the acceptance of each; there are {len(conditional)}")
    return 1 + sum(accumulate(conditional[:depth], lambda a, b: a * b))


def best_drafts(
    costs: Costs, conditional: Sequence[float], n: int, context: float, *, margin: float = 0.0, plain: bool = True
) -> int:
    """The number of drafts, up to those that `conditional` covers, of most tokens per second; the fewer where tied.

    A deeper one must win by more than the share `margin`. 0 drafts cost plain decode, or with `plain` False a step
    whose head follows.
    """
    best, rate = 0, 1 / costs.seconds(n, 1, n, context, not plain)
    for depth in range(1, len(conditional) + 1):
        found = tokens(conditional, depth) / costs.seconds(n, depth + 1, n * (depth + 1), context)
        if found > rate * (1 + margin):
            best, rate = depth, found
    return best


def fit_ladder(
    costs: Costs, conditional: Sequence[float], widths: Sequence[int], context: float, *, margin: float = 0.0
) -> Fit:
    """The ladder that is best at each of `widths`, ascending, for an acceptance per draft.

    Beyond the last width at which a draft pays lies the cap.
    """
    best = [(n, best_drafts(costs, conditional, n, context, margin=margin)) for n in sorted(widths)]
    if not best:
        raise PolicyError("a ladder is fitted at one width or more")
    cap = max((n for n, depth in best if depth), default=0)
    below = [(n, depth) for n, depth in best if n <= cap]
    steps: list[tuple[int, int]] = []
    for n, depth in below:
        if steps and steps[-1][1] == max(depth, 1):
            steps[-1] = (n, steps[-1][1])
        else:
            steps.append((n, max(depth, 1)))
    return Fit(tuple(steps) or ((best[-1][0], 1),), cap, tuple(n for n, depth in below if not depth), tuple(best))
