"""The cells of the kernel bench: which shapes, how many bytes they must move, and how long they take.

A cell's bytes are the least that the op can move (its spec's own model); its share is bytes over time over the measured
copy rate. Where nothing can be timed a cell still says its bytes, and its microseconds are None.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.kernels.backends import Backend
from atlas_jax.kernels.cache_attention import cache_attention
from atlas_jax.kernels.cache_attention.specs import AttentionSpec
from atlas_jax.kernels.cache_attention.specs import spec as attention_spec
from atlas_jax.kernels.cache_attention.tiles import CANDIDATES
from atlas_jax.kernels.cache_attention.tiles import Tile as AttentionTile
from atlas_jax.kernels.gdn_chunk import check as chunk_check
from atlas_jax.kernels.gdn_chunk import gdn_chunk
from atlas_jax.kernels.gdn_chunk.specs import ChunkSpec
from atlas_jax.kernels.gdn_chunk.specs import spec as chunk_spec
from atlas_jax.kernels.gdn_step import check, gdn_step
from atlas_jax.kernels.gdn_step.specs import StepSpec, spec
from atlas_jax.kernels.gdn_step.tiles import Tile
from atlas_jax.lab.rollback_kernels import snapshot_step
from atlas_jax.lab.timing import Timing, chained, measure

STEP_MODELS = ("qwen3.5-4b", "qwen3.5-0.8b", "qwen3.5-27b")  # one for each pair of heads
STEP_BATCHES = (1, 8, 32)
STEP_ROWS = ((1, 0), (4, 0), (4, 3))  # (rows, pending)
DESIGN_MODEL = "qwen3.5-4b"  # rollback designs, backends and foreign kernels are compared at its shapes
SWEEP = (Tile(8, 1), Tile(16, 1), Tile(16, 2), Tile(32, 4))
ATTENTION_SWEEP = CANDIDATES
CONTEXT, SHORT = 4096, 512  # capacity of a slot, which is full or holds this little

_ROTATION = 160 << 20  # bytes of states in rotation: three times the last-level cache of the largest chips
_MOST_SETS = 16  # every set is a call of its own in the program, and compiles


@dataclasses.dataclass(frozen=True)
class Cell:
    """One kernel at one shape. Times are microseconds per call, None where nothing was timed.

    Attributes:
      us, low, high: median and quartiles over repetitions.
      bytes: the least that this call can move.
      share_of_copy, share_of_nominal: of the measured copy rate and of the data sheet's.
      against: other implementations of the same call on the same inputs, microseconds; where nothing was timed, the
        bytes they move instead, named `<name>_bytes`.
      resident: the buffers in rotation may fit the cache, so that the time is not that of memory.
      tile: how a program is cut, columns and warps for a step; empty where the compiler chooses.
    """

    kernel: str
    spec: str
    n: int
    rows: int
    pending: int
    bytes: int
    backend: str
    us: float | None = None
    low: float | None = None
    high: float | None = None
    share_of_copy: float | None = None
    share_of_nominal: float | None = None
    against: dict[str, float] = dataclasses.field(default_factory=dict)
    resident: bool = False
    tile: str = ""

    def timed(self, timing: Timing, copy: float, nominal: float | None) -> Cell:
        """The cell with its time, against a copy rate and a nominal bandwidth in bytes per second."""
        rate = self.bytes / (timing.us * 1e-6)
        return dataclasses.replace(
            self,
            us=timing.us,
            low=timing.low,
            high=timing.high,
            share_of_copy=rate / copy,
            share_of_nominal=rate / nominal if nominal else None,
        )


def step_specs() -> Iterator[tuple[StepSpec, int]]:
    """`(spec, pending)` of every step that is timed, each with room for as many pending rows as there are drafts."""
    for n in reversed(STEP_BATCHES):  # what matters most comes first, should time run out
        for model in STEP_MODELS if n == max(STEP_BATCHES) else (DESIGN_MODEL,):
            for rows, pending in STEP_ROWS:
                yield spec(model, n, rows), pending


def row_specs() -> tuple[StepSpec, ...]:
    """Every number of rows from 1 to 8 at the largest batch, without room for pending ones."""
    return tuple(spec(DESIGN_MODEL, max(STEP_BATCHES), rows, folded=0) for rows in range(1, 9))


def step_cell(what: StepSpec, pending: int, backend: Backend, tile: Tile | None) -> Cell:
    """The untimed cell of a step."""
    return Cell(
        kernel="gdn_step",
        spec=what.name,
        n=what.n,
        rows=what.rows,
        pending=pending,
        bytes=what.bytes(pending),
        backend=backend,
        resident=sets_of_states(what) * _state_bytes(what) < _ROTATION,
        tile=f"{tile.columns}x{tile.warps}" if tile and backend != "xla" else "",
    )


def design_bytes(what: StepSpec, pending: int) -> dict[str, int]:
    """What a step of each rollback design moves: deferred commit as the spec says, the others by their states.

    A snapshot behind every row is one read and T writes. Recompute reads the state twice and writes it once, and reads
    the rows again to fold the accepted ones.
    """
    states, deferred = _state_bytes(what), what.bytes(pending)
    rows = what.bytes(0) - 2 * states
    return {"deferred": deferred, "snapshot": (1 + what.rows) * states + rows, "recompute": 3 * states + 2 * rows}


def time_step(
    what: StepSpec, pending: int, backend: Backend, tile: Tile, *, interpret: bool = False, **options: Any
) -> Timing:
    """Time `gdn_step` with full sequences and `pending` pending rows each. `options` go to `timing.measure`."""
    kernel = gdn_step if backend == "xla" else functools.partial(_kernel(backend), tile=tile, interpret=interpret)
    carry, slots = _rotated(what)
    carry["rows"] = _arrays(_inputs(what))
    carry["counts"] = (jnp.full(what.n, pending, jnp.int32), jnp.full(what.n, what.rows, jnp.int32))

    def call(carry: dict[str, Any], i: int) -> dict[str, Any]:
        out, pool = kernel(carry["pool"], slots[i], *carry["rows"], *carry["counts"])
        # XLA would not compute outputs that the next call replaces; a kernel gives them with the pool or not at all.
        return {**carry, "pool": pool, "out": carry["out"] + out if backend == "xla" else out}

    if backend == "xla":  # many kernels a call, each compiled anew
        options = {"unroll": 4, **options}
    return _time(call, carry, slots, **options)


def time_snapshot(what: StepSpec, tile: Tile, *, interpret: bool = False, **options: Any) -> Timing:
    """The same step with a snapshot behind every row."""
    carry, slots = _rotated(what, snapshots=what.rows)
    carry["rows"] = _arrays(_own_rows(what))
    carry["start"] = jnp.full(what.n, what.rows - 1, jnp.int32)

    def call(carry: dict[str, Any], i: int) -> dict[str, Any]:
        arguments = (carry["pool"], slots[i], carry["start"], *carry["rows"], carry["out"])
        out, pool = snapshot_step(*arguments, tile=tile, interpret=interpret)
        return {**carry, "pool": pool, "out": out}

    return _time(call, carry, slots, **options)


def time_recompute(what: StepSpec, tile: Tile, *, interpret: bool = False, **options: Any) -> Timing:
    """The same step as two kernels: verify every row without writing, then fold all of them (all were accepted)."""
    commit = functools.partial(_kernel("triton"), tile=tile, interpret=interpret)
    carry, slots = _rotated(what, snapshots=1)
    q, *rest = _own_rows(what)
    # Folding pending rows alone: gdn_step without a row of its own, but with room for one.
    padded = (np.pad(a, ((0, 0), (0, 1)) + ((0, 0),) * (a.ndim - 2)) for a in rest)
    carry["rows"], carry["pending"] = _arrays((q, *rest)), _arrays((q[:, :1], *padded))
    carry["counts"] = (jnp.full(what.n, what.rows, jnp.int32), jnp.zeros(what.n, jnp.int32))

    def call(carry: dict[str, Any], i: int) -> dict[str, Any]:
        pool, first = carry["pool"], carry["counts"][1]
        arguments = (pool, slots[i], first, *carry["rows"], carry["out"])
        out, _ = snapshot_step(*arguments, write=False, tile=tile, interpret=interpret)
        # In this order: both read the pool, and the second one writes it.
        out, flat = jax.lax.optimization_barrier((out, pool[:, 0]))
        _, flat = commit(flat, slots[i], *carry["pending"], *carry["counts"])
        return {**carry, "pool": flat[:, None], "out": out}

    return _time(call, carry, slots, **options)


def foreign_inputs(what: StepSpec) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """`((q, k, v, g, beta), states)` of a step's own rows, for kernels that are not ours."""
    return _own_rows(what), check.inputs(dataclasses.replace(what, slots=what.n), 0, full=True, poison=0.0).pool


def chunk_specs() -> tuple[ChunkSpec, ...]:
    """A long prompt, with rows in float32 as the model has them and in bfloat16 as other kernels take them."""
    return tuple(chunk_spec(DESIGN_MODEL, 1, 8192, row_dtype=dtype) for dtype in ("float32", "bfloat16"))


def chunk_cell(what: ChunkSpec, backend: Backend) -> Cell:
    """The untimed cell of a chunked forward."""
    return Cell("gdn_chunk", what.name, what.n, what.length, 0, what.bytes(), backend)


def time_chunk(
    what: ChunkSpec,
    backend: Backend,
    capability: tuple[int, int] | None = None,
    *,
    interpret: bool = False,
    **options: Any,
) -> Timing:
    """Time the forward, each run beginning with the state that the last one left. `options` go to `timing.measure`."""
    state, *rows = (jnp.asarray(a) for a in chunk_check.inputs(what, 0))
    forward = functools.partial(gdn_chunk, backend=backend, interpret=interpret, capability=capability)
    program = jax.jit(forward, donate_argnums=0)
    timing, _ = measure(lambda carry: program(carry[0], *rows)[::-1], (state, None), **options)
    return timing


def attention_specs() -> Iterator[tuple[AttentionSpec, int]]:
    """`(spec, live entries of a sequence)` of every attention over the cache that is timed."""
    for n in reversed(STEP_BATCHES):
        for model in STEP_MODELS if n == max(STEP_BATCHES) else (DESIGN_MODEL,):
            for rows in (1, 4):
                yield attention_spec(model, n, rows, context=CONTEXT), CONTEXT
    yield attention_spec(DESIGN_MODEL, max(STEP_BATCHES), 4, context=CONTEXT), SHORT
    yield attention_spec(DESIGN_MODEL, 1, 1, context=8 * CONTEXT), 8 * CONTEXT


def attention_cell(what: AttentionSpec, length: int, backend: Backend, tile: AttentionTile | None) -> Cell:
    """The untimed cell of an attention over `length` entries; nothing is pending in it."""
    return Cell(
        kernel="cache_attention",
        spec=f"{what.name} at {length}",
        n=what.n,
        rows=what.rows,
        pending=0,
        bytes=what.bytes(length),
        backend=backend,
        resident=_sets(_cache_bytes(what, length)) * _cache_bytes(what, length) < _ROTATION,
        tile=attention_tile_name(tile) if tile and backend != "xla" else "",
    )


def attention_tile_name(tile: AttentionTile) -> str:
    """Entries, warps, stages and programs."""
    return f"{tile.entries}x{tile.warps}x{tile.stages} {tile.programs}"


def copying_bytes(what: AttentionSpec, length: int) -> int:
    """What XLA's form moves: it copies each block out of the pool, then reads the copy."""
    return what.bytes(length) + 2 * _cache_bytes(what, length)


def time_attention(
    what: AttentionSpec,
    length: int,
    backend: Backend,
    tile: AttentionTile,
    *,
    interpret: bool = False,
    **options: Any,
) -> Timing:
    """Time attention over `length` entries of full sequences; what one call gives are the queries of the next."""
    attend: Callable[..., jax.Array] = cache_attention
    if backend != "xla":
        kernel = importlib.import_module(f"atlas_jax.kernels.cache_attention.pallas_{backend}").cache_attention
        attend = functools.partial(kernel, tile=tile, interpret=interpret)
    sets = _sets(_cache_bytes(what, length))
    shape = dataclasses.replace(what, slots=sets * what.n).arguments()
    positions = jnp.broadcast_to(length - what.rows + jnp.arange(what.rows), (what.n, what.rows))
    carry = {
        "pool": jnp.ones(shape[0].shape, shape[0].dtype),
        "out": jnp.ones(shape[-1].shape, shape[-1].dtype),
        "positions": positions,
        "lengths": jnp.full(what.n, length, jnp.int32),
    }

    def call(carry: dict[str, Any], i: int) -> dict[str, Any]:
        return {**carry, "out": attend(carry["pool"], slots[i], carry["positions"], carry["lengths"], carry["out"])}

    slots = _order(sets, what.n)
    if backend == "xla":  # many kernels a call, each compiled anew
        options = {"unroll": 4, **options}
    return _time(call, carry, slots, **options)


def sets_of_states(what: StepSpec) -> int:
    """How many sets of n states are in rotation."""
    return _sets(_state_bytes(what))


def _sets(size: int) -> int:
    """How many of this many bytes are in rotation."""
    return int(np.clip(-(-_ROTATION // size), 2, _MOST_SETS))


def ratios(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What more rows cost: T = 4 over T = 1 with nothing pending, at 0 and 3 pending rows, per model and batch."""
    found: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for cell in cells:
        if cell.kernel == "gdn_step" and cell.us is not None:
            found.setdefault((cell.spec.split()[0], cell.n), {})[cell.rows, cell.pending] = cell.us
    return [
        {"model": model, "n": n, "t4_p0": times[4, 0] / times[1, 0], "t4_p3": times[4, 3] / times[1, 0]}
        for (model, n), times in found.items()
        if times.keys() >= set(STEP_ROWS)
    ]


def _kernel(backend: Backend) -> Callable[..., Any]:
    """The kernel itself, which takes a tile; the op chooses its own."""
    return importlib.import_module(f"atlas_jax.kernels.gdn_step.pallas_{backend}").gdn_step


def _state_bytes(what: StepSpec) -> int:
    """States of the n sequences."""
    return what.n * what.value_heads * what.key_dim * what.value_dim * jnp.dtype(what.state_dtype).itemsize


def _cache_bytes(what: AttentionSpec, length: int) -> int:
    """Live keys and values of the n sequences."""
    return what.n * 2 * what.kv_heads * length * what.head_dim * jnp.dtype(what.cache_dtype).itemsize


def _inputs(what: StepSpec) -> tuple[np.ndarray, ...]:
    """`(q, k, v, g, beta)` with room for pending rows, all of them live."""
    x = check.inputs(dataclasses.replace(what, slots=what.n), 0, full=True, poison=0.0)
    return x.q, x.k, x.v, x.g, x.beta


def _own_rows(what: StepSpec) -> tuple[np.ndarray, ...]:
    """The same without the pending rows, which only k, v, g and beta have."""
    q, *rest = _inputs(what)
    return q, *(a[:, what.folded :] for a in rest)


def _arrays(values: Iterable[np.ndarray]) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(a) for a in values)


def _rotated(what: StepSpec, snapshots: int = 0) -> tuple[dict[str, Any], list[jax.Array]]:
    """A pool of several sets of n states and a place for outputs; the slots of each set, in random order."""
    sets = sets_of_states(what)
    places = (snapshots,) if snapshots else ()
    pool = jnp.ones((sets * what.n, *places, what.value_heads, what.key_dim, what.value_dim), what.state_dtype)
    out = jnp.zeros((what.n, what.rows, what.value_heads, what.value_dim), what.state_dtype)
    return {"pool": pool, "out": out}, _order(sets, what.n)


def _order(sets: int, n: int) -> list[jax.Array]:
    """The n slots of each set, in random order."""
    order = np.random.default_rng(1).permutation(sets * n).astype(np.int32).reshape(sets, n)
    return [jnp.asarray(slots) for slots in order]


def _time(
    call: Callable[[dict[str, Any], int], dict[str, Any]],
    carry: dict[str, Any],
    slots: Sequence[jax.Array],
    turns: int = 4,
    unroll: int = 32,
    **options: Any,
) -> Timing:
    # Enough calls in a turn that the loop's own small kernels don't count; all share one kernel's code.
    sets = len(slots)
    unroll = -(-unroll // sets) * sets
    program = chained(lambda carry, i: call(carry, i % sets), unroll, turns)
    timing, _ = measure(program, carry, calls=unroll * turns, **options)
    return timing
