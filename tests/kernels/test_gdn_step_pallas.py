"""The GPU kernels of the GDN step, interpreted, against the recurrence in float64; and that wrong ones are caught."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.kernels.backends import BackendError, Target, obstacle
from atlas_jax.kernels.check import GATES
from atlas_jax.kernels.gdn_step import api, check
from atlas_jax.kernels.gdn_step.program import Parts, committed, fold_row
from atlas_jax.kernels.gdn_step.reference import recurrence
from atlas_jax.kernels.gdn_step.specs import HEADS, SPECS, StepSpec, spec
from atlas_jax.kernels.gdn_step.tiles import Tile

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton")

TINY = StepSpec("tiny", n=6, rows=3, folded=2, key_heads=1, value_heads=2, key_dim=8, value_dim=16, slots=9)


def kernel(backend):
    if why := obstacle(backend, Target.current(), interpret=True):
        pytest.skip(why)
    if backend == "triton":
        from atlas_jax.kernels.gdn_step import pallas_triton as module
    else:
        from atlas_jax.kernels.gdn_step import pallas_mosaic as module
    return module.gdn_step


@functools.cache
def interpreted(backend, **options):
    return jax.jit(functools.partial(kernel(backend), interpret=True, **options))


def sized(backend, **changes):
    """TINY, at the least Dk that the backend has."""
    return dataclasses.replace(TINY, **{"key_dim": 8 if backend == "triton" else 64, **changes})


SHAPES = {
    "plain decode": {"rows": 1, "folded": 0, "key_heads": 2, "value_heads": 2},
    "one row, pending": {"rows": 1, "folded": 3},
    "no room for pending": {"rows": 4, "folded": 0, "value_heads": 4},
    "default": {"rows": 4, "folded": 3, "key_heads": 2, "value_heads": 4},
    "many rows": {"rows": 8, "folded": 7, "n": 9, "slots": 10},
    "blocks of columns": {"value_dim": 64},
    "tall": {"key_dim": 64, "key_heads": 3, "value_heads": 3},
}


# Mosaic's interpreter simulates threads and is slow; both backends share the order of things.
@pytest.mark.parametrize(
    ("backend", "shape"),
    [("triton", shape) for shape in SHAPES]
    + [("mosaic", shape) for shape in ("plain decode", "no room for pending", "default", "blocks of columns")],
)
def test_equals_the_recurrence_at_any_gate(backend, shape):
    """Ragged rows and pending rows, zero of both included; slots in random order; dead rows, free slots and padding
    sequences full of NaN: outputs and states within 2e-6, free slots bit-identical, dead outputs zero."""
    size = sized(backend, **SHAPES[shape])
    step = interpreted(backend)
    gates = GATES if backend == "triton" else ("mild", "forget")
    for seed, gate in enumerate(gates):
        assert check.error(step, size, check.inputs(size, seed, gate=gate, padding=seed % 3)) <= check.BOUNDS["float32"]


@pytest.mark.parametrize("backend", ["xla", "triton", "mosaic"])
@pytest.mark.parametrize(("rows", "state"), [("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_bfloat16_is_only_a_way_to_store(backend, rows, state):
    """Through the public op: arithmetic is float32, so what remains is the rounding of the results to their dtype."""
    if backend != "xla":
        kernel(backend)
    size = sized(backend, row_dtype=rows, state_dtype=state, key_dim=64)
    step = jax.jit(functools.partial(api.gdn_step, backend=backend, interpret=True))
    assert check.error(step, size, check.inputs(size, 1, padding=1)) <= check.BOUNDS[state]


def test_float64_shows_that_nothing_but_rounding_is_left():
    size = dataclasses.replace(TINY, row_dtype="float64", state_dtype="float64")
    with jax.enable_x64(True):
        assert check.error(interpreted("triton"), size, check.inputs(size, 2)) <= check.BOUNDS["float64"]


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_a_sequence_without_rows_keeps_its_state_bit_for_bit(backend):
    size = sized(backend)
    x = check.inputs(size, 3, full=True, poison=7.0)
    idle = x._replace(num_pending=np.zeros_like(x.num_pending), num_rows=np.zeros_like(x.num_rows))
    out, pool = interpreted(backend)(*idle)
    np.testing.assert_array_equal(pool, x.pool)
    assert not np.asarray(out).any()


WRONG = {
    "decay after the update": Parts(fold_row=lambda s, k, v, g, beta: jnp.exp(g) * fold_row(s, k, v, 0.0, beta)),
    "one lane dropped": Parts(
        fold_row=lambda s, k, *rest: fold_row(
            s, jnp.where(jax.lax.broadcasted_iota(jnp.int32, k.shape, 0) < k.shape[0] - 1, k, 0), *rest
        )
    ),
    "key heads interleaved": Parts(key_head=lambda head, ratio: head % ratio),
    "first pending row missed": Parts(
        committed=lambda folded, p, r: (jnp.minimum(committed(folded, p, r)[0] + 1, folded), committed(folded, p, r)[1])
    ),
    "one dead row too many": Parts(
        committed=lambda folded, p, r: (jnp.maximum(committed(folded, p, r)[0] - 1, 0), committed(folded, p, r)[1])
    ),
    "row 0 not folded": Parts(committed=lambda folded, p, r: (folded - p, folded)),
    "drafts folded": Parts(committed=lambda folded, p, r: (folded - p, folded + r)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_caught(wrong):
    """The judge of the tests above and of the gate rejects each of these at a shrunk real shape."""
    size = spec("qwen3.5-4b", 16, 4).shrunk()
    x = check.inputs(size, 0, poison=0.5)  # what NaN would give away must be caught without it
    assert check.error(interpreted("triton"), size, x) <= check.BOUNDS["float32"]
    assert not check.error(interpreted("triton", parts=WRONG[wrong]), size, x) <= 1e-3


@pytest.mark.parametrize("fault", ["free slot touched", "dead output", "slots in order"])
def test_the_judge_sees_what_lies_beside_the_results(fault):
    x = check.inputs(TINY, 0, poison=0.5)

    @jax.jit
    def step(pool, slots, *rest):
        out, after = api.gdn_step(pool, jnp.sort(slots) if fault == "slots in order" else slots, *rest)
        if fault == "free slot touched":
            free = np.setdiff1d(np.arange(TINY.slots), x.slots)[0]
            after = after.at[free, -1, -1, -1].add(1e-6)
        if fault == "dead output":
            dead = int(np.argmin(x.num_rows))
            out = out.at[dead, -1, -1, -1].set(1e-30)
        return out, after

    assert not check.error(step, TINY, x) <= 1e-3


def test_error_does_not_grow_over_thousands_of_steps():
    """4,096 steps with bfloat16 rows, a float32 state and drafts accepted at random, in the state that the kernel
    itself carries: relative error of the state under 1e-5, and no larger in the second half than in the first."""
    steps, blocks, head, dk, dv = 4096, 8, 1, 16, 16
    size = StepSpec("long", steps, 2, 0, head, head, dk, dv, slots=1, row_dtype="bfloat16")
    rng = np.random.default_rng(4)
    x = check.inputs(dataclasses.replace(size, slots=steps), 4, full=True)  # rows of every step: row 0 and one draft
    accepted = rng.random(steps) < 0.6
    pending = np.concatenate([[0], accepted[:-1]]).astype(np.int32)
    before = lambda a: np.concatenate([np.roll(a[:, 1:], 1, axis=0), a], axis=1)  # the previous step's draft, first
    rows = (x.q, *(before(a) for a in (x.k, x.v, x.g, x.beta)))
    state = rng.standard_normal((1, head, dk, dv))

    step = functools.partial(kernel("triton"), interpret=True)

    def one(pool, inputs):
        pending, *rows = inputs
        both = jnp.full(1, 2)
        return step(pool, jnp.zeros(1, jnp.int32), *(a[None] for a in rows), pending[None], both)[1], None

    run = jax.jit(lambda pool, inputs: jax.lax.scan(one, pool, inputs)[0])
    pool, exact, errors = jnp.asarray(state, jnp.float32), state, []
    for block in np.split(np.arange(steps), blocks):
        pool = run(pool, (pending[block], *(a[block] for a in rows)))
        live = np.stack([pending[block] > 0, np.ones(len(block), bool)], axis=1).reshape(1, -1)  # pending row, row 0
        flat = (a[block, :2].reshape(1, -1, *a.shape[2:]) for a in rows[1:])
        k, v, g, beta = (np.where(live.reshape(1, -1, *[1] * (a.ndim - 2)), a, 0) for a in flat)
        with jax.enable_x64(True):
            wide = (jnp.asarray(a, jnp.float64) for a in (exact, np.zeros_like(k), k, v, g, beta))
            exact = np.asarray(jax.jit(recurrence)(*wide)[1])
        errors.append(np.linalg.norm(np.asarray(pool) - exact) / np.linalg.norm(exact))
    assert max(errors) < 1e-5
    assert np.median(errors[blocks // 2 :]) <= 2 * np.median(errors[: blocks // 2])


def test_what_triton_cannot_do_is_refused():
    with pytest.raises(BackendError, match="powers of two, not 12 and 16"):
        kernel("triton")(*check.inputs(dataclasses.replace(TINY, key_dim=12), 0))


@pytest.mark.parametrize(
    ("changes", "tile", "why"),
    [
        ({"key_dim": 8}, Tile(), "Dk in multiples of 64"),
        ({"value_dim": 24}, Tile(), "blocks of 24 columns"),
        ({}, Tile(16, 2), "one warpgroup"),
        ({"state_dtype": "float64"}, Tile(), "float64"),
    ],
)
def test_what_mosaic_cannot_do_is_refused(changes, tile, why):
    step = kernel("mosaic")
    with pytest.raises(BackendError, match=why), jax.enable_x64(True):
        step(*map(jnp.asarray, check.inputs(sized("mosaic", **changes), 0)), tile=tile)


def test_specs_are_the_models_and_their_bytes_are_counted():
    from atlas_jax.presets import PRESETS

    for model, heads in HEADS.items():
        cfg = PRESETS[model]
        assert (cfg.gdn_key_heads, cfg.gdn_value_heads, cfg.gdn_key_dim, cfg.gdn_value_dim) == (*heads, 128, 128)
    assert len({size.name for size in SPECS}) == len(SPECS)
    four = spec("qwen3.5-4b", 16, 4)
    small = four.shrunk()
    assert [(a.shape, a.dtype) for a in small.arguments()] == [(a.shape, a.dtype) for a in check.inputs(small, 0)]
    # By hand, n = 16, float32: two passes over 32 states of 128 x 128, 4 rows of q, k, v, g, beta, 4 rows of outputs.
    assert four.bytes() == 16 * 4 * (2 * 32 * 128 * 128 + 4 * (2 * 2048 + 4096 + 2 * 32) + 4 * 4096)
    assert four.bytes(pending=3) - four.bytes() == 16 * 4 * 3 * (2048 + 4096 + 2 * 32)
