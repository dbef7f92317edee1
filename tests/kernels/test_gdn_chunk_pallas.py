"""The Triton kernels of the chunked rule, interpreted: the recurrence in float64 at any gate, packing, masks and
gradients, and wrong twins of their parts, which the same comparison must reject."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.kernels.backends import BackendError
from atlas_jax.kernels.check import GATES
from atlas_jax.kernels.gdn_chunk import check, gdn_chunk, pallas_triton, xla
from atlas_jax.kernels.gdn_chunk.program import PARTS, Parts, decays
from atlas_jax.kernels.gdn_chunk.specs import SPECS, ChunkSpec
from atlas_jax.kernels.gdn_chunk.tiles import Tile

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")

TILE = Tile(chunk=16, columns=16, depth=16, span=32)


@functools.cache
def kernel(tile=TILE, parts=PARTS):
    return jax.jit(functools.partial(pallas_triton.gdn_chunk, tile=tile, interpret=True, parts=parts))


def small(length, heads=(2, 4), dims=(16, 32), **dtypes):
    return ChunkSpec("small", 2, length, *heads, *dims, **dtypes)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("length", "heads", "dims", "chunk"),
    [
        (1, (1, 1), (16, 16), 16),
        (16, (2, 2), (32, 16), 16),
        (17, (1, 4), (16, 32), 32),
        (100, (2, 4), (32, 32), 32),
        (130, (3, 3), (16, 16), 64),
        (140, (1, 2), (16, 16), 128),
    ],
)
def test_equals_the_recurrence(length, heads, dims, chunk, gate):
    """Outputs and final state from a nonzero one; head ratios 1, 2, 4, T off the chunk, all ways to join blocks."""
    tile = dataclasses.replace(TILE, chunk=chunk, span=2 * chunk)
    assert check.error(kernel(tile), check.inputs(small(length, heads, dims), length, gate=gate)) <= 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_keys_that_repeat_without_decay_stay_exact(seed):
    """Equal keys written at full strength: powers of the triangular matrix would reach binomials of the chunk."""
    x = check.inputs(small(70), seed, gate="none")
    x = x._replace(k=np.broadcast_to(x.k[:, :1], x.k.shape), beta=np.full_like(x.beta, 1.0 if seed else 0.99))
    assert check.error(kernel(dataclasses.replace(TILE, chunk=64, span=64)), x) <= 1e-5


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.n == 1 and spec.length == 8192], ids=lambda s: s.name)
def test_named_shapes_match_when_shrunk(spec):
    spec = spec.shrunk()
    assert check.error(kernel(None), check.inputs(spec, 0)) <= check.bound(spec)


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        x = check.inputs(small(40, row_dtype="float64", state_dtype="float64"), 0)
        assert check.error(kernel(), x) <= check.BOUNDS["float64"]


def tf32(x):
    """Rounded to the 11 significant bits that TF32 has, ties away from zero, as the hardware's conversion does."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + jnp.uint32(0x1000)) & jnp.uint32(0xFFFFE000), jnp.float32)


def test_bfloat16_rows_survive_tf32_products():
    """With every operand that a GPU would round to TF32 rounded, outputs stay within bfloat16's own rounding, and the
    state's error stays under 1e-3 and doesn't grow over 4,096 rows."""
    spec = ChunkSpec("small", 1, 4096, 1, 2, 16, 16, row_dtype="bfloat16")
    x = check.inputs(spec, 0)
    run = kernel(dataclasses.replace(TILE, chunk=32, span=512), dataclasses.replace(PARTS, operand=tf32))
    assert check.error(run, x) <= check.BOUNDS["bfloat16"]

    def state_error(length):
        rows = x._replace(**{name: getattr(x, name)[:, :length] for name in ("q", "k", "v", "g", "beta")})
        actual, wanted = np.asarray(run(*map(jnp.asarray, rows))[1]), check.expected(rows)[1]
        return np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)

    early, late = state_error(512), state_error(4096)
    assert 1e-6 < early < 1e-3  # the rounding is there, and small
    assert late < 2 * early


def documents(x, lengths):
    """The rows of x cut at `lengths`, from the second document on with a state that the first row forgets."""
    cuts = np.cumsum((0, *lengths))
    cut = lambda a, i: a[:, cuts[i] : cuts[i + 1]]
    return [x._replace(state=x.state if i == 0 else 0 * x.state, **{f: cut(getattr(x, f), i) for f in x._fields[1:]})
            for i in range(len(lengths))]  # fmt: skip


def test_packed_documents_are_as_if_alone_forward_and_backward():
    """Documents in one row, the first row of each with g = -inf: outputs, final state and gradients are those of every
    document run by itself, wherever the borders fall in chunks and spans."""
    lengths = (20, 1, 31, 16, 12)
    x = check.inputs(small(sum(lengths)), 3)
    starts = np.cumsum(lengths)[:-1]
    x.g[:, starts] = -np.inf
    weigh = np.random.default_rng(4).standard_normal((2, sum(lengths), 4, 32)).astype("float32")

    def loss(weigh, *args):
        out, end = kernel()(*args)
        return (out * weigh).sum(), (out, end)

    both = jax.jit(jax.grad(loss, argnums=range(1, 7), has_aux=True))
    gradients, (out, end) = both(weigh, *x)
    cuts = np.cumsum((0, *lengths))
    for i, alone in enumerate(documents(x, lengths)):
        rows = slice(cuts[i], cuts[i + 1])
        expected_out, expected_end = check.expected(alone)
        assert check.max_error((out[:, rows],), (expected_out,)) <= 1e-5
        if i == len(lengths) - 1:
            assert check.max_error((end,), (expected_end,)) <= 1e-5
        wanted = reference_gradients(alone, weigh[:, rows], np.zeros_like(x.state))
        for got, want in zip(gradients[1:], wanted[1:], strict=True):
            assert check.max_error((got[:, rows],), (want,)) <= 1e-5
        if i == 0:
            assert check.max_error((gradients[0],), (wanted[0],)) <= 1e-5


def loss(fn, weigh_out, weigh_end, *args):
    out, end = fn(*args)
    return (out * weigh_out).sum() + (end * weigh_end).sum()


@functools.cache
def gradient(fn):
    return jax.jit(jax.grad(functools.partial(loss, fn), argnums=range(2, 8)))


@functools.cache
def reference(chunk):
    return functools.partial(xla.chunked, chunk=chunk)


def reference_gradients(x, weigh_out, weigh_end):
    """Autodiff of the reference form in float64, which `test_gdn.py` holds to the recurrence's; finite at any gate."""
    with jax.enable_x64(True):
        exact = (jnp.asarray(a, jnp.float64) for a in (weigh_out, weigh_end, *x))
        return [np.asarray(a) for a in gradient(reference(8))(*exact)]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("length", "heads"), [(75, (2, 4)), (5, (1, 4)), (64, (2, 2))])
def test_gradients_are_finite_and_right(gate, length, heads):
    """For the state, q, k, v, g and beta, over several spans, from cotangents of the outputs and of the final state."""
    x = check.inputs(small(length, heads), 7, gate=gate)
    rng = np.random.default_rng(8)
    weigh = [rng.standard_normal(shape).astype("float32") for shape in ((2, length, heads[1], 32), x.state.shape)]
    actual = gradient(kernel())(*weigh, *x)
    for got, want in zip(actual, reference_gradients(x, *weigh), strict=True):
        assert check.max_error((got,), (want,)) <= 1e-5
    assert not np.asarray(actual[4])[np.isneginf(x.g)].any()


def test_gradients_have_the_dtypes_of_their_arguments():
    x = check.inputs(small(40, row_dtype="bfloat16"), 0)
    weigh = (np.ones((2, 40, 4, 32), "float32"), np.ones_like(x.state))
    actual = gradient(kernel())(*weigh, *x)
    assert [a.dtype for a in actual] == [jnp.asarray(a).dtype for a in x]
    for got, want in zip(actual, reference_gradients(x, *weigh), strict=True):
        assert check.max_error((got,), (want,)) <= 2**-7


def test_what_is_kept_for_the_backward_is_the_arguments_and_a_state_per_span():
    x = [jnp.asarray(a) for a in check.inputs(small(128), 0)]
    _, pull = jax.vjp(kernel(), *x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes"))
    rows, state = sum(a.nbytes for a in x[1:]), x[0].nbytes
    assert rows < kept <= rows + (128 // TILE.span) * state + 64


@pytest.mark.parametrize("poison", [np.nan, 1e4])
def test_dead_rows_are_identities_forward_and_backward(poison):
    """By the public function: whatever dead rows hold, results are bit-identical, gradients finite and zero there."""
    lengths = np.array([5, 0])
    x = check.inputs(small(40), 5)
    live = jnp.arange(40)[None] < lengths[:, None]
    public = functools.partial(gdn_chunk, backend="triton", interpret=True)

    def total(state, *rows):
        out, end = public(state, *rows, live)
        return (out[0, :5] ** 2).sum() + (end**2).sum(), (out, end)

    run = jax.jit(jax.grad(total, argnums=range(6), has_aux=True))
    fill = lambda value: [np.where(live.reshape(2, 40, *[1] * (a.ndim - 2)), a, np.float32(value)) for a in x[1:]]
    (clean, results), (dirty, poisoned) = run(x.state, *fill(0)), run(x.state, *fill(poison))
    for a, b in zip((*clean, *results), (*dirty, *poisoned), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(results[1][1], x.state[1])
    for a in dirty[1:]:
        assert np.isfinite(a).all() and not np.asarray(a)[~np.asarray(live)].any()
    short = x._replace(**{f: getattr(x, f)[:, :5] for f in x._fields[1:]})
    assert check.max_error((results[0][0, :5], results[1][0]), [a[0] for a in check.expected(short)]) <= 1e-5


def before_its_row(g):
    """A row decayed after it is written instead of before."""
    between, since, until = decays(g)
    return between * jnp.exp(jnp.maximum(g, -1e30))[None, :], since, until


MUTATIONS = {
    "decay after the write": Parts(decays=before_its_row),
    "decay until the end with the row's own": Parts(decays=lambda g: (*decays(g)[:2], decays(g)[2] * jnp.exp(g))),
    "decay since the row before": Parts(decays=lambda g: (decays(g)[0], decays(g)[1] / jnp.exp(g), decays(g)[2])),
    "value heads interleaved": Parts(key_head=lambda head, ratio: head % 2),
    "chunks overlap by a row": Parts(first_row=lambda chunk, size: jnp.maximum(chunk * size - 1, 0)),
    "a chunk late by a row": Parts(first_row=lambda chunk, size: jnp.minimum(chunk * size + 1, 48)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_fails_the_comparison(name):
    x = check.inputs(small(64), 0)
    assert check.error(kernel(), x) <= 1e-5
    assert not check.error(kernel(parts=MUTATIONS[name]), x) <= 1e-3


@pytest.mark.parametrize("dims", [(24, 16), (16, 8)])
def test_sizes_that_triton_lacks_are_refused(dims):
    with pytest.raises(BackendError, match="powers of two"):
        pallas_triton.gdn_chunk(*map(jnp.asarray, check.inputs(small(4, dims=dims), 0)), interpret=True)


def test_a_backend_without_a_kernel_is_refused():
    with pytest.raises(BackendError, match="no 'mosaic' kernel"):
        gdn_chunk(*map(jnp.asarray, check.inputs(small(4), 0)), backend="mosaic")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_least_bytes_are_those_of_the_arguments_and_results(spec):
    size = lambda arrays: sum(a.size * a.dtype.itemsize for a in arrays)
    results = jax.eval_shape(reference(32), *spec.arguments())
    assert spec.bytes() == size(spec.arguments()) + size(results)
    assert spec.bytes() < spec.kernel_bytes() < spec.xla_bytes()
