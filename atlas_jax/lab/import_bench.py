"""A checkpoint in a released model's real layout with random contents: what reading one costs needs no download."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.weights.hf import BF16
from atlas_jax.weights.layout import Naming, leaves
from atlas_jax.weights.shards import INDEX, index_json, write_shard

SHARD_BYTES = 2**29


def write_random_release(
    directory: Path,
    cfg: ModelConfig,
    *,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Write bfloat16 shards of random numbers in (-2, 2), their index and `config.json`; returns the tensors' bytes.

    Names are those of the multimodal releases (of Qwen3-Next for its family), the MTP head included. No more than one
    shard is in memory.
    """
    trunk = "model." if cfg.family == "qwen3_next" else "model.language_model."
    parts = [part for leaf in leaves(cfg, Naming.of_release(cfg, trunk)) for part in leaf.parts]
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    room = shard_bytes
    for part in parts:
        size = math.prod(part.shape) * BF16.itemsize
        if groups[-1] and size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append((part.name, part.shape))
        room -= size
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    sizes: dict[str, Mapping[str, int]] = {}
    for i, group in enumerate(groups, start=1):
        name = f"model-{i:05}-of-{len(groups):05}.safetensors"
        say(f"writing {name}")
        tensors = {at: _random(rng, shape) for at, shape in group}
        write_shard(directory / name, tensors)
        sizes[name] = {at: tensor.nbytes for at, tensor in tensors.items()}
    (directory / INDEX).write_text(index_json(sizes))
    (directory / "config.json").write_text(json.dumps(cfg.to_hf(), indent=1) + "\n")
    return sum(size for tensors in sizes.values() for size in tensors.values())


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits but the exponent's highest, so all are finite: as dense as trained weights, at the speed of memory."""
    bits = rng.integers(0, 2**16, math.prod(shape), np.uint16)
    return (bits & np.uint16(0xBFFF)).view(BF16).reshape(shape)
