"""A tiny random model in float64 and an engine on it: exactness is tested where rounding cannot hide a mistake."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.config import ModelConfig
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.depth.policies import Fixed, Off
from atlas_jax.model.modules import Model

TINY = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    layers=("gdn", "attention"),
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    rotary_dim=4,
    rope_theta=1e4,
    gdn_key_heads=2,
    gdn_value_heads=4,
    gdn_key_dim=8,
    gdn_value_dim=4,
    ffn_size=32,
    eos_ids=(60,),
)


@pytest.fixture(scope="session")
def tiny():
    """`(cfg, params)`; weights scaled up so that picks vary and states matter."""
    rng = np.random.default_rng(0)
    params = Model(TINY, rngs=nnx.Rngs(0)).params()
    scale = lambda x: np.asarray(x, np.float64) + rng.standard_normal(x.shape) * (0.3 if x.ndim > 1 else 0.1)
    return TINY, jax.tree.map(scale, params)


@pytest.fixture(scope="module")
def engine(tiny):
    """One engine for a module: 4 slots, up to 4 drafts, chunks of 4 and 8, everything in float64.

    One batch bucket, so that 1 to 3 sequences leave padding in it.
    """
    buckets = BucketConfig(n=(4,))
    config = EngineConfig(slots=4, context=96, max_drafts=4, buckets=buckets, prefill=(4, 8), dtype=jnp.float64)
    with jax.enable_x64(True):
        cfg, params = tiny
        yield Engine(params, cfg, config)


@pytest.fixture(scope="module")
def quick(engine):
    """The module's engine with steps of one or of five rows alone, compiled for a short life."""
    engine.config = dataclasses.replace(engine.config, buckets=BucketConfig(n=(4,), k=(1, 5)))
    engine.warmup([Off(), Fixed(0), Fixed(4)], compiler_options={"xla_backend_optimization_level": 0})
