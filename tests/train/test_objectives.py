"""What is supervised, exactly; what gets a gradient; and that packed documents are strangers to each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY

from atlas_jax.model import mtp
from atlas_jax.model.modules import Model
from atlas_jax.model.state import init_state
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full, Prefill, Step
from atlas_jax.train.losses import agreement, cross_entropy, distillation
from atlas_jax.train.objectives import Chained, base_loss, head_loss

CFG = dataclasses.replace(TINY, vocab_size=23, hidden_size=16, gdn_key_dim=4, ffn_size=24)
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
    assert base == weights[0, 1:].sum()
    first = weights[0, [2, 5, 6]].sum()  # (0, 1 -> 2), (3, 4 -> 5), (4, 5 -> 6)
    second = weights[0, 6]  # (3, 4, 5 -> 6)
    for depth, expected in ((1, first), (2, first + 0.5 * second), (3, first + 0.5 * second)):
        loss = lambda p, depth=depth: head_loss(p, CFG, tokens, weights, SEGMENTS, depth=depth, decay=0.5)
        assert jax.jit(loss)(params)[1] == expected


def test_the_head_trains_and_nothing_else_does(params, tokens):
    gradient = jax.jit(jax.grad(lambda p: head_loss(p, CFG, tokens, np.ones((1, 9)), SEGMENTS)[0]))(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient["mtp"]))
    rest = {name: value for name, value in gradient.items() if name != "mtp"}
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(rest))


def test_the_unroll_trains_what_serving_drafts(params):
    """Depth by depth, the hiddens of the unroll are those of prefill and single chained steps on the same tokens."""
    length, start, depth = 9, 4, 3
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 23, (1, length)))
    hidden, _ = trunk(params, CFG, tokens, Full(jnp.arange(length)[None]))
    recycled, entries, unrolled = hidden, (), []
    for ahead in range(depth):
        rows = length - 1 - ahead
        view = Chained(jnp.arange(rows)[None] + ahead, jnp.zeros((1, rows), int), entries)
        recycled, entry = mtp.head(params, CFG, tokens[:, 1 + ahead :], recycled[:, :rows], view)
        entries = (*entries, entry)
        unrolled.append(recycled[0, start])

    cache = init_state(CFG, slots=1, length=16, max_drafts=0, dtype=jnp.float32, head=True).head
    slot, count = jnp.array([0]), jnp.array([start + 1])
    view = Prefill(slot, jnp.array([0]), count, start + 1)
    served, cache = mtp.head(params, CFG, tokens[:, 1 : start + 2], hidden[:, : start + 1], view, cache)
    served = served[:, -1]
    np.testing.assert_allclose(served[0], unrolled[0], atol=1e-5)
    for ahead in range(1, depth):
        cell = jnp.array([0])
        view = Step(slot, jnp.array([start + ahead]), jnp.array([1]), jnp.array([0]), cell[:, None], cell, False)
        served, cache = mtp.head(params, CFG, tokens[:, start + 1 + ahead], served, view, cache)
        np.testing.assert_allclose(served[0], unrolled[ahead], atol=1e-5)


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


@pytest.mark.parametrize("measure", [cross_entropy, distillation, agreement])
def test_nothing_supervised_is_nothing_and_finite(measure):
    other = jnp.zeros((1, 2), int) if measure is cross_entropy else jnp.ones((1, 2, 3))
    total, weight = measure(jnp.ones((1, 2, 3)), other, jnp.zeros((1, 2)))
    assert (total, weight) == (0, 0)


def test_distillation_and_agreement_know_their_best(tokens):
    """The loss is smallest where head and trunk agree in law, and is then the trunk's entropy; weights count."""
    rng = np.random.default_rng(2)
    teacher, weights = jnp.asarray(rng.standard_normal((2, 3, 5))), jnp.asarray(rng.random((2, 3)))
    best, weight = distillation(teacher, teacher, weights)
    entropy = -(jax.nn.softmax(teacher) * jax.nn.log_softmax(teacher)).sum(-1)
    np.testing.assert_allclose(best, (entropy * weights).sum(), rtol=1e-6)
    assert best < distillation(teacher + rng.standard_normal((2, 3, 5)), teacher, weights)[0]
    assert agreement(teacher * 3 + 1, teacher, weights) == (weight, weight)
    assert agreement(-teacher, teacher, weights)[0] == 0
