"""What is supervised, exactly; what gets a gradient; and that packed documents are strangers to each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.config import ModelConfig
from atlas_jax.model import mtp
from atlas_jax.model.modules import Model
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full
from atlas_jax.train.losses import base_loss, cross_entropy, head_loss

CFG = ModelConfig(
    vocab_size=23,
    hidden_size=16,
    layers=("gdn", "attention"),
    q_heads=2,
    kv_heads=1,
    head_dim=8,
    rotary_dim=4,
    rope_theta=1e4,
    gdn_key_heads=1,
    gdn_value_heads=2,
    gdn_key_dim=4,
    gdn_value_dim=8,
    ffn_size=24,
)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2]])


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 5 if x.ndim > 1 else x, Model(CFG, rngs=nnx.Rngs(0)).params())


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 23, SEGMENTS.shape)


def test_the_supervised_pairs_are_those_counted_by_hand(params, tokens):
    """Base: tokens 1..8 by their weights. Head: the token after next where all three are of one document."""
    weights = np.arange(1.0, 10.0)[None]
    _, base = jax.jit(lambda p: base_loss(p, CFG, tokens, weights, SEGMENTS))(params)
    _, head = jax.jit(lambda p: head_loss(p, CFG, tokens, weights, SEGMENTS))(params)
    assert base == weights[0, 1:].sum()
    assert head == weights[0, [2, 5, 6]].sum()  # (0, 1 -> 2), (3, 4 -> 5), (4, 5 -> 6)


def test_the_head_trains_and_nothing_else_does(params, tokens):
    gradient = jax.jit(jax.grad(lambda p: head_loss(p, CFG, tokens, np.ones((1, 9)), SEGMENTS)[0]))(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient["mtp"]))
    rest = {name: value for name, value in gradient.items() if name != "mtp"}
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(rest))


def test_packed_documents_score_as_alone(params, tokens):
    """Trunk and head, each document of a packed row against itself in a row of its own."""

    def scores(tokens, segments):
        view = Full(jnp.arange(tokens.shape[1])[None], segments)
        hidden, _ = trunk(params, CFG, tokens, view)
        short = Full(view.positions[:, :-1], None if segments is None else segments[:, :-1])
        return logits(params, hidden), logits(params, mtp.head(params, CFG, tokens[:, 1:], hidden[:, :-1], short)[0])

    packed, packed_head = scores(jnp.asarray(tokens), jnp.asarray(SEGMENTS))
    for a, b in ((0, 3), (3, 7), (7, 9)):
        alone, alone_head = scores(jnp.asarray(tokens[:, a:b]), None)
        np.testing.assert_allclose(packed[:, a:b], alone, atol=1e-5)
        np.testing.assert_allclose(packed_head[:, a : b - 1], alone_head, atol=1e-5)


def test_nothing_supervised_is_nothing_and_finite():
    total, weight = cross_entropy(jnp.ones((1, 2, 3)), jnp.zeros((1, 2), int), jnp.zeros((1, 2)))
    assert (total, weight) == (0, 0)
