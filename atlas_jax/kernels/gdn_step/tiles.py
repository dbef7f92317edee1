"""How a GPU kernel of the step cuts its work, per chip. One default; a chip gets its own line once measured there."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tile:
    """`columns` of a state per program (`C <= Dv`), held by `warps` of 32 threads."""

    columns: int = 32
    warps: int = 4


# 32 state values per thread at Dk = 128: few enough registers to fill an SM, and the reads of a warp are whole sectors.
DEFAULT = Tile()

# By CUDA capability, (9, 0) for sm_90. Empty until a sweep on a device has shown that another tile is faster.
TILES: dict[tuple[int, int], Tile] = {}


def tile_for(capability: tuple[int, int] | None) -> Tile:
    """The tile of a chip, or the default for one that wasn't measured (or isn't known)."""
    return DEFAULT if capability is None else TILES.get(capability, DEFAULT)
