"""The chunked rule as two Pallas Triton kernels: sm_80 and later, every supported jax.

`solve`, one program per chunk and value head, makes what doesn't depend on the state; `pass`, one program per value
head and block of columns, carries the state through the chunks in registers. Between them travel `2 C + 1` numbers per
row and head. For 8,192 rows of the 4B model in float32 both move 648 MiB, where arguments and results alone are 390 and
XLA's form comes to 5,126 (`specs.ChunkSpec` has the counts): hence no part of the forward is left to XLA.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from atlas_jax.kernels.backends import BackendError
from atlas_jax.kernels.gdn_chunk.backward import pull_back
from atlas_jax.kernels.gdn_chunk.program import PARTS, Memory, Parts, Product, advance, factors
from atlas_jax.kernels.gdn_chunk.tiles import Tile, tile_for
from atlas_jax.kernels.numerics import EXACT, widen

_LEAST = 16  # rows of the smallest matrix product that Triton has


def gdn_chunk(
    state: Float[Array, "N Hv Dk Dv"],
    q: Float[Array, "N T Hk Dk"],
    k: Float[Array, "N T Hk Dk"],
    v: Float[Array, "N T Hv Dv"],
    g: Float[Array, "N T Hv"],
    beta: Float[Array, "N T Hv"],
    *,
    tile: Tile | None = None,
    interpret: bool = False,
    parts: Parts = PARTS,
) -> tuple[Float[Array, "N T Hv Dv"], Float[Array, "N Hv Dk Dv"]]:
    """As the public `gdn_chunk`: `forward`, with a gradient for every argument.

    `tile` None is the default for the rows' dtype. For the gradient the arguments are kept and the state before every
    `tile.span` rows: of 512 rows of 128 columns, that is a quarter of v. The rest is recomputed (`backward.pull_back`,
    in XLA).
    """
    tile = tile_for(None, k.dtype.name) if tile is None else tile
    return _differentiable((tile, interpret, parts), state, q, k, v, g, beta)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(
    how: tuple[Tile, bool, Parts], state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array
) -> tuple[Array, Array]:
    tile, interpret, parts = how
    return forward(state, q, k, v, g, beta, tile=tile, interpret=interpret, parts=parts)[:2]


def _keep(
    how: tuple[Tile, bool, Parts], state: Array, *rows: Array
) -> tuple[tuple[Array, Array], tuple[Array | None, tuple[Array, ...]]]:
    tile, interpret, parts = how
    out, end, starts = forward(state, *rows, tile=tile, interpret=interpret, keep=True, parts=parts)
    return (out, end), (starts, rows)


def _pull_back(
    how: tuple[Tile, bool, Parts], kept: tuple[Array, tuple[Array, ...]], cotangents: tuple[Array, Array]
) -> tuple[Array, ...]:
    tile, (starts, rows), (d_out, d_end) = how[0], kept, cotangents
    d_state, d_rows = pull_back(starts, rows, d_out, d_end, span=tile.span, chunk=tile.chunk)
    return d_state.astype(d_end.dtype), *d_rows


_differentiable.defvjp(_keep, _pull_back)


def forward(
    state: Float[Array, "N Hv Dk Dv"],
    q: Float[Array, "N T Hk Dk"],
    k: Float[Array, "N T Hk Dk"],
    v: Float[Array, "N T Hv Dv"],
    g: Float[Array, "N T Hv"],
    beta: Float[Array, "N T Hv"],
    *,
    tile: Tile,
    interpret: bool = False,
    keep: bool = False,
    parts: Parts = PARTS,
) -> tuple[Float[Array, "N T Hv Dv"], Float[Array, "N Hv Dk Dv"], Float[Array, "N G Hv Dk Dv"] | None]:
    """Outputs, the final state and, if `keep`, the state before every `tile.span` rows, at least float32.

    Arithmetic is at least float32 whatever the state and the rows are stored in. Products of float32 rows run in three
    passes of TF32, whose sum has float32's precision; of bfloat16 rows in one pass: TF32 holds these rows exactly, and
    rounds what is computed from them to 11 bits, three more than the rows had. The inverse is made in three passes
    always. Raises `BackendError` for sizes that Triton doesn't have.
    """
    n, length, key_heads, dk = q.shape
    value_heads, dv = v.shape[2:]
    if any(size & (size - 1) or size < _LEAST for size in (dk, dv)):
        raise BackendError(
            f"gdn_chunk: Triton needs Dk and Dv to be powers of two from {_LEAST} on, not {dk} and {dv}; xla takes any"
        )
    size = min(tile.chunk, max(_LEAST, pl.next_power_of_2(length)))
    count = -(-length // size)
    ratio, columns, depth = value_heads // key_heads, min(tile.columns, dv), min(tile.depth, dk)
    dtype = widen(state).dtype
    # Rows of zeros are identities. Whole chunks are padded with nothing, and no copy is made.
    q, k, v, g, beta = (
        jnp.pad(x, ((0, 0), (0, count * size - length)) + ((0, 0),) * (x.ndim - 2)) for x in (q, k, v, g, beta)
    )

    def chunk_rows(*width: int, heads: int = 1) -> pl.BlockSpec:
        """A chunk of one head; `heads` neighbours share what is read."""
        head = lambda h: h if heads == 1 else parts.key_head(h, heads)
        return pl.BlockSpec((None, size, None, *width), lambda i, c, h: (i, c, head(h), *(0 for _ in width)))

    square = pl.BlockSpec((None, size, None, size), lambda i, c, h: (i, c, h, 0))
    per_row = lambda *width: jax.ShapeDtypeStruct((n, count * size, value_heads, *width), dtype)
    to_out, to_state, since = pl.pallas_call(
        functools.partial(_solve, depth=depth, parts=parts, interpret=interpret),
        grid=(n, count, value_heads),
        in_specs=[chunk_rows(dk, heads=ratio), chunk_rows(dk, heads=ratio), chunk_rows(), chunk_rows()],
        out_specs=[square, square, chunk_rows()],
        out_shape=[per_row(size), per_row(size), per_row()],
        compiler_params=plt.CompilerParams(num_warps=tile.solve_warps, num_stages=1),
        interpret=interpret,
        name="gdn_chunk_solve",
    )(q, k, g, beta)

    def all_rows(*width: int, heads: int = 1, split: bool = False) -> pl.BlockSpec:
        """All rows of one head, all columns or the program's."""
        head = lambda h: h if heads == 1 else parts.key_head(h, heads)
        return pl.BlockSpec(
            (None, count * size, None, *width), lambda i, h, j: (i, 0, head(h), *(j if split else 0 for _ in width))
        )

    span = tile.span // tile.chunk  # in chunks
    kept = -(-count // span)
    block = pl.BlockSpec((None, None, dk, columns), lambda i, h, j: (i, h, 0, j))
    starts = pl.BlockSpec((None, kept, None, dk, columns), lambda i, h, j: (i, 0, h, 0, j))
    out, end, *before = pl.pallas_call(
        functools.partial(_pass, size=size, depth=depth, span=span, parts=parts, interpret=interpret),
        grid=(n, value_heads, dv // columns),
        in_specs=[
            block,
            *(all_rows(dk, heads=ratio),) * 2,
            all_rows(columns, split=True),
            all_rows(),
            *(all_rows(size),) * 2,
        ],
        out_specs=[all_rows(columns, split=True), block, *([starts] if keep else [])],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, state.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
            *([jax.ShapeDtypeStruct((n, kept, *state.shape[1:]), dtype)] if keep else []),
        ],
        compiler_params=plt.CompilerParams(num_warps=tile.pass_warps, num_stages=tile.stages),
        interpret=interpret,
        name="gdn_chunk_pass",
    )(state, q, k, v, since, to_out, to_state)
    return out[:, :length], end, before[0] if keep else None


def _solve(q, k, g, beta, to_out, to_state, since, *, depth: int, parts: Parts, interpret: bool) -> None:
    dtype = since.dtype
    rows, exact = _products(k.dtype, interpret, parts), _products(dtype, interpret, parts)
    size, dk = k.shape

    def products(ref) -> Array:
        """With the keys, as they are stored: a product of two bfloat16 is exact in float32."""

        def add(i: Array, total: Array) -> Array:
            part = pl.ds(i * depth, depth)
            return total + rows(ref[:, part], k[:, part], 1, 1)

        return jax.lax.fori_loop(0, dk // depth, add, jnp.zeros((size, size), dtype))

    between, since[...], until = parts.decays(g[...].astype(dtype))
    to_out[...], to_state[...] = factors(
        products(k), products(q), between, until, beta[...].astype(dtype), exact
    )


def _pass(start, q, k, v, since, to_out, to_state, out, end, *before, size, depth, span, parts, interpret) -> None:
    dtype, dk = since.dtype, k.shape[1]
    product = _products(k.dtype, interpret, parts)
    slices = [pl.ds(at, depth) for at in range(0, dk, depth)]

    def step(chunk: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        for kept in before:

            @pl.when(jax.lax.rem(chunk, span) == 0)
            def _(kept=kept) -> None:
                for at, part in zip(slices, state, strict=True):
                    kept[jax.lax.div(chunk, span), at, :] = part

        first = parts.first_row(chunk, size)
        rows = pl.ds(first, size)

        def write_out(values: Array) -> None:
            out[rows, :] = values.astype(out.dtype)

        memory = Memory(
            q=lambda i: q[rows, slices[i]].astype(dtype),
            k=lambda i: k[rows, slices[i]].astype(dtype),
            v=lambda: v[rows, :].astype(dtype),
            since=lambda: since[rows],
            total=lambda: since[first + size - 1],
            to_out=lambda: to_out[rows, :],
            to_state=lambda: to_state[rows, :],
            write_out=write_out,
        )
        return advance(state, memory, product)

    state = jax.lax.fori_loop(0, k.shape[0] // size, step, tuple(start[at, :].astype(dtype) for at in slices))
    for at, part in zip(slices, state, strict=True):
        end[at, :] = part.astype(end.dtype)


def _products(stored: jnp.dtype, interpret: bool, parts: Parts) -> Product:
    """Matrix products for rows of this dtype, accumulated in at least float32."""

    def product(a: Array, b: Array, over_a: int, over_b: int) -> Array:
        dtype = jnp.promote_types(a.dtype, jnp.float32)
        one_pass = stored == jnp.bfloat16
        if one_pass and a.dtype == dtype:
            a, b = parts.operand(a), parts.operand(b)
        preset, precision = jax.lax.DotAlgorithmPreset, None
        if a.dtype == dtype:
            tensor_cores = dtype == jnp.float32 and not interpret
            tf32 = preset.TF32_TF32_F32 if one_pass else preset.TF32_TF32_F32_X3
            precision = tf32 if tensor_cores else EXACT
        return jax.lax.dot_general(
            a, b, (((over_a,), (over_b,)), ((), ())), precision=precision, preferred_element_type=dtype
        )

    return product
