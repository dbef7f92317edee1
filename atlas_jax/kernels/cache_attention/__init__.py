"""Attention of a few rows per sequence over the pooled key-value cache."""

from atlas_jax.kernels.cache_attention.api import cache_attention, write_cache

__all__ = ["cache_attention", "write_cache"]
