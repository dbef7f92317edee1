"""Every Pallas kernel at its named real shapes: a program to compile, and an error to check."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.kernels import backends
from atlas_jax.kernels.backends import Backend
from atlas_jax.kernels.cache_attention import cache_attention
from atlas_jax.kernels.cache_attention import check as attention_check
from atlas_jax.kernels.cache_attention.specs import SPECS as ATTENTION_SPECS
from atlas_jax.kernels.cache_attention.specs import AttentionSpec
from atlas_jax.kernels.gdn_chunk import check as chunk_check
from atlas_jax.kernels.gdn_chunk import gdn_chunk
from atlas_jax.kernels.gdn_chunk.specs import SPECS as CHUNK_SPECS
from atlas_jax.kernels.gdn_chunk.specs import ChunkSpec
from atlas_jax.kernels.gdn_step import check as step_check
from atlas_jax.kernels.gdn_step import gdn_step
from atlas_jax.kernels.gdn_step.reference import recurrence
from atlas_jax.kernels.gdn_step.specs import SPECS as STEP_SPECS
from atlas_jax.kernels.gdn_step.specs import StepSpec
from atlas_jax.lab.crosscompile.chips import CHIPS, Chip
from atlas_jax.lab.crosscompile.jobs import Job
from atlas_jax.lab.crosscompile.worker import Program

Kernel = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Op:
    """One op and its judge, the one of tests and of devices too.

    Attributes:
      function: the public function; takes `backend`, `interpret` and `capability`.
      symbol: how the names of its GPU kernels begin.
      error: of a kernel on random inputs of a spec, against float64.
      bound: the largest error that is rounding, of a spec.
      donate: whether the first argument is updated in place.
      small: what the shrunk shape of a spec must be besides.
    """

    function: Kernel
    symbol: str
    specs: Sequence[Any]
    backends: tuple[Backend, ...]
    error: Callable[[Kernel, Any], float]
    bound: Callable[[Any], float]
    donate: bool = False
    # Two blocks of columns, whatever the spec shrinks to.
    small: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"value_dim": 64})


def step_error(kernel: Kernel, spec: StepSpec) -> float:
    given = (step_check.inputs(spec, 0, gate="mild", padding=1), step_check.inputs(spec, 1, gate="forget", padding=1))
    return float(np.max([step_check.error(kernel, spec, x) for x in given]))  # NaN stays NaN


def chunk_error(kernel: Kernel, spec: ChunkSpec) -> float:
    given = (chunk_check.inputs(spec, 0, gate="mild"), chunk_check.inputs(spec, 1, gate="forget"))
    return float(np.max([chunk_check.error(kernel, x) for x in given]))


def chunk_gradient(*arguments: Any, function: Kernel = gdn_chunk, **options: Any) -> tuple[jax.Array, ...]:
    """Gradients of every argument, for a loss that sees every output and the final state."""

    def loss(*arguments: Any) -> jax.Array:
        out, end = function(*arguments, **options)
        return (out * out).sum() + (end * end).sum()

    return jax.grad(loss, argnums=range(len(arguments)))(*arguments)


def chunk_gradient_error(kernel: Kernel, spec: ChunkSpec) -> float:
    """Of the gradients; the recurrence's own are NaN at a gate of `-inf`, so gates are mild."""
    x = chunk_check.inputs(spec, 0, gate="mild")
    with jax.enable_x64(True):
        exact = functools.partial(chunk_gradient, function=recurrence)
        wanted = jax.jit(exact)(*(jnp.asarray(a, jnp.float64) for a in x))
    return chunk_check.max_error(kernel(*map(jnp.asarray, x)), tuple(map(np.asarray, wanted)))


def attention_error(kernel: Kernel, spec: AttentionSpec) -> float:
    inputs = functools.partial(attention_check.inputs, spec, padding=min(1, spec.n - 1))
    given = (inputs(0, scores="mild"), inputs(1, scores="spiky"))
    return float(np.max([attention_check.error(kernel, x) for x in given]))


_GRADIENT_SPECS = [spec for spec in CHUNK_SPECS if (spec.n, spec.length, spec.value_heads) == (1, 2048, 32)]
OPS: dict[str, Op] = {
    "gdn_step": Op(
        gdn_step,
        "gdn_step",
        STEP_SPECS,
        ("triton", "mosaic"),
        step_error,
        lambda spec: step_check.BOUNDS[spec.state_dtype],
        donate=True,
    ),
    "gdn_chunk": Op(gdn_chunk, "gdn_chunk", CHUNK_SPECS, ("triton",), chunk_error, chunk_check.bound),
    "gdn_chunk gradient": Op(
        chunk_gradient, "gdn_chunk", _GRADIENT_SPECS, ("triton",), chunk_gradient_error, chunk_check.bound
    ),
    "cache_attention": Op(
        cache_attention,
        "cache_attention",
        ATTENTION_SPECS,
        ("triton",),
        attention_error,
        lambda spec: attention_check.BOUNDS[spec.row_dtype],
        small={},
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one named shape.

    Attributes:
      op: one of `OPS`.
      function: `"module:function"` in the place of the op's own. A test of the tests names a wrong one.
    """

    op: str
    spec: str
    backend: Backend
    function: str = ""

    @property
    def name(self) -> str:
        return f"{self.op} {self.backend}: {self.spec}"

    @property
    def shapes(self) -> Any:
        found = {spec.name: spec for spec in OPS[self.op].specs}
        if self.spec not in found:
            raise ValueError(f"{self.op} has no spec {self.spec!r}; there are {', '.join(found)}")
        return found[self.spec]

    @property
    def bound(self) -> float:
        """Largest `rel_err` that is rounding."""
        return OPS[self.op].bound(self.shapes)

    @property
    def donated_bytes(self) -> int:
        """What must be updated in place."""
        first = self.shapes.arguments()[0]
        return first.size * first.dtype.itemsize if OPS[self.op].donate else 0

    def job(self, chip: Chip) -> Job:
        return Job(self.name, f"{__name__}:program", {**dataclasses.asdict(self), "chip": chip.name})

    def obstacle(self, chip: Chip | None = None) -> str | None:
        """Why this cannot exist on a chip (None: interpreted, on this machine) with this jax; None if it can."""
        target = backends.Target.current() if chip is None else chip.target()
        return backends.obstacle(self.backend, target, interpret=chip is None)

    def rel_err(self) -> float:
        """Error against float64, interpreted, at a shrunk shape; may be NaN or infinite."""
        # The model's name is no part of a shape.
        small = dataclasses.replace(self.shapes.shrunk(), model="", **OPS[self.op].small)
        return _error(dataclasses.replace(self, spec=""), small)

    def kernel(self, **options: Any) -> Kernel:
        function = OPS[self.op].function
        if self.function:
            module, name = self.function.split(":")
            function = getattr(importlib.import_module(module), name)
        return functools.partial(function, backend=self.backend, **options)


@functools.cache  # shapes that differ in size alone shrink to the same
def _error(case: Case, small: Any) -> float:
    return OPS[case.op].error(jax.jit(case.kernel(interpret=True)), small)


def cases(ops: Sequence[str] = tuple(OPS)) -> list[Case]:
    """All there are, of these ops."""
    return [Case(op, spec.name, backend) for op in ops for backend in OPS[op].backends for spec in OPS[op].specs]


def program(chip: str, **case: Any) -> Program:
    """The program of `Case(**case)` with the tile of a chip."""
    made = Case(**case)
    kernel = made.kernel(capability=CHIPS[chip].capability)
    return Program(kernel, made.shapes.arguments(), donate=(0,) if OPS[made.op].donate else ())
