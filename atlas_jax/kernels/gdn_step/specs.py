"""Shapes that matter: those of released models, shared by tests (shrunk), the compile gate and the benches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# (Hk, Hv) of the GDN layers; Dk = Dv = 128 in all of them. Models with the same heads run the same kernels.
HEADS: dict[str, tuple[int, int]] = {
    "qwen3.5-0.8b": (16, 16),
    "qwen3.5-4b": (16, 32),
    "qwen3.5-27b": (16, 48),
    "qwen3.5-35b-a3b": (16, 32),
    "qwen3-next-80b-a3b": (16, 32),
}


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Shapes and dtypes of one call: `rows` is K, `folded` the pending rows there is room for (`M = K + folded`)."""

    model: str
    n: int
    rows: int
    folded: int
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    slots: int = 64
    row_dtype: str = "float32"
    state_dtype: str = "float32"

    @property
    def name(self) -> str:
        dtypes = "" if self.state_dtype == self.row_dtype == "float32" else f" {self.row_dtype}/{self.state_dtype}"
        return f"{self.model} n{self.n} k{self.rows} p{self.folded}{dtypes}"

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arguments of `gdn_step`, in its order, as shapes: enough to lower and compile it. Gates are float32."""
        total = self.rows + self.folded
        counts = jax.ShapeDtypeStruct((self.n,), jnp.int32)
        rows = lambda count, *rest, dtype=self.row_dtype: jax.ShapeDtypeStruct((self.n, count, *rest), dtype)
        return (
            jax.ShapeDtypeStruct((self.slots, self.value_heads, self.key_dim, self.value_dim), self.state_dtype),
            counts,
            rows(self.rows, self.key_heads, self.key_dim),
            rows(total, self.key_heads, self.key_dim),
            rows(total, self.value_heads, self.value_dim),
            rows(total, self.value_heads, dtype="float32"),
            rows(total, self.value_heads, dtype="float32"),
            counts,
            counts,
        )

    def bytes(self, pending: int = 0) -> int:
        """Least bytes that a step of n full sequences with `pending` rows each moves: states read and written once,
        every live row read once, outputs written once."""
        state, row = jnp.dtype(self.state_dtype).itemsize, jnp.dtype(self.row_dtype).itemsize
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        states = 2 * state * self.value_heads * self.key_dim * self.value_dim
        inputs = (pending + self.rows) * (row * (keys + values) + 2 * 4 * self.value_heads)
        return self.n * (states + inputs + self.rows * (row * keys + state * values))

    def shrunk(self) -> StepSpec:
        """The same code at a size that an interpreter runs in a second: fewer and smaller heads, in the same ratio."""
        return dataclasses.replace(
            self,
            n=min(self.n, 6),
            key_heads=2,
            value_heads=2 * (self.value_heads // self.key_heads),
            key_dim=64,
            value_dim=32,
            slots=9,
        )


def spec(model: str, n: int, rows: int, *, folded: int | None = None, **other: str | int) -> StepSpec:
    """A step of a model in `HEADS`; by default with room for as many pending rows as there are drafts."""
    folded = rows - 1 if folded is None else folded
    return StepSpec(model, n, rows, folded, *HEADS[model], **other)  # type: ignore[arg-type]


# Every number of rows of the default ladder for one model, the other ratios of heads, and the corners of the kernel.
SPECS: tuple[StepSpec, ...] = (
    *(spec("qwen3.5-4b", 16, rows) for rows in (1, 2, 3, 4)),
    spec("qwen3.5-0.8b", 16, 4),
    spec("qwen3.5-27b", 16, 4),
    spec("qwen3.5-4b", 16, 8),
    spec("qwen3.5-4b", 16, 4, row_dtype="bfloat16"),
    spec("qwen3.5-4b", 16, 4, row_dtype="bfloat16", state_dtype="bfloat16"),
    spec("qwen3.5-4b", 32, 4, slots=4096),  # a pool of 8 GiB: offsets beyond 32 bits
)
