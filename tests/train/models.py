"""Random parameters in no time: drawn by NumPy, where a module's own initialisers would be compiled one by one."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlas_jax.model.modules import Model


def random_params(cfg, seed=0, scale=0.1):
    """Matrices normal with this deviation, norms and gates a tenth of it."""
    rng = np.random.default_rng(seed)
    shapes = nnx.eval_shape(lambda: Model(cfg, rngs=nnx.Rngs(0))).params()
    draw = lambda x: jnp.float32(rng.standard_normal(x.shape) * (scale if x.ndim > 1 else scale / 10))
    return jax.tree.map(draw, shapes)
