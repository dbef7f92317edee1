"""Training batches as a pure function of the step number: a resumed run sees what it would have seen.

A row is either a random window of a prose work or several transcripts back to back. Which rows are which,
which windows and which transcripts follow from `(step, seed)` alone; there is no iterator whose state would
have to be saved.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import floor

import numpy as np

from atlas_jax.train.tokens import TokenSet

LOOK_AHEAD = 64  # transcripts searched for one that fits the rest of a row


def packed_batch(
    token_sets: Mapping[str, TokenSet],
    mix: float,
    step: int,
    batch: int,
    length: int,
    seed: int = 0,
    reply_weight: float = 3.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The batch of `step`: tokens int32, weights float32, segments int32, each [batch, length].

    `token_sets` holds "prose" and "tools" (one that `mix` leaves out may be absent); `mix` is the exact
    long-run share of tools rows, spread evenly over rows and steps. `segments` counts the documents of a
    row from 0: the model resets its state where it rises. `weights[b, t]` is the weight of token t AS A
    TARGET: 1, `reply_weight` on the assistant's replies, 0 on the first token of a segment, which nothing
    in it predicts, and 0 on padding (token 0, a segment of its own: after a text shorter than a row, and in
    the last tools row of an epoch). A loss on shifted logits therefore uses `logits[:, :-1]`, `tokens[:,
    1:]`, `weights[:, 1:]`.

    Tools: each epoch has its own order; every transcript starts a segment and, if it fits a row, is whole
    once an epoch (but a few rows at an epoch's end may be skipped or repeated). Where nothing near fits the
    rest of a row, the next transcript fills it, cut, and comes again in the following row. Replies stand at
    the end, so `length` should exceed most transcripts. `ValueError` if `mix`, `step`, `batch` or `length`
    make no sense.
    """
    if not 0 <= mix <= 1 or min(batch, length) < 1 or step < 0:
        raise ValueError(
            f"mix={mix}, step={step}, batch={batch}, length={length}: want 0 <= mix <= 1, sizes >= 1"
        )
    tokens = np.zeros((batch, length), np.int32)
    weights = np.zeros((batch, length), np.float32)
    segments = np.zeros((batch, length), np.int32)
    for b in range(batch):
        row = step * batch + b  # counted over the whole run
        tools_before = floor(row * mix)
        is_tools = floor((row + 1) * mix) > tools_before
        chosen = token_sets["tools" if is_tools else "prose"]
        if chosen.packed:
            pieces = _packed_row(chosen, tools_before, length, seed)
        else:
            pieces = (_window(chosen, np.random.default_rng((seed, row)), length),)
        at = 0
        for segment, (start, stop) in enumerate(pieces):
            end = at + stop - start
            tokens[b, at:end] = chosen.tokens[start:stop]
            weights[b, at:end] = np.where(chosen.reply[start:stop], np.float32(reply_weight), np.float32(1))
            weights[b, at] = 0
            segments[b, at:] = segment
            at = end
        segments[b, at:] = len(pieces)
    return tokens, weights, segments


def _window(chosen: TokenSet, rng: np.random.Generator, length: int) -> tuple[int, int]:
    """(start, stop) of a window of one document, all such windows being equally likely."""
    lengths = chosen.lengths
    windows = np.maximum(lengths - length, 0) + 1
    last = np.cumsum(windows)
    index = int(rng.integers(last[-1]))
    document = int(np.searchsorted(last, index, side="right"))
    start = int(chosen.starts[document] + index - (last[document] - windows[document]))
    return start, start + int(min(length, lengths[document]))


def _packed_row(chosen: TokenSet, row: int, length: int, seed: int) -> tuple[tuple[int, int], ...]:
    # Epochs differ by a few rows in how tightly they pack. Taking the first one's count for all makes the
    # epoch of a row a division, with no need to pack all the epochs before it.
    per_epoch = len(_pack(chosen, 0, length, seed))
    rows = _pack(chosen, row // per_epoch, length, seed)
    return rows[row % per_epoch % len(rows)]


@lru_cache(maxsize=8)
def _pack(chosen: TokenSet, epoch: int, length: int, seed: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """All rows of an epoch: the (start, stop) token ranges of their transcripts, at most `length` tokens."""
    order = np.random.default_rng((seed, epoch)).permutation(len(chosen.starts))
    starts, lengths = chosen.starts.tolist(), chosen.lengths.tolist()
    waiting = deque(order.tolist())
    rows = []
    while waiting:
        row: list[tuple[int, int]] = []
        room = length
        while room and waiting:
            near = range(min(LOOK_AHEAD, len(waiting)))
            fit = next((i for i in near if lengths[waiting[i]] <= room), None) if row else 0
            document = waiting[fit or 0]
            taken = min(lengths[document], room)
            row.append((starts[document], starts[document] + taken))
            if fit is not None:
                del waiting[fit]  # else it is cut, and opens the next row
            room -= taken
        rows.append(tuple(row))
    return tuple(rows)


def pack(lengths: Sequence[int], length: int, seed: int = 0) -> list[list[tuple[int, int, int]]]:
    """All texts in rows of at most `length` tokens: `(text, start, stop)` of the pieces of each row.

    First fit in a shuffled order, so that the rows of any stretch are alike. A text longer than a row is cut into
    windows.
    """
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    pieces = [
        (text, start, min(start + length, lengths[text])) for text in order for start in range(0, lengths[text], length)
    ]
    rows: list[list[tuple[int, int, int]]] = []
    open_rows: deque[tuple[int, int]] = deque(maxlen=LOOK_AHEAD)  # (room, row), oldest first
    for piece in pieces:
        size = piece[2] - piece[1]
        fit = next((i for i, (room, _) in enumerate(open_rows) if room >= size), None)
        if fit is None:
            rows.append([piece])
            open_rows.append((length - size, len(rows) - 1))
        else:
            room, row = open_rows[fit]
            rows[row].append(piece)
            open_rows[fit] = (room - size, row)
    return rows
