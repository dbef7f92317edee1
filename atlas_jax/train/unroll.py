"""The draft head unrolled as it is served: chains of single rows, each judged on what the base itself does next.

A chain begins at an *anchor*, a row t of a text whose token t + 1 has just been emitted. Depth 1 is fed that token and
the trunk's hidden at t, depth j the token before the one it must guess and the head's own output of the depth before,
and it guesses token t + j + 1. It sees what serving shows it: the head's entries up to t, made of the trunk's hiddens,
and the entries of its own chain. So a batch costs the head's keys and values on all rows and the head itself on the
anchors only; the trunk's hiddens come from a cache (`hiddens.py`) or are computed on the fly (`from_tokens`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.config import ModelConfig
from atlas_jax.kernels.backends import Kernels
from atlas_jax.kernels.numerics import EXACT, widen
from atlas_jax.model import mtp
from atlas_jax.model.mixers import Params
from atlas_jax.model.trunk import trunk
from atlas_jax.model.views import Full
from atlas_jax.train.losses import Measure, Measured, cross_entropy, in_blocks

ANCHOR_BLOCK = 128  # anchors of one product of attention: bounds its memory


class Rows(NamedTuple):
    """A batch of packed texts with the hiddens of the frozen trunk.

    Attributes:
      tokens: text.
      weights: of each token as a target, 0 where it is not supervised.
      segments: document of each token; they are strangers to each other.
      hidden: the trunk's output after its final norm.
      anchors: rows where chains begin; one of `T` or more is padding.
    """

    tokens: Int[Array, "N T"]
    weights: Float[Array, "N T"]
    segments: Int[Array, "N T"]
    hidden: Float[Array, "N T D"]
    anchors: Int[Array, "N A"]


@dataclasses.dataclass(frozen=True)
class Unroll:
    """How chains run and what their depths weigh.

    Attributes:
      depth: drafts of a chain, 1 to 8.
      decay: depth j weighs `decay^(j - 1)`.
      step_weights: instead of `decay`, the weight of each depth.
      feed: what depths from 2 on are fed: the "text", or their "own" drafts. A chain whose draft is not the text's
        token has left the text, and what the base would say there is not known; with "own" it is judged no further.
        So the deeper depths train on exactly those chains that get there in serving.
      revisit: weight of a chain at whose first token the chain one row before guessed right. Serving begins chains
        behind the last emitted token, so mostly where a guess failed, and passes over most rows where it didn't; about
        0.25 weighs rows as three drafts visit them. Wants anchors that follow each other.
      hidden: "own" output of the depth before, as in serving, or the trunk's "true" hidden at every depth: what a chain
        that lost nothing to recycling could do.
      block: rows whose logits exist at a time.
    """

    depth: int = 3
    decay: float = 0.8
    step_weights: tuple[float, ...] | None = None
    feed: Literal["text", "own"] = "text"
    revisit: float = 1.0
    hidden: Literal["own", "true"] = "own"
    block: int = 4096

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 8:
            raise ValueError(f"depth is {self.depth}; a chain has 1 to 8 drafts")
        if self.step_weights is not None and len(self.step_weights) != self.depth:
            raise ValueError(f"{len(self.step_weights)} step weights for depth {self.depth}")
        if self.feed not in ("text", "own") or self.hidden not in ("own", "true"):
            raise ValueError(f"feed={self.feed!r}, hidden={self.hidden!r}: text or own, own or true")

    def weight(self, index: int) -> float:
        """Of depth `index + 1`."""
        return self.decay**index if self.step_weights is None else self.step_weights[index]


class Depth(NamedTuple):
    """One depth of all chains: its `[N, A]` outputs beside what they are judged by.

    Attributes:
      hidden: the head's outputs.
      teacher: the trunk's hiddens at the rows whose next token is guessed.
      targets: that token in the text.
      weights: of the guess; 0 where the chain has left its document, the row, or (`feed="own"`) the text.
    """

    hidden: Float[Array, "N A D"]
    teacher: Float[Array, "N A D"]
    targets: Int[Array, "N A"]
    weights: Float[Array, "N A"]


@dataclasses.dataclass(frozen=True)
class Anchored:
    """A view: rows continue chains from their anchors, and see the head's entries up to there and their own chain's.

    Attributes:
      positions: rotary positions, the anchor's plus the depth less one.
      anchors, segments: where the chains begin, and the documents there.
      entries: keys and values of all rows of the text, and their documents.
      chain: keys and values of the chain's depths from 2 on.
      first: whether this is depth 1, whose own entry is among `entries`.
    """

    positions: Int[Array, "N A"]
    anchors: Int[Array, "N A"]
    segments: Int[Array, "N A"]
    entries: tuple[Float[Array, "N T Hkv Dh"], Float[Array, "N T Hkv Dh"], Int[Array, "N T"]]
    chain: tuple[tuple[Float[Array, "N A Hkv Dh"], Float[Array, "N A Hkv Dh"]], ...] = ()
    first: bool = True

    def recur(self, *_: object) -> tuple[Array, None]:
        raise TypeError("a draft head has no recurrent layers")

    def attend(
        self, q: Float[Array, "N A Hq Dh"], k: Float[Array, "N A Hkv Dh"], v: Float[Array, "N A Hkv Dh"], cache: None
    ) -> tuple[Float[Array, "N A Hq Dh"], Any]:
        own = () if self.first else (*self.chain, (k, v))
        parts = []
        for start in range(0, q.shape[1], ANCHOR_BLOCK):
            rows = slice(start, start + ANCHOR_BLOCK)
            chain = [(a[:, rows], b[:, rows]) for a, b in own]
            parts.append(_attend(q[:, rows], self.anchors[:, rows], self.segments[:, rows], self.entries, chain))
        return jnp.concatenate(parts, axis=1), own


def _attend(q: Array, anchors: Array, documents: Array, entries: Any, chain: list[tuple[Array, Array]]) -> Array:
    """Softmax over the text's entries and the chain's own without putting them side by side, which copies them."""
    keys, values, segments = entries
    kv_heads, dim = keys.shape[2:]
    shape = q.shape
    q = q.reshape(*shape[:2], kv_heads, -1, dim) * dim**-0.5
    seen = jnp.arange(keys.shape[1]) <= anchors[..., None]
    seen = seen & (segments[:, None, :] == documents[..., None])
    scores = widen(jnp.einsum("nahgd,nkhd->nhgak", q, keys, precision=EXACT))
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    own = [widen(jnp.einsum("nahgd,nahd->nhga", q, k, precision=EXACT)) for k, _ in chain]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, own, scores.max(axis=-1)))
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(axis=-1)
    out = widen(jnp.einsum("nhgak,nkhd->nhgad", weights.astype(values.dtype), values, precision=EXACT))
    for score, (_, value) in zip(own, chain, strict=True):
        weight = jnp.exp(score - top)
        total += weight
        out += jnp.einsum("nhga,nahd->nhgad", weight, widen(value), precision=EXACT)
    return (out / total[..., None]).astype(values.dtype).transpose(0, 3, 1, 2, 4).reshape(shape)


def unroll(params: Params, cfg: ModelConfig, rows: Rows, how: Unroll) -> list[Depth]:
    """The chains of a batch, depth by depth. Differentiate with respect to `params["mtp"]` only."""
    tokens, _, segments, hidden, anchors = rows
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length - 1), tokens[:, 1:].shape)
    entries = mtp.head_entries(params, cfg, tokens[:, 1:], hidden[:, :-1], positions)
    live = anchors < length - 1  # the last row has no next token to be fed
    anchors = jnp.where(live, anchors, 0)  # any row will do for padding: it weighs nothing
    at = lambda array, offset: jnp.take_along_axis(array, jnp.minimum(anchors + offset, length - 1), axis=1)
    rows_at = lambda array, offset: jnp.take_along_axis(
        array, jnp.minimum(anchors + offset, length - 1)[..., None], axis=1
    )
    scale = jnp.ones(anchors.shape, hidden.dtype)
    view = Anchored(anchors, anchors, at(segments, 0), (*entries, segments[:, :-1]))
    fed, recycled = at(tokens, 1), rows_at(hidden, 0)
    found: list[Depth] = []
    for ahead in range(how.depth):
        found_chain: Any
        recycled, found_chain = mtp.head(params, cfg, fed, recycled, view)
        inside = live & (anchors + ahead + 2 < length) & (at(segments, ahead + 2) == at(segments, 0))
        targets = at(tokens, ahead + 2)
        if how.revisit != 1 and ahead == 0:
            right = inside & (_drafts(params, recycled) == targets)
            follows = (anchors[:, 1:] == anchors[:, :-1] + 1) & right[:, :-1]
            scale = jnp.pad(jnp.where(follows, how.revisit, 1.0), ((0, 0), (1, 0)), constant_values=1.0)
        weights = jnp.where(inside, scale * at(rows.weights, ahead + 2), 0)
        found.append(Depth(recycled, rows_at(hidden, ahead + 1), targets, weights))
        view = dataclasses.replace(view, positions=anchors + ahead + 1, chain=found_chain, first=False)
        fed = targets
        if how.feed == "own" and ahead + 1 < how.depth:
            fed = _drafts(params, recycled)
            live = live & (fed == targets)
        if how.hidden == "true":
            recycled = rows_at(hidden, ahead + 1)
    return found


def _drafts(params: Params, hidden: Float[Array, "N A D"]) -> Int[Array, "N A"]:
    return mtp.draft_tokens(params, mtp.draft_logits(params, hidden).argmax(axis=-1))


def unrolled(
    params: Params, cfg: ModelConfig, rows: Rows, how: Unroll, measure: Measure
) -> list[tuple[Float[Array, ""], Float[Array, ""]]]:
    """`(sum, weight)` by `measure` of each depth, the weights of the depths not in it."""
    frozen = jax.lax.stop_gradient({name: value for name, value in params.items() if name != "mtp"})
    own = frozen | {"mtp": params["mtp"]}
    result = []
    for depth in unroll(own, cfg, rows._replace(hidden=jax.lax.stop_gradient(rows.hidden)), how):
        places, weights = _places(own, depth)
        teacher, teach = (places, lambda x: x) if measure is cross_entropy else (depth.teacher, _teacher_scores(own))
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        score = lambda x: mtp.draft_logits(own, x)
        result.append(in_blocks(measure, score, teach, flat(depth.hidden), flat(teacher), flat(weights), how.block))
    return result


def _places(params: Params, depth: Depth) -> tuple[Int[Array, "N A"], Float[Array, "N A"]]:
    """The targets' places in the draft vocabulary, and the weights: one that it lacks can't be drafted, weighs 0."""
    if "draft_ids" not in params["mtp"]:
        return depth.targets, depth.weights
    ids = params["mtp"]["draft_ids"]
    places = jnp.minimum(jnp.searchsorted(ids, depth.targets), len(ids) - 1)
    return places, jnp.where(ids[places] == depth.targets, depth.weights, 0)


def _teacher_scores(params: Params) -> Callable[[Float[Array, "R D"]], Float[Array, "R Vd"]]:
    """The base's logits on the draft vocabulary. Measures renormalise its law there."""
    return lambda hidden: jax.lax.stop_gradient(mtp.draft_logits(params, hidden))


def head_loss(
    params: Params,
    cfg: ModelConfig,
    rows: Rows,
    *,
    how: Unroll = Unroll(),
    measure: Measure,
) -> Measured:
    """The weighted sum over the depths and its weight. Only `params["mtp"]` gets a gradient."""
    total = weight = jnp.zeros(())
    for index, (loss, seen) in enumerate(unrolled(params, cfg, rows, how, measure)):
        total, weight = total + how.weight(index) * loss, weight + how.weight(index) * seen
    return total, weight


def from_tokens(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "N T"],
    weights: Float[Array, "N T"],
    segments: Int[Array, "N T"],
    kernels: Kernels = Kernels(),
) -> Rows:
    """`Rows` with hiddens computed on the fly and a chain at every row."""
    frozen = jax.lax.stop_gradient({name: value for name, value in params.items() if name != "mtp"})
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = trunk(frozen, cfg, tokens, Full(positions, segments, kernels))
    return Rows(tokens, weights, segments, hidden, positions)
