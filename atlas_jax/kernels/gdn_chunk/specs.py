"""Shapes that matter: those of released models, shared by tests (shrunk), the compile gate and the benches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from atlas_jax.kernels.gdn_chunk.tiles import DEFAULTS, Tile, tile_for
from atlas_jax.kernels.gdn_step.specs import HEADS

_CHUNK = DEFAULTS["float32"].chunk


@dataclasses.dataclass(frozen=True)
class ChunkSpec:
    """The shapes and dtypes of one call; q, k and v have `row_dtype`, gates are float32."""

    model: str
    n: int
    length: int
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    row_dtype: str = "float32"
    state_dtype: str = "float32"

    @property
    def name(self) -> str:
        dtypes = "" if self.state_dtype == self.row_dtype == "float32" else f" {self.row_dtype}/{self.state_dtype}"
        return f"{self.model} n{self.n} t{self.length}{dtypes}"

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arguments of `gdn_chunk`, in its order, as shapes: enough to lower and compile it."""
        rows = lambda *rest, dtype=self.row_dtype: jax.ShapeDtypeStruct((self.n, self.length, *rest), dtype)
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        gates = rows(self.value_heads, dtype="float32")
        state = (self.n, self.value_heads, self.key_dim, self.value_dim)
        return jax.ShapeDtypeStruct(state, self.state_dtype), rows(*keys), rows(*keys), rows(*values), gates, gates

    def bytes(self) -> int:
        """Least bytes of a forward: every argument read once, every result written once."""
        state, row = jnp.dtype(self.state_dtype).itemsize, jnp.dtype(self.row_dtype).itemsize
        states = 2 * state * self.value_heads * self.key_dim * self.value_dim
        per_row = row * (2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim)
        per_row += self.value_heads * (2 * 4 + state * self.value_dim)
        return self.n * (states + self.length * per_row)

    def kernel_bytes(self, tile: Tile | None = None) -> int:
        """Bytes that the two Triton kernels move: the least, q and k a second time, and what travels between them, two
        matrices of a chunk and a decay per row and value head, written and read in float32. Programs that share rows
        (the value heads of a key head, the blocks of columns) are taken to find them in L2."""
        tile = tile_for(None, self.row_dtype) if tile is None else tile
        row = jnp.dtype(self.row_dtype).itemsize
        again = row * 2 * self.key_heads * self.key_dim
        between = 2 * 4 * self.value_heads * (2 * tile.chunk + 1)
        return self.bytes() + self.n * self.length * (again + between)

    def xla_bytes(self, chunk: int = _CHUNK) -> int:
        """Bytes that the XLA form moves at least, with every matrix product, solve and scan step a kernel of its own
        that reads and writes float32 and everything else fused into it: q, k and v into chunk-major order; k, v and the
        decays into `[k, v]`, solved; three `[C, C]` per head; the state and the deltas through memory every chunk."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        wide = self.value_heads * (self.key_dim + self.value_dim)
        square = self.value_heads * chunk
        to_chunks = 2 * (2 * keys + values)
        solve = (keys + values) + 2 * wide + wide  # made, read and solved in place
        squares = 2 * 3 * square  # decays, products with strengths, scores
        repeated = 2 * 2 * self.value_heads * self.key_dim  # q and k per value head, with their decays
        scan = wide + 2 * values + 4 * self.value_heads * self.key_dim * self.value_dim // chunk
        per_row = to_chunks + solve + squares + repeated + scan
        return self.bytes() + 4 * self.n * self.length * per_row

    def flops(self, chunk: int = _CHUNK) -> int:
        """Of the matrix products of the Triton kernels; a pass of TF32 counts once, and float32 rows take three."""
        passes = 1 if self.row_dtype == "bfloat16" else 3
        solve = 2 * 2 * chunk**2 * self.key_dim
        factors = 2 * chunk**3 * (1 + 2 * max(0, (chunk // 16).bit_length() - 1))  # P X, and two per joining
        columns = 3 * 2 * chunk * self.key_dim * self.value_dim + 2 * 2 * chunk**2 * self.value_dim
        chunks = -(-self.length // chunk)
        return self.n * self.value_heads * chunks * (passes * (solve + columns) + 3 * factors)

    def shrunk(self) -> ChunkSpec:
        """The same code at a size that an interpreter runs in a second: fewer, smaller heads in the same ratio, and a
        few chunks, the last one short."""
        return dataclasses.replace(
            self,
            n=min(self.n, 2),
            length=min(self.length, 3 * _CHUNK + 5),
            key_heads=2,
            value_heads=2 * (self.value_heads // self.key_heads),
            key_dim=64,
            value_dim=32,
        )


def spec(model: str, n: int, length: int, **other: str | int) -> ChunkSpec:
    """Rows of a model in `HEADS`."""
    return ChunkSpec(model, n, length, *HEADS[model], **other)  # type: ignore[arg-type]


# One model for each pair of heads (the 4B, 35B-A3B and 80B-A3B share theirs), a training row and a long prompt.
SPECS: tuple[ChunkSpec, ...] = (
    *(spec(model, 1, length) for model in ("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-27b") for length in (2048, 8192)),
    spec("qwen3.5-4b", 8, 2048),
    spec("qwen3.5-4b", 1, 8192, row_dtype="bfloat16"),
    spec("qwen3.5-4b", 1, 8192, row_dtype="bfloat16", state_dtype="bfloat16"),
    spec("qwen3.5-4b", 4, 17),  # less than a chunk
)
