"""What a model needs and how fast it could be, from its config alone: bytes, what fits a GPU, the floor of a step.

Arithmetic, not measurement. Weights, keys and values are bfloat16, recurrent states float32. A floor is the time that a
step can't undercut: the larger of its bytes over the bandwidth and its products over the peak.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from atlas_jax.config import ConfigError, ModelConfig
from atlas_jax.model.state import init_state
from atlas_jax.weights.layout import Naming, leaves

USABLE = 0.9  # of a GPU's memory: the rest is the runtime's, and a step's temporaries


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Nominal figures of a data sheet: bytes, bytes/s and dense bfloat16 operations/s."""

    memory: float
    bandwidth: float
    flops: float


GPUS = {
    "a100": Gpu(80e9, 2.04e12, 312e12),
    "h100": Gpu(80e9, 3.35e12, 990e12),
    "h200": Gpu(141e9, 4.8e12, 990e12),
    "b200": Gpu(180e9, 8.0e12, 2250e12),
    "gb10": Gpu(128e9, 273e9, 125e12),
}


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of a model.

    Attributes:
      weight_bytes: of the trunk, the embedding and the LM head (once where they are tied).
      head_bytes: of the MTP head's own weights; 0 without one.
      gdn_state_bytes_per_sequence: recurrent states of all GDN layers.
      conv_state_bytes_per_sequence: the `W - 1` last rows before the convolution, of all GDN layers.
      kv_bytes_per_token, head_kv_bytes_per_token: of the trunk's attention layers, of the head's.
      pending_bytes_per_row: an accepted draft that is not folded yet: `(q | k | v | b | a)` of all GDN layers.
    """

    weight_bytes: int
    head_bytes: int
    gdn_state_bytes_per_sequence: int
    conv_state_bytes_per_sequence: int
    kv_bytes_per_token: int
    head_kv_bytes_per_token: int
    pending_bytes_per_row: int


@functools.cache
def footprint(cfg: ModelConfig) -> Footprint:
    """The bytes of a model of this config."""
    gdn, attention = cfg.layers.count("gdn"), cfg.layers.count("attention")
    weights: dict[bool, int] = {True: 0, False: 0}
    for leaf in leaves(cfg, Naming()):
        weights[leaf.path[0] == "mtp"] += math.prod(leaf.shape) * (4 if leaf.path[-1] in ("a_log", "dt_bias") else 2)
    head_kv = 2 * cfg.kv_heads * cfg.head_dim * 2
    return Footprint(
        weight_bytes=weights[False],
        head_bytes=weights[True],
        gdn_state_bytes_per_sequence=gdn * cfg.gdn_value_heads * cfg.gdn_key_dim * cfg.gdn_value_dim * 4,
        conv_state_bytes_per_sequence=gdn * (cfg.conv_width - 1) * cfg.conv_channels * 2,
        kv_bytes_per_token=attention * head_kv,
        head_kv_bytes_per_token=head_kv if cfg.mtp_layers else 0,
        pending_bytes_per_row=gdn * (cfg.conv_channels + 2 * cfg.gdn_value_heads) * 2,
    )


def slot_bytes(cfg: ModelConfig, context: int, drafts: int) -> int:
    """Bytes of one slot of the engine's state, all of it: what `init_state` really allocates for it."""
    state = jax.eval_shape(
        lambda: init_state(
            cfg, slots=1, length=context, max_drafts=drafts, dtype=jnp.dtype(jnp.bfloat16), head=bool(cfg.mtp_layers)
        )
    )
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@dataclasses.dataclass(frozen=True)
class Fit:
    """What fits a GPU. 0 where even one slot, or one token, does not.

    Attributes:
      free_bytes: left for slots beside the weights; negative where the weights alone don't fit.
      slot_bytes: of one slot at the context asked for.
      max_slots: most slots at that context.
      max_context: longest context of the slots asked for, at most the model's own.
    """

    free_bytes: int
    slot_bytes: int
    max_slots: int
    max_context: int


def fit(cfg: ModelConfig, gpu: Gpu, context: int, slots: int, drafts: int = 3) -> Fit:
    """How many slots of a context, and how long a context of a number of slots, fit beside the weights."""
    sizes = footprint(cfg)
    free = int(gpu.memory * USABLE) - sizes.weight_bytes - sizes.head_bytes
    slot = slot_bytes(cfg, context, drafts)
    per_token = sizes.kv_bytes_per_token + sizes.head_kv_bytes_per_token
    fixed = slot - context * per_token
    longest = (free // slots - fixed) // per_token if per_token else cfg.max_positions
    return Fit(free, slot, max(0, free // slot), max(0, min(longest, cfg.max_positions)))


def floor_ms(cfg: ModelConfig, gpu: Gpu, n: int, rows: int, context: int) -> float:
    """Least milliseconds of the trunk's step for n sequences of `rows` rows each, at `context` committed tokens.

    Weights are read once (of the experts, those that `n * rows` uniformly routed rows hit), states read and written
    once whatever the rows, keys and values read once a sequence.
    """
    sizes, total = footprint(cfg), n * rows
    body, experts = _body_params(cfg)
    active = body + (experts * cfg.moe.experts_per_token / cfg.moe.num_experts if cfg.moe else 0)
    hit = 1 - (1 - cfg.moe.experts_per_token / cfg.moe.num_experts) ** total if cfg.moe else 0.0
    moved = 2 * (body + experts * hit)
    moved += n * (2 * sizes.gdn_state_bytes_per_sequence + context * sizes.kv_bytes_per_token)
    attention, gdn = cfg.layers.count("attention"), cfg.layers.count("gdn")
    flops = 2 * total * active + 4 * total * context * cfg.q_heads * cfg.head_dim * attention
    flops += 7 * total * cfg.value_size * cfg.gdn_key_dim * gdn
    return 1e3 * max(moved / gpu.bandwidth, flops / gpu.flops)


def draft_floor_ms(cfg: ModelConfig, gpu: Gpu, n: int, context: int) -> float:
    """Least milliseconds of one pass of the MTP head over n rows: its weights, the LM head, its keys and values."""
    sizes, moe = footprint(cfg), cfg.moe
    own = sizes.head_bytes / 2
    if moe:
        experts = 3 * moe.num_experts * moe.expert_size * cfg.hidden_size
        own -= experts * (1 - moe.experts_per_token / moe.num_experts) ** n
    weights = own + cfg.vocab_size * cfg.hidden_size
    moved = 2 * weights + n * context * sizes.head_kv_bytes_per_token
    return 1e3 * max(moved / gpu.bandwidth, 2 * n * weights / gpu.flops)


def _body_params(cfg: ModelConfig) -> tuple[float, float]:
    """Parameters that every step reads (layers and LM head), and those of all experts."""
    experts = 0
    if cfg.moe:
        experts = 3 * cfg.moe.num_experts * cfg.moe.expert_size * cfg.hidden_size * len(cfg.layers)
    total = footprint(cfg).weight_bytes / 2
    embedding = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.hidden_size  # a few rows of it are read
    return total - embedding - experts, experts


def buckets(slots: int, drafts: int) -> list[tuple[int, int]]:
    """`(n, rows)` of the steps that a plan lists: powers of two up to the slots, one row and more."""
    widths = [2**i for i in range(max(slots, 1).bit_length()) if 2**i <= slots]
    return [(n, rows) for n in widths for rows in range(1, drafts + 2)]


def plan(
    cfg: ModelConfig, gpu: Gpu, context: int = 4096, slots: int = 32, drafts: int = 3
) -> dict[str, int | Mapping[str, float]]:
    """All of the above in one flat record. Raises `ConfigError` for sizes that make no sense."""
    if context < 1 or slots < 1 or drafts < 0:
        raise ConfigError(f"context {context} and slots {slots} must be at least 1, drafts {drafts} at least 0")
    if context > cfg.max_positions:
        raise ConfigError(f"context {context} exceeds the model's {cfg.max_positions} positions")
    fits = fit(cfg, gpu, context, slots, drafts)
    return {
        **dataclasses.asdict(footprint(cfg)),
        **dataclasses.asdict(fits),
        "floor_ms": {f"{n}x{k}": round(floor_ms(cfg, gpu, n, k, context), 4) for n, k in buckets(slots, drafts)},
        "draft_floor_ms": {str(n): round(draft_floor_ms(cfg, gpu, n, context), 4) for n in _widths(slots, drafts)},
    }


def _widths(slots: int, drafts: int) -> Sequence[int]:
    return list(dict.fromkeys(n for n, _ in buckets(slots, drafts)))
