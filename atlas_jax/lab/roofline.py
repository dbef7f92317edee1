"""Cost tables from bytes and operations: what a step cannot be faster than on a device. Synthetic, and said to be.

Weights are read once per forward and recurrent states read and written once per step whatever its rows (deferred
commit); a mixture of experts reads the experts that its rows are expected to hit. Each pass takes the longer of its
bytes over the bandwidth and its operations over the peak. No launch, no host, no communication: real steps are slower,
and their rows dearer. So these tables show directions, not speeds.
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas_jax.config import ModelConfig
from atlas_jax.lab.cost import CostError, CostTable, StepTime, model_id


@dataclass(frozen=True)
class Device:
    """Data sheet: bytes per second, dense bfloat16 operations per second, bytes of memory."""

    name: str
    bandwidth: float
    flops: float
    memory: float


DEVICES = {
    "h200": Device("NVIDIA H200", 4.8e12, 989e12, 141e9),
    "gb10": Device("NVIDIA GB10", 0.273e12, 125e12, 128e9),
}
# Bytes of a weight; 4-bit blocks of 16 carry a scale of one byte.
WEIGHTS = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128.0, 1024.0, 4096.0, 16384.0, 65536.0)


@dataclass(frozen=True)
class Sizes:
    """Parameters of the parts of a model that a step reads, and the experts' apart."""

    gdn: int
    attention: int
    dense: int  # of one layer's FFN; with experts, the router and the shared one
    expert: int
    experts: int
    chosen: int
    lm_head: int
    joint: int  # the draft head's projection of embedding and hidden

    @classmethod
    def of(cls, cfg: ModelConfig) -> Sizes:
        d, moe = cfg.hidden_size, cfg.moe
        key, value = cfg.key_size, cfg.value_size
        queries, keys = cfg.q_heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        return cls(
            gdn=d * (2 * key + 2 * value + 2 * cfg.gdn_value_heads) + value * d + cfg.conv_width * cfg.conv_channels,
            attention=d * (2 * queries + 2 * keys) + queries * d,
            dense=d * (moe.num_experts + 3 * moe.shared_size + 1) if moe else 3 * d * cfg.ffn_size,
            expert=3 * d * moe.expert_size if moe else 0,
            experts=moe.num_experts if moe else 0,
            chosen=moe.experts_per_token if moe else 0,
            lm_head=cfg.vocab_size * d,
            joint=2 * d * d,
        )

    def ffn(self, rows: int) -> tuple[float, float]:
        """Parameters of one FFN that `rows` rows read, and that one row multiplies with."""
        if not self.experts:
            return self.dense, self.dense
        hit = self.experts * (1 - (1 - self.chosen / self.experts) ** rows)
        return self.dense + hit * self.expert, self.dense + self.chosen * self.expert


def total_params(cfg: ModelConfig, *, head: bool = False) -> int:
    """Parameters in matrices (norms and biases, under 1 in 1,000, left out); `head` adds the MTP head's own."""
    s, gdn = Sizes.of(cfg), cfg.layers.count("gdn")
    ffn = s.dense + s.experts * s.expert
    total = gdn * s.gdn + (len(cfg.layers) - gdn) * s.attention + len(cfg.layers) * ffn
    total += s.lm_head * (1 if cfg.tie_embeddings else 2)
    return total + (s.joint + s.attention + ffn if head else 0)


def step_seconds(
    cfg: ModelConfig, device: Device, weight_bytes: float, n: int, k: int, rows: int, context: float, head: bool
) -> float:
    """Lower bound of a step over n sequences, `rows` rows in all, that proposes k - 1 drafts each."""
    s, gdn = Sizes.of(cfg), cfg.layers.count("gdn")
    attention = len(cfg.layers) - gdn
    state = cfg.gdn_value_heads * cfg.gdn_key_dim * cfg.gdn_value_dim
    cache = 2 * cfg.kv_heads * cfg.head_dim * context
    scores = 4 * cfg.q_heads * cfg.head_dim * context
    longer = lambda moved, operations: max(moved / device.bandwidth, operations / device.flops)

    read, used = s.ffn(rows)
    mixers = gdn * s.gdn + attention * s.attention
    trunk = longer(
        weight_bytes * (mixers + len(cfg.layers) * read + s.lm_head)
        + n * (gdn * state * 4 * 2 + attention * cache * 2),
        rows * (2 * (mixers + len(cfg.layers) * used + s.lm_head) + gdn * 8 * state + attention * scores),
    )
    if not head:
        return trunk
    entries = s.joint + 2 * cfg.hidden_size * cfg.kv_heads * cfg.head_dim
    refill = longer(weight_bytes * entries, rows * 2 * entries)
    read, used = s.ffn(n)
    one = s.joint + s.attention + s.lm_head
    propose = longer(weight_bytes * (one + read) + n * cache * 2, n * (2 * (one + used) + scores))
    return trunk + refill + (k - 1) * propose


def roofline_table(name: str, cfg: ModelConfig, device: str, weights: str = "bf16", *, deepest: int = 4) -> CostTable:
    """The table of a model on a device; a model too large for one is spread over as many as hold it, at no cost.

    `device` is a key of `DEVICES`, `weights` of `WEIGHTS`. Raises `CostError` for others.
    """
    for what, key, known in (("device", device, DEVICES), ("weights", weights, WEIGHTS)):
        if key not in known:
            raise CostError(f"no {what} {key!r}; there are {', '.join(known)}")
    chip, size = DEVICES[device], WEIGHTS[weights]
    stored = size * total_params(cfg, head=True)
    chips = -(-int(stored) // int(0.9 * chip.memory))
    wide = Device(chip.name, chip.bandwidth * chips, chip.flops * chips, chip.memory * chips)
    steps = []
    for n in WIDTHS:
        shapes = [(1, n, False)]
        for k in range(1, deepest + 2):
            shapes += [(k, rows, True) for rows in sorted({*range(n, n * k, max(1, n // 2)), n * k})]
        for k, rows, head in shapes:
            for context in CONTEXTS:
                seconds = step_seconds(cfg, wide, size, n, k, rows, context, head)
                steps.append(StepTime(n, k, rows, head, context, seconds))
    _, used = Sizes.of(cfg).ffn(1)
    s, gdn = Sizes.of(cfg), cfg.layers.count("gdn")
    active = gdn * s.gdn + (len(cfg.layers) - gdn) * s.attention + len(cfg.layers) * used
    return CostTable(
        kind="roofline",
        model=model_id(cfg),
        device=chip.name if chips == 1 else f"{chips} x {chip.name}",
        steps=tuple(steps),
        prefill=2 * active / wide.flops,
        context_rule="mean",
        about=(
            ("source", "bytes and operations over data-sheet rates; a bound, not a measurement"),
            ("name", name),
            ("weights", weights),
        ),
    )
