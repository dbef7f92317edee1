"""What a base is trained on: the next token. The draft head's objective is in `unroll.py`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.config import ModelConfig
from atlas_jax.kernels.backends import Kernels
from atlas_jax.model.mixers import Params
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full
from atlas_jax.train.losses import cross_entropy


def base_loss(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "N T"],
    weights: Float[Array, "N T"],
    segments: Int[Array, "N T"],
    *,
    kernels: Kernels = Kernels(),
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Next-token cross-entropy of the trunk; `weights[:, t]` is the weight of token t as a target."""
    hidden, _ = trunk(params, cfg, tokens, Full(_positions(tokens), segments, kernels))
    return cross_entropy(logits(params, hidden[:, :-1]), tokens[:, 1:], weights[:, 1:])


def _positions(tokens: Int[Array, "N T"]) -> Int[Array, "N T"]:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
