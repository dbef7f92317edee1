"""The compiled programs of an engine: one per bucket and prefill width, and the small ones around them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig
from atlas_jax.decode import step as steps
from atlas_jax.decode.plan import Bucket, Plan, StepConfig
from atlas_jax.decode.state import DecodeState
from atlas_jax.kernels.backends import Kernels
from atlas_jax.model.mixers import Params

Key = Bucket | int | Literal["fold", "copy", "bias", "masks"]


@dataclasses.dataclass
class Programs:
    """Compiled on first use or by `compile`, from shapes alone; each takes and gives the (donated) state.

    Steps, prefills, "fold" and "copy" are called with `(params, state, packed)`; "bias" and "masks" with
    `(state, slot, table)`.
    """

    cfg: ModelConfig
    config: StepConfig
    kernels: Kernels
    fold: int  # most pending rows
    slots: int
    params: Params
    state: DecodeState  # shapes and dtypes of it
    compiled: dict[Key, Any] = dataclasses.field(default_factory=dict)

    def __getitem__(self, key: Key) -> Any:
        if key not in self.compiled:
            self.compiled[key] = self._lower(key).compile()
        return self.compiled[key]

    def compile(self, keys: Iterable[Key], options: Mapping[str, Any] | None = None) -> None:
        """Compile side by side what is not compiled yet; all of it where XLA `options` are given."""
        lowered = {key: self._lower(key) for key in keys if options is not None or key not in self.compiled}
        with ThreadPoolExecutor(max_workers=4) as pool:
            compiled = pool.map(lambda program: program.compile(options), lowered.values())
            self.compiled |= dict(zip(lowered, compiled, strict=True))

    def _lower(self, key: Key) -> Any:
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        if key == "bias":
            row = jax.ShapeDtypeStruct(self.state.bias.shape[1:], jnp.float32)
            return jax.jit(steps.set_bias, donate_argnums=0).lower(self.state, ints(), row)
        if key == "masks":
            rows = jax.ShapeDtypeStruct(self.state.masks.shape[1:], jnp.uint32)
            return jax.jit(steps.set_masks, donate_argnums=0).lower(self.state, ints(), rows)
        common: Any = {"cfg": self.cfg, "kernels": self.kernels}
        if isinstance(key, Bucket):
            fn: Any = functools.partial(steps.step, bucket=key, config=self.config, **common)
            packed = ints(key.n, Plan.width(key.k, self.config.end_ids))
        elif key == "fold":
            how: Any = {"fold": self.fold, "rollback": self.config.rollback}
            fn, packed = functools.partial(steps.fold_pending, **how, **common), ints(4, self.slots)
        elif key == "copy":
            fn, packed = steps.copy_slot, ints(2)
        else:
            fn, packed = functools.partial(steps.prefill, width=key, **common), ints(4 + key)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.params)
        return jax.jit(fn, donate_argnums=1).lower(abstract, self.state, packed)
