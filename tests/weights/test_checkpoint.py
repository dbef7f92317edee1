"""A model directory written here reads back bit for bit, and what does not fit its config is named."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_models import TINY

from atlas_jax.config import ConfigError
from atlas_jax.model.modules import Model
from atlas_jax.weights.checkpoint import load_model, save_model
from atlas_jax.weights.hf import WeightError

CFG = dataclasses.replace(
    TINY, vocab_size=31, hidden_size=16, gdn_key_dim=4, ffn_size=24, tie_embeddings=True, eos_ids=(3, 5)
)


@pytest.fixture
def directory(tmp_path):
    params = jax.device_get(Model(CFG, rngs=nnx.Rngs(1)).params())
    save_model(tmp_path / "model", params, CFG)
    return tmp_path / "model", params


def test_round_trip_rounds_once_to_bfloat16(directory, tmp_path):
    path, params = directory
    cfg, loaded = load_model(path)
    assert cfg == CFG

    def rounded(keys, leaf):
        exact = getattr(keys[-1], "key", None) in ("a_log", "dt_bias")
        return leaf if exact else np.asarray(leaf).astype(ml_dtypes.bfloat16).astype(np.float32)

    expected = jax.tree_util.tree_map_with_path(rounded, params)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    save_model(tmp_path / "again", loaded, cfg)
    again, first = (load_file(p / "model.safetensors") for p in (tmp_path / "again", path))
    assert again.keys() == first.keys() and "mtp.fc.weight" in first and "lm_head.weight" not in first
    for name in first:
        np.testing.assert_array_equal(again[name], first[name])


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda t: t.pop("mtp.norm.weight"), "lacks the tensor 'mtp.norm.weight'"),
        (lambda t: t.update({"mtp.extra": np.zeros(1, np.float32)}), "no place for the tensors mtp.extra"),
        (lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}), "model.norm.weight.* has the shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(directory, spoil, word):
    path, _ = directory
    tensors = load_file(path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(WeightError, match=word):
        load_model(path)


def test_a_directory_without_its_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CFG.to_hf()))
    with pytest.raises(WeightError, match=r"no model\.safetensors"):
        load_model(tmp_path)
