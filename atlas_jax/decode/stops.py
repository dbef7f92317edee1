"""Stop texts: found on the host, wherever tokens begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def first_stop(
    detokenize: Callable[[Sequence[int]], str], stops: Sequence[str], before: Sequence[int], tokens: Sequence[int]
) -> tuple[int, str] | None:
    """How many of the new `tokens` it takes until the answer contains a stop text, and which text; None if none does.

    `before` are the answer's tokens so far, which contain none. Only as much of them is looked at as a stop text can
    reach back, taking a token for a byte at least; special tokens may stand for no text at all, so the window grows
    until it holds enough.
    """
    reach = max(len(stop.encode()) for stop in stops)
    start = max(0, len(before) - reach)
    while start > 0 and len(detokenize(before[start:]).encode()) < reach:
        start = max(0, start - reach)
    window = list(before[start:])
    if not any(stop in detokenize([*window, *tokens]) for stop in stops):
        return None
    for count in range(1, len(tokens) + 1):
        text = detokenize([*window, *tokens[:count]])
        for stop in stops:
            if stop in text:
                return count, stop
    return None
