"""The MTP draft head: one attention layer that predicts the token after next, and recurses on its own output."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.config import ModelConfig
from atlas_jax.model.mixers import Params, View, keys_and_values
from atlas_jax.model.ops import rms_norm
from atlas_jax.model.state import KvCache
from atlas_jax.model.trunk import layer


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
    x = rms_norm(head_input(params, cfg, next_tokens, hidden), block["input_norm"], cfg.norm_eps)
    kv = x @ block["mixer"]["qkv_proj"][:, 2 * cfg.q_heads * cfg.head_dim :]
    return keys_and_values(block["mixer"], cfg, kv, positions)
