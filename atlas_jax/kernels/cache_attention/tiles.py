"""How the GPU kernel of cache attention cuts its work, per chip and dtype of its matrix products.

No device has timed these. The defaults are what compiles for sm_80, 90, 120 and 121 without a spilled register.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes are powers of two.

    Attributes:
      entries: of the cache, keys and values, that a program holds at once; from 16 on.
      rows: most query rows of a program, from 16 on; more of them are further programs, which read the cache again.
      warps: of 32 threads, per program.
      stages: blocks of entries in flight; each takes shared memory.
      programs: wanted in all. Where sequences and heads are fewer, each one's entries are split among several programs.
      least: entries of the capacity that a split must stand for, so that joining splits stays cheap.
    """

    entries: int = 32
    rows: int = 32
    warps: int = 4
    stages: int = 3
    programs: int = 256
    least: int = 64


# Three passes of TF32 hold three times the operands of one: float32 has registers for half the block and half the rows.
DEFAULTS: dict[str, Tile] = {
    "bfloat16": Tile(),
    "float32": Tile(entries=16, rows=16, warps=8, stages=2),
}

# For a sweep on bfloat16: more or smaller blocks in flight, and more programs.
CANDIDATES: tuple[Tile, ...] = (
    Tile(),
    Tile(stages=2),
    Tile(entries=16, stages=4),
    Tile(entries=64, stages=2),
    Tile(entries=16, warps=8),
    Tile(programs=128),
    Tile(programs=512),
)

# By CUDA capability, (9, 0) for sm_90, and dtype. Empty until a sweep on a device has shown that another one is faster.
TILES: dict[tuple[tuple[int, int], str], Tile] = {}


def tile_for(capability: tuple[int, int] | None, products: str = "bfloat16") -> Tile:
    """The tile for products of this dtype (the wider one of queries and cache) on a chip, or the default where that
    wasn't measured (or isn't known)."""
    default = DEFAULTS.get(products, DEFAULTS["float32"])
    return default if capability is None else TILES.get((capability, products), default)
