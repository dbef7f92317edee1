"""A grown trunk is the trunk it grew from, and its new layers can learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY
from train.models import random_params

from atlas_jax.config import ConfigError
from atlas_jax.model.trunk import trunk
from atlas_jax.model.views import Full
from atlas_jax.train.deepen import deepen
from atlas_jax.train.objectives import base_loss

CFG = dataclasses.replace(TINY, vocab_size=23, hidden_size=16, gdn_key_dim=4, ffn_size=24)
TOKENS = np.random.default_rng(0).integers(0, 23, (2, 9))


def test_the_same_function_and_a_gradient_for_every_output_projection_added():
    params = random_params(CFG)
    deep, cfg = deepen(params, CFG, 6)
    assert cfg.layers == CFG.layers * 3
    view = Full(jnp.arange(9)[None].repeat(2, 0))
    hidden = lambda params, cfg: jax.jit(lambda p: trunk(p, cfg, TOKENS, view)[0])(params)
    np.testing.assert_array_equal(hidden(deep, cfg), hidden(params, CFG))
    loss = lambda p: base_loss(p, cfg, TOKENS, np.ones((2, 9), np.float32), np.zeros((2, 9), int))[0]
    grads = jax.jit(jax.grad(loss))(deep)
    for i in range(2, 6):
        mixer = grads["layers"][i]["mixer"]
        assert np.abs(mixer["out_proj" if "out_proj" in mixer else "o_proj"]).max() > 0
        assert np.abs(grads["layers"][i]["ffn"]["down"]).max() > 0


def test_what_is_trained_is_not_shared_with_what_it_grew_from():
    params = random_params(CFG)
    deep, _ = deepen(jax.device_get(params), CFG, 4)
    assert not np.shares_memory(deep["layers"][0]["input_norm"], deep["layers"][2]["input_norm"])


@pytest.mark.parametrize("layers", [0, 1, 3, 5])
def test_other_depths_are_refused(layers):
    with pytest.raises(ConfigError, match="multiple"):
        deepen(random_params(CFG), CFG, layers)
