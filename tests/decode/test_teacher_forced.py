"""A head's accuracy on a fixed text is a property of the head: how deep it is asked to draft does not enter it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import TINY
from train.models import random_params

from atlas_jax.train.replay import hits
from atlas_jax.train.unroll import Unroll, from_tokens

CFG = dataclasses.replace(TINY, vocab_size=7, hidden_size=16, gdn_key_dim=4, ffn_size=24)


def test_accuracy_by_position_is_the_same_at_every_depth():
    """Unlike acceptance by position, which averages over the steps that a depth happens to take: draft j of every
    place of a text is right or wrong alike whether one or three are drafted (B45)."""
    params = random_params(CFG)
    tokens = np.random.default_rng(0).integers(0, 7, (2, 40))
    rows = jax.jit(from_tokens, static_argnums=1)(params, CFG, tokens, jnp.ones((2, 40)), jnp.zeros((2, 40), int))
    deep, shallow = (np.asarray(hits(params, CFG, rows, Unroll(depth))) for depth in (3, 1))
    assert 4 < shallow.sum(axis=(0, 1)).min() < 70
    np.testing.assert_array_equal(deep[..., :1], shallow)
