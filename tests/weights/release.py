"""Directories as releases have them, with tiny random models."""

import dataclasses
import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tiny_models import TINY

from atlas_jax.config import MoEConfig
from atlas_jax.weights.layout import leaves
from atlas_jax.weights.shards import INDEX

CFG = dataclasses.replace(
    TINY, vocab_size=31, hidden_size=16, gdn_key_dim=4, ffn_size=24, tie_embeddings=True, eos_ids=(3, 5)
)
MOE = dataclasses.replace(CFG, ffn_size=0, moe=MoEConfig(4, 2, 8, 8), tie_embeddings=False)
NEXT = dataclasses.replace(MOE, family="qwen3_next")


def write_release(target, cfg, naming, shards=3, extra=(), wrapper=False):
    """A directory as a release has it: bfloat16 (decays in float32) in shards with an index, and its small files."""
    rng = np.random.default_rng(0)
    tensors = {
        part.name: rng.standard_normal(part.shape).astype(
            np.float32 if part.name.endswith("A_log") else ml_dtypes.bfloat16
        )
        for leaf in leaves(cfg, naming)
        for part in leaf.parts
    }
    tensors |= {name: rng.standard_normal(3).astype(ml_dtypes.bfloat16) for name in extra}
    target.mkdir(parents=True)
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        group = dict(list(tensors.items())[i::shards])
        save_file(group, target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, name)
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    config = {"model_type": "qwen3_5", "text_config": cfg.to_hf(), "vision_config": {}} if wrapper else cfg.to_hf()
    (target / "config.json").write_text(json.dumps(config))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    (target / "merges.txt").write_text("a b\n")
    return tensors
