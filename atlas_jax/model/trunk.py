"""The one forward of the trunk: pure functions over a parameter tree, a view and the caches of that view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.config import LayerKind, ModelConfig
from atlas_jax.kernels.numerics import widen
from atlas_jax.model import mixers
from atlas_jax.model.ffn import ffn
from atlas_jax.model.mixers import Params, View
from atlas_jax.model.ops import rms_norm
from atlas_jax.model.state import LayerCache


def layer(
    params: Params, cfg: ModelConfig, kind: LayerKind, x: Float[Array, "... D"], view: View, cache: LayerCache | None
) -> tuple[Float[Array, "... D"], LayerCache | None]:
    """Pre-norm residual block: `h = x + mixer(norm(x))`, then `h + ffn(norm(h))`."""
    mixer: Any = mixers.gdn if kind == "gdn" else mixers.attention
    mixed, cache = mixer(params["mixer"], cfg, rms_norm(x, params["input_norm"], cfg.norm_eps), view, cache)
    x = x + mixed
    return x + ffn(params["ffn"], cfg, rms_norm(x, params["post_norm"], cfg.norm_eps)), cache


def trunk(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "..."],
    view: View,
    caches: Sequence[LayerCache] | None = None,
) -> tuple[Float[Array, "... D"], tuple[Any, ...]]:
    """Hiddens after the final norm (what LM and MTP head see) and the updated caches (None for a view without them).

    Layers are unrolled over per-layer arrays: a scan over stacked weights copies them on every decode step.
    """
    x = params["embed"][tokens]
    new_caches: list[Any] = []
    for index, kind in enumerate(cfg.layers):
        cache = caches[index] if caches is not None else None
        x, cache = layer(params["layers"][index], cfg, kind, x, view, cache)
        new_caches.append(cache)
    return rms_norm(x, params["final_norm"], cfg.norm_eps), tuple(new_caches)


def logits(params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Scores over the vocabulary, at least float32, by the LM head or, where tied, by the embedding."""
    weight = params.get("lm_head", params["embed"])
    return widen(jnp.einsum("...d,vd->...v", hidden, weight))
