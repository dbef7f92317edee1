"""Beyond one device: a mesh, and one table of which axis of which array lies along which axis of it.

Arrays are placed by `shardings`; XLA's partitioner does the rest, so most of the model knows nothing of a mesh. Three
things are spread by hand, in a `shard_map`. Sequences, since no partitioner can know that a sequence's slot lies where
its row does: under a `data` axis every shard runs the step on its own slots (`local_slots`). Experts, whose grouped
products no partitioner cuts (`model.ffn.moe`). And Pallas kernels, each device's on its own heads (`by_heads`).

Processes of several hosts (`join`) run the same program on the same requests; each holds its devices' part of every
array and is answered in full.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from atlas_jax.config import ModelConfig

Tree = Any

# What a named axis of an array lies along; `batch` is that of a training batch.
RULES: dict[str, str | tuple[str, ...]] = {
    "slots": "data",
    "batch": ("data", "fsdp"),
    "hidden": "fsdp",
    "experts": "expert",
    "heads": "tensor",
    "width": "tensor",
    "vocab": "tensor",
}

# The axes of each array, by its name in the trees of parameters and of decode state, and its rank. None: not cut.
# Vectors that are not here are whole. Fused weights have an axis more where their columns are `grouped`.
_ARRAYS: dict[tuple[str, int], tuple[str | None, ...]] = {
    ("embed", 2): ("vocab", "hidden"),
    ("lm_head", 2): ("vocab", "hidden"),
    ("draft_head", 2): ("vocab", "hidden"),
    ("in_proj", 2): ("hidden", "heads"),
    ("in_proj", 3): ("hidden", "heads", None),
    ("conv", 2): (None, None),
    ("conv", 3): (None, "heads", None),
    ("a_log", 1): ("heads",),
    ("dt_bias", 1): ("heads",),
    ("out_proj", 2): ("heads", "hidden"),
    ("qkv_proj", 2): ("hidden", "heads"),
    ("qkv_proj", 3): ("hidden", "heads", None),
    ("o_proj", 2): ("heads", "hidden"),
    ("gate_up", 2): ("hidden", "width"),
    ("gate_up", 3): ("hidden", "width", None),
    ("down", 2): ("width", "hidden"),
    ("experts/gate_up", 3): ("experts", "hidden", "width"),
    ("experts/gate_up", 4): ("experts", "hidden", "width", None),
    ("experts/down", 3): ("experts", "width", "hidden"),
    ("router", 2): ("hidden", None),
    ("shared_gate_up", 2): ("hidden", "width"),
    ("shared_gate_up", 3): ("hidden", "width", None),
    ("shared_down", 2): ("width", "hidden"),
    ("fc", 2): ("hidden", None),
    ("state", 4): ("slots", "heads", None, None),
    ("state", 5): ("slots", None, "heads", None, None),
    ("window", 3): ("slots", None, "heads"),
    ("kv", 5): ("slots", None, "heads", None, None),
    ("text", 2): ("slots", None),
    ("ledger", 2): ("slots", None),
    ("bias", 2): ("slots", "vocab"),
    ("masks", 3): ("slots", None, None),
    ("proposals", 3): ("slots", None, "vocab"),
}


def join(
    devices: int | None = None,
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Make this process one of several, before anything else starts JAX's backend; no coordinator: the only one.

    Args:
      devices: CPU devices of this process, for tests; None leaves it alone.
      coordinator: `host:port` where process 0 listens; where given, so are `processes` and `process_id` (from 0).

    Raises `MeshError` for half of these. If a process is lost, JAX ends the others when they hear nothing of it.
    """
    if devices is not None:
        jax.config.update("jax_num_cpu_devices", devices)
    if (coordinator, processes, process_id) == (None, None, None):
        return
    if coordinator is None or processes is None or process_id is None or not 0 <= process_id < processes:
        raise MeshError(
            f"coordinator {coordinator}, processes {processes}, process_id {process_id}: give all three, with ids from "
            "0 to processes - 1, or none"
        )
    jax.distributed.initialize(coordinator, processes, process_id)


class MeshError(ValueError):
    """A mesh that the model, the engine or the machine doesn't have room for; the message says what would fit."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes of a mesh; devices are their product, tensor neighbours next to each other.

    Attributes:
      data: shards of the sequences (decode) and of the batch (training).
      fsdp: shards of the weights along the hidden size, and of the batch in training.
      expert: shards of the experts.
      tensor: shards of heads, FFN width and vocabulary.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise MeshError(f"{name}={size}: an axis of a mesh has at least size 1")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """From `"tensor=2,data=4"`; axes that are not named have size 1. The empty text is one device."""
        sizes: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
            if found is None or found[1] not in cls.__dataclass_fields__ or found[1] in sizes:
                axes = ", ".join(cls.__dataclass_fields__)
                raise MeshError(f"{part!r} in {text!r} is not axis=size with another one of {axes}")
            sizes[found[1]] = int(found[2])
        return cls(**sizes)

    def __str__(self) -> str:
        named = (f"{name}={size}" for name, size in dataclasses.asdict(self).items() if size > 1)
        return ",".join(named) or "one device"

    @property
    def size(self) -> int:
        """Devices."""
        return math.prod(dataclasses.astuple(self))

    @property
    def spread(self) -> frozenset[str]:
        """Axes that a `shard_map` over sequences takes: `data`, and those of size 1, so that where nothing else is cut
        nothing is left to the partitioner, which knows no Pallas kernels."""
        return frozenset(name for name, size in dataclasses.asdict(self).items() if name == "data" or size == 1)

    def build(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
        """The mesh of the first `size` devices (default: of all processes). `MeshError` where there are fewer."""
        devices = jax.devices() if devices is None else devices
        if len(devices) < self.size:
            raise MeshError(
                f"{self} takes {self.size} devices and there are {len(devices)} ({devices[0].platform}); on a CPU, "
                "jax.config.update('jax_num_cpu_devices', N) before anything else makes N of it"
            )
        sizes = dataclasses.asdict(self)
        automatic = (AxisType.Auto,) * len(sizes)
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), automatic, devices=devices[: self.size])

    def check(self, cfg: ModelConfig, slots: int | None = None) -> None:
        """Raises `MeshError` for an axis that does not divide what lies along it, with the sizes that would."""
        if self.expert > 1 and cfg.moe is None:
            raise MeshError(f"expert={self.expert}: this model has no experts; leave the axis out")
        along: dict[str, dict[str, int]] = {
            "data": {} if slots is None else {"slots": slots},
            "fsdp": {"hidden_size": cfg.hidden_size},
            "expert": {"num_experts": cfg.moe.num_experts} if cfg.moe else {},
            "tensor": {name: getattr(cfg, name) for name in ("q_heads", "kv_heads", "vocab_size")},
        }
        if "gdn" in cfg.layers:
            along["tensor"] |= {name: getattr(cfg, name) for name in ("gdn_key_heads", "gdn_value_heads")}
        ffn = {"expert_size": cfg.moe.expert_size, "shared_size": cfg.moe.shared_size} if cfg.moe else {}
        along["tensor"] |= ffn or {"ffn_size": cfg.ffn_size}
        for axis, extents in along.items():
            size = getattr(self, axis)
            if whole := [f"{name} {extent}" for name, extent in extents.items() if extent % size]:
                fit = math.gcd(*extents.values())
                sizes = ", ".join(str(d) for d in range(1, fit + 1) if fit % d == 0)
                raise MeshError(f"{axis}={size} does not divide {', '.join(whole)}; what would: {sizes}")

    # ---- sequences under `data`: slot s is the `s // data`-th of shard `s % data`, so that they fill shards in turn

    def fullest(self, slots: Sequence[int], counts: Sequence[int]) -> int:
        """The largest sum of `counts` that the slots of one shard have."""
        sums = [0] * self.data
        for slot, count in zip(slots, counts, strict=True):
            sums[slot % self.data] += count
        return max(sums)

    def places(self, slots: Sequence[int], n: int) -> list[int]:
        """Where in a plan of `data` times `n` lines the sequences stand: each with its shard, in the order given."""
        free = [shard * n for shard in range(self.data)]
        found = []
        for slot in slots:
            found.append(free[slot % self.data])
            free[slot % self.data] += 1
        return found


def by_heads(
    kernel: Callable[..., Any], arrays: Sequence[Array], heads: Sequence[int | None], out: Any, *, rows: bool = False
) -> Any:
    """`kernel(*arrays)`, on a mesh with each device's own heads, since no partitioner can cut a Pallas kernel.

    Takes what axes of the mesh the caller has left to the partitioner, so it works inside a `shard_map` over sequences
    and outside; without a mesh it is the call itself. Differentiable as the kernel is.

    Args:
      heads: axis of each array along which heads lie, key or value; None where all devices need all of it.
      out: the same for the results, a tuple if there are several.
      rows: axis 0 of every array and result is the rows of a batch, cut like a training batch where it divides.
    """
    meshes = [mesh for mesh in (jax.typeof(x).sharding.mesh for x in arrays) if not mesh.empty]
    free = {name for name in meshes[0].auto_axes} if meshes else set()
    if not free:
        return kernel(*arrays)
    sizes = meshes[0].shape
    batch = tuple(axis for axis in RULES["batch"] if axis in free) if rows else ()
    if arrays[0].shape[0] % math.prod(sizes[axis] for axis in batch):
        batch = ()
    along = "tensor" if "tensor" in free else None

    def spec(axis: int | None) -> PartitionSpec:
        if axis is None:
            return PartitionSpec(batch or None)
        return PartitionSpec(batch or None, *[None] * (axis - 1), along)

    specs = tuple(spec(axis) for axis in heads)
    outs = tuple(spec(axis) for axis in out) if isinstance(out, tuple) else spec(out)
    over = jax.shard_map(
        kernel, mesh=meshes[0], axis_names=free, in_specs=specs, out_specs=outs, check_vma=False
    )
    return over(*arrays)


def shardings(tree: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """A `NamedSharding` for every array of a tree of parameters, decode state or optimizer state.

    Arrays are known by the last name on their path and their rank, so an optimizer's moments lie where their parameters
    do. Raises `MeshError` for an array that has no rule or an axis that doesn't divide.
    """

    last = lambda path: str(getattr(path[-1], "key", getattr(path[-1], "name", path[-1]))) if path else ""
    routed = any(last(path) == "router" for path, _ in jax.tree_util.tree_leaves_with_path(tree))

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = last(path)
        if routed and name in ("gate_up", "down"):
            name = f"experts/{name}"
        axes = _ARRAYS.get((name, leaf.ndim), (None,) * leaf.ndim if leaf.ndim < 2 else None)
        where = jax.tree_util.keystr(path)
        if axes is None:
            raise MeshError(f"{where}, {list(leaf.shape)}: no rule says how it lies on a mesh; add it to sharding.py")
        spec = PartitionSpec(*(RULES[axis] if axis else None for axis in axes))
        found = NamedSharding(mesh, spec)
        try:
            found.shard_shape(leaf.shape)
        except ValueError:
            raise MeshError(f"{where}, {list(leaf.shape)}: {dict(mesh.shape)} does not divide {axes}") from None
        return found

    return jax.tree_util.tree_map_with_path(place, tree)


def place(tree: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """The arrays of `shardings` (on host or device, the same in every process) where they belong."""
    return jax.tree.map(_put, tree, shardings(tree, mesh))


def place_batch(batch: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """Arrays of a training batch, the same in every process: cut by rows. Raises `MeshError` if uneven."""
    rows = NamedSharding(mesh, PartitionSpec(RULES["batch"]))
    shards = math.prod(mesh.shape[axis] for axis in RULES["batch"])
    if uneven := {len(x) for x in jax.tree.leaves(batch) if len(x) % shards}:
        raise MeshError(f"data x fsdp, {shards} shards, does not divide a batch of {uneven.pop()} rows")
    return jax.tree.map(lambda x: _put(x, rows), batch)


def _put(x: Any, where: NamedSharding) -> jax.Array:
    if jax.process_count() == 1:
        return jax.device_put(x, where)
    # Each process hands over what its own devices hold; `device_put` would compare whole arrays between processes.
    return jax.make_array_from_callback(x.shape, where, np.asarray(x).__getitem__)


def whole(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def grouped(params: Tree, cfg: ModelConfig, groups: int) -> Tree:
    """Parameters for decoding where heads are cut in `groups`: each holds its own part of all that is fused.

    Cut as they are stored, `(q | k | v | b | a | z)` would lie where no part is together, and every product would be
    sent around. Training leaves them: its checkpoints must not know of a mesh.
    """
    if groups == 1:
        return params
    key, value, q, kv = cfg.key_size, cfg.value_size, cfg.q_heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    ffn = cfg.moe.expert_size if cfg.moe else cfg.ffn_size
    fused = {
        "in_proj": (key, key, value, cfg.gdn_value_heads, cfg.gdn_value_heads, value),
        "conv": (key, key, value),
        "qkv_proj": (q, q, kv, kv),
        "gate_up": (ffn, ffn),
        "shared_gate_up": (cfg.moe.shared_size,) * 2 if cfg.moe else (),
    }

    def regroup(path: tuple[Any, ...], leaf: Any) -> Any:
        sizes = fused.get(getattr(path[-1], "key", ""))
        if sizes is None:
            return leaf
        numpy: Any = np if isinstance(leaf, np.ndarray) else jnp
        parts = numpy.split(leaf, np.cumsum(sizes)[:-1], axis=-1)
        return numpy.concatenate([part.reshape(*leaf.shape[:-1], groups, -1) for part in parts], axis=-1)

    return jax.tree_util.tree_map_with_path(regroup, params)


def abstract(tree: Tree, mesh: jax.sharding.Mesh | None) -> Tree:
    """Shapes, dtypes and, on a mesh, places of a tree: all that lowering needs."""
    if mesh is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(place, tree, shardings(tree, mesh))


def zeros(tree: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """Zeros of a tree's shapes, each made where it lies: no device ever holds all of it."""
    return jax.tree.map(lambda x, s: jnp.zeros(x.shape, x.dtype, device=s), tree, shardings(tree, mesh))


def local_slots(slots: Int[Array, "..."], count: int, shards: int) -> Int[Array, "..."]:
    """Inside a `shard_map` over `data`: the slots as this shard numbers its own `count`; `count` for all others."""
    return jnp.where(slots % shards == jax.lax.axis_index("data"), slots // shards, count)


def everywhere(holds: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether it holds on every shard of the data, inside a `shard_map` over `data`; elsewhere as it is."""
    spread = "data" in jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.pmin(holds.astype(jnp.int32), "data") > 0 if spread else holds
