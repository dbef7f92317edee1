"""Flax NNX modules: they hold, name and initialise the parameters. The computation is in the pure functions they call.

`Model.params()` is the tree those functions take: nested dicts of arrays. Weights are stored `[in, out]`, those that
share an input fused into one array, because a decode step pays for every array it is handed. On a mesh that cuts heads
or widths a decode step takes fused columns in groups, `[in, G, out / G]` (`ops.groups`, `sharding.grouped`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from atlas_jax.config import LayerKind, ModelConfig
from atlas_jax.model import mtp as mtp_head
from atlas_jax.model.mixers import Params
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full

_normal = nnx.initializers.normal(0.02)


def _weight(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(_normal(rngs.params(), shape, jnp.float32))


def _zeros(*shape: int) -> nnx.Param:
    """A zero-centred norm weight: 0 is the identity."""
    return nnx.Param(jnp.zeros(shape, jnp.float32))


class Gdn(nnx.Module):
    """`in_proj` columns are `(q | k | v | b | a | z)`; `conv` is `[W, C]`, oldest tap first."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        heads = cfg.gdn_value_heads
        self.in_proj = _weight(rngs, cfg.hidden_size, cfg.conv_channels + 2 * heads + cfg.value_size)
        bound = cfg.conv_width**-0.5
        self.conv = nnx.Param(
            jax.random.uniform(rngs.params(), (cfg.conv_width, cfg.conv_channels), minval=-bound, maxval=bound)
        )
        self.a_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=0.01, maxval=16.0)))
        self.dt_bias = nnx.Param(jnp.ones((heads,)))
        self.norm = nnx.Param(jnp.ones((cfg.gdn_value_dim,)))
        self.out_proj = _weight(rngs, cfg.value_size, cfg.hidden_size)


class Attention(nnx.Module):
    """`qkv_proj` columns are `(all q | all gates | all k | all v)`."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        q_size, kv_size = cfg.q_heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        self.qkv_proj = _weight(rngs, cfg.hidden_size, 2 * q_size + 2 * kv_size)
        self.q_norm = _zeros(cfg.head_dim)
        self.k_norm = _zeros(cfg.head_dim)
        self.o_proj = _weight(rngs, q_size, cfg.hidden_size)


class Dense(nnx.Module):
    """`gate_up` columns are `(gate | up)`."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.gate_up = _weight(rngs, cfg.hidden_size, 2 * cfg.ffn_size)
        self.down = _weight(rngs, cfg.ffn_size, cfg.hidden_size)


class MoE(nnx.Module):
    """Experts stacked on the first axis; the shared expert is a SwiGLU behind a sigmoid gate."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        moe = cfg.moe
        assert moe is not None
        self.router = _weight(rngs, cfg.hidden_size, moe.num_experts)
        self.gate_up = _weight(rngs, moe.num_experts, cfg.hidden_size, 2 * moe.expert_size)
        self.down = _weight(rngs, moe.num_experts, moe.expert_size, cfg.hidden_size)
        self.shared_gate_up = _weight(rngs, cfg.hidden_size, 2 * moe.shared_size)
        self.shared_down = _weight(rngs, moe.shared_size, cfg.hidden_size)
        self.shared_gate = _weight(rngs, cfg.hidden_size)


class Layer(nnx.Module):
    """A mixer and an FFN with their norms."""

    def __init__(self, cfg: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs):
        self.input_norm = _zeros(cfg.hidden_size)
        self.mixer = (Gdn if kind == "gdn" else Attention)(cfg, rngs=rngs)
        self.post_norm = _zeros(cfg.hidden_size)
        self.ffn = (MoE if cfg.moe else Dense)(cfg, rngs=rngs)


class MtpHead(nnx.Module):
    """One recursive draft layer; embedding and LM head are the trunk's."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.embed_norm = _zeros(cfg.hidden_size)
        self.hidden_norm = _zeros(cfg.hidden_size)
        self.fc = _weight(rngs, 2 * cfg.hidden_size, cfg.hidden_size)
        self.layer = Layer(cfg, "attention", rngs=rngs)
        self.norm = _zeros(cfg.hidden_size)


class Model(nnx.Module):
    """Trunk, LM head and, where the config has one, MTP head.

    `model(tokens)` scores whole sequences; serving takes `model.params()` and `model.cfg` instead.
    """

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = _weight(rngs, cfg.vocab_size, cfg.hidden_size)
        self.layers = nnx.List([Layer(cfg, kind, rngs=rngs) for kind in cfg.layers])
        self.final_norm = _zeros(cfg.hidden_size)
        if not cfg.tie_embeddings:
            self.lm_head = _weight(rngs, cfg.vocab_size, cfg.hidden_size)
        if cfg.mtp_layers:
            self.mtp = MtpHead(cfg, rngs=rngs)

    def params(self) -> Params:
        """The parameters as nested dicts of arrays (layers by index)."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def load(self, params: Params) -> None:
        """Replace the parameters by a tree of the same structure and shapes."""
        state = nnx.state(self, nnx.Param)
        nnx.replace_by_pure_dict(state, params)
        nnx.update(self, state)

    def __call__(self, tokens: Int[Array, "N T"]) -> Float[Array, "N T V"]:
        return self.score(self.params(), tokens)[0]

    def score(
        self, params: Params, tokens: Int[Array, "N T"]
    ) -> tuple[Float[Array, "N T V"], Float[Array, "N T-1 V"] | None]:
        """Logits for token t + 1 and, with a head, the head's for token t + 2 (teacher forced)."""
        view = Full(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
        hidden, _ = trunk(params, self.cfg, tokens, view)
        ahead: Any = None
        if self.cfg.mtp_layers:
            short = Full(view.positions[:, :-1])
            ahead = logits(params, mtp_head.head(params, self.cfg, tokens[:, 1:], hidden[:, :-1], short)[0])
        return logits(params, hidden), ahead
