"""Growing a trained trunk: new layers that change nothing yet, between layers that are trained already.

A zero output projection makes a residual block an identity, and its gradient is not zero, so the deeper model starts
where the shallower one ended (Net2Net, arXiv 1511.05641; the copies as in arXiv 2401.02415).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from atlas_jax.config import ConfigError, ModelConfig


def deepen(params: dict[str, Any], cfg: ModelConfig, layers: int) -> tuple[dict[str, Any], ModelConfig]:
    """`(params, cfg)` with `layers` layers, same function: each period is followed by copies that add zero.

    Copies, NumPy arrays, are whole periods, so that the pattern of mixers holds; all else is as it was.
    `ConfigError` where `layers` isn't a multiple of what is there, or the trunk isn't made of whole periods.
    """
    depth = len(cfg.layers)
    period = cfg.layers.index("attention") + 1 if "attention" in cfg.layers else depth
    if depth % period or layers % depth or layers < depth:
        raise ConfigError(
            f"{layers} layers can't be grown from {depth}: take a multiple, and whole periods of {period}"
        )
    grown: list[Any] = []
    kinds = []
    for first in range(0, depth, period):
        block = range(first, first + period)
        for repeat in range(layers // depth):
            kinds += [cfg.layers[i] for i in block]
            grown += [_identity(params["layers"][i]) if repeat else params["layers"][i] for i in block]
    return params | {"layers": dict(enumerate(grown))}, dataclasses.replace(cfg, layers=tuple(kinds))


def _identity(layer: dict[str, Any]) -> dict[str, Any]:
    """A copy whose mixer and FFN put out zero: `out_proj`, `o_proj`, `down` and `shared_down` are 0."""

    def leaf(path: tuple[Any, ...], x: Any) -> np.ndarray:
        last = path[-1].key
        return np.zeros_like(x) if last in ("out_proj", "o_proj", "down", "shared_down") else np.array(x)

    return jax.tree_util.tree_map_with_path(leaf, layer)
