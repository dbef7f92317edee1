"""Lossless speculative decoding for hybrid Gated-DeltaNet language models, with trainable MTP draft heads.

The names below are what a script starts from; everything else lives in the rooms: `model`, `kernels`, `decode`,
`depth`, `train`, `weights`, `lab`.
"""

from atlas_jax.config import ModelConfig
from atlas_jax.decode.engine import Engine, EngineConfig
from atlas_jax.decode.requests import Completion, Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import Fixed, Ladder, Off, parse_policy
from atlas_jax.weights.checkpoint import load_model, save_model

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "Fixed",
    "Ladder",
    "ModelConfig",
    "Off",
    "Request",
    "Sampling",
    "load_model",
    "parse_policy",
    "save_model",
]
