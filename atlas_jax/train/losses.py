"""Losses of the base and of the draft head. Each returns a weighted sum and the sum of weights, so that means over
micro-batches and masked rows stay exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from atlas_jax.config import ModelConfig
from atlas_jax.model import mtp
from atlas_jax.model.mixers import Params
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full


def cross_entropy(
    scores: Float[Array, "N T V"], targets: Int[Array, "N T"], weights: Float[Array, "N T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted sum of `-log p(target)` in nats, and the sum of weights."""
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    return (losses * weights).sum(), weights.sum()


def base_loss(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "N T"],
    weights: Float[Array, "N T"],
    segments: Int[Array, "N T"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Next-token cross-entropy of the trunk; `weights[:, t]` is the weight of token t as a target."""
    hidden, _ = trunk(params, cfg, tokens, _packed(segments))
    return cross_entropy(logits(params, hidden[:, :-1]), tokens[:, 1:], weights[:, 1:])


def head_loss(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "N T"],
    weights: Float[Array, "N T"],
    segments: Int[Array, "N T"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Cross-entropy of the head on the token after next, over the frozen trunk.

    Row t is fed the trunk's hidden t and token t + 1 and is judged on token t + 2; rows whose three tokens are not of
    one document are masked.
    """
    frozen = jax.lax.stop_gradient({name: value for name, value in params.items() if name != "mtp"})
    hidden, _ = trunk(frozen, cfg, tokens, _packed(segments))
    view = _packed(segments[:, :-1])
    drafted, _ = mtp.head(frozen | {"mtp": params["mtp"]}, cfg, tokens[:, 1:], hidden[:, :-1], view)
    judged = jnp.where(segments[:, :-2] == segments[:, 2:], weights[:, 2:], 0)
    return cross_entropy(logits(frozen, drafted[:, :-1]), tokens[:, 2:], judged)


def _packed(segments: Int[Array, "N T"]) -> Full:
    positions = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    return Full(positions, segments)
