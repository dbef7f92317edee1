"""Short causal depthwise convolution with SiLU, in front of the GDN recurrence."""

from atlas_jax.kernels.causal_conv.api import causal_conv

__all__ = ["causal_conv"]
