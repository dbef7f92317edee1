"""Depth policy: how many drafts to propose. Host code on plain numbers; nothing here imports JAX."""

from atlas_jax.depth.ladder import LadderConfig, describe_bad_part, format_ladder, parse_ladder

__all__ = ["LadderConfig", "describe_bad_part", "format_ladder", "parse_ladder"]
