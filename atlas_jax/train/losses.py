"""What a draft head is trained on and measured by, row by row.

Every measure is `(scores, teacher, weights) -> (weighted sum, sum of weights)`: sums, so that means over micro-batches
and masked rows stay exact. `scores` are the head's logits q, `teacher` the base's logits p (or, for `cross_entropy`,
token ids). All reductions are in float32 at least, whatever the dtype of the scores; a row of weight 0 adds exactly 0.

A draft is accepted with probability `alpha = sum_v min(p(v), q(v)) = 1 - TV(p, q)` (Leviathan et al., arXiv 2211.17192,
theorem 3.5): total variation and its logarithm are acceptance itself; the divergences bound it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.kernels.numerics import widen

Scores = Float[Array, "... V"]
Weights = Float[Array, "..."]
Measured = tuple[Float[Array, ""], Float[Array, ""]]
Measure = Callable[[Array, Array, Array], Measured]


def _weighted(losses: Float[Array, "..."], weights: Weights) -> Measured:
    weights = widen(weights)
    return jnp.where(weights > 0, widen(losses) * weights, 0).sum(), weights.sum()


def _log_laws(scores: Scores, teacher: Scores) -> tuple[Scores, Scores]:
    return jax.nn.log_softmax(widen(scores), axis=-1), jax.nn.log_softmax(widen(teacher), axis=-1)


def cross_entropy(scores: Scores, targets: Int[Array, "..."], weights: Weights) -> Measured:
    """`-log q(target)` in nats."""
    log_q = jax.nn.log_softmax(widen(scores), axis=-1)
    return _weighted(-jnp.take_along_axis(log_q, targets[..., None], axis=-1)[..., 0], weights)


def pick_cross_entropy(scores: Scores, teacher: Scores, weights: Weights) -> Measured:
    """`-log q(argmax p)`: the negative log acceptance when the base decodes greedily, its law being one token."""
    return cross_entropy(scores, teacher.argmax(axis=-1), weights)


def distillation(scores: Scores, teacher: Scores, weights: Weights) -> Measured:
    """Cross-entropy `-sum p log q`: `forward_kl` plus the teacher's entropy, so of the same gradient."""
    log_q, log_p = _log_laws(scores, teacher)
    return _weighted(-(jnp.exp(log_p) * log_q).sum(axis=-1), weights)


def forward_kl(scores: Scores, teacher: Scores, weights: Weights) -> Measured:
    """`KL(p || q) = sum p (log p - log q)` (Hinton et al., arXiv 1503.02531, at temperature 1): covers all of p."""
    log_q, log_p = _log_laws(scores, teacher)
    return _weighted((jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1), weights)


def reverse_kl(scores: Scores, teacher: Scores, weights: Weights) -> Measured:
    """`KL(q || p)` (Gu et al., MiniLLM, arXiv 2306.08543): settles on the modes of p."""
    return forward_kl(teacher, scores, weights)


def total_variation(scores: Scores, teacher: Scores, weights: Weights) -> Measured:
    """`TV(p, q) = 1 - alpha = 1/2 sum |p - q|` (Zhou et al., DistillSpec, arXiv 2310.08461)."""
    log_q, log_p = _log_laws(scores, teacher)
    return _weighted(0.5 * jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)).sum(axis=-1), weights)


def negative_log_acceptance(scores: Scores, teacher: Scores, weights: Weights) -> Measured:
    """`-log alpha = -log sum min(p, q)` (LK losses, arXiv 2602.23881), as a log-sum-exp: finite where p and q part."""
    return _weighted(-_log_acceptance(scores, teacher), weights)


def kl_to_tv(decay: float = 3.0) -> Measure:
    """`c KL(p || q) + (1 - c) TV(p, q)` with `c = exp(-decay alpha)` held constant (LK losses, as above).

    Far from the teacher the gradient of total variation vanishes and KL leads; near it acceptance itself does. Here c
    is each row's own.
    """

    def measure(scores: Scores, teacher: Scores, weights: Weights) -> Measured:
        log_q, log_p = _log_laws(scores, teacher)
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        distance = 0.5 * jnp.abs(p - q).sum(axis=-1)
        share = jnp.exp(-decay * (1 - jax.lax.stop_gradient(distance)))
        return _weighted(share * (p * (log_p - log_q)).sum(axis=-1) + (1 - share) * distance, weights)

    return measure


def mixture(*parts: tuple[float | Array, Measure]) -> Measure:
    """`sum_i c_i measure_i`. A coefficient may be traced: `scheduled` makes it follow the progress of training."""

    def measure(scores: Array, teacher: Array, weights: Array) -> Measured:
        found = [(c, part(scores, teacher, weights)) for c, part in parts]
        return sum((c * total for c, (total, _) in found), jnp.zeros(())), found[0][1][1]

    return measure


def scheduled(first: Measure, last: Measure, progress: float | Array) -> Measure:
    """From `first` at progress 0 to `last` at 1, linearly in between."""
    return mixture((1 - progress, first), (progress, last))


def agreement(scores: Scores, teacher: Scores, weights: Weights) -> Measured:
    """Rows where both like the same token best: greedy acceptance on given text."""
    return _weighted(scores.argmax(axis=-1) == teacher.argmax(axis=-1), weights)


def acceptance(scores: Scores, teacher: Scores, weights: Weights) -> Measured:
    """`alpha`, the chance that a sampled draft is accepted at temperature 1."""
    return _weighted(jnp.exp(_log_acceptance(scores, teacher)), weights)


def _log_acceptance(scores: Scores, teacher: Scores) -> Float[Array, "..."]:
    log_q, log_p = _log_laws(scores, teacher)
    return jax.nn.logsumexp(jnp.minimum(log_p, log_q), axis=-1)


MEASURES: dict[str, Measure] = {
    "text": cross_entropy,  # the one that is judged by the text's token, not by the teacher
    "pick": pick_cross_entropy,
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "lk": negative_log_acceptance,
    "kl_to_tv": kl_to_tv(),
}


def in_blocks(
    measure: Measure,
    score: Callable[[Array], Array],
    teach: Callable[[Array], Array],
    hidden: Float[Array, "R D"],
    teacher: Array,
    weights: Float[Array, " R"],
    block: int,
) -> Measured:
    """`measure(score(hidden), teach(teacher), weights)` over blocks of at most `block` rows, exactly.

    `score` and `teach` make `[rows, V]` logits of hiddens (`teach` may pass token ids through). Only one block's logits
    exist at a time, in the backward pass too, where they are made again: at V = 248k a block of 256 float32 rows is
    0.25 GB, where the rows of a batch would take tens.
    """
    rows = hidden.shape[0]
    if rows <= block:
        return measure(score(hidden), teach(teacher), weights)
    pad = -rows % block
    cut = lambda x: jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(-1, block, *x.shape[1:])

    @jax.checkpoint
    def one(carry: Measured, part: Sequence[Array]) -> tuple[Measured, None]:
        total, weight = measure(score(part[0]), teach(part[1]), part[2])
        return (carry[0] + total, carry[1] + weight), None

    zero = jnp.zeros((), jnp.promote_types(hidden.dtype, jnp.float32))
    return jax.lax.scan(one, (zero, zero), (cut(hidden), cut(teacher), cut(weights)))[0]
