"""Packed batches on small made-up token sets, where every token tells its document and its place."""

import time

import numpy as np
import pytest

from atlas_jax.train.batches import packed_batch
from atlas_jax.train.tokens import TokenSet


def token_set(lengths, *, packed: bool, base: int) -> TokenSet:
    """Document i is `base + 1000 i, + 1, + 2, ...`; in transcripts the last quarter is a reply."""
    lengths = np.asarray(lengths)
    documents = [base + 1000 * i + np.arange(n) for i, n in enumerate(lengths)]
    reply = np.concatenate([np.arange(n) >= n - n // 4 if packed else np.zeros(n, bool) for n in lengths])
    starts = np.cumsum(lengths) - lengths
    return TokenSet(
        regime="tools" if packed else "prose",
        tokens=np.concatenate(documents).astype(np.int32),
        starts=starts.astype(np.int64),
        reply=reply,
        packed=packed,
        bytes=0,
    )


LENGTHS = np.random.default_rng(0).integers(10, 60, size=50)
TOOLS = token_set(LENGTHS, packed=True, base=1_000_000)
PROSE = token_set([700, 300], packed=False, base=0)
SETS = {"prose": PROSE, "tools": TOOLS}


def segments_of(tokens, segments):
    """The tokens of each segment of a tools row, in order, without the padding at an epoch's end."""
    pieces = [tokens[segments == s] for s in range(segments.max() + 1)]
    return pieces[:-1] if pieces[-1][0] == 0 else pieces


def test_a_batch_depends_on_step_and_seed_alone():
    first = [packed_batch(SETS, 0.5, step, 4, 128, seed=7) for step in range(30)]
    resumed = [
        packed_batch(dict(reversed(SETS.items())), 0.5, step, 4, 128, seed=7) for step in reversed(range(30))
    ]
    for a, b in zip(first, reversed(resumed), strict=True):
        for x, y, dtype in zip(a, b, (np.int32, np.float32, np.int32), strict=True):
            assert x.shape == (4, 128) and x.dtype == dtype
            np.testing.assert_array_equal(x, y)
    assert any((a[0] != packed_batch(SETS, 0.5, s, 4, 128, seed=8)[0]).any() for s, a in enumerate(first))
    assert (first[0][0] != first[1][0]).any()


@pytest.mark.parametrize("mix", [0.0, 0.25, 0.3, 0.5, 1.0])
def test_the_mix_is_exact(mix):
    rows = [packed_batch(SETS, mix, step, 5, 64)[0][:, 0] >= 1_000_000 for step in range(40)]
    assert abs(np.concatenate(rows).sum() - 200 * mix) <= 1
    assert all(abs(tools.sum() - 5 * mix) < 1 for tools in rows)


def test_only_the_needed_set_is_needed():
    packed_batch({"tools": TOOLS}, 1.0, 0, 2, 64)
    packed_batch({"prose": PROSE}, 0.0, 0, 2, 64)


def test_prose_rows_are_windows_inside_one_work():
    seen = set()
    for step in range(50):
        tokens, weights, segments = packed_batch(SETS, 0.0, step, 4, 128)
        assert (np.diff(tokens, axis=1) == 1).all() and (segments == 0).all()
        assert (weights[:, 0] == 0).all() and (weights[:, 1:] == 1).all()
        seen |= set(tokens[:, 0].tolist())
    assert len(seen) > 150 and max(seen) <= 1000 + 300 - 128 and any(start >= 1000 for start in seen)


def test_tools_rows_hold_transcripts_from_their_beginning():
    for step in range(20):
        for tokens, weights, segments in zip(
            *packed_batch(SETS, 1.0, step, 3, 128, reply_weight=2.5), strict=True
        ):
            pieces = segments_of(tokens, segments)
            assert (np.diff(segments) >= 0).all() and (np.diff(segments) <= 1).all() and segments[0] == 0
            assert sum(map(len, pieces)) == (tokens != 0).sum()
            assert (weights[tokens == 0] == 0).all()
            for i, piece in enumerate(pieces):
                document, place = divmod(int(piece[0]) - 1_000_000, 1000)
                assert place == 0 and (np.diff(piece) == 1).all()
                whole = len(piece) == LENGTHS[document]
                assert whole or (i == len(pieces) - 1 and piece[-1] == tokens[-1])
                n = LENGTHS[document]
                expected = np.where(np.arange(n) >= n - n // 4, 2.5, 1.0)[: len(piece)]
                expected[0] = 0
                np.testing.assert_array_equal(weights[segments == i], expected)


def test_an_epoch_shows_every_transcript_whole():
    length = 128
    seen: dict[int, int] = {}
    rows = 0
    while len(seen) < len(LENGTHS):
        tokens, _, segments = packed_batch(SETS, 1.0, rows, 1, length)
        for piece in segments_of(tokens[0], segments[0]):
            document = (int(piece[0]) - 1_000_000) // 1000
            if len(piece) == LENGTHS[document]:
                assert document not in seen, "whole twice before all others were"
                seen[document] = rows
        rows += 1
        assert rows < 40
    assert rows * length < 1.3 * LENGTHS.sum()  # little is shown twice
    orders = [[int(t) for t in packed_batch(SETS, 1.0, step, 1, length)[0][0]] for step in (0, rows)]
    assert orders[0] != orders[1]


def test_a_transcript_longer_than_a_row_is_cut():
    long = token_set([300] * 10 + [20, 20], packed=True, base=1000)
    seen = []
    for step in range(11):  # one epoch: a row for each long one, and one that the short ones open
        tokens, _, segments = packed_batch({"tools": long}, 1.0, step, 1, 64)
        seen += [(int(piece[0]), len(piece)) for piece in segments_of(tokens[0], segments[0])]
    assert {document for document, _ in seen} == {1000 * (i + 1) for i in range(12)}
    assert all((1000 * (i + 1), 64) in seen for i in range(10))


def test_short_texts_are_padded_with_weight_zero():
    short = token_set([20], packed=False, base=0)
    tokens, weights, segments = packed_batch({"prose": short}, 0.0, 0, 2, 32)
    np.testing.assert_array_equal(tokens[:, :20], np.broadcast_to(np.arange(20), (2, 20)))
    assert (tokens[:, 20:] == 0).all() and (weights[:, 20:] == 0).all() and (weights[:, 1:20] == 1).all()
    assert (segments[:, :20] == 0).all() and (segments[:, 20:] == 1).all()


@pytest.mark.parametrize("bad", [{"mix": -0.1}, {"mix": 1.1}, {"batch": 0}, {"length": 0}, {"step": -1}])
def test_impossible_requests_are_refused(bad):
    with pytest.raises(ValueError, match="0 <= mix <= 1"):
        packed_batch(SETS, **{"mix": 0.5, "step": 0, "batch": 1, "length": 8, **bad})


def test_a_batch_is_cheap():
    packed_batch(SETS, 0.5, 0, 8, 1024)
    began = time.perf_counter()
    for step in range(20):
        packed_batch(SETS, 0.5, step, 8, 1024)
    assert (time.perf_counter() - began) / 20 < 0.05  # measured 0.0005; the bound forgives a busy machine
