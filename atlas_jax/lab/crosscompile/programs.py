"""Whole decode steps at the sizes of released models, from shapes alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig
from atlas_jax.decode.plan import Bucket, Plan
from atlas_jax.decode.state import DecodeState, init_state
from atlas_jax.decode.step import step
from atlas_jax.kernels.backends import Kernels, choose
from atlas_jax.lab.crosscompile.chips import CHIPS
from atlas_jax.lab.crosscompile.worker import Program
from atlas_jax.model.mixers import Params, leaf_dtype
from atlas_jax.presets import abstract_params, preset

CONTEXT = 4096  # cache length; no time and no temporary depends on it


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """One bucket of one model on a chip, over a pool of `slots`; `layers` keeps the first few."""

    model: str
    chip: str
    n: int
    k: int
    slots: int
    layers: int | None = None

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.n, self.k, self.n * self.k, head=self.k > 1)

    @property
    def cfg(self) -> ModelConfig:
        return preset(self.model, layers=self.layers)

    @property
    def kernels(self) -> Kernels:
        """What an engine on that chip would choose."""
        return choose("auto", CHIPS[self.chip].target())

    def state(self) -> DecodeState:
        make = functools.partial(init_state, slots=self.slots, length=CONTEXT, max_drafts=3, head=self.bucket.head)
        return jax.eval_shape(functools.partial(make, self.cfg, dtype=jnp.bfloat16))

    def params(self) -> Params:
        """As the engine casts them to bfloat16."""
        cast = lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf_dtype(path, jnp.bfloat16))
        return jax.tree_util.tree_map_with_path(cast, abstract_params(self.cfg))

    def state_bytes(self) -> int:
        return _bytes(self.state())

    def layer_bytes(self) -> int:
        """Weights of the largest layer."""
        return max(map(_bytes, self.params()["layers"].values()))


def decode_step(**fields: Any) -> Program:
    """The program of a `DecodeStep` of these fields; the state is donated, as the engine does."""
    size = DecodeStep(**fields)
    fn = functools.partial(step, cfg=size.cfg, bucket=size.bucket, kernels=size.kernels)
    plan = jax.ShapeDtypeStruct((size.n, Plan.width(size.k)), jnp.int32)
    return Program(fn, (size.params(), size.state(), plan), donate=(1,))


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
