"""The short convolution and the gated norm against their definitions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.kernels.causal_conv import causal_conv
from atlas_jax.kernels.gated_norm import gated_norm


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_conv_equals_its_definition(length):
    rng = np.random.default_rng(length)
    inputs, weight = rng.standard_normal((2, 3 + length, 5)), rng.standard_normal((4, 5))
    expected = silu(np.stack([(inputs[:, t : t + 4] * weight).sum(1) for t in range(length)], axis=1))
    actual = causal_conv(jnp.float32(inputs), jnp.float32(weight))
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_conv_never_reaches_into_another_document():
    """Packed documents give what each gives alone."""
    rng = np.random.default_rng(0)
    rows, weight = jnp.float32(rng.standard_normal((1, 9, 5))), jnp.float32(rng.standard_normal((4, 5)))
    pad = lambda x: jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    packed = causal_conv(pad(rows), weight, jnp.array([[0, 0, 0, 0, 0, 1, 2, 2, 2]]))
    alone = [causal_conv(pad(rows[:, a:b]), weight) for a, b in ((0, 5), (5, 6), (6, 9))]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gated_norm_equals_its_definition(dtype):
    """Norm before gate, plain weight, result in the gate's dtype."""
    rng = np.random.default_rng(1)
    x, gate, weight = rng.standard_normal((3, 4, 12)) * 5, rng.standard_normal((3, 4, 12)), rng.standard_normal(12)
    gate = np.asarray(jnp.asarray(gate, dtype), np.float64)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight * silu(gate)
    actual = jax.jit(gated_norm, static_argnums=3)(jnp.float32(x), jnp.asarray(gate, dtype), jnp.float32(weight), 1e-6)
    assert actual.dtype == dtype
    bound = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.float64(actual), expected, atol=bound * np.abs(expected).max())
