"""What the target itself picks at a position. Speculation only ever asks whether a draft equals this pick."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, for the plain and the speculative path alike


def pick(
    scores: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    keys: UInt32[Array, "R 2"],
    positions: Int[Array, " R"],
) -> Int[Array, " R"]:
    """The token at each absolute position: argmax, or a sample at `temperature` by the Gumbel-max trick.

    The noise is a function of the request's key and of the token's absolute position alone, so a request draws the
    same token there with speculation on or off, at any depth, in any bucket, beside any neighbour. The draft head
    picks with the same noise: it then guesses the sample and not just the likeliest token.
    """

    def noisy(scores: Array) -> Array:
        def noise(key: Array, position: Array) -> Array:
            folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
            return jax.random.gumbel(folded, scores.shape[1:], scores.dtype)

        sampled = temperature >= GREEDY_BELOW
        scaled = scores / jnp.where(sampled, temperature, 1)[:, None].astype(scores.dtype)
        return jnp.where(sampled[:, None], scaled + jax.vmap(noise)(keys, positions), scores)

    scores = jax.lax.cond((temperature >= GREEDY_BELOW).any(), noisy, lambda scores: scores, scores)
    return _argmax(scores)


def _argmax(scores: Float[Array, "R V"]) -> Int[Array, " R"]:
    """First index of the largest score (of a NaN, where there is one), as `jnp.argmax`.

    In two plain reductions: XLA's CPU code for the paired one takes up to five times as long.
    """
    top = scores.max(axis=-1, keepdims=True)
    index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    return jnp.where((scores == top) | jnp.isnan(scores), index, scores.shape[-1]).min(axis=-1)
