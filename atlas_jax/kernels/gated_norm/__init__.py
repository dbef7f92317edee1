"""RMSNorm with a SiLU gate, behind the GDN recurrence."""

from atlas_jax.kernels.gated_norm.api import gated_norm

__all__ = ["gated_norm"]
