"""The two sequence mixers of the family, up to how rows see their sequence, which is the view's business.

A view (`views.py`) answers two questions: what does the recurrence give for these rows, and what does attention give.
Everything here is dense work on rows of any leading shape.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.config import ModelConfig
from atlas_jax.kernels.causal_conv import causal_conv
from atlas_jax.kernels.gated_norm import gated_norm
from atlas_jax.kernels.numerics import widen
from atlas_jax.model.ops import apart, columns, groups, l2_normalise, rms_norm, rotate
from atlas_jax.model.state import GdnCache, KvCache

Params = dict[str, Any]


def leaf_dtype(path: tuple[Any, ...], dtype: Any) -> Any:
    """The dtype that a parameter (`path` as of `tree_map_with_path`) has in a model of this one: decays are wider."""
    decay = getattr(path[-1], "key", None) in ("a_log", "dt_bias")
    return jnp.promote_types(dtype, jnp.float32) if decay else jnp.dtype(dtype)


class View(Protocol):
    """How the rows of a forward see their sequences: `Full` (no cache), `Prefill` or `Step` (the layer's cache)."""

    @property
    def positions(self) -> Int[Array, "..."]: ...

    def recur(
        self, params: Params, cfg: ModelConfig, rows: Float[Array, "... C+2Hv"], cache: Any
    ) -> tuple[Float[Array, "... Hv Dv"], Any]: ...

    def attend(
        self,
        q: Float[Array, "... Hq Dh"],
        k: Float[Array, "... Hkv Dh"],
        v: Float[Array, "... Hkv Dh"],
        cache: Any,
    ) -> tuple[Float[Array, "... Hq Dh"], Any]: ...


def gdn(
    params: Params, cfg: ModelConfig, x: Float[Array, "... D"], view: View, cache: GdnCache | None
) -> tuple[Float[Array, "... D"], GdnCache | None]:
    """Gated DeltaNet mixer: one fused projection `(q|k|v|b|a|z)`, conv, delta rule, gated norm, output projection."""
    fused = [cfg.conv_channels + 2 * cfg.gdn_value_heads, cfg.value_size]
    rows, gate = apart(columns(x, params["in_proj"]), fused, groups(params["in_proj"]))
    out, cache = view.recur(params, cfg, rows, cache)
    gate = gate.reshape(*gate.shape[:-1], cfg.gdn_value_heads, cfg.gdn_value_dim)
    out = gated_norm(out, gate, params["norm"], cfg.norm_eps)
    return out.reshape(*x.shape[:-1], cfg.value_size) @ params["out_proj"], cache


def delta_inputs(
    params: Params,
    cfg: ModelConfig,
    history: Float[Array, "N H C+2Hv"],
    segments: Int[Array, "N T"] | None = None,
) -> tuple[
    Float[Array, "N T Hk Dk"],
    Float[Array, "N T Hk Dk"],
    Float[Array, "N T Hv Dv"],
    Float[Array, "N T Hv"],
    Float[Array, "N T Hv"],
]:
    """`(q, k, v, g, beta)` of the delta rule, at least float32, from projected rows behind `W - 1` rows of history.

    `q = l2(q) Dk^-0.5`, `k = l2(k)`, `beta = sigmoid(b)`, `g = -exp(A_log) softplus(a + dt_bias)`.
    """
    heads, taps, count = cfg.gdn_value_heads, params["conv"], groups(params["conv"])
    before, gates = apart(history, [cfg.conv_channels, 2 * heads], count)
    mixed = causal_conv(before, taps.reshape(taps.shape[0], -1), segments)
    both, v = apart(mixed, [2 * cfg.key_size, cfg.value_size], count)
    lead = mixed.shape[:2]
    both = l2_normalise(both.reshape(*lead, count, 2, cfg.gdn_key_heads // count, cfg.gdn_key_dim))
    q, k = (both[:, :, :, i].reshape(*lead, cfg.gdn_key_heads, cfg.gdn_key_dim) for i in (0, 1))
    q = q * cfg.gdn_key_dim**-0.5
    v = widen(v.reshape(*lead, heads, cfg.gdn_value_dim))
    b, a = apart(widen(gates[:, cfg.conv_width - 1 :]), [heads, heads], count)
    g = -jnp.exp(widen(params["a_log"])) * jax.nn.softplus(a + widen(params["dt_bias"]))
    return q, k, v, g, jax.nn.sigmoid(b)


def attention(
    params: Params, cfg: ModelConfig, x: Float[Array, "... D"], view: View, cache: KvCache | None
) -> tuple[Float[Array, "... D"], KvCache | None]:
    """Gated attention: fused projection `(q|gate|k|v)`, per-head norms, partial rotary, `sigmoid(gate)` on the out."""
    q_size, weight = cfg.q_heads * cfg.head_dim, params["qkv_proj"]
    q, gate, kv = apart(columns(x, weight), [q_size, q_size, 2 * cfg.kv_heads * cfg.head_dim], groups(weight))
    q = q.reshape(*x.shape[:-1], cfg.q_heads, cfg.head_dim)
    q = rotate(rms_norm(q, params["q_norm"], cfg.norm_eps), view.positions, cfg.rotary_dim, cfg.rope_theta)
    k, v = keys_and_values(params, cfg, kv, view.positions)
    out, cache = view.attend(q, k, v, cache)
    out = out.reshape(*x.shape[:-1], q_size) * jax.nn.sigmoid(gate)
    return out @ params["o_proj"], cache


def keys_and_values(
    params: Params, cfg: ModelConfig, projected: Float[Array, "... 2HkvDh"], positions: Int[Array, "..."]
) -> tuple[Float[Array, "... Hkv Dh"], Float[Array, "... Hkv Dh"]]:
    """Keys (normed, rotated) and values as the cache holds them, from the last columns of `qkv_proj`."""
    k, v = apart(projected, [cfg.kv_heads * cfg.head_dim] * 2, groups(params["qkv_proj"]))
    k = k.reshape(*k.shape[:-1], cfg.kv_heads, cfg.head_dim)
    v = v.reshape(*v.shape[:-1], cfg.kv_heads, cfg.head_dim)
    k = rotate(rms_norm(k, params["k_norm"], cfg.norm_eps), positions, cfg.rotary_dim, cfg.rope_theta)
    return k, v
