"""Every kernel against the answer in float64, on the device of this process: what a bench must not run without."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.kernels import backends
from atlas_jax.kernels.backends import Backend
from atlas_jax.kernels.cache_attention import cache_attention
from atlas_jax.kernels.cache_attention import check as attention_check
from atlas_jax.kernels.cache_attention.check import SCORES, Scores
from atlas_jax.kernels.cache_attention.specs import SPECS as ATTENTION_SPECS
from atlas_jax.kernels.cache_attention.specs import AttentionSpec
from atlas_jax.kernels.cache_attention.specs import spec as attention_spec
from atlas_jax.kernels.check import GATES, Gate
from atlas_jax.kernels.gdn_chunk import check as chunk_check
from atlas_jax.kernels.gdn_chunk import gdn_chunk
from atlas_jax.kernels.gdn_chunk.specs import SPECS as CHUNK_SPECS
from atlas_jax.kernels.gdn_chunk.specs import ChunkSpec
from atlas_jax.kernels.gdn_chunk.specs import spec as chunk_spec
from atlas_jax.kernels.gdn_step import check, gdn_step
from atlas_jax.kernels.gdn_step.specs import SPECS, StepSpec, spec

STEP_BACKENDS: tuple[Backend, ...] = ("triton", "mosaic", "xla")
CHUNK_BACKENDS: tuple[Backend, ...] = ("triton", "xla")
ATTENTION_BACKENDS: tuple[Backend, ...] = ("triton", "xla")
PADDING = 2  # padding sequences in every batch
FREE = 3  # slots that no sequence runs in
_MOST_SLOTS = 256  # a larger pool is made on the device, not on the host


@dataclasses.dataclass(frozen=True)
class Skipped:
    """What could not be checked here, and why."""

    what: str
    why: str


@dataclasses.dataclass(frozen=True)
class Checked:
    """One kernel at one shape and kind of inputs (gates, or scores); `rel_err` is None where it did not run, `error`
    says why."""

    kernel: str
    spec: str
    backend: str
    inputs: str
    rel_err: float | None
    bound: float
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.spec} {self.backend} {self.inputs}"

    @property
    def ok(self) -> bool:
        return self.rel_err is not None and self.rel_err <= self.bound  # NaN is not


def check_kernels(*, interpret: bool = False, shrink: bool = False, quick: bool = False) -> Iterator[Checked | Skipped]:
    """Every op with every backend at every named shape; mild inputs at all of them, every kind of inputs at one.

    Steps have ragged rows, padding sequences, and poison where nothing is live. `interpret` runs Pallas kernels without
    a GPU, `shrink` takes the shapes' small twins, `quick` three shapes an op and one kind of inputs.
    """
    target = backends.Target.current()
    hard = spec("qwen3.5-4b", 16, 4)
    for backend in STEP_BACKENDS:
        if why := backends.obstacle(backend, target, interpret=interpret):
            yield Skipped(f"gdn_step {backend}", why)
            continue
        for what in (SPECS[0], hard, SPECS[-1]) if quick else SPECS:
            for gate in GATES if what == hard and not quick else GATES[:1]:
                yield check_step(what, backend, gate, interpret, shrink, target.capability)
    deep = chunk_spec("qwen3.5-4b", 1, 2048)
    for backend in CHUNK_BACKENDS:
        if why := backends.obstacle(backend, target, interpret=interpret):
            yield Skipped(f"gdn_chunk {backend}", why)
            continue
        # The float64 recurrence runs row by row, and more chunks are more of the same: 2048 rows are enough.
        bounded = [dataclasses.replace(what, length=min(what.length, 2048)) for what in CHUNK_SPECS]
        shapes = list(dict.fromkeys(bounded))
        for length in (shapes[0], shapes[-2], shapes[-1]) if quick else shapes:
            if backend == "xla" and length.state_dtype == "bfloat16":
                yield Skipped(f"gdn_chunk {length.name} xla", "it computes in the state's own dtype, bfloat16")
                continue
            for kind in GATES if length == deep and not quick else GATES[:1]:
                yield check_chunk(length, backend, kind, interpret, shrink, target.capability)
    grouped = attention_spec("qwen3.5-4b", 16, 4)
    for backend in ATTENTION_BACKENDS:
        if why := backends.obstacle(backend, target, interpret=interpret):
            yield Skipped(f"cache_attention {backend}", why)
            continue
        for cache in (ATTENTION_SPECS[0], grouped, ATTENTION_SPECS[-1]) if quick else ATTENTION_SPECS:
            for scores in SCORES if cache == grouped and not quick else SCORES[:1]:
                yield check_attention(cache, backend, scores, interpret, shrink, target.capability)


def check_step(
    what: StepSpec,
    backend: Backend,
    gate: Gate,
    interpret: bool,
    shrink: bool,
    capability: tuple[int, int] | None,
) -> Checked:
    """`gdn_step` at one shape."""
    size = what.shrunk() if shrink else what
    small = dataclasses.replace(size, slots=size.n + FREE)
    step = jax.jit(functools.partial(gdn_step, backend=backend, interpret=interpret, capability=capability))
    run = far_slots(step, size.slots) if size.slots > _MOST_SLOTS else step
    return _settled(
        Checked("gdn_step", what.name, backend, gate, None, check.BOUNDS[what.state_dtype]),
        lambda: check.error(run, small, check.inputs(small, 0, gate=gate, padding=PADDING)),
    )


def check_chunk(
    what: ChunkSpec,
    backend: Backend,
    gate: Gate,
    interpret: bool,
    shrink: bool,
    capability: tuple[int, int] | None,
) -> Checked:
    """`gdn_chunk`, forward, at one shape."""
    size = what.shrunk() if shrink else what
    forward = jax.jit(functools.partial(gdn_chunk, backend=backend, interpret=interpret, capability=capability))
    return _settled(
        Checked("gdn_chunk", what.name, backend, gate, None, chunk_check.bound(what)),
        lambda: chunk_check.error(forward, chunk_check.inputs(size, 0, gate=gate)),
    )


def check_attention(
    what: AttentionSpec,
    backend: Backend,
    scores: Scores,
    interpret: bool,
    shrink: bool,
    capability: tuple[int, int] | None,
) -> Checked:
    """`cache_attention` at one shape, over a context that a host fills in a second, in a pool of as many bytes."""
    size = what.shrunk() if shrink else what
    context = min(size.context, max(1024, 16384 // size.n))
    slots = size.slots * (size.context // context)
    small = dataclasses.replace(size, context=context, slots=size.n + FREE)
    attend = jax.jit(functools.partial(cache_attention, backend=backend, interpret=interpret, capability=capability))

    def far(pool: jax.Array, where: jax.Array, *rest: jax.Array) -> jax.Array:
        first = slots - pool.shape[0]
        return attend(_at_the_end(pool, slots), where + first, *rest)

    run = far if size.slots > _MOST_SLOTS else attend
    inputs = functools.partial(attention_check.inputs, small, 0, scores=scores, padding=min(PADDING, small.n - 1))
    return _settled(
        Checked("cache_attention", what.name, backend, scores, None, attention_check.BOUNDS[what.row_dtype]),
        lambda: attention_check.error(run, inputs()),
    )


@functools.partial(jax.jit, static_argnums=1)
def _at_the_end(pool: jax.Array, slots: int) -> jax.Array:
    """The pool as the last of so many slots, the others empty: offsets beyond 32 bits, and nothing on the host."""
    return jnp.zeros((slots, *pool.shape[1:]), pool.dtype).at[slots - pool.shape[0] :].set(pool)


def _settled(found: Checked, error: Callable[[], float]) -> Checked:
    try:
        return dataclasses.replace(found, rel_err=error())
    except Exception as failure:  # of any layer of the compiler: what it says is the finding, and the rest goes on
        said = " ".join(str(failure)[:300].split())
        return dataclasses.replace(found, error=f"{type(failure).__name__}: {said}")


def far_slots(step: Callable[..., Any], slots: int) -> Callable[..., tuple[Any, Any]]:
    """`step` with its pool at the far end of one of `slots` slots: offsets beyond 32 bits, and nothing on the host.

    What the step returns of the pool is that end; all of it is NaN if any other slot has changed.
    """

    @jax.jit
    def changed(large: jax.Array, first: jax.Array) -> jax.Array:
        before = jnp.arange(slots)[:, None, None, None] < first
        return jnp.any(before & (large != 0))

    def run(pool: jax.Array, where: jax.Array, *rest: jax.Array) -> tuple[Any, Any]:
        first = slots - pool.shape[0]
        out, large = jax.jit(step, donate_argnums=0)(_at_the_end(pool, slots), where + first, *rest)
        kept = np.asarray(large[first:])
        return out, np.full_like(kept, np.nan) if bool(changed(large, jnp.int32(first))) else kept

    return run
