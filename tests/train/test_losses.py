"""Measures against their definitions, in any dtype, with rows that count for nothing, and in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.train import losses
from atlas_jax.train.losses import MEASURES, in_blocks

RNG = np.random.default_rng(0)
SCORES, TEACHER = RNG.standard_normal((2, 3, 5, 7)) * 3
WEIGHTS = RNG.integers(0, 3, (3, 5)).astype(float)


def law(scores):
    made = np.exp(scores - scores.max(-1, keepdims=True))
    return made / made.sum(-1, keepdims=True)


Q, P = law(SCORES), law(TEACHER)
ALPHA = np.minimum(P, Q).sum(-1)
PICK = np.take_along_axis(Q, P.argmax(-1)[..., None], -1)[..., 0]
SHARE = np.exp(-3 * ALPHA)
FORWARD, REVERSE = (P * np.log(P / Q)).sum(-1), (Q * np.log(Q / P)).sum(-1)
BY_DEFINITION = {
    "pick": -np.log(PICK),
    "kl": FORWARD,
    "reverse_kl": REVERSE,
    "tv": 0.5 * np.abs(P - Q).sum(-1),
    "lk": -np.log(ALPHA),
    "kl_to_tv": SHARE * FORWARD + (1 - SHARE) * (1 - ALPHA),
    "distillation": -(P * np.log(Q)).sum(-1),
    "acceptance": ALPHA,
    "agreement": (Q.argmax(-1) == P.argmax(-1)).astype(float),
}
NAMED = {**MEASURES, "distillation": losses.distillation, "agreement": losses.agreement}
NAMED["acceptance"] = losses.acceptance


@pytest.mark.parametrize("name", BY_DEFINITION)
def test_a_measure_is_its_definition(name):
    total, weight = NAMED[name](jnp.float32(SCORES), jnp.float32(TEACHER), WEIGHTS)
    np.testing.assert_allclose(total, (BY_DEFINITION[name] * WEIGHTS).sum(), rtol=2e-5)
    assert weight == WEIGHTS.sum()


def test_cross_entropy_is_its_definition():
    targets = P.argmax(-1)
    total, weight = losses.cross_entropy(jnp.float32(SCORES), jnp.asarray(targets), WEIGHTS)
    np.testing.assert_allclose(total, (-np.log(PICK) * WEIGHTS).sum(), rtol=2e-5)
    assert weight == WEIGHTS.sum()


@pytest.mark.parametrize("name", [name for name in MEASURES if name != "text"])
def test_a_measure_is_finite_and_its_gradient_too_where_the_laws_part(name):
    """Logits of +-60, rows that agree exactly, bfloat16 scores, rows of weight 0 (NaN in them is nobody's business)."""
    measure = MEASURES[name]
    far = jnp.array([[60.0, -60.0, 0.0], [1.0, 2.0, 3.0]])
    other = jnp.array([[-60.0, 60.0, 0.0], [1.0, 2.0, 3.0]])
    value, gradient = jax.value_and_grad(lambda s: measure(s, other, jnp.ones(2))[0])(far)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    alone = measure(far[1:], other[1:], jnp.ones(1))[0]
    assert measure(far.at[0].set(jnp.nan), other, jnp.array([0.0, 1.0]))[0] == alone
    assert measure(far, other, jnp.zeros(2)) == (0, 0)
    narrow, wide = jnp.bfloat16(SCORES), jnp.bfloat16(SCORES).astype(jnp.float32)
    found = measure(narrow, jnp.float32(TEACHER), WEIGHTS)[0]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, measure(wide, jnp.float32(TEACHER), WEIGHTS)[0], rtol=1e-6)


def test_mixtures_and_schedules_are_linear():
    args = jnp.float32(SCORES), jnp.float32(TEACHER), WEIGHTS
    kl, tv = (float(MEASURES[name](*args)[0]) for name in ("kl", "tv"))
    both = losses.mixture((0.25, losses.forward_kl), (2.0, losses.total_variation))
    np.testing.assert_allclose(both(*args), (0.25 * kl + 2 * tv, WEIGHTS.sum()), rtol=1e-5)
    for progress in (0.0, 0.3, 1.0):
        found = losses.scheduled(losses.forward_kl, losses.total_variation, jnp.float32(progress))(*args)[0]
        np.testing.assert_allclose(found, (1 - progress) * kl + progress * tv, rtol=1e-5)


def test_blocks_are_exact_in_value_and_gradient():
    """Rows that don't fill the last block, one block, and the gradient of hiddens and of the LM head."""
    hidden, teacher = jnp.float32(RNG.standard_normal((2, 11, 4)))
    head, weights = jnp.float32(RNG.standard_normal((4, 9))), jnp.float32(RNG.integers(0, 3, 11))

    def run(hidden, head, block):
        score = lambda x: x @ head
        return in_blocks(losses.negative_log_acceptance, score, score, hidden, teacher, weights, block)[0]

    both = jax.jit(jax.value_and_grad(run, (0, 1)), static_argnums=2)
    whole = both(hidden, head, 11)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    for block in (3, 4):
        jax.tree.map(same, both(hidden, head, block), whole)


def test_a_vocabulary_of_248k_fits():
    """Compiled, not run: 4,096 rows at V = 248,320 and the gradient take a block's memory, not 4 GiB a logits array."""
    rows, width, vocab, block = 4096, 64, 248_320, 64

    def loss(hidden, teacher, head):
        score = lambda x: x @ head
        total, weight = in_blocks(losses.kl_to_tv(), score, score, hidden, teacher, jnp.ones(rows), block)
        return total / weight

    shape = lambda *of: jax.ShapeDtypeStruct(of, jnp.float32)
    args = shape(rows, width), shape(rows, width), shape(width, vocab)
    used = jax.jit(jax.grad(loss)).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert used < 16 * block * vocab * 4 < rows * vocab * 4
