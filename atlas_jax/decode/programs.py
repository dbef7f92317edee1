"""The compiled programs of an engine: one per bucket and prefill width, and the small ones around them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from atlas_jax import sharding
from atlas_jax.config import ModelConfig
from atlas_jax.decode import step as steps
from atlas_jax.decode.plan import Bucket, Plan, StepConfig
from atlas_jax.decode.state import DecodeState
from atlas_jax.kernels.backends import Kernels
from atlas_jax.model.mixers import Params
from atlas_jax.sharding import Mesh

Key = Bucket | int | Literal["fold", "copy", "bias", "masks"]


@dataclasses.dataclass
class Programs:
    """Compiled on first use or by `compile`, from shapes alone; each takes and gives the (donated) state.

    Steps, prefills, "fold" and "copy" are called with `(params, state, packed)`; "bias" and "masks" with
    `(state, slot, table)`. On a mesh, parameters and state lie as `sharding.shardings` says, before and after. Where it
    spreads sequences, a bucket is the shape of one shard: a plan has its lines `data` times, each shard's together.
    """

    cfg: ModelConfig
    config: StepConfig
    kernels: Kernels
    fold: int  # most pending rows
    slots: int
    params: Params
    state: DecodeState  # shapes and dtypes of it
    mesh: Mesh = Mesh()
    devices: jax.sharding.Mesh | None = None  # the mesh itself; None: one device
    compiled: dict[Key, Any] = dataclasses.field(default_factory=dict)

    def __getitem__(self, key: Key) -> Any:
        if key not in self.compiled:
            self.compiled[key] = self._lower(key).compile()
        return self.compiled[key]

    def compile(self, keys: Iterable[Key], options: Mapping[str, Any] | None = None) -> None:
        """Compile side by side what is not compiled yet; all of it where XLA `options` are given."""
        with ThreadPoolExecutor(max_workers=4) as pool:
            # One thread traces while the others compile what is traced already.
            jobs = {
                key: pool.submit(self._lower(key).compile, options)
                for key in keys
                if options is not None or key not in self.compiled
            }
            self.compiled |= {key: job.result() for key, job in jobs.items()}

    def _lower(self, key: Key) -> Any:
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        state = sharding.abstract(self.state, self.devices)
        if key == "bias":
            row = jax.ShapeDtypeStruct(self.state.bias.shape[1:], jnp.float32)
            return self._jit(key, steps.set_bias).lower(state, ints(), row)
        if key == "masks":
            rows = jax.ShapeDtypeStruct(self.state.masks.shape[1:], jnp.uint32)
            return self._jit(key, steps.set_masks).lower(state, ints(), rows)
        common: Any = {"cfg": self.cfg, "kernels": self.kernels}
        if isinstance(key, Bucket):
            fn: Any = functools.partial(steps.step, bucket=key, config=self.config, **common)
            packed = ints(key.n * self.mesh.data, Plan.width(key.k, self.config.end_ids))
        elif key == "fold":
            how: Any = {"fold": self.fold, "rollback": self.config.rollback}
            fn, packed = functools.partial(steps.fold_pending, **how, **common), ints(4, self.slots)
        elif key == "copy":
            fn, packed = steps.copy_slot, ints(2)
        else:
            fn, packed = functools.partial(steps.prefill, width=key, **common), ints(4 + key)
        return self._jit(key, fn).lower(sharding.abstract(self.params, self.devices), state, packed)

    def _jit(self, key: Key, fn: Any) -> Any:
        """The program with its state donated; on a mesh, with everything where it belongs before and after."""
        only_state = key in ("bias", "masks")
        donated = 0 if only_state else 1
        if self.devices is None:
            return jax.jit(fn, donate_argnums=donated)
        places, whole = sharding.shardings(self.state, self.devices), sharding.whole(self.devices)
        params = sharding.shardings(self.params, self.devices)
        return jax.jit(
            self._spread(key, fn) if self.mesh.data > 1 else fn,
            donate_argnums=donated,
            # Every process runs the host's part of the engine: it tells all of its devices, and is answered in full.
            in_shardings=(places, whole, whole) if only_state else (params, places, whole),
            out_shardings=(places, whole) if isinstance(key, Bucket) else places,
        )

    def _spread(self, key: Key, fn: Any) -> Any:
        """Every shard of the data runs `fn` on its own slots; those of others are out of range there, hence dropped."""
        shards, count = self.mesh.data, self.state.ledger.shape[0] // self.mesh.data
        own = lambda slots: sharding.local_slots(slots, count, shards)
        over = functools.partial(jax.shard_map, mesh=self.devices, axis_names=self.mesh.spread, check_vma=False)
        if isinstance(key, Bucket):
            step = lambda params, state, packed: fn(params, state, packed.at[:, 0].set(own(packed[:, 0])))
            spread = over(step, in_specs=(P(), P("data"), P("data")), out_specs=(P("data"), P(None, "data")))

            def whole(params: Params, state: DecodeState, packed: Array) -> Any:
                after, answer = spread(params, state, packed)
                # A step only reads these; XLA cuts them inside to its taste and would gather them again to return them.
                return after._replace(bias=state.bias, masks=state.masks), answer

            return whole
        if key in ("bias", "masks"):
            put = lambda state, slot, row: _set_row(fn, state, getattr(state, str(key)), own(slot), row)
            return over(put, in_specs=(P("data"), P(), P()), out_specs=P("data"))
        if key == "copy":
            run = lambda params, state, packed: _copy_across(state, *own(packed))
        else:  # the slots come first in what fold and prefill are told
            run = lambda params, state, packed: fn(params, state, packed.at[0].set(own(packed[0])))
        return over(run, in_specs=(P(), P("data"), P()), out_specs=P("data"))


def _set_row(fn: Any, state: DecodeState, pool: Array, slot: Int[Array, ""], row: Array) -> DecodeState:
    """`fn(state, slot, row)`, or nothing new where the slot is out of range: a slice would be moved back into it."""
    inside = jnp.minimum(slot, pool.shape[0] - 1)
    return fn(state, inside, jnp.where(slot == inside, row, pool[inside]))


def _copy_across(state: DecodeState, source: Int[Array, ""], target: Int[Array, ""]) -> DecodeState:
    """`steps.copy_slot` between shards of the data: whoever has the source tells the others."""

    def copy(pool: Array) -> Array:
        inside = jnp.minimum(source, pool.shape[0] - 1)
        mine = jnp.where(source == inside, pool[inside], jnp.zeros_like(pool[inside]))
        told = jax.lax.optimization_barrier(jax.lax.psum(mine, "data"))  # read before the pool is written
        return pool.at[target].set(told, mode="drop")

    return jax.tree.map(copy, state)
