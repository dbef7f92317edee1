"""Configs in and out of the Hugging Face layout, and what is refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest

from atlas_jax.config import ConfigError, ModelConfig

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.glob("*.config.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_round_trip(file):
    cfg = ModelConfig.from_hf(json.loads(file.read_text()))
    assert ModelConfig.from_hf(json.loads(json.dumps(cfg.to_hf()))) == cfg
    wrapped = {"model_type": "qwen3_5", "text_config": json.loads(file.read_text())}
    assert ModelConfig.from_hf(wrapped) == cfg


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "qwen4_exp"}, "qwen4_exp"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"mlp_only_layers": [1]}, "mix dense and MoE"),
        ({"layer_types": ["linear_attention"]}, "layer_types must be 8"),
        ({"num_key_value_heads": 3}, "not a multiple of kv_heads"),
        ({"linear_num_value_heads": 3}, "not a multiple of gdn_key_heads"),
        ({"eos_token_id": 97}, "outside the vocabulary"),
        ({"mtp_num_hidden_layers": 2}, "only one recursive"),
        ({"hidden_size": None}, "lacks the field 'hidden_size'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
    ],
)
def test_what_is_not_of_the_family_is_refused_by_name(change, word):
    config = json.loads((DATA / "qwen3_5_tiny.config.json").read_text())
    config |= change
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(ConfigError, match=word):
        ModelConfig.from_hf(config)


def test_exactly_one_kind_of_ffn():
    cfg = ModelConfig.from_hf(json.loads((DATA / "qwen3_5_tiny.config.json").read_text()))
    with pytest.raises(ConfigError, match="exactly one"):
        dataclasses.replace(cfg, ffn_size=0)
