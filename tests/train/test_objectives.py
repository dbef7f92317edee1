"""What a base is supervised on, exactly, and that packed documents are strangers to each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY
from train.models import random_params

from atlas_jax.model import mtp
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full
from atlas_jax.train.objectives import base_loss

CFG = dataclasses.replace(TINY, vocab_size=23, hidden_size=16, gdn_key_dim=4, ffn_size=24)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2]])


@pytest.fixture(scope="module")
def params():
    return random_params(CFG)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 23, SEGMENTS.shape)


def test_the_supervised_tokens_are_those_counted_by_hand(params, tokens):
    """Tokens 1..8 by their weights: the batch gives 0 to the first token of a document."""
    weights = np.arange(1.0, 10.0)[None]
    _, weight = jax.jit(lambda p: base_loss(p, CFG, tokens, weights, SEGMENTS))(params)
    assert weight == weights[0, 1:].sum()


def test_packed_documents_score_as_alone(params, tokens):
    """Trunk and head, each document of a packed row against itself in a row of its own."""

    @jax.jit
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
