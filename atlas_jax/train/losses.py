"""Measures of predicted scores. Each returns a weighted sum and the sum of weights, so that means over micro-batches
and masked rows stay exact."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax
from jaxtyping import Array, Float, Int

Measure = Callable[[Array, Array, Array], tuple[Array, Array]]  # (scores, teacher or targets, weights) -> sum, weight


def cross_entropy(
    scores: Float[Array, "N T V"], targets: Int[Array, "N T"], weights: Float[Array, "N T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted sum of `-log p(target)` in nats, and the sum of weights."""
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    return (losses * weights).sum(), weights.sum()


def distillation(
    scores: Float[Array, "N T V"], teacher: Float[Array, "N T V"], weights: Float[Array, "N T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted sum of the cross-entropy of `softmax(scores)` against `softmax(teacher)` in nats, and its weight.

    The gradient is that of the forward KL divergence (Hinton et al., arXiv 1503.02531, at temperature 1).
    """
    losses = optax.softmax_cross_entropy(scores, jax.nn.softmax(teacher, axis=-1))
    return (losses * weights).sum(), weights.sum()


def agreement(
    scores: Float[Array, "N T V"], teacher: Float[Array, "N T V"], weights: Float[Array, "N T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted count of rows where both like the same token best (greedy acceptance on given text), and its weight."""
    same = scores.argmax(axis=-1) == teacher.argmax(axis=-1)
    return (same * weights).sum(), weights.sum()
