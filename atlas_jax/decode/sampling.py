"""What the target itself picks at a position. Speculation only ever asks whether a draft equals this pick.

Scores become a pick in one order, for plain and speculative decode alike: logit bias, penalties, allowed tokens;
then, above a temperature of `GREEDY_BELOW`, temperature, min-p, top-k, top-p, and a sample by the Gumbel-max trick.
All of it is data: a batch in which nobody asks for anything costs one branch not taken.
"""

from __future__ import annotations

import dataclasses
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


class Tables(NamedTuple):
    """Pools by slot that sampling reads, none of them in a batch where nobody asks for anything."""

    text: Int[Array, "S L"]
    bias: Float[Array, "S V"]
    masks: UInt32[Array, "S K V/32"]


class Places(NamedTuple):
    """Where R rows stand in their sequences.

    Attributes:
      slots: of the sequence; `S` for padding.
      positions: absolute position of the token to pick.
      lengths, prompts: committed positions, and tokens of the prompt: what stands behind it is answer.
      more: tokens behind the committed ones, and `live` those of them that stand before the row.
      mask: which of the slot's masks holds for the row; -1 for none.
    """

    slots: Int[Array, " R"]
    positions: Int[Array, " R"]
    lengths: Int[Array, " R"]
    prompts: Int[Array, " R"]
    more: Int[Array, "R E"]
    live: Bool[Array, "R E"]
    mask: Int[Array, " R"]


def pick(
    scores: Float[Array, "R V"],
    rows: Controls,
    wanted: Controls,
    places: Places,
    tables: Tables,
    ids: Int[Array, " V"] | None = None,
) -> Int[Array, " R"]:
    """The token at each place.

    The noise is a function of the request's key and of the token's absolute position alone, so a request draws the
    same token there with speculation on or off, at any depth, in any bucket, beside any neighbour. The draft head
    picks with the same noise: it then guesses the sample and not just the likeliest token.

    Args:
      scores: over the whole vocabulary, or over the tokens `ids` of it.
      rows: controls of each row (of a padding row anything).
      wanted: controls of each sequence, padding ones neutral: whether anybody asks for anything follows from these.
    """

    def one(row: tuple[Array, Controls, Places]) -> Array:
        scores, controls, place = row
        shaped = shape_scores(spread(scores, ids, tables.bias.shape[1]), controls, place, tables)
        return _argmax(add_noise(shaped[None], controls, place.positions)[0][None])[0]

    def greedy(scores: Array) -> Array:
        best = _argmax(scores)
        return best if ids is None else ids[best]

    # Row by row: together, the arrays over the vocabulary would be the largest of the whole step.
    special = lambda scores: jax.lax.map(one, (scores, rows, places))
    return jax.lax.cond(_special(wanted), special, greedy, scores)


def probabilities(
    scores: Float[Array, "R V"], rows: Controls, places: Places, tables: Tables, ids: Int[Array, " V"] | None = None
) -> Float[Array, "R V"]:
    """The distribution over the whole vocabulary that a row is drawn from: one-hot at the best token where greedy."""

    def one(row: tuple[Array, Controls, Places]) -> Array:
        scores, controls, place = row
        shaped = shape_scores(spread(scores, ids, tables.bias.shape[1]), controls, place, tables)
        best = jax.nn.one_hot(_argmax(shaped[None])[0], shaped.shape[0], dtype=shaped.dtype)
        return jnp.where(controls.samples, jax.nn.softmax(shaped), best)

    return jax.lax.map(one, (scores, rows, places))


def spread(scores: Float[Array, " V"], ids: Int[Array, " V"] | None, vocab: int) -> Float[Array, " V"]:
    """Scores over tokens `ids` as scores over all of them; the others have -inf."""
    return scores if ids is None else jnp.full(vocab, -jnp.inf, scores.dtype).at[ids].set(scores)


def shape_scores(scores: Float[Array, " V"], row: Controls, place: Places, tables: Tables) -> Float[Array, " V"]:
    """Everything but the noise, for one row (of `Controls` and `Places`). Dropped tokens have a score of -inf."""
    vocab = scores.shape[0]
    text = tables.text.at[place.slots].get(mode="fill", fill_value=0)
    seen, emitted = token_counts(text, place.lengths, place.prompts, place.more, place.live, vocab)
    bias = tables.bias.at[place.slots].get(mode="fill", fill_value=0)
    scores = scores + jnp.where(row.biased > 0, bias, 0).astype(scores.dtype)
    repeated = jnp.where(scores > 0, scores / row.repetition, scores * row.repetition).astype(scores.dtype)
    scores = jnp.where((seen > 0) & (row.repetition != 1), repeated, scores)
    scores = scores - (row.frequency * emitted + jnp.where(emitted > 0, row.presence, 0)).astype(scores.dtype)
    words = tables.masks.at[place.slots, jnp.maximum(place.mask, 0)].get(mode="fill", fill_value=0)
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = (bits.reshape(-1)[:vocab] > 0) | (row.masked == 0) | (place.mask < 0)
    scores = jnp.where(allowed, scores, -jnp.inf)
    scores = scores / jnp.where(row.samples, row.temperature, 1).astype(scores.dtype)
    cut = row.samples & row.truncates
    return jax.lax.cond(cut, lambda x: _truncate(x, row), lambda x: x, scores)


def add_noise(
    scores: Float[Array, "R V"], rows: Controls, positions: Int[Array, " R"], purpose: int = 0
) -> Float[Array, "R V"]:
    """Gumbel noise for the rows that sample: the argmax is then a draw from `softmax(scores)`."""
    samples = rows.samples.reshape(-1, 1)
    keys = noise_keys(rows.keys.reshape(-1, 2), positions.reshape(-1), purpose)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:], scores.dtype))(keys)
    return jnp.where(samples, scores + noise, scores)


def noise_keys(keys: UInt32[Array, "R 2"], positions: Int[Array, " R"], purpose: int = 0) -> Array:
    """One random key per row, by request, absolute position and purpose."""

    def fold(key: Array, position: Array) -> Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.fold_in(folded, purpose) if purpose else folded

    return jax.vmap(fold)(keys, positions)


def token_counts(
    text: Int[Array, " L"],
    length: Int[Array, ""],
    prompt: Int[Array, ""],
    more: Int[Array, " E"],
    live: Bool[Array, " E"],
    vocab: int,
) -> tuple[Int[Array, " V"], Int[Array, " V"]]:
    """How often each token stands before a place: in all of the history, and in the answer alone.

    The history is `text[:length]` and, behind it, the live ones of `more`; the answer begins at position `prompt`.
    """
    place = jnp.concatenate([jnp.arange(text.shape[0]), length + jnp.arange(more.shape[0])])
    there = jnp.concatenate([jnp.arange(text.shape[0]) < length, live])
    tokens = jnp.concatenate([text, more])
    count = lambda wanted: jnp.zeros(vocab, jnp.int32).at[jnp.where(wanted, tokens, vocab)].add(1, mode="drop")
    return count(there), count(there & (place >= prompt))


def _special(wanted: Controls) -> Bool[Array, ""]:
    return (wanted.samples | wanted.penalises | (wanted.biased > 0) | (wanted.masked > 0)).any()


def _truncate(scores: Float[Array, " V"], row: Controls) -> Float[Array, " V"]:
    """Min-p, then top-k, then top-p, by one sort: each keeps the scores from a threshold up."""
    vocab = scores.shape[0]
    ordered = -jnp.sort(-scores)
    floor = jnp.where(row.min_p > 0, jnp.log(jnp.maximum(row.min_p, 1e-30)), -jnp.inf).astype(scores.dtype)
    rank = jnp.clip(jnp.where(row.top_k > 0, row.top_k, vocab), 1, vocab) - 1
    least = jnp.maximum(ordered[0] + floor, ordered[rank])
    kept = jnp.where(ordered >= least, ordered, -jnp.inf)
    chances = jax.nn.softmax(kept)
    before = jnp.cumsum(chances) - chances  # the probability of everything likelier
    nucleus = kept[jnp.maximum((before < row.top_p).sum() - 1, 0)]
    least = jnp.where(row.top_p < 1, jnp.maximum(least, nucleus), least)
    return jnp.where(scores >= least, scores, -jnp.inf)


def _argmax(scores: Float[Array, "R V"]) -> Int[Array, " R"]:
    """First index of the largest score (of a NaN, where there is one), as `jnp.argmax`.

    In two plain reductions: XLA's CPU code for the paired one takes up to five times as long.
    """
    top = scores.max(axis=-1, keepdims=True)
    index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    return jnp.where((scores == top) | jnp.isnan(scores), index, scores.shape[-1]).min(axis=-1)
