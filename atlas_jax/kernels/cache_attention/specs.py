"""Shapes that matter: those of released models, shared by tests (shrunk), the compile gate and the benches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# (Hq, Hkv) of the attention layers; Dh = 256 in all of them. Models with the same heads run the same kernels.
HEADS: dict[str, tuple[int, int]] = {
    "qwen3.5-0.8b": (8, 2),
    "qwen3.5-4b": (16, 4),
    "qwen3.5-27b": (24, 4),
    "qwen3.5-35b-a3b": (16, 2),
    "qwen3-next-80b-a3b": (16, 2),
}


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Shapes and dtypes of one call: `rows` is K, `context` the capacity L of a slot."""

    model: str
    n: int
    rows: int
    q_heads: int
    kv_heads: int
    head_dim: int = 256
    context: int = 4096
    slots: int = 64
    row_dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        dtypes = "" if self.cache_dtype == self.row_dtype == "bfloat16" else f" {self.row_dtype}/{self.cache_dtype}"
        return f"{self.model} n{self.n} k{self.rows} l{self.context}{dtypes}"

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arguments of `cache_attention`, in its order, as shapes: enough to lower and compile it."""
        pool = (self.slots, 2, self.kv_heads, self.context, self.head_dim)
        counts = jax.ShapeDtypeStruct((self.n,), jnp.int32)
        return (
            jax.ShapeDtypeStruct(pool, self.cache_dtype),
            counts,
            jax.ShapeDtypeStruct((self.n, self.rows), jnp.int32),
            counts,
            jax.ShapeDtypeStruct((self.n, self.rows, self.q_heads, self.head_dim), self.row_dtype),
        )

    def bytes(self, length: int) -> int:
        """Least bytes that a call with `length` live entries in each sequence moves: those entries and the queries read
        once, outputs written once."""
        cache, row = jnp.dtype(self.cache_dtype).itemsize, jnp.dtype(self.row_dtype).itemsize
        entries = 2 * self.kv_heads * length * self.head_dim * cache
        return self.n * (entries + 2 * self.rows * self.q_heads * self.head_dim * row)

    def shrunk(self) -> AttentionSpec:
        """The same code at a size that an interpreter runs in a second: fewer and smaller heads, in the same ratio and
        with a scale that is a power of two, a context of a few blocks, the last of them not whole, in two splits."""
        return dataclasses.replace(
            self,
            n=min(self.n, 8),
            q_heads=2 * (self.q_heads // self.kv_heads),
            kv_heads=2,
            head_dim=64,
            context=150,
            slots=9,
        )


def spec(model: str, n: int, rows: int, **other: str | int) -> AttentionSpec:
    """A step of a model in `HEADS`."""
    return AttentionSpec(model, n, rows, *HEADS[model], **other)  # type: ignore[arg-type]


# Every number of rows of the default ladder for one model, the other ratios of heads, and the corners of the kernel.
SPECS: tuple[AttentionSpec, ...] = (
    *(spec("qwen3.5-4b", 16, rows) for rows in (1, 2, 3, 4)),
    spec("qwen3.5-0.8b", 16, 4),
    spec("qwen3.5-27b", 16, 4),
    spec("qwen3.5-35b-a3b", 16, 4),
    spec("qwen3.5-4b", 1, 1, context=32768),  # one sequence fills no chip unless its context is split
    spec("qwen3.5-35b-a3b", 64, 8, slots=128),  # no split, and rows for two programs
    spec("qwen3.5-4b", 16, 4, row_dtype="float32"),
    spec("qwen3.5-4b", 16, 4, row_dtype="float32", cache_dtype="float32"),
    spec("qwen3.5-27b", 16, 4, row_dtype="float32", cache_dtype="float32"),
    spec("qwen3.5-4b", 32, 4, slots=1024),  # a pool of 16 GiB: offsets beyond 32 bits
)
