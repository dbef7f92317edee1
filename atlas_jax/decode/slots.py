"""Who holds which slot: sequences, and states kept for prompts that begin alike."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence


@dataclasses.dataclass
class Kept:
    """A state in a slot: all but the last of `tokens` are committed, `pending` of them not folded yet.

    The last token is part of the key because the head's cache pairs each hidden with the token that follows it.
    """

    tokens: tuple[int, ...]
    slot: int
    pending: int
    head: int  # leading entries of the head's cache that are the sequence's


class Slots:
    """Slots by number. A kept state gives way to a sequence that needs its slot, the longest unused one first."""

    def __init__(self, count: int, keep: int):
        """`count` slots in all, of which at most `keep` hold states for later."""
        self.keep = keep
        self._free = list(range(count))[::-1]
        self._kept: OrderedDict[tuple[int, ...], Kept] = OrderedDict()

    def take(self) -> int:
        """A slot for a sequence. There must be one: sequences are never more than `count - keep`."""
        if not self._free:
            self.drop(next(iter(self._kept)))
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """The slot's sequence is gone."""
        self._free.append(slot)

    def keep_state(self, kept: Kept) -> None:
        """The slot's state stays, until the slot is needed. The slot must be taken; a state of the same tokens goes."""
        self.drop(kept.tokens)
        if not self.keep:
            self.give_back(kept.slot)
            return
        if len(self._kept) == self.keep:
            self.drop(next(iter(self._kept)))
        self._kept[kept.tokens] = kept

    def drop(self, tokens: tuple[int, ...]) -> None:
        """Forget the state of these tokens, if there is one."""
        if found := self._kept.pop(tokens, None):
            self._free.append(found.slot)

    def has(self, tokens: Sequence[int]) -> bool:
        return tuple(tokens) in self._kept

    def longest(self, prompt: Sequence[int]) -> Kept | None:
        """The longest kept state whose tokens begin the prompt; it counts as used."""
        prompt = tuple(prompt)
        fitting = [tokens for tokens in self._kept if tokens == prompt[: len(tokens)]]
        if not fitting:
            return None
        best = max(fitting, key=len)
        self._kept.move_to_end(best)
        return self._kept[best]
