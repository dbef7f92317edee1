"""What the programs of the chunked kernels compute, on values that are already in registers.

With `S` the state before a chunk, `D_ij` the decays between its rows, `a_i` those since its start and `e_i` until its
end, and with `A = tril(beta_i (k_i . k_j) D_ij, -1)`, `P = tril((q_i . k_j) D_ij)`, `X = (I + A)^-1 diag(beta)`::

    R = v - a S^T k          o = a S^T q + (P X) R          S <- a_last S + k^T (diag(e) X) R

(Gated DeltaNet, arXiv 2412.06464, section 3.3, with the state moved to the right of the inverse: beside q, k and v a
chunk needs the two `[C, C]` matrices and a, where the W and U of the paper are `Dk + Dv` numbers per row and head.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlas_jax.kernels.gdn_chunk.segments import FORGET

_BLOCK = 16  # rows inverted by substitution; products join the blocks

Product = Callable[[Array, Array, int, int], Array]  # (a, b, axis of a, axis of b) that are summed over


def decays(g: Float[Array, " C"]) -> tuple[Float[Array, "C C"], Float[Array, " C"], Float[Array, " C"]]:
    """`(between, since, until)`: `exp` of sums of g over (j, i], [0, i] and (i, C), each summed on its own.

    `between` is 0 above the diagonal. As in `segments.segment_decays`, no sum is a difference of two, so any gate
    `<= 0` is exact, `-inf` included.
    """
    size = g.shape[0]
    row, column = _iota(size, 0), _iota(size, 1)
    g = jnp.maximum(g, FORGET)
    sums = jnp.cumsum(jnp.where(row > column, _down(g, size), 0), axis=0)
    between = jnp.exp(jnp.where(row >= column, sums, -jnp.inf))
    until = jnp.exp(jnp.where(row > column, _down(g, size), 0).sum(0))
    return between, jnp.exp(jnp.cumsum(g, axis=0)), until


def key_head(head: Array, ratio: int) -> Array:
    """The key head of a value head: neighbours share one."""
    return head // ratio


def first_row(chunk: Array, size: int) -> Array:
    """Where a chunk of `size` rows begins."""
    return chunk * size


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a program that can be wrong and still run. A test of the tests replaces one by a wrong twin.

    `operand` is applied to both sides of the products that run in TF32 on a device: a test rounds them there.
    """

    decays: Callable[[Array], tuple[Array, Array, Array]] = decays
    key_head: Callable[[Array, int], Array] = key_head
    first_row: Callable[[Array, int], Array] = first_row
    operand: Callable[[Array], Array] = lambda x: x


PARTS = Parts()


def unit_inverse(lower: Float[Array, "C C"], product: Product) -> Float[Array, "C C"]:
    """`(I + lower)^-1` of a strictly lower triangular matrix, C a power of two from 16 on.

    The blocks on the diagonal are inverted by forward substitution, all at once; then, with `X` of these and
    `M = X (lower off the blocks)`, nilpotent of order C / 16, `(I + M)^-1 X = (I - M)(I + M^2)(I + M^4)... X`.
    Powers of the whole matrix, without the substitution, would cancel: they grow like binomials of C.
    """
    size = lower.shape[0]
    row, column = _iota(size, 0), _iota(size, 1)
    inside = row // _BLOCK == column // _BLOCK
    within = jnp.where(inside, lower, 0)

    def substitute(i: Array, solved: Array) -> Array:
        here = row % _BLOCK == i
        factors = jnp.where(here, within, 0).sum(0)  # row i of every block, side by side
        update = (_down(factors, size) * solved).sum(0)
        return solved - jnp.where(here & inside, _across(update, size), 0)

    solved = jax.lax.fori_loop(1, _BLOCK, substitute, jnp.where(row == column, 1, jnp.zeros_like(lower)))
    blocks = size // _BLOCK
    if blocks == 1:
        return solved
    power = product(solved, lower - within, 1, 0)
    joined = solved - product(power, solved, 1, 0)
    while (blocks := blocks // 2) > 1:
        power = product(power, power, 1, 0)
        joined = joined + product(power, joined, 1, 0)
    return joined


def factors(
    products: Float[Array, "C C"],
    scores: Float[Array, "C C"],
    between: Float[Array, "C C"],
    until: Float[Array, " C"],
    beta: Float[Array, " C"],
    product: Product,
) -> tuple[Float[Array, "C C"], Float[Array, "C C"]]:
    """What takes R to the outputs, `P X`, and to the update of the state, `diag(e) X`."""
    size = beta.shape[0]
    lower = jnp.where(_iota(size, 0) > _iota(size, 1), _down(beta, size) * products * between, 0)
    solved = unit_inverse(lower, product) * _across(beta, size)
    return product(scores * between, solved, 1, 0), _down(until, size) * solved


@dataclasses.dataclass(frozen=True)
class Memory:
    """Loads and stores of one chunk in the state pass, in the dtype it computes in. Slice i is D of the Dk columns."""

    q: Callable[[int], Float[Array, "C D"]]
    k: Callable[[int], Float[Array, "C D"]]
    v: Callable[[], Float[Array, "C B"]]
    since: Callable[[], Float[Array, " C"]]
    total: Callable[[], Float[Array, ""]]
    to_out: Callable[[], Float[Array, "C C"]]
    to_state: Callable[[], Float[Array, "C C"]]
    write_out: Callable[[Float[Array, "C B"]], None]


def advance(
    state: tuple[Float[Array, "D B"], ...], memory: Memory, product: Product
) -> tuple[Float[Array, "D B"], ...]:
    """One chunk of some columns of the state, in slices of D rows: writes its outputs, returns the state after it.

    The order is made for registers, which whole operands would overflow: every slice of the state meets its columns of
    k and q in turn, and everything is loaded where it is needed. The store of the outputs stands before the update so
    that no compiler merges the second load of k with the first and holds k all the while.
    """
    through_k = through_q = jnp.zeros((), state[0].dtype)
    for i, part in enumerate(state):
        through_k += product(memory.k(i), part, 1, 0)
        through_q += product(memory.q(i), part, 1, 0)
    since = _down(memory.since(), state[0].shape[1])
    residual = memory.v() - since * through_k
    memory.write_out(since * through_q + product(memory.to_out(), residual, 1, 0))
    updates, total = product(memory.to_state(), residual, 1, 0), memory.total()
    return tuple(total * part + product(memory.k(i), updates, 0, 0) for i, part in enumerate(state))


def _iota(size: int, axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, (size, size), axis)


def _down(x: Float[Array, " C"], columns: int) -> Float[Array, "C B"]:
    """x as a column, repeated."""
    return jax.lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def _across(x: Float[Array, " B"], rows: int) -> Float[Array, "C B"]:
    """x as a row, repeated."""
    return jax.lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))
