"""What was offered and what was accepted, per depth, per width; the rates that decide follow from these counts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Acceptance:
    """Counts over sequence-steps (one sequence in one step).

    Attributes:
      steps: sequence-steps.
      tokens: tokens emitted, cut at end tokens and limits.
      offered: `offered[j - 1]` sequence-steps that verified at least j drafts.
      accepted: `accepted[j - 1]` of those that accepted at least j.
      reached: `reached[j - 1]` sequence-steps that verified at least j drafts and accepted the first j - 1.
    """

    steps: int = 0
    tokens: int = 0
    offered: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    reached: list[int] = dataclasses.field(default_factory=list)

    def record(self, offered: int, emitted: int) -> None:
        """One sequence-step that verified `offered` drafts and emitted `emitted` tokens, the extra one included."""
        self.steps += 1
        self.tokens += emitted
        while len(self.offered) < offered:
            for counts in (self.offered, self.accepted, self.reached):
                counts.append(0)
        for j in range(offered):
            self.offered[j] += 1
            self.reached[j] += emitted > j
            self.accepted[j] += emitted > j + 1

    def merge(self, other: Acceptance) -> None:
        """Add the counts of `other`."""
        self.steps += other.steps
        self.tokens += other.tokens
        for mine, theirs in zip(
            (self.offered, self.accepted, self.reached), (other.offered, other.accepted, other.reached), strict=True
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            for j, count in enumerate(theirs):
                mine[j] += count

    @property
    def tok_step(self) -> float | None:
        """Tokens per sequence-step, the acceptance length."""
        return self.tokens / self.steps if self.steps else None

    def unconditional(self, j: int) -> float | None:
        """`u_j`: at least j drafts accepted, among steps that offered j."""
        return _ratio(self.accepted, self.offered, j)

    def conditional(self, j: int) -> float | None:
        """`p_j`: draft j accepted given the ones before it were, among steps that offered j."""
        return _ratio(self.accepted, self.reached, j)


def _ratio(part: list[int], whole: list[int], j: int) -> float | None:
    return part[j - 1] / whole[j - 1] if len(whole) >= j and whole[j - 1] else None
