"""Gated delta rule over whole sequences: prefill and training."""

from atlas_jax.kernels.gdn_chunk.api import gdn_chunk

__all__ = ["gdn_chunk"]
