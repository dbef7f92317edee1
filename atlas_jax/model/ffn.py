"""Feed-forward halves of a layer: dense SwiGLU, or a mixture of experts with one shared, gated expert."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from atlas_jax import sharding
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
    """`sum_k w_k expert_k(x) + sigmoid(x . g) * shared(x)`.

    Where the weights lie on a mesh that cuts experts or their grouped columns, each shard adds what it holds and one
    sum of `[R, D]` follows: no partitioner cuts a grouped product between its groups, it would gather the weights.
    """
    mesh = jax.typeof(params["down"]).sharding.mesh
    can = ("expert", "tensor") if params["gate_up"].ndim == 4 else ("expert",)
    axes = tuple(axis for axis in can if mesh.shape.get(axis, 1) > 1)
    if not axes:
        return _of_one_shard(params, moe_cfg, x, 0)
    taken = lambda where: P(*(axis if axis in axes else None for axis in where.spec))
    specs = jax.tree.map(taken, sharding.shardings(params, mesh))

    def shard(params: dict[str, Any], x: Array) -> Array:
        index = jax.lax.axis_index("expert") if "expert" in axes else 0
        return jax.lax.psum(_of_one_shard(params, moe_cfg, x, index), axes)

    over = functools.partial(jax.shard_map, mesh=mesh, axis_names=set(axes), check_vma=False)
    return over(shard, in_specs=(specs, P()), out_specs=P())(params, x)


def _of_one_shard(
    params: dict[str, Any], moe_cfg: MoEConfig, x: Float[Array, "R D"], index: int | Int[Array, ""]
) -> Float[Array, "R D"]:
    """What the `index`-th shard of the experts adds, as grouped products over rows sorted by expert."""
    weights, ids = route(params["router"], moe_cfg, x)
    count = params["down"].shape[0]
    own = ids - index * count
    flat_ids = jnp.where((own >= 0) & (own < count), own, count).reshape(-1)
    order = jnp.argsort(flat_ids, stable=True)
    # Rows of other shards' experts come last and are out of range, so read as zeros and written nowhere.
    order = jnp.where(flat_ids[order] < count, order, flat_ids.size)
    sizes = jnp.bincount(flat_ids, length=count).astype(jnp.int32)
    gate_up = params["gate_up"]  # [E, D, 2 I], or in groups of columns
    rows = x.at[order // moe_cfg.experts_per_token].get(mode="fill", fill_value=0)
    both = jax.lax.ragged_dot(rows, gate_up.reshape(*gate_up.shape[:2], -1), sizes)
    gate, up = apart(both, [params["down"].shape[1]] * 2, groups(gate_up[0]))
    rows = jax.lax.ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)
    # Back to (row, choice) order, so that each row adds its experts in the same order whatever the batch.
    chosen = jnp.zeros_like(rows).at[order].set(rows, mode="drop").reshape(*ids.shape, -1)
    routed = (chosen * weights[..., None]).sum(axis=1)
    shared = swiglu(x, params["shared_gate_up"], params["shared_down"])
    shared = jax.nn.sigmoid(x @ params["shared_gate"])[:, None] * shared
    return routed + jnp.where(index == 0, shared, 0)
