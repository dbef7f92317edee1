"""Which backend runs each op: one frozen choice, made once from the device and the jax version, never in silence.

| backend | runs on | needs |
|---|---|---|
| `xla` | everything | |
| `sequential` | everything; `gdn_step` alone | the recurrence row by row: no row's bits depend on those beside it |
| `triton` | Pallas Triton: NVIDIA sm_80 (Ampere) and later | a jax that still has it (deprecated from 0.11.0 on) |
| `mosaic` | Pallas Mosaic GPU: NVIDIA sm_90 (Hopper) and later | jax >= 0.11.2; only `gdn_step` has such a kernel |
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from typing import Any, Literal, get_args

import jax

Backend = Literal["xla", "sequential", "triton", "mosaic"]

# The backends that each op has, the preferred one for a GPU first. A field of `Kernels` per op.
_WRITTEN: dict[str, tuple[Backend, ...]] = {
    "gdn_step": ("triton", "mosaic", "xla", "sequential"),
    "gdn_chunk": ("triton", "xla"),
    "cache_attention": ("triton", "xla"),
}
_OLDEST_CHIP: dict[Backend, tuple[int, int]] = {"triton": (8, 0), "mosaic": (9, 0)}
_MOSAIC_SINCE = (0, 11, 2)


class BackendError(ValueError):
    """A backend that the device, the jax version or the op doesn't have; the message says why and what would work."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Backend per op: a static argument of jit.

    Attributes:
      gdn_step, gdn_chunk, cache_attention: who computes the op; prefill's attention is XLA's always.
      interpret: whether Pallas kernels are interpreted (on a CPU, for tests).
      capability: of the chip, which chooses the kernels' tiles; None for the default tiles.
    """

    gdn_step: Backend = "xla"
    gdn_chunk: Backend = "xla"
    cache_attention: Backend = "xla"
    interpret: bool = False
    capability: tuple[int, int] | None = None

    def options(self, op: str) -> dict[str, Any]:
        """The keyword arguments of the op's public function."""
        return {"backend": getattr(self, op), "interpret": self.interpret, "capability": self.capability}

    def describe(self) -> str:
        """One line to print once per run."""
        ops = ", ".join(f"{op} {getattr(self, op)}" for op in _WRITTEN)
        return f"kernels: {ops}{' (interpreted)' if self.interpret else ''}"


@dataclasses.dataclass(frozen=True)
class Target:
    """What a choice depends on. `capability` is CUDA's, `(9, 0)` for sm_90; None on anything but an NVIDIA GPU."""

    platform: str
    kind: str = ""
    capability: tuple[int, int] | None = None
    jax_version: tuple[int, ...] = jax.__version_info__
    has_triton: bool = True

    @classmethod
    def current(cls) -> Target:
        """The first device of this process and the jax that runs it. Starts jax's backend."""
        device = jax.devices()[0]
        found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
        return cls(
            platform=device.platform,
            kind=device.device_kind,
            capability=(int(found[1]), int(found[2])) if found else None,
            has_triton=_has_triton(),
        )

    def describe(self) -> str:
        chip = f" sm_{self.capability[0]}{self.capability[1]}" if self.capability else ""
        name = f" ({self.kind})" if self.kind not in ("", self.platform) else ""
        return f"{self.platform}{chip}{name}, jax {'.'.join(map(str, self.jax_version))}"


def choose(
    wanted: Literal["auto"] | Backend | Kernels = "auto", target: Target | None = None, *, interpret: bool = False
) -> Kernels:
    """The backends to run with on `target` (this process's device if None).

    `"auto"` is triton on NVIDIA GPUs from sm_80 on and xla anywhere else. A backend's name asks for it in every op
    that has a kernel of that kind; the other ops are chosen as by `"auto"`. A `Kernels` is checked and returned.
    `interpret` lets Pallas kernels run where they can't be compiled. Raises `BackendError` for what can't run.
    """
    target = Target.current() if target is None else target
    if isinstance(wanted, Kernels):
        chosen = dataclasses.replace(wanted, interpret=wanted.interpret or interpret)
    elif wanted == "auto":
        ops: dict[str, Any] = {op: _first(written, target) for op, written in _WRITTEN.items()}
        chosen = Kernels(**ops, interpret=interpret)
    elif wanted in get_args(Backend):
        ops = {op: wanted if wanted in written else _first(written, target) for op, written in _WRITTEN.items()}
        chosen = Kernels(**ops, interpret=interpret)
    else:
        raise BackendError(f"kernels {wanted!r} is none of 'auto', {', '.join(map(repr, get_args(Backend)))}")
    for op, written in _WRITTEN.items():
        backend = getattr(chosen, op)
        if backend not in written:
            raise BackendError(f"{op} has no {backend!r} kernel; it has {', '.join(sorted(written))}")
        if why := obstacle(backend, target, interpret=chosen.interpret):
            works = [b for b in written if obstacle(b, target, interpret=chosen.interpret) is None]
            where = f"{op}: {backend} can't run on {target.describe()}"
            raise BackendError(f"{where}: {why}. Would work: {', '.join(works)}")
    return dataclasses.replace(chosen, capability=target.capability)


def obstacle(backend: Backend, target: Target, *, interpret: bool = False) -> str | None:
    """Why `backend` can't run on `target`, or None if it can."""
    if backend in ("xla", "sequential"):
        return None
    if backend == "mosaic" and target.jax_version < _MOSAIC_SINCE:
        return f"Mosaic kernels need jax >= {'.'.join(map(str, _MOSAIC_SINCE))}"
    if backend == "triton" and not target.has_triton:
        return "this jax has no jax.experimental.pallas.triton any more"
    if interpret:
        return None
    if target.capability is None:
        return "it compiles for NVIDIA GPUs only (interpret=True runs it anywhere, slowly)"
    if target.capability < (oldest := _OLDEST_CHIP[backend]):
        return f"it needs sm_{oldest[0]}{oldest[1]} or later"
    return None


def _first(written: tuple[Backend, ...], target: Target) -> Backend:
    # Mosaic runs on request only: it covers fewer chips and versions than Triton.
    return next(b for b in written if b != "mosaic" and obstacle(b, target) is None)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
