"""The Pallas kernels inside the engine: the same tokens and states as the reference, through the same programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Fixed
from atlas_jax.kernels.backends import BackendError, Kernels
from atlas_jax.model.modules import Model

# A Pallas kernel may not name sizes below 16.
SIZES = {"gdn_key_dim": 16, "gdn_value_dim": 16, "gdn_key_heads": 1, "gdn_value_heads": 2, "hidden_size": 16}
pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton")


def run(params, cfg, kernels):
    config = EngineConfig(slots=2, context=48, max_drafts=2, prefill=(16,), dtype=jnp.float64, kernels=kernels)
    engine = Engine(params, cfg, config, Fixed(2))
    rng = np.random.default_rng(0)
    # Of two lengths, and one more than there are slots: padding rows, padding sequences and a slot used again.
    requests = [Request(rng.integers(0, cfg.vocab_size, n).tolist(), 9, ignore_eos=True) for n in (3, 20, 7)]
    answers = [completion.tokens for completion in engine.generate(requests)]
    return answers, jax.device_get(engine.materialize()), engine.kernels


@pytest.mark.slow
def test_the_engine_gives_the_same_with_kernels(tiny):
    cfg = dataclasses.replace(tiny[0], layers=("gdn", "attention"), **SIZES)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), Model(cfg, rngs=nnx.Rngs(1)).params())
        params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params)  # picks that differ
        wanted, state, _ = run(params, cfg, "xla")
        kernels = Kernels(gdn_step="triton", gdn_chunk="triton", interpret=True)
        found, same, used = run(params, cfg, kernels)
    assert used.gdn_step == used.gdn_chunk == "triton"
    assert found == wanted
    assert len({token for answer in wanted for token in answer}) > 4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), same, state)


def test_a_kernel_that_cannot_run_is_refused(tiny):
    cfg, params = tiny
    with pytest.raises(BackendError, match=r"triton can't run on cpu.*Would work: xla"):
        Engine(params, cfg, EngineConfig(kernels="triton"))
