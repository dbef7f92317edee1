"""Feed-forward halves of a layer: dense SwiGLU, or a mixture of experts with one shared, gated expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.config import ModelConfig, MoEConfig
from atlas_jax.kernels.numerics import widen
from atlas_jax.model.ops import apart, groups, swiglu


def ffn(params: dict[str, Any], cfg: ModelConfig, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """The layer's FFN, dense or MoE as the config says."""
    if cfg.moe is None:
        return swiglu(x, params["gate_up"], params["down"])
    flat = x.reshape(-1, x.shape[-1])
    return moe(params, cfg.moe, flat).reshape(x.shape)


def route(
    router: Float[Array, "D E"], moe_cfg: MoEConfig, x: Float[Array, "R D"]
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Weights and ids of the chosen experts: softmax over ALL experts, top k, renormalised to sum to one."""
    probabilities = jax.nn.softmax(widen(x @ router), axis=-1)
    weights, ids = jax.lax.top_k(probabilities, moe_cfg.experts_per_token)
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(x.dtype), ids


def moe(params: dict[str, Any], moe_cfg: MoEConfig, x: Float[Array, "R D"]) -> Float[Array, "R D"]:
    """`sum_k w_k expert_k(x) + sigmoid(x . g) * shared(x)`, experts as grouped products over rows sorted by expert."""
    weights, ids = route(params["router"], moe_cfg, x)
    flat_ids = ids.reshape(-1)
    order = jnp.argsort(flat_ids, stable=True)
    source = order // moe_cfg.experts_per_token
    sizes = jnp.bincount(flat_ids, length=moe_cfg.num_experts).astype(jnp.int32)
    gate_up = params["gate_up"]  # [E, D, 2 I], or in groups of columns
    both = jax.lax.ragged_dot(x[source], gate_up.reshape(*gate_up.shape[:2], -1), sizes)
    gate, up = apart(both, [moe_cfg.expert_size] * 2, groups(gate_up[0]))
    rows = jax.lax.ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)
    # Back to (row, choice) order, so that each row adds its experts in the same order whatever the batch.
    chosen = jnp.zeros_like(rows).at[order].set(rows).reshape(*ids.shape, -1)
    routed = (chosen * weights[..., None]).sum(axis=1)
    shared = swiglu(x, params["shared_gate_up"], params["shared_down"])
    return routed + jax.nn.sigmoid(x @ params["shared_gate"])[:, None] * shared
