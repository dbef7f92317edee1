"""The smallest model of the family with both kinds of layers; tests change what they are about."""

from atlas_jax.config import ModelConfig

TINY = ModelConfig(
    vocab_size=256,
    hidden_size=32,
    layers=("gdn", "attention"),
    q_heads=2,
    kv_heads=1,
    head_dim=8,
    rotary_dim=4,
    rope_theta=1e4,
    gdn_key_heads=1,
    gdn_value_heads=2,
    gdn_key_dim=8,
    gdn_value_dim=8,
    ffn_size=32,
)
