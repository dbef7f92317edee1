"""Presets: sizes give the published parameter totals, and random weights are those of a fresh model, leaf by leaf."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax import presets
from atlas_jax.config import ConfigError, ModelConfig
from atlas_jax.model.modules import Model
from atlas_jax.presets import PRESETS, param_count, preset, random_params

# Billions of parameters of the text model, and of its MTP head.
PUBLISHED = {
    "qwen3.5-0.8b": (0.75, 0.020),
    "qwen3.5-2b": (1.88, 0.061),
    "qwen3.5-4b": (4.21, 0.121),
    "qwen3.5-9b": (8.95, 0.243),
    "qwen3.5-27b": (26.90, 0.425),
    "qwen3.5-35b-a3b": (34.66, 0.845),
    "qwen3.5-122b-a10b": (122.1, 2.52),
    "qwen3.5-397b-a17b": (396.3, 6.60),
    "qwen3-next-80b-a3b": (79.67, 1.65),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    cfg = preset(name)
    total, head = PUBLISHED[name]
    assert param_count(cfg) == pytest.approx(total * 1e9, rel=0.01)
    assert param_count(cfg, head=True) - param_count(cfg) == pytest.approx(head * 1e9, rel=0.03)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_round_trip_through_config_json(name):
    assert ModelConfig.from_hf(preset(name).to_hf()) == preset(name)


def test_unknown_names_and_impossible_cuts_are_refused():
    with pytest.raises(ConfigError, match=r"'qwen3\.5-5b'; there are qwen3\.5-0\.8b, .*qwen3-next-80b-a3b"):
        preset("qwen3.5-5b")
    with pytest.raises(ConfigError, match="has 24 layers; 25"):
        preset("qwen3.5-0.8b", layers=25)
    with pytest.raises(ConfigError, match="has 24 layers; 0"):
        preset("qwen3.5-0.8b", layers=0)
    with pytest.raises(ConfigError, match="tokens; 1 of them"):
        preset("qwen3.5-0.8b", vocab=1)
    cut = preset("qwen3.5-0.8b", layers=5, vocab=100)
    assert cut.layers == ("gdn", "gdn", "gdn", "attention", "gdn") and cut.vocab_size == 100


@pytest.mark.parametrize(("name", "dtype"), [("qwen3.5-0.8b", jnp.bfloat16), ("qwen3-next-80b-a3b", jnp.float32)])
def test_random_weights_have_the_statistics_of_a_fresh_model(name, dtype):
    """Every leaf: the shape of `Model`'s, its mean and its standard deviation, in the dtype asked for."""
    cfg = small(name)
    drawn, fresh = random_params(cfg, 1, dtype), Model(cfg, rngs=nnx.Rngs(0)).params()
    assert jax.tree.structure(drawn) == jax.tree.structure(fresh)
    paths = jax.tree_util.tree_leaves_with_path(drawn)
    for (path, mine), theirs in zip(paths, jax.tree.leaves(fresh), strict=True):
        where = jax.tree_util.keystr(path)
        decay = where.endswith(("['a_log']", "['dt_bias']"))
        assert mine.shape == theirs.shape and mine.dtype == (jnp.float32 if decay else dtype), where
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        spread = max(mine.std(), theirs.std())
        assert abs(mine.mean() - theirs.mean()) <= 6 * spread / mine.size**0.5, where
        assert mine.std() == pytest.approx(theirs.std(), rel=0.02 + 3 / mine.size**0.5), where


def test_random_weights_depend_on_the_seed_alone_and_no_leaf_repeats_another():
    cfg = small("qwen3.5-0.8b")
    first, again, other = (random_params(cfg, seed, jnp.bfloat16) for seed in (0, 0, 1))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), first, again)
    assert all(jax.tree.leaves(same))
    assert not bool((first["embed"] == other["embed"]).all())
    gate_up = [np.asarray(layer["ffn"]["gate_up"], np.float32) for layer in first["layers"].values()]
    assert all((a != b).any() for a, b in itertools.pairwise(gate_up))


@pytest.mark.parametrize("shape", [(4096, 4099), (8, 512, 2048)])
def test_drawing_a_large_leaf_stores_little_beside_it(shape):
    """A model that nearly fills the memory in bfloat16 can be made there. Blocks are drawn apart: none repeats."""
    compiled = presets._draw.lower(jax.random.key(0), shape, "weight", jnp.dtype(jnp.bfloat16)).compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes == 2 * math.prod(shape)
    assert memory.temp_size_in_bytes < 32 * presets._BLOCK  # whatever the size of the leaf
    rows = np.asarray(compiled(jax.random.key(0)), np.float32).reshape(-1, shape[-1])[:, :8]
    assert len({row.tobytes() for row in rows}) == len(rows)
    assert rows.std() == pytest.approx(0.02, rel=0.02)


def small(name):
    """The preset at a size where all leaves fit into a test, its proportions kept."""
    cfg = preset(name, layers=4, vocab=512)
    moe = cfg.moe and dataclasses.replace(cfg.moe, num_experts=8, experts_per_token=2, expert_size=32, shared_size=32)
    return dataclasses.replace(cfg, hidden_size=64, ffn_size=0 if moe else 96, moe=moe)
