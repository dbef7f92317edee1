"""What bounds drafts besides their worth: the slot that a sequence sits in, and the rows of one forward.

This project's engine keeps rejected drafts out of its state and so has no snapshot pools; the rules are for engines
that have them, for `Queued.most`, and for replaying Atlas' measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atlas_jax.depth.ladder import LadderConfig

ROW_BUDGET = 96  # verify rows of one forward


@dataclass(frozen=True)
class StatePool:
    """Bytes of one recurrent state and one conv window of a sequence, all layers; what tiered verify pools reserve."""

    state_bytes: int
    conv_bytes: int

    def reserve(self, config: LadderConfig, slots: int, num_drafts: int, *, full_width: bool = False) -> int:
        """Bytes for `slots` sequences: live state, snapshots behind each row of a verify, a checkpoint.

        Snapshots are kept for `state_slots` only: c + 1 of the state and num_drafts + 1 of the conv window in a slot of
        capacity c.
        """
        blob = self.state_bytes + self.conv_bytes
        speculating = range(state_slots(config, slots, full_width=full_width))
        depth = lambda slot: num_drafts if full_width else slot_drafts(config, num_drafts, slot)
        snapshots = sum((depth(s) + 1) * self.state_bytes + (num_drafts + 1) * self.conv_bytes for s in speculating)
        return slots * blob + snapshots + len(speculating) * blob


def state_slots(config: LadderConfig, slots: int, *, full_width: bool = False) -> int:
    """Slots whose sequences may speculate, of `slots` in all."""
    return slots if full_width else min(slots, max(config.max_seqs, 32))


def slot_drafts(config: LadderConfig, num_drafts: int, slot: int) -> int:
    """Draft capacity of a slot (from 0) under tiered pools: the deepest rung at the widths at which it is in use.

    Slots are filled from the bottom, so a sequence in slot s is one of s + 1 or more. 0 where speculation is off.
    """
    widths = range(slot + 1, max(config.max_seqs, slot + 1) + 1)
    return max(config.drafts(n, num_drafts) for n in widths)


def chunk_ranges(rows: Sequence[int], budget: int = ROW_BUDGET) -> list[range]:
    """Cuts a batch, ordered, of `rows[i]` rows a sequence into forwards that hold `budget` rows each.

    Greedy: a chunk takes at most `budget // rows of its first` sequences and `budget` rows, and at least one sequence.
    """
    chunks, start = [], 0
    while start < len(rows):
        most, taken, end = budget // rows[start], rows[start], start + 1
        while end < len(rows) and end - start < most and taken + rows[end] <= budget:
            taken += rows[end]
            end += 1
        chunks.append(range(start, end))
        start = end
    return chunks
