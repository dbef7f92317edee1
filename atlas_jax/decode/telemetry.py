"""What was offered and what was accepted, per depth, per width; the rates that decide follow from these counts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from atlas_jax.decode.plan import Bucket


@dataclasses.dataclass
class Acceptance:
    """Counts over sequence-steps (one sequence in one step).

    Attributes:
      histogram: sequence-steps by `(drafts offered, drafts accepted)`, after the cut at end tokens and limits.
      tokens: tokens emitted.
    """

    histogram: Counter[tuple[int, int]] = dataclasses.field(default_factory=Counter)
    tokens: int = 0

    def record(self, offered: int, emitted: int) -> None:
        """One sequence-step that verified `offered` drafts and emitted `emitted` tokens, the extra one included."""
        self.histogram[offered, emitted - 1] += 1
        self.tokens += emitted

    def merge(self, other: Acceptance) -> None:
        """Add the counts of `other`."""
        self.histogram.update(other.histogram)
        self.tokens += other.tokens

    @property
    def steps(self) -> int:
        """Sequence-steps."""
        return self.histogram.total()

    @property
    def tok_step(self) -> float | None:
        """Tokens per sequence-step, the acceptance length."""
        return self.tokens / self.steps if self.steps else None

    def unconditional(self, j: int) -> float | None:
        """`u_j`: at least j drafts accepted, among steps that offered j."""
        return self._rate(j, self.count(j, 0))

    def conditional(self, j: int) -> float | None:
        """`p_j`: draft j accepted given the ones before it were, among steps that offered j."""
        return self._rate(j, self.count(j, j - 1))

    def count(self, offered: int, accepted: int) -> int:
        """Sequence-steps that offered at least so many drafts and accepted at least so many."""
        return sum(count for (k, a), count in self.histogram.items() if k >= offered and a >= accepted)

    def _rate(self, j: int, whole: int) -> float | None:
        return self.count(j, j) / whole if whole else None


@dataclasses.dataclass
class Steps:
    """Decode steps at one width: how many, and the seconds that host and device took for them."""

    count: int = 0
    host_s: float = 0.0
    device_s: float = 0.0
    buckets: Counter[Bucket] = dataclasses.field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        return self.host_s + self.device_s


@dataclasses.dataclass
class Telemetry:
    """What an engine has done since it was made or last told to forget.

    Attributes:
      acceptance: by `(active sequences of the step, label of the request)`.
      steps: by active sequences of the step; the width is that of the program's live rows, not of a wish.
      prefill_s: seconds spent in prefill.
      prefilled: prompt tokens that prefill consumed.
      reused: prompt tokens whose state was at hand.
    """

    acceptance: dict[tuple[int, str], Acceptance] = dataclasses.field(default_factory=dict)
    steps: dict[int, Steps] = dataclasses.field(default_factory=dict)
    prefill_s: float = 0.0
    prefilled: int = 0
    reused: int = 0

    def total(self, width: int | None = None, label: str | None = None) -> Acceptance:
        """Acceptance over all widths and labels, or those of one."""
        found = Acceptance()
        for (at, of), counts in self.acceptance.items():
            if width in (None, at) and label in (None, of):
                found.merge(counts)
        return found

    @property
    def decode_s(self) -> float:
        """Seconds of all decode steps, host work included."""
        return sum(steps.seconds for steps in self.steps.values())

    def rows(self) -> list[dict[str, Any]]:
        """One row per width and label, for a table or a file; times are those of the width."""
        found = []
        for (width, label), counts in sorted(self.acceptance.items()):
            steps = self.steps[width]
            deepest = max((offered for offered, _ in counts.histogram), default=0)
            found.append(
                {
                    "width": width,
                    "label": label,
                    "sequence_steps": counts.steps,
                    "tok_step": counts.tok_step,
                    "u": [counts.unconditional(j) for j in range(1, deepest + 1)],
                    "p": [counts.conditional(j) for j in range(1, deepest + 1)],
                    "histogram": {f"{k}:{a}": count for (k, a), count in sorted(counts.histogram.items())},
                    "steps": steps.count,
                    "host_ms": 1e3 * steps.host_s / steps.count,
                    "device_ms": 1e3 * steps.device_s / steps.count,
                    "buckets": {f"{b.n}x{b.k}:{b.rows}": count for b, count in sorted(steps.buckets.items())},
                }
            )
        return found
