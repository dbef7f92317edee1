"""How the GPU kernels of the chunked rule cut their work, per chip and dtype of the rows.

No device has timed these. The defaults are what compiles for sm_80, 90, 120 and 121 without a spilled register, the
candidates are for a sweep: pipelined loads (`stages`) hide latency and take shared memory, narrow blocks make more
programs, and long chunks fewer steps in sequence.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes are powers of two.

    Attributes:
      chunk: rows of a chunk, from 16 on.
      columns: of the state, in one program of the state pass.
      depth: rows of the state, and columns of q and k, in one matrix product, from 16 on.
      pass_warps, solve_warps: warps of 32 threads per program.
      stages: chunks of loads in flight in the state pass.
      span: rows between the states that the forward keeps for the backward, a multiple of `chunk`.
    """

    chunk: int = 32
    columns: int = 64
    depth: int = 32
    pass_warps: int = 8
    solve_warps: int = 4
    stages: int = 1
    span: int = 512


# Three passes of TF32 hold three times the operands of one: float32 rows have no registers left for a pipeline.
DEFAULTS: dict[str, Tile] = {
    "float32": Tile(),
    "bfloat16": Tile(columns=32, pass_warps=4, stages=2),
}

CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "float32": (
        Tile(columns=32, depth=16),
        Tile(columns=32, depth=16, stages=3),  # 124 KiB of shared memory: sm_80 and sm_90
        Tile(columns=32, depth=16, pass_warps=4, stages=3),
        Tile(chunk=16, columns=32, depth=16, pass_warps=4, stages=2),
    ),
    "bfloat16": (
        Tile(columns=32, pass_warps=4, stages=3),
        Tile(stages=2),
        Tile(stages=3),
    ),
}

# By CUDA capability, (9, 0) for sm_90, and dtype. Timed nowhere yet.
TILES: dict[tuple[tuple[int, int], str], Tile] = {
    ((8, 0), "float32"): Tile(solve_warps=8),  # with 4, sm_80's compiler spills two registers at some lengths
}


def tile_for(capability: tuple[int, int] | None, rows: str = "float32") -> Tile:
    """The tile for rows of this dtype on a chip, or the default where that wasn't measured (or isn't known)."""
    default = DEFAULTS.get(rows, DEFAULTS["float32"])
    return default if capability is None else TILES.get((capability, rows), default)
