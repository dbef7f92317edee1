"""What is trained: the trunk on the next token, the draft head on the trunk's own choices further ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax.config import ModelConfig
from atlas_jax.kernels.backends import Kernels
from atlas_jax.model import mtp
from atlas_jax.model.attention import causal_attention
from atlas_jax.model.mixers import Params
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full
from atlas_jax.train.losses import Measure, cross_entropy, distillation


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


def head_loss(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "N T"],
    weights: Float[Array, "N T"],
    segments: Int[Array, "N T"],
    *,
    depth: int = 1,
    decay: float = 0.8,
    measure: Measure = distillation,
    kernels: Kernels = Kernels(),
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The head, unrolled `depth` times, against the frozen trunk's own choices, by `measure`.

    A draft is accepted when it is the trunk's pick, not when it is the text's next word; so the trunk is the teacher.
    Row t of depth j (from 1) is fed token t + j and a hidden: the trunk's at t for depth 1, then the head's own output
    of the depth before, as in serving. It is judged on token t + j + 1, with weight `decay^(j - 1)`; rows whose tokens
    are not all of one document are masked. The tokens are the text's (teacher forcing). Only `params["mtp"]` trains.
    """
    frozen = jax.lax.stop_gradient({name: value for name, value in params.items() if name != "mtp"})
    own = frozen | {"mtp": params["mtp"]}
    positions = _positions(tokens)
    length = tokens.shape[1]
    hidden, _ = trunk(frozen, cfg, tokens, Full(positions, segments, kernels))
    recycled: Array = hidden
    entries: tuple[Any, ...] = ()
    total = weight = jnp.zeros(())
    for ahead in range(depth):
        rows = length - 1 - ahead
        view = Chained(positions[:, :rows] + ahead, segments[:, :rows], entries)
        recycled, entry = mtp.head(own, cfg, tokens[:, 1 + ahead :], recycled[:, :rows], view)
        entries = (*entries, entry)
        judged = jnp.where(segments[:, : rows - 1] == segments[:, 2 + ahead :], weights[:, 2 + ahead :], 0)
        found = measure(logits(frozen, recycled[:, :-1]), logits(frozen, hidden[:, 1 + ahead : -1]), judged)
        total, weight = total + decay**ahead * found[0], weight + decay**ahead * found[1]
    return total, weight


@dataclasses.dataclass(frozen=True)
class Chained:
    """Row t continues a chain of drafts that began at row t: what the head's cache shows it in serving.

    It sees the entries of depth 1 up to t (made of the trunk's hiddens, so true ones in serving too), then the entries
    of its own chain at the depths since, then itself.

    Attributes:
      positions: `[N, T]` rotary positions, those of depth 1 shifted by the depth.
      segments: `[N, T]` documents of the rows.
      entries: keys and values of the depths before, at least T rows each; none for depth 1.
    """

    positions: Int[Array, "N T"]
    segments: Int[Array, "N T"]
    entries: tuple[tuple[Float[Array, "N T Hkv Dh"], Float[Array, "N T Hkv Dh"]], ...] = ()

    def recur(self, *_: object) -> tuple[Array, None]:
        raise TypeError("a draft head has no recurrent layers")

    def attend(
        self, q: Float[Array, "N T Hq Dh"], k: Float[Array, "N T Hkv Dh"], v: Float[Array, "N T Hkv Dh"], cache: None
    ) -> tuple[Float[Array, "N T Hq Dh"], tuple[Array, Array]]:
        length = q.shape[1]
        (first_k, first_v), *chain = [(a[:, :length], b[:, :length]) for a, b in (*self.entries, (k, v))]
        return causal_attention(q, first_k, first_v, self.segments, chain), (k, v)


def _positions(tokens: Int[Array, "N T"]) -> Int[Array, "N T"]:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
