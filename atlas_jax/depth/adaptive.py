"""The adaptive rung: one or two drafts at 9 to 16 sequences, as the acceptance of the last verifies says.

A pure reducer of flushes, `(width, depth, p1, mean accepted)` over 128 verifies, decides; a policy around it collects
the flushes. Names and thresholds are the Atlas engine's. Different from it: each width has a window of its own, at one
depth; a window that fills too slowly is dropped by count, not by clock; and a depth that no sequence can verify is
never asked for, so that a controller without capacity for two drafts does not wait for what can't be observed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from atlas_jax.depth.interface import Decision, Outcome, PolicyError, Queued, uniform
from atlas_jax.depth.ladder import LadderConfig

DEEP = 2  # drafts at depth


@dataclasses.dataclass(frozen=True)
class RungConfig:
    """Thresholds of the controller.

    Attributes:
      enter, leave: token ratio of two drafts over one from which depth is entered, and down to which it is kept.
      alpha, alpha_slow: weights of a new flush in the averages that decide and that trigger a probe; at most 1.
      probe_ticks: flushes without one at depth after which two drafts are tried again.
      p1_trigger: rise of the slow p1 above its value at the last decision that tries them at once.
      first, last: the widths that it owns.
      flush: verifies (of one sequence each) in a flush. 128 are 8 steps at 16 sequences.
      stale: verifies at any width after which a window that has not filled is dropped.
    """

    enter: float = 1.32
    leave: float = 1.30
    alpha: float = 0.5
    alpha_slow: float = 0.15
    probe_ticks: int = 2048
    p1_trigger: float = 0.08
    first: int = 9
    last: int = 16
    flush: int = 128
    stale: int = 512

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise PolicyError(f"{field.name} must be finite and above 0, got {value}")
        if self.alpha > 1 or self.alpha_slow > 1:
            raise PolicyError(f"alpha and alpha_slow are at most 1, got {self.alpha} and {self.alpha_slow}")
        if self.leave > self.enter:
            raise PolicyError(f"leave {self.leave} above enter {self.enter} would flip at every flush between them")


@dataclasses.dataclass(frozen=True)
class Rung:
    """What the controller remembers. The averages are None until their first flush."""

    at_depth: bool = False
    p1_fast: float | None = None
    p1_slow: float | None = None
    p2_fast: float | None = None
    tick: int = 0
    last_probe: int = 0
    p1_at_decision: float = 0.0


def token_ratio(p1: float, p2_cond: float) -> float:
    """Tokens of a step with two drafts over one with one, `(1 + p1 + p1 p2) / (1 + p1)`; 1 where p1 says nothing."""
    if not (math.isfinite(p1) and p1 > 0):
        return 1.0
    return 1 + p1 * p2_cond / (1 + p1)


def p2_cond_from(p1: float, mean_accepted: float) -> float | None:
    """p2_cond of a flush at two drafts, or None where no first draft was accepted."""
    return min(max((mean_accepted - p1) / p1, 0.0), 1.0) if p1 > 0 else None


def observe_flush(config: RungConfig, rung: Rung, n: int, k: int, p1: float, mean_accepted: float) -> Rung:
    """The controller after a flush of verifies with k drafts at width n; widths that it does not own change nothing."""
    if not config.first <= n <= config.last:
        return rung
    p1_slow = _average(config.alpha_slow, rung.p1_slow, p1)
    rung = dataclasses.replace(
        rung, p1_fast=_average(config.alpha, rung.p1_fast, p1), p1_slow=p1_slow, tick=rung.tick + 1
    )
    if k < DEEP:
        return rung
    rung = dataclasses.replace(rung, last_probe=rung.tick, p1_at_decision=p1_slow)
    p2 = p2_cond_from(p1, mean_accepted)
    if p2 is None:
        return rung
    p2_fast = _average(config.alpha, rung.p2_fast, p2)
    assert rung.p1_fast is not None
    wanted = config.leave if rung.at_depth else config.enter
    return dataclasses.replace(rung, p2_fast=p2_fast, at_depth=token_ratio(rung.p1_fast, p2_fast) >= wanted)


def probing(config: RungConfig, rung: Rung) -> bool:
    """Whether two drafts are due to be tried: never seen, p1 has risen, or too long ago.

    One-sided: at a fixed p2_cond the token ratio grows with p1, so a fall never makes depth newly attractive.
    """
    if rung.p2_fast is None or rung.p1_slow is None:
        return True
    risen = rung.p1_slow - rung.p1_at_decision >= config.p1_trigger
    return risen or rung.tick - rung.last_probe >= config.probe_ticks


def _average(alpha: float, before: float | None, new: float) -> float:
    return new if before is None else alpha * new + (1 - alpha) * before


@dataclasses.dataclass(frozen=True)
class _Window:
    """Verifies at one width and depth, counted since `opened` on the clock of all verifies."""

    depth: int
    opened: int
    verifies: int = 0
    first: int = 0  # accepted at least one draft
    accepted: int = 0


@dataclasses.dataclass(frozen=True)
class AdaptiveState:
    """The controller, a window per width of its own (None: not begun), and the clock: verifies at any width."""

    rung: Rung
    windows: tuple[_Window | None, ...]
    clock: int = 0


@dataclasses.dataclass(frozen=True)
class AdaptiveRung:
    """A ladder whose rung at 9 to 16 sequences rises to two drafts while that pays.

    The static ladder where `config` pins it, and with fewer than two drafts.
    """

    config: LadderConfig = LadderConfig()
    num_drafts: int = 3
    rung: RungConfig = RungConfig()
    name: str = "adaptive_rung"
    head: bool = True
    needs_log_probs: bool = False
    ragged: bool = False

    @property
    def max_drafts(self) -> int:
        return self.num_drafts

    def start(self) -> AdaptiveState:
        return AdaptiveState(Rung(), (None,) * (self.rung.last - self.rung.first + 1))

    def owns(self, n: int) -> bool:
        """Whether the controller decides at this width."""
        pinned = self.config.adaptive_pinned or self.num_drafts < DEEP or n > self.config.max_seqs
        return not pinned and self.rung.first <= n <= self.rung.last

    def drafts(self, state: AdaptiveState, n: int, reach: int) -> int:
        """Drafts per sequence at width n where the best of the sequences can verify `reach`."""
        base = self.config.step_drafts(n, self.num_drafts)
        if not self.owns(n) or reach < DEEP:
            return base
        return max(base, DEEP) if state.rung.at_depth or probing(self.rung, state.rung) else base

    def decide(self, state: AdaptiveState, queued: Sequence[Queued]) -> Decision:
        return uniform(queued, self.drafts(state, len(queued), max(q.most for q in queued)))

    def observe(self, state: AdaptiveState, outcome: Outcome) -> AdaptiveState:
        """A sequence that verified fewer drafts than the deepest (just admitted, near its end) is not counted."""
        clock = state.clock + len(outcome.offered)
        depth = max(outcome.offered, default=0)
        if not self.owns(outcome.width) or depth == 0:
            return dataclasses.replace(state, clock=clock)
        at = outcome.width - self.rung.first
        window = state.windows[at]
        if window is None or window.depth != depth or clock - window.opened > self.rung.stale:
            window = _Window(depth, state.clock)
        counted = [a for a, offered in zip(outcome.accepted, outcome.offered, strict=True) if offered == depth]
        window = _Window(
            depth,
            window.opened,
            window.verifies + len(counted),
            window.first + sum(a > 0 for a in counted),
            window.accepted + sum(counted),
        )
        rung: Rung = state.rung
        kept: _Window | None = window
        if window.verifies >= self.rung.flush:
            p1, mean = window.first / window.verifies, window.accepted / window.verifies
            rung, kept = observe_flush(self.rung, rung, outcome.width, depth, p1, mean), None
        return AdaptiveState(rung, (*state.windows[:at], kept, *state.windows[at + 1 :]), clock)

    def depths(self, n: int) -> frozenset[int]:
        base = self.config.step_drafts(n, self.num_drafts)
        return frozenset((base, max(base, DEEP))) if self.owns(n) else frozenset((base,))
