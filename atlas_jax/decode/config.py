"""Sizes and rules of an engine."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from atlas_jax.decode.accept import Rule
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.plan import Bucket, StepConfig
from atlas_jax.kernels.backends import Backend, Kernels
from atlas_jax.model.rollback import Rollback
from atlas_jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and rules of the engine.

    Attributes:
      slots: most sequences active at once.
      context: most tokens of a sequence, prompt included.
      max_drafts: most drafts a step can verify per sequence.
      buckets: which shapes are compiled.
      prefill: widths of prefill programs, ascending; a prompt runs in chunks of the largest that it fills.
      prefill_tokens: prompt tokens between two decode steps while sequences decode (at least one chunk is run).
      queue: most requests waiting for a slot.
      keep: further slots for states that prompts may begin with; 0 reuses nothing.
      acceptance: "match" emits what plain decode would, draw for draw; "rejection" and "block" take sampled drafts and
        are exact in law.
      top_log_probs: how many of the likeliest tokens to answer with each emitted one.
      draft_log_probs: record drafts' log-probabilities whatever the policy asks, for traces.
      end_ids: most end tokens of a request.
      rounds: most steps in one call to the device, where nothing on the host has a say between them.
      numerics: "invariant" runs every step, plain or not, in one bucket and one form of the recurrence: outputs are
        then bit-equal whatever is drafted, in any dtype.
      rollback: how recurrent states go back to the last accepted row, with equal outputs. All but "deferred" are there
        to be compared with it (`scripts/bench_rollback.py`) and run on the xla backend only.
      dtype: of weights, activations and caches (recurrent states are at least float32).
      kernels: who computes the GDN ops; "auto" is the reference on CPUs and Pallas Triton on GPUs that it supports.
      mesh: devices of the engine and what is cut over them. Under `data` every shard has its share of the slots, and
        buckets are shapes of one shard.
      seed: of requests that bring none.
    """

    slots: int = 8
    context: int = 1024
    max_drafts: int = 3
    buckets: BucketConfig = BucketConfig()
    prefill: tuple[int, ...] = (32, 128, 512)
    prefill_tokens: int = 512
    queue: int = 4096
    keep: int = 0
    acceptance: Rule = "match"
    top_log_probs: int = 0
    draft_log_probs: bool = False
    end_ids: int = StepConfig.end_ids
    rounds: int = 1
    numerics: Literal["fast", "invariant"] = "fast"
    rollback: Rollback = "deferred"
    dtype: Any = jnp.float32
    kernels: Literal["auto"] | Backend | Kernels = "auto"
    mesh: Mesh = Mesh()
    seed: int = 0

    def __post_init__(self) -> None:
        self.buckets.check(min(self.slots, self.slots_per_shard))
        if not self.prefill or list(self.prefill) != sorted(set(self.prefill)) or self.prefill[0] < 1:
            raise ValueError(f"prefill widths must be positive and ascending, not {self.prefill}")
        if self.numerics == "invariant" and self.rollback != "deferred":
            raise ValueError(f"numerics 'invariant' needs rollback 'deferred', not {self.rollback!r}")
        for name in ("slots", "context", "queue", "rounds", "prefill_tokens", "end_ids"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def invariant_bucket(self, head: bool) -> Bucket:
        """The one bucket of `numerics="invariant"`: room for every slot at full depth."""
        wanted = min(self.slots, self.slots_per_shard)
        n, k = min(size for size in self.buckets.n if size >= wanted), self.max_drafts + 1 if head else 1
        return Bucket(n, k, n * k, head)

    @property
    def slots_per_shard(self) -> int:
        """Slots, kept ones included, of each shard of the data."""
        return (self.slots + self.keep) // self.mesh.data
