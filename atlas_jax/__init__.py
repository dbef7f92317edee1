"""Lossless speculative decoding for gated-delta-net language models in JAX."""

__version__ = "0.1.0"
