"""The MTP draft head: one attention layer that predicts the token after next, and recurses on its own output."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from atlas_jax.config import ModelConfig
from atlas_jax.kernels.numerics import widen
from atlas_jax.model.mixers import Params, View, keys_and_values
from atlas_jax.model.ops import columns, groups, rms_norm
from atlas_jax.model.state import KvCache
from atlas_jax.model.trunk import layer, logits


def head_input(
    params: Params, cfg: ModelConfig, next_tokens: Int[Array, "..."], hidden: Float[Array, "... D"]
) -> Float[Array, "... D"]:
    """`fc([norm(embed(token t+1)) | norm(hidden t)])`, embedding first. Training and serving both come here.

    `hidden` is the trunk's output AFTER its final norm for the first draft, and the head's own output (after
    `mtp.norm`) from the second on. That it is normed twice is intended.
    """
    mtp = params["mtp"]
    embedded = rms_norm(params["embed"][next_tokens], mtp["embed_norm"], cfg.norm_eps)
    both = jnp.concatenate([embedded, rms_norm(hidden, mtp["hidden_norm"], cfg.norm_eps)], axis=-1)
    return both @ mtp["fc"]


def head(
    params: Params,
    cfg: ModelConfig,
    next_tokens: Int[Array, "..."],
    hidden: Float[Array, "... D"],
    view: View,
    cache: KvCache | None = None,
) -> tuple[Float[Array, "... D"], KvCache | None]:
    """Hiddens whose `logits` predict token t + 2, and the head's updated cache. A row's position is its hidden's, t."""
    mtp = params["mtp"]
    x = head_input(params, cfg, next_tokens, hidden)
    x, cache = layer(mtp["layer"], cfg, "attention", x, view, cache)  # type: ignore[assignment]
    return rms_norm(x, mtp["norm"], cfg.norm_eps), cache


def head_entries(
    params: Params,
    cfg: ModelConfig,
    next_tokens: Int[Array, "..."],
    hidden: Float[Array, "... D"],
    positions: Int[Array, "..."],
) -> tuple[Float[Array, "... Hkv Dh"], Float[Array, "... Hkv Dh"]]:
    """Keys and values that `head` would cache for these rows, and nothing else.

    The head is one layer, so its entries depend on their own inputs only: prefill needs no attention here.
    """
    block = params["mtp"]["layer"]
    weight = block["mixer"]["qkv_proj"]
    last = 2 * cfg.kv_heads * cfg.head_dim // groups(weight)
    x = rms_norm(head_input(params, cfg, next_tokens, hidden), block["input_norm"], cfg.norm_eps)
    return keys_and_values(block["mixer"], cfg, columns(x, weight[..., -last:]), positions)


def draft_logits(params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... Vd"]:
    """Scores over the draft vocabulary: all tokens, or those of the sorted map `params["mtp"]["draft_ids"]`.

    Serving gathers the map's rows of the LM head once (`with_draft_head`); else they are gathered here.
    """
    mtp = params["mtp"]
    if "draft_ids" not in mtp:
        return logits(params, hidden)
    rows = mtp["draft_head"] if "draft_head" in mtp else _draft_rows(params)
    return widen(jnp.einsum("...d,vd->...v", hidden, rows))


def draft_tokens(params: Params, picked: Int[Array, "..."]) -> Int[Array, "..."]:
    """Token ids of places in the draft vocabulary."""
    mtp = params["mtp"]
    return mtp["draft_ids"][picked] if "draft_ids" in mtp else picked


def with_draft_head(params: Params) -> Params:
    """The parameters with the LM-head rows of the draft vocabulary gathered, if the head has one: once, for serving."""
    mtp = params.get("mtp", {})
    if "draft_ids" not in mtp or "draft_head" in mtp:
        return params
    return {**params, "mtp": {**mtp, "draft_head": _draft_rows(params)}}


def _draft_rows(params: Params) -> Array:
    weight: Any = params.get("lm_head", params["embed"])
    return weight[params["mtp"]["draft_ids"]]


def check_draft_ids(draft_ids: Any, cfg: ModelConfig) -> None:
    """Raises `ValueError` for a map that is not sorted, repeats a token or leaves the vocabulary of this model."""
    ids = np.asarray(draft_ids)
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"the draft vocabulary must be a list of token ids, not {ids.dtype}{list(ids.shape)}")
    if (np.diff(ids) <= 0).any():
        raise ValueError("the token ids of the draft vocabulary must be sorted and differ")
    if ids[0] < 0 or ids[-1] >= cfg.vocab_size:
        raise ValueError(
            f"the draft vocabulary holds token ids {ids[0]} to {ids[-1]} and the model has {cfg.vocab_size} tokens: "
            "the map is of another model"
        )
