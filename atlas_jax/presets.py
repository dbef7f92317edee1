"""The released models of the family by name, and random weights of their sizes: a step's cost needs no checkpoint.

Text models only. Sizes are those of the released `config.json` files; a test holds total parameters to the published
ones. The vision tower of the Qwen3.5 releases has no part in a decode step and is left out.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from atlas_jax.config import ConfigError, LayerKind, ModelConfig, MoEConfig
from atlas_jax.model.mixers import Params, leaf_dtype
from atlas_jax.model.modules import Model

_BLOCK = 2**21  # most elements drawn at once: bounds what drawing a leaf stores beside it


def _layers(count: int) -> tuple[LayerKind, ...]:
    """Every fourth layer is attention, the rest are GDN."""
    return tuple("attention" if i % 4 == 3 else "gdn" for i in range(count))


def _qwen(
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    ffn: int | MoEConfig,
    *,
    tied: bool = False,
    vocab: int = 248320,
    **other: Any,
) -> ModelConfig:
    """What the releases differ in; `heads` are `(Hq, Hkv)`. Everything else they have in common."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        layers=_layers(layers),
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        gdn_key_heads=16,
        gdn_value_heads=value_heads,
        gdn_key_dim=128,
        gdn_value_dim=128,
        ffn_size=ffn if isinstance(ffn, int) else 0,
        moe=ffn if isinstance(ffn, MoEConfig) else None,
        tie_embeddings=tied,
        **other,
    )


PRESETS: dict[str, ModelConfig] = {
    "qwen3.5-0.8b": _qwen(1024, 24, (8, 2), 16, 3584, tied=True),
    "qwen3.5-2b": _qwen(2048, 24, (8, 2), 16, 6144, tied=True),
    "qwen3.5-4b": _qwen(2560, 32, (16, 4), 32, 9216, tied=True),
    "qwen3.5-9b": _qwen(4096, 32, (16, 4), 32, 12288),
    "qwen3.5-27b": _qwen(5120, 64, (24, 4), 48, 17408),
    "qwen3.5-35b-a3b": _qwen(2048, 40, (16, 2), 32, MoEConfig(256, 8, 512, 512)),
    "qwen3.5-122b-a10b": _qwen(3072, 48, (32, 2), 64, MoEConfig(256, 8, 1024, 1024)),
    "qwen3.5-397b-a17b": _qwen(4096, 60, (32, 2), 64, MoEConfig(512, 10, 1024, 1024)),
    "qwen3-next-80b-a3b": _qwen(
        2048, 48, (16, 2), 32, MoEConfig(512, 10, 512, 512), vocab=151936, family="qwen3_next"
    ),
}


def preset(name: str, *, layers: int | None = None, vocab: int | None = None) -> ModelConfig:
    """A released model's sizes by name, cut to its first `layers` layers and to `vocab` tokens where asked.

    Raises `ConfigError` for an unknown name (it lists the known ones) and for a cut that the model does not have.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    cfg = PRESETS[name]
    if layers is not None and not 1 <= layers <= len(cfg.layers):
        raise ConfigError(f"{name} has {len(cfg.layers)} layers; {layers} of them cannot be kept")
    if vocab is not None and not 1 < vocab <= cfg.vocab_size:
        raise ConfigError(f"{name} has {cfg.vocab_size} tokens; {vocab} of them cannot be kept")
    return dataclasses.replace(cfg, layers=cfg.layers[:layers], vocab_size=vocab or cfg.vocab_size)


def abstract_params(cfg: ModelConfig) -> Params:
    """The tree of `Model(cfg).params()` as `ShapeDtypeStruct`s in float32: shapes, and nothing allocated."""
    return nnx.eval_shape(lambda: Model(cfg, rngs=nnx.Rngs(0))).params()


def param_count(cfg: ModelConfig, *, head: bool = False) -> int:
    """Parameters of the trunk, embedding and LM head (once where they are tied); `head` adds the MTP head's own."""
    params = abstract_params(cfg)
    counted = {name: part for name, part in params.items() if head or name != "mtp"}
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(counted))


def random_params(cfg: ModelConfig, seed: int = 0, dtype: Any = jnp.bfloat16) -> Params:
    """Random weights of a model, for measuring what a step costs; the text they give means nothing.

    Made leaf by leaf on the default device, a large leaf block by block: no wider copy of the model, nor of a leaf,
    ever exists. Same distributions as a freshly made `Model`: weights normal with standard deviation 0.02, zero-centred
    norms 0, the GDN output norm and `dt_bias` 1, `A ~ U(0.01, 16)`. `a_log` and `dt_bias` are at least float32, as the
    engine keeps them.
    """
    key = jax.random.key(seed)
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_params(cfg))
    drawn = []
    for i, (path, leaf) in enumerate(leaves):
        parent, name = ("", *(getattr(part, "key", None) for part in path))[-2:]
        drawn.append(_draw(jax.random.fold_in(key, i), leaf.shape, _kind(parent, name), leaf_dtype(path, dtype)))
    return jax.tree_util.tree_unflatten(tree, drawn)


def _kind(parent: Any, name: Any) -> str:
    if name in ("a_log", "conv"):
        return name
    if name == "dt_bias" or (parent, name) == ("mixer", "norm"):
        return "one"
    return "zero" if name == "norm" or str(name).endswith("_norm") else "weight"


def _initialise(key: jax.Array, shape: tuple[int, ...], kind: str, dtype: jnp.dtype) -> jax.Array:
    if kind in ("one", "zero"):
        return jnp.full(shape, kind == "one", dtype)
    if math.prod(shape) <= _BLOCK:
        return _sample(key, shape, kind, dtype)
    rows = math.prod(shape[:-1])
    blocks = next(d for d in range(1, rows + 1) if rows % d == 0 and (rows // d) * shape[-1] <= _BLOCK)
    block = (rows // blocks, shape[-1])
    drawn = jax.lax.map(lambda i: _sample(jax.random.fold_in(key, i), block, kind, dtype), jnp.arange(blocks))
    return drawn.reshape(shape)


def _sample(key: jax.Array, shape: tuple[int, ...], kind: str, dtype: jnp.dtype) -> jax.Array:
    # In float32, then cast: draws in bfloat16 have 7 random bits, a biased mean and no tails.
    if kind == "weight":
        return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    if kind == "conv":
        bound = shape[0] ** -0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)  # a_log


_draw = jax.jit(_initialise, static_argnums=(1, 2, 3))
