"""A model directory as other engines know it: `config.json`, and `model.safetensors` under Hugging Face names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from atlas_jax.config import ModelConfig
from atlas_jax.model.mixers import Params
from atlas_jax.weights.hf import WeightError, params_from_hf, params_to_hf


def save_model(directory: Path, params: Params, cfg: ModelConfig, dtype: Any = ml_dtypes.bfloat16) -> None:
    """Write `config.json` and `model.safetensors` in `dtype`; `A_log` and `dt_bias` stay float32."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.astype(np.float32 if name.endswith(("A_log", "dt_bias")) else dtype)
        for name, tensor in params_to_hf(params, cfg).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(cfg.to_hf(), indent=1) + "\n")


def load_model(directory: Path | str, dtype: Any = np.float32) -> tuple[ModelConfig, Params]:
    """Read a model directory; all tensors become `dtype`, but `A_log` and `dt_bias`, which are at least float32.

    Raises `ConfigError` or `WeightError` naming what is missing or does not fit.
    """
    directory = Path(directory)
    cfg = ModelConfig.load(directory)
    file = directory / "model.safetensors"
    if not file.is_file():
        raise WeightError(f"no model.safetensors in {directory}")
    wide = np.promote_types(dtype, np.float32)
    with safe_open(file, framework="numpy") as opened:
        tensors = {
            name: opened.get_tensor(name).astype(wide if name.endswith(("A_log", "dt_bias")) else dtype)
            for name in opened.keys()  # noqa: SIM118 (not a dict)
        }
    prefix = "model.language_model." if any(name.startswith("model.language_model.") for name in tensors) else "model."
    return cfg, params_from_hf(tensors, cfg, prefix)
