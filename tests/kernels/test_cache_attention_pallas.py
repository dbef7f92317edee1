"""The GPU kernel of cache attention, interpreted, against a softmax in float64; and that wrong ones are caught."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.kernels.backends import BackendError
from atlas_jax.kernels.cache_attention import api, check, pallas_triton
from atlas_jax.kernels.cache_attention.program import Parts, span
from atlas_jax.kernels.cache_attention.specs import HEADS, SPECS, AttentionSpec, spec
from atlas_jax.kernels.cache_attention.tiles import Tile

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton")

TILE = Tile(entries=16, rows=16)
TINY = AttentionSpec("tiny", 8, 3, 6, 2, 16, context=150, slots=9, row_dtype="float32", cache_dtype="float32")


@functools.cache
def interpreted(tile=TILE, **options):
    return jax.jit(functools.partial(pallas_triton.cache_attention, tile=tile, interpret=True, **options))


SHAPES = {
    "plain decode": ({"rows": 1, "q_heads": 2}, {}),
    "heads share a cache": ({"rows": 4, "q_heads": 8, "kv_heads": 2}, {}),
    "more rows than a program has": ({"rows": 8, "q_heads": 6, "kv_heads": 1}, {}),
    "one program per head": ({}, {"programs": 1}),
    "more splits than blocks": ({"n": 2, "rows": 2}, {"programs": 64, "least": 8}),
    "a slot smaller than a block": ({"context": 9, "rows": 2}, {"entries": 32}),
    "a slot of whole blocks": ({"context": 64, "head_dim": 32}, {"least": 16}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_a_softmax_whatever_the_scores(shape):
    """Ragged rows; lengths of 0, 1, around blocks and up to the capacity; slots in random order; dead entries, free
    slots and queries that nobody reads full of NaN; padding sequences: live rows within 2e-6, the rest zero."""
    changes, cut = SHAPES[shape]
    size, tile = dataclasses.replace(TINY, **changes), dataclasses.replace(TILE, **cut)
    for seed, scores in enumerate(check.SCORES):
        x = check.inputs(size, seed, scores=scores, block=tile.entries, padding=seed % min(3, size.n))
        assert check.error(interpreted(tile), x) <= check.BOUNDS["float32"]


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize(("rows", "cache"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_bfloat16_is_only_a_way_to_store(backend, rows, cache):
    """Through the public op: scores, softmax and sums are float32, so what remains is the rounding of the outputs."""
    size = dataclasses.replace(TINY, row_dtype=rows, cache_dtype=cache)
    attend = jax.jit(functools.partial(api.cache_attention, backend=backend, interpret=True))
    for seed, scores in enumerate(check.SCORES):
        assert check.error(attend, check.inputs(size, seed, scores=scores, padding=1)) <= check.BOUNDS[rows]


def test_float64_shows_that_nothing_but_rounding_is_left():
    size = dataclasses.replace(TINY, row_dtype="float64", cache_dtype="float64")
    with jax.enable_x64(True):
        for scores in check.SCORES:
            assert check.error(interpreted(), check.inputs(size, 2, scores=scores)) <= check.BOUNDS["float64"]


def test_a_sequence_sees_no_more_than_its_slot():
    """Lengths beyond the capacity are cut to it, and the slot past the end has no entries whatever its length."""
    x = check.inputs(TINY, 3, lengths=(TINY.context,), padding=1)
    wanted = interpreted()(*x[:5])
    found = interpreted()(*x._replace(lengths=x.lengths + 100)[:5])
    live = np.arange(TINY.rows) < x.num_rows[:, None]
    np.testing.assert_array_equal(np.asarray(found)[live], np.asarray(wanted)[live])
    assert not np.asarray(found)[-1].any()


def split(first=lambda first, split: first, end=lambda end, split: end):
    """The blocks of a split with its ends moved."""

    def moved(blocks, splits, split):
        ends = span(blocks, splits, split)
        return first(ends[0], split), end(ends[1], split)

    return Parts(span=moved)


WRONG = {
    "one entry too many": Parts(live=lambda at, length: at <= length, seen=lambda at, position: at <= position + 1),
    "its own entry missed": Parts(seen=lambda at, position: at < position),
    "no causal order": Parts(seen=lambda at, position: at >= 0),
    "heads swapped": Parts(kv_head=lambda program, blocks: 1 - program // blocks),
    "sums not rescaled": Parts(rescale=lambda old, new: jnp.where(jnp.isneginf(old), 0.0, 1.0)),
    "the first split alone": split(end=lambda end, split: jnp.where(split == 1, 0, end)),
    "a block dropped": split(first=lambda first, split: first + jnp.minimum(split, 1)),
    "a block twice": split(first=lambda first, split: jnp.maximum(first - 1, 0)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_caught(wrong):
    """The judge of the tests above and of the gate rejects each of these at a shrunk real shape."""
    size = dataclasses.replace(spec("qwen3.5-4b", 16, 4).shrunk(), row_dtype="float32", cache_dtype="float32")
    x = check.inputs(size, 0, poison=0.5)  # what NaN would give away must be caught without it
    tile = dataclasses.replace(TILE, least=32)
    assert check.error(interpreted(tile), x) <= check.BOUNDS["float32"]
    assert not check.error(interpreted(tile, parts=WRONG[wrong]), x) <= 1e-3


def test_dead_values_that_are_multiplied_by_zero_are_caught():
    """A kernel that reads dead entries and trusts their weight of 0: right wherever memory holds numbers."""
    trusting = interpreted(parts=Parts(live=lambda at, length: at >= 0))
    whole = dataclasses.replace(TINY, context=144)  # nothing lies beyond a slot
    assert check.error(trusting, check.inputs(whole, 0, poison=0.5)) <= check.BOUNDS["float32"]
    assert not check.error(trusting, check.inputs(whole, 0)) <= 1e-3


def test_what_triton_cannot_do_is_refused():
    with pytest.raises(BackendError, match="Dh to be a power of two from 16 on, not 24"):
        pallas_triton.cache_attention(*check.inputs(dataclasses.replace(TINY, head_dim=24), 0)[:5])
    with pytest.raises(BackendError, match="no backend 'mosaic'; it has xla, triton"):
        api.cache_attention(*check.inputs(TINY, 0)[:5], backend="mosaic")


@pytest.mark.parametrize(
    ("programs", "capacity", "splits"), [(4, 32768, 64), (64, 4096, 4), (128, 4096, 2), (256, 4096, 1), (1, 100, 1)]
)
def test_the_context_is_split_where_the_chip_would_be_idle(programs, capacity, splits):
    assert pallas_triton.count_splits(Tile(programs=256, least=64), programs, capacity) == splits


def test_specs_are_the_models_and_their_bytes_are_counted():
    from atlas_jax.presets import PRESETS

    for model, heads in HEADS.items():
        cfg = PRESETS[model]
        assert (cfg.q_heads, cfg.kv_heads, cfg.head_dim) == (*heads, 256)
    assert len({size.name for size in SPECS}) == len(SPECS)
    four = spec("qwen3.5-4b", 16, 4)
    small = four.shrunk()
    assert [(a.shape, a.dtype) for a in small.arguments()] == [(a.shape, a.dtype) for a in check.inputs(small, 0)[:5]]
    # By hand, n = 16, bfloat16: keys and values of 4 heads, 4 rows of 16 heads of queries and of outputs.
    assert four.bytes(4096) == 16 * 2 * 256 * (2 * 4 * 4096 + 2 * 4 * 16)
