"""One decode or verify step of the gated delta rule, with deferred commit."""

from atlas_jax.kernels.gdn_step.api import gdn_step

__all__ = ["gdn_step"]
