"""What the target itself picks at a position. Speculation only ever asks whether a draft equals this pick.

Scores become a pick in one order, for plain and speculative decode alike: logit bias, penalties, allowed tokens;
then, above a temperature of `GREEDY_BELOW`, temperature, min-p, top-k, top-p, and a sample by the Gumbel-max trick.
All of it is data: a batch in which nobody asks for anything costs one branch not taken.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, for the plain and the speculative path alike

# What the noise of a position is for: no two uses share a draw. The target's own pick is the default stream.
DRAFT, ACCEPT, RESIDUAL = 1, 2, 3

Allowed = np.ndarray | Callable[[Sequence[int]], np.ndarray]
HostOrDevice = Any  # NumPy on the host, traced arrays in a program


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are picked.

    Attributes:
      temperature: 0 for greedy (anything under 1e-5 is).
      top_k: keep the k best tokens; 0 keeps all. Ties at the border are kept.
      top_p: keep the smallest set of likeliest tokens with at least this probability, of what top-k left; 1 keeps all.
      min_p: drop tokens less likely than this share of the likeliest one's probability.
      repetition_penalty: scores of tokens in prompt or answer are divided by it where positive, else multiplied.
      presence_penalty: taken from the score of each token that the answer already holds.
      frequency_penalty: the same, times how often.
      bias: added to scores, by token id.
      allowed: which tokens may come next, as a boolean `[V]` table, or as a function of all tokens so far (prompt and
        answer) that returns one. A function is called on the host before each step, for each draft.
      seed: of the sampling noise: the same seed gives the same answer in any batch, at any depth. None draws one from
        the engine's own seed and the request's number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed: Allowed | None = None
    seed: int | None = None

    def problem(self, vocab: int) -> str | None:
        """Why these settings cannot be served with a vocabulary of this size; None if they can."""
        finite = math.isfinite
        ranges = {
            "temperature": (self.temperature, finite(self.temperature) and self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k, self.top_k >= 0, "0 (all) or more"),
            "top_p": (self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (
                self.repetition_penalty,
                finite(self.repetition_penalty) and self.repetition_penalty > 0,
                "more than 0",
            ),
            "presence_penalty": (self.presence_penalty, finite(self.presence_penalty), "finite"),
            "frequency_penalty": (self.frequency_penalty, finite(self.frequency_penalty), "finite"),
        }
        for name, (value, fine, want) in ranges.items():
            if not fine:
                return f"{name} is {value}; it must be {want}"
        for token, value in self.bias.items():
            if not 0 <= token < vocab:
                return f"bias names token {token}, outside the vocabulary of {vocab}"
            if not finite(value):
                return f"bias of token {token} is {value}; it must be finite (use `allowed` to forbid a token)"
        if isinstance(self.allowed, np.ndarray):
            return table_problem(self.allowed, vocab)
        return None


def table_problem(allowed: np.ndarray, vocab: int) -> str | None:
    """Why this is no table of allowed tokens; None if it is one."""
    if allowed.shape != (vocab,) or allowed.dtype != np.bool_:
        return f"allowed must be a boolean table of shape ({vocab},), not {allowed.dtype} {allowed.shape}"
    return None if allowed.any() else "allowed forbids every token"


class Controls(NamedTuple):
    """The same settings resolved to numbers, one entry per sequence or per row."""

    temperature: Float[HostOrDevice, " N"]
    top_k: Int[HostOrDevice, " N"]
    top_p: Float[HostOrDevice, " N"]
    min_p: Float[HostOrDevice, " N"]
    repetition: Float[HostOrDevice, " N"]
    presence: Float[HostOrDevice, " N"]
    frequency: Float[HostOrDevice, " N"]
    biased: Int[HostOrDevice, " N"]
    masked: Int[HostOrDevice, " N"]
    keys: UInt32[HostOrDevice, "N 2"]

    @property
    def samples(self) -> Bool[Array, " N"]:
        return self.temperature >= GREEDY_BELOW

    @property
    def penalises(self) -> Bool[Array, " N"]:
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)

    @property
    def truncates(self) -> Bool[Array, " N"]:
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


@dataclasses.dataclass(frozen=True)
class Background:
    """What scores of R rows are adjusted by beside the controls. Each is made only inside the branch that needs it.

    Attributes:
      counts: `[R, V]` int32 each: how often a token stands in the row's history, and in the answer part of it.
      bias: `[R, V]` additive.
      allowed: `[R, V]` boolean; None where rows have no tables (drafts).
    """

    counts: Callable[[], tuple[Int[Array, "R V"], Int[Array, "R V"]]]
    bias: Callable[[], Float[Array, "R V"]]
    allowed: Callable[[], Bool[Array, "R V"]] | None


def pick(
    scores: Float[Array, "R V"],
    rows: Controls,
    wanted: Controls,
    positions: Int[Array, " R"],
    background: Background,
    ids: Int[Array, " V"] | None = None,
    vocab: int = 0,
) -> Int[Array, " R"]:
    """The token at each absolute position.

    The noise is a function of the request's key and of the token's absolute position alone, so a request draws the
    same token there with speculation on or off, at any depth, in any bucket, beside any neighbour. The draft head
    picks with the same noise: it then guesses the sample and not just the likeliest token.

    Args:
      scores: over the whole vocabulary, or over the tokens `ids` of one of `vocab`.
      rows: controls of each row (of a padding row anything).
      wanted: controls of each sequence, padding ones neutral; which branches run follows from these.
    """

    def special(scores: Array) -> Array:
        whole = scores if ids is None else jnp.full((scores.shape[0], vocab), -jnp.inf).at[:, ids].set(scores)
        shaped = shape_scores(whole, rows, wanted, background)
        noisy = functools.partial(add_noise, rows=rows, positions=positions)
        return _argmax(jax.lax.cond(wanted.samples.any(), noisy, lambda x: x, shaped))

    def greedy(scores: Array) -> Array:
        best = _argmax(scores)
        return best if ids is None else ids[best]

    return jax.lax.cond(_special(wanted), special, greedy, scores)


def probabilities(
    scores: Float[Array, "R V"], rows: Controls, wanted: Controls, background: Background
) -> Float[Array, "R V"]:
    """The distribution that a row is drawn from: one-hot at the best token where it is greedy."""

    def special(scores: Array) -> Array:
        return shape_scores(scores, rows, wanted, background)

    shaped = jax.lax.cond(_special(wanted), special, lambda x: x, scores)
    best = jax.nn.one_hot(_argmax(shaped), scores.shape[-1], dtype=scores.dtype)
    return jnp.where(rows.samples[:, None], jax.nn.softmax(shaped, axis=-1), best)


def shape_scores(
    scores: Float[Array, "R V"], rows: Controls, wanted: Controls, background: Background
) -> Float[Array, "R V"]:
    """Everything but the noise. Dropped tokens have a score of -inf."""

    def bias(scores: Array) -> Array:
        return scores + jnp.where(rows.biased[:, None] > 0, background.bias(), 0)

    def penalties(scores: Array) -> Array:
        seen, emitted = background.counts()
        repeated = jnp.where(scores > 0, scores / rows.repetition[:, None], scores * rows.repetition[:, None])
        scores = jnp.where((seen > 0) & (rows.repetition != 1)[:, None], repeated, scores)
        scores = scores - rows.frequency[:, None] * emitted
        return scores - jnp.where(emitted > 0, rows.presence[:, None], 0)

    def masks(scores: Array) -> Array:
        assert background.allowed is not None
        return jnp.where((rows.masked[:, None] == 0) | background.allowed(), scores, -jnp.inf)

    def temperature(scores: Array) -> Array:
        scaled = scores / jnp.where(rows.samples, rows.temperature, 1)[:, None].astype(scores.dtype)
        return jax.lax.cond(wanted.truncates.any(), lambda x: _truncate(x, rows), lambda x: x, scaled)

    keep = lambda x: x
    scores = jax.lax.cond((wanted.biased > 0).any(), bias, keep, scores)
    scores = jax.lax.cond(wanted.penalises.any(), penalties, keep, scores)
    if background.allowed is not None:
        scores = jax.lax.cond((wanted.masked > 0).any(), masks, keep, scores)
    return jax.lax.cond(wanted.samples.any(), temperature, keep, scores)


def add_noise(
    scores: Float[Array, "R V"], rows: Controls, positions: Int[Array, " R"], purpose: int = 0
) -> Float[Array, "R V"]:
    """Gumbel noise for the rows that sample: the argmax is then a draw from `softmax(scores)`."""
    keys = noise_keys(rows.keys, positions, purpose)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:], scores.dtype))(keys)
    return jnp.where(rows.samples[:, None], scores + noise, scores)


def noise_keys(keys: UInt32[Array, "R 2"], positions: Int[Array, " R"], purpose: int = 0) -> Array:
    """One random key per row, by request, absolute position and purpose."""

    def fold(key: Array, position: Array) -> Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.fold_in(folded, purpose) if purpose else folded

    return jax.vmap(fold)(keys, positions)


def token_counts(
    text: Int[Array, "N S"],
    lengths: Int[Array, " N"],
    prompts: Int[Array, " N"],
    more: Int[Array, "N E"],
    live: Bool[Array, "N E"],
    vocab: int,
) -> tuple[Int[Array, "N E V"], Int[Array, "N E V"]]:
    """How often each token stands before a place, in all of the history and in the answer alone.

    Entry e counts `text[:lengths]` and `more[:e + 1]`, which continue it (dead ones are left out); the answer begins
    at position `prompts`.
    """

    def count(tokens: Array, wanted: Array) -> Array:
        at = jnp.where(wanted, tokens, vocab)
        return jax.vmap(lambda row: jnp.zeros(vocab, jnp.int32).at[row].add(1, mode="drop"))(at)

    place = jnp.arange(text.shape[1])[None]
    before = place < lengths[:, None]
    answer = before & (place >= prompts[:, None])
    hot = jax.nn.one_hot(jnp.where(live, more, vocab), vocab, dtype=jnp.int32)
    in_answer = lengths[:, None] + jnp.arange(more.shape[1])[None] >= prompts[:, None]
    seen = count(text, before)[:, None] + jnp.cumsum(hot, axis=1)
    emitted = count(text, answer)[:, None] + jnp.cumsum(hot * in_answer[..., None], axis=1)
    return seen, emitted


def _special(wanted: Controls) -> Bool[Array, ""]:
    return (wanted.samples | wanted.penalises | (wanted.biased > 0) | (wanted.masked > 0)).any()


def _truncate(scores: Float[Array, "R V"], rows: Controls) -> Float[Array, "R V"]:
    """Min-p, then top-k, then top-p, by one sort: each keeps the scores from a threshold up."""
    vocab = scores.shape[-1]
    ordered = -jnp.sort(-scores, axis=-1)
    least = ordered[:, 0] + jnp.where(rows.min_p > 0, jnp.log(jnp.maximum(rows.min_p, 1e-30)), -jnp.inf)
    rank = jnp.clip(jnp.where(rows.top_k > 0, rows.top_k, vocab), 1, vocab) - 1
    least = jnp.maximum(least, jnp.take_along_axis(ordered, rank[:, None], axis=-1)[:, 0])
    kept = jnp.where(ordered >= least[:, None], ordered, -jnp.inf)
    chances = jax.nn.softmax(kept, axis=-1)
    before = jnp.cumsum(chances, axis=-1) - chances  # the probability of everything likelier
    last = jnp.maximum((before < rows.top_p[:, None]).sum(axis=-1) - 1, 0)
    nucleus = jnp.take_along_axis(kept, last[:, None], axis=-1)[:, 0]
    least = jnp.where(rows.top_p < 1, jnp.maximum(least, nucleus), least)
    return jnp.where(scores >= least[:, None], scores, -jnp.inf)


def _argmax(scores: Float[Array, "R V"]) -> Int[Array, " R"]:
    """First index of the largest score (of a NaN, where there is one), as `jnp.argmax`.

    In two plain reductions: XLA's CPU code for the paired one takes up to five times as long.
    """
    top = scores.max(axis=-1, keepdims=True)
    index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    return jnp.where((scores == top) | jnp.isnan(scores), index, scores.shape[-1]).min(axis=-1)
