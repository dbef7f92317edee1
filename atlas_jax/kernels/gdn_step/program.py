"""What one program of a Pallas kernel does, whatever the backend: one sequence, one value head, a block of columns.

Columns of a state never interact, so a program holds `[Dk, C]` of it in registers from the read to the last draft. The
backends bring the loads and stores (`Memory`), this file the order of things.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Loads and stores of a program, in the dtype that it computes in. Rows are numbered as in `q` and in `k`."""

    read_state: Callable[[], Float[Array, "Dk C"]]
    write_state: Callable[[Float[Array, "Dk C"]], None]
    inputs: Callable[[Array], tuple[Array, Array, Array, Array]]  # row of k -> k [Dk C] (broadcast), v [C], g, beta
    query: Callable[[Array], Float[Array, "Dk C"]]  # row of q -> q, broadcast over the columns
    write_out: Callable[[Array, Float[Array, " C"]], None]


def fold_row(
    state: Float[Array, "Dk C"], k: Float[Array, "Dk C"], v: Float[Array, " C"], g: Array, beta: Array
) -> Float[Array, "Dk C"]:
    """One row of the recurrence (Gated DeltaNet, arXiv 2412.06464, eq. 10)."""
    decayed = jnp.exp(g) * state
    delta = beta * (v - (decayed * k).sum(0))
    return decayed + k * jax.lax.broadcast_in_dim(delta, state.shape, (1,))


def key_head(head: Array, ratio: int) -> Array:
    """The key head of a value head: neighbours share one."""
    return head // ratio


def committed(folded: int, num_pending: Array, num_rows: Array) -> tuple[Array, Array]:
    """First and end of the rows that the state absorbs: the live pending ones, right-aligned, and row 0."""
    return folded - num_pending, folded + jnp.minimum(num_rows, 1)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a program that can be wrong and still run. A test of the tests replaces one by a wrong twin."""

    fold_row: Callable[..., Array] = fold_row
    key_head: Callable[[Array, int], Array] = key_head
    committed: Callable[[int, Array, Array], tuple[Array, Array]] = committed


PARTS = Parts()


def run(
    memory: Memory,
    slot: Int[Array, ""],
    num_pending: Int[Array, ""],
    num_rows: Int[Array, ""],
    *,
    slots: int,
    folded: int,
    rows: int,
    zeros: Float[Array, " C"],
    parts: Parts = PARTS,
) -> None:
    """Fold the committed rows, write the state once, run the drafts from registers; zero the outputs of dead rows.

    Dead rows are never loaded, so whatever they hold, NaN included, reaches nothing. A padding sequence
    (`slot >= slots`) and one without any row only zero their outputs.
    """
    busy = (slot < slots) & (num_pending + num_rows > 0)

    def fold(row: Array, state: Array) -> Array:
        return parts.fold_row(state, *memory.inputs(row))

    def emit(row: Array, state: Array) -> None:
        memory.write_out(row, (state * memory.query(row)).sum(0))

    def draft(row: Array, state: Array) -> Array:
        state = fold(folded + row, state)
        emit(row, state)
        return state

    @pl.when(busy)
    def _() -> None:
        start, end = parts.committed(folded, num_pending, num_rows)
        state = jax.lax.fori_loop(start, end, fold, memory.read_state())
        memory.write_state(state)

        @pl.when(num_rows > 0)
        def _() -> None:
            emit(jnp.int32(0), state)

        jax.lax.fori_loop(1, num_rows, draft, state)

    def clear(row: Array, carry: Array) -> Array:
        memory.write_out(row, zeros)
        return carry

    jax.lax.fori_loop(jnp.where(busy, num_rows, 0), rows, clear, jnp.int32(0))
