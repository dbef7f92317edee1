"""What must hold of every kernel and every decode step before a GPU is asked: the limits, and what broke them.

A check that cannot be made here is listed as such, with the reason; it never counts as passed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atlas_jax.lab.crosscompile import CHIPS, Job, Report
from atlas_jax.lab.crosscompile.kernels import OPS, Case
from atlas_jax.lab.crosscompile.programs import DecodeStep
from atlas_jax.lab.kernel_check import Skipped

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """One kernel at one shape on one chip. None: not checked.

    Attributes:
      rel_err: largest error of outputs and state against float64, relative to their largest value;
        interpreted, at a shrunk shape, so the same for every chip; 1e30 where that is no number.
      registers, spill_bytes, shared_bytes, loads, stores: see `crosscompile.Kernel`; sums or, for registers and shared
        memory, the largest where an op is several kernels.
      failures: what breaks a limit; empty is passed (or not checked, where `compiled` is None).
    """

    kernel: str
    spec: str
    chip: str
    backend: str
    rel_err: float | None
    lowered: bool | None = None
    compiled: bool | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    loads: int | None = None
    stores: int | None = None
    failures: tuple[str, ...] = ()


_NO_NUMBER = 1e30  # stands for NaN and infinity, which JSON doesn't have


def kernel_row(case: Case, chip: str, rel_err: float | None, report: Report | None) -> KernelRow:
    """The row of a case; `report` is None where nothing could be compiled."""
    failures = []
    if rel_err is not None and not rel_err <= case.bound:  # NaN fails too
        failures.append(f"rel_err {rel_err:.1e} exceeds {case.bound:.0e}")
        rel_err = rel_err if math.isfinite(rel_err) else _NO_NUMBER
    row = KernelRow(case.op, case.spec, chip, case.backend, rel_err)
    if report is None:
        return dataclasses.replace(row, failures=tuple(failures))
    if report.error:
        failures.append(f"{'not compiled' if report.lowered else 'not lowered'}: {report.error}")
    row = dataclasses.replace(row, lowered=report.lowered, compiled=report.compiled)
    if report.compiled:
        spilling = {kernel.name: kernel.spill_bytes for kernel in report.kernels if kernel.spill_bytes}
        failures += [f"{name} spills {size} bytes" for name, size in spilling.items()]
        if _known(report.aliased_bytes) < case.donated_bytes:
            failures.append(f"{report.aliased_bytes:,} of {case.donated_bytes:,} donated bytes are updated in place")
        symbol = OPS[case.op].symbol
        own = [kernel for kernel in report.kernels if kernel.name.startswith(symbol)]
        if own:
            shared = [kernel.shared_bytes for kernel in own if kernel.shared_bytes is not None]
            row = dataclasses.replace(
                row,
                registers=max(kernel.registers for kernel in own),
                shared_bytes=max(shared, default=None),
                spill_bytes=sum(spilling.values()),
                loads=sum(kernel.loads for kernel in own),
                stores=sum(kernel.stores for kernel in own),
            )
        else:
            names = ", ".join(kernel.name for kernel in report.kernels) or "none"
            failures.append(f"no kernel named {symbol}* was compiled; there are: {names}")
    return dataclasses.replace(row, failures=tuple(failures))


@dataclasses.dataclass(frozen=True)
class ProgramRow:
    """One decode step on one chip.

    Attributes:
      backend: of the GDN step and of the attention over the cache, as an engine there would choose.
      slots: of the pool, and `state_bytes` its size; the step was compiled with four times as many as well.
      temp_growth: bytes by which temporaries grew with the pool; small changes are alignment.
      kernels_per_layer: launches that a layer more adds, averaged over the kinds of layers, a loop's body counted once.
        Products are as XLA chooses them without timing any.
      loops: in the whole step, but for branches that only sampling options enter; a GPU waits for the host once a turn.
    """

    model: str
    chip: str
    backend: str
    n: int
    k: int
    slots: int
    state_bytes: int
    layer_bytes: int
    aliased_bytes: int | None = None
    temp_bytes: int | None = None
    temp_growth: int | None = None
    kernels_per_layer: float | None = None
    launches: int | None = None
    loops: int | None = None
    failures: tuple[str, ...] = ()


STEP_OPS = ("gdn_step", "cache_attention")  # whose kernels a decode step must hold
PERIOD = 4  # layers after which the kinds of layers repeat
MORE_SLOTS = 4  # times as many slots in the second compile
GROWTH_ALLOWED = 1 << 16  # bytes; a growing temporary is at least one state, 1 MiB for the smallest model


def variants(size: DecodeStep) -> tuple[DecodeStep, DecodeStep, DecodeStep]:
    """What is compiled for one row: the step, the step over a larger pool, the step of one period of layers."""
    larger = dataclasses.replace(size, slots=MORE_SLOTS * size.slots)
    shorter = dataclasses.replace(size, layers=PERIOD)
    return size, larger, shorter


def program_name(size: DecodeStep) -> str:
    return f"{size.model} on {size.chip} n={size.n} k={size.k} slots={size.slots} layers={size.layers or 'all'}"


def program_job(size: DecodeStep) -> Job:
    return Job(program_name(size), "atlas_jax.lab.crosscompile.programs:decode_step", dataclasses.asdict(size))


def program_row(size: DecodeStep, reports: Sequence[Report] | None) -> ProgramRow:
    """The row of a step from the reports on its `variants`; None where nothing could be compiled."""
    chosen = {op: getattr(size.kernels, op) for op in STEP_OPS}
    backend = "/".join(dict.fromkeys(chosen.values()))
    row = ProgramRow(size.model, size.chip, backend, size.n, size.k, size.slots, size.state_bytes(), size.layer_bytes())
    if reports is None:
        return row
    if errors := [f"{report.name}: {report.error}" for report in reports if not report.compiled]:
        return dataclasses.replace(row, failures=tuple(errors))
    main, larger, shorter = reports
    row = dataclasses.replace(
        row,
        aliased_bytes=main.aliased_bytes,
        temp_bytes=main.temp_bytes,
        temp_growth=_known(larger.temp_bytes) - _known(main.temp_bytes),
        kernels_per_layer=round(
            (_known(main.launches) - _known(shorter.launches)) / (len(size.cfg.layers) - PERIOD), 2
        ),
        launches=main.launches,
        loops=main.loops,
    )
    failures = []
    for op, backend in chosen.items():
        own = [kernel for kernel in main.kernels if kernel.name.startswith(op)]
        failures += [f"{kernel.name} spills {kernel.spill_bytes} bytes" for kernel in own if kernel.spill_bytes]
        if backend != "xla" and not own:
            failures.append(f"no kernel named {op}* is in it, though {backend} was chosen")
    if row.loops and "xla" not in chosen.values():
        failures.append(f"{row.loops} loops wait for the host, though what would loop has kernels")
    if _known(row.aliased_bytes) < row.state_bytes:
        failures.append(f"{row.state_bytes - _known(row.aliased_bytes):,} bytes of donated state are not aliased")
    if _known(row.temp_bytes) >= row.layer_bytes:
        failures.append(f"temporaries of {row.temp_bytes:,} bytes reach a layer's weights, {row.layer_bytes:,}")
    if _known(row.temp_growth) > GROWTH_ALLOWED:
        failures.append(f"temporaries grow by {row.temp_growth:,} bytes with {MORE_SLOTS} times the slots")
    return dataclasses.replace(row, failures=tuple(failures))


def _known(value: int | None) -> int:
    if value is None:
        raise ValueError("a compiled program without its numbers")
    return value


def to_json(
    kernels: Sequence[KernelRow], programs: Sequence[ProgramRow], skipped: Sequence[Skipped]
) -> dict[str, Any]:
    """`{kernels, programs, not_checked, failed}`; `failed` repeats what broke a limit, one line each."""
    failed = [
        f"{row.kernel} {row.spec} {row.backend} {row.chip}: {why}" for row in kernels for why in row.failures
    ] + [f"{row.model} n={row.n} k={row.k} {row.chip}: {why}" for row in programs for why in row.failures]
    return {
        "kernels": [dataclasses.asdict(row) for row in kernels],
        "programs": [dataclasses.asdict(row) for row in programs],
        "not_checked": [dataclasses.asdict(entry) for entry in skipped],
        "failed": failed,
    }


def impossible(everything: Sequence[Case], chips: Sequence[str]) -> list[Skipped]:
    """What cannot exist: a backend on a chip, or interpreted with this jax. One entry per kernel."""
    found: dict[Skipped, None] = {}
    for case in everything:
        what = f"{case.op} {case.backend}"
        if why := case.obstacle():
            found[Skipped(f"{what}, interpreted", why)] = None
        for chip in chips:
            if why := case.obstacle(CHIPS[chip]):
                found[Skipped(f"{what} on {chip}", why)] = None
    return list(found)


def kernel_table(rows: Sequence[KernelRow]) -> Table:
    """One line per kernel and shape, a column per chip."""
    from rich import box
    from rich.table import Table

    chips = list(dict.fromkeys(row.chip for row in rows))
    made = Table(
        title="kernels",
        caption="rel_err: against float64, interpreted. A chip's column: registers of a thread / bytes spilled / bytes "
        "of shared memory of a block. ld/st: instructions on global memory, a loop's body once. -: not checked, or not "
        "known.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    made.add_column("kernel, spec", no_wrap=True)
    for name in ("rel_err", *chips, "ld/st"):
        made.add_column(name, justify="right", no_wrap=True)
    lines: dict[tuple[str, str], dict[str, dict[str, KernelRow]]] = {}
    for row in rows:
        lines.setdefault((row.kernel, row.backend), {}).setdefault(row.spec, {})[row.chip] = row
    for (kernel, backend), specs in lines.items():
        made.add_row(f"{kernel}, {backend}", style="bold")
        for spec, found in specs.items():
            first = next(iter(found.values()))
            made.add_row(
                f"  {spec}",
                _cell(first.rel_err, ".1e"),
                *(_on_chip(found.get(chip)) for chip in chips),
                f"{_cell(first.loads)}/{_cell(first.stores)}",
                style="red" if any(row.failures for row in found.values()) else "",
            )
    return made


def _on_chip(row: KernelRow | None) -> str:
    if row is None or row.compiled is None:
        return "-"
    if not row.compiled:
        return "FAILED"
    return "/".join(map(_cell, (row.registers, row.spill_bytes, row.shared_bytes)))


def program_table(rows: Sequence[ProgramRow]) -> Table:
    """One line per row."""
    from rich import box
    from rich.table import Table

    made = Table(
        title="decode steps, MiB",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"state: donated. layer: weights of the largest. temp: temporaries; growth: theirs, with {MORE_SLOTS} "
        "times the slots. per layer: launches that a layer more adds; loops: each turn waits for the host.",
        caption_justify="left",
    )
    made.add_column("model", no_wrap=True)
    made.add_column("chip")
    made.add_column("kernels")
    for name in ("n", "rows", "state", "aliased", "layer", "temp", "growth", "per layer", "launches", "loops"):
        made.add_column(name, justify="right")
    mib = lambda value: "-" if value is None else f"{value / 2**20:,.1f}"
    for row in rows:
        made.add_row(
            *(row.model, row.chip, row.backend, str(row.n), str(row.k)),
            *map(mib, (row.state_bytes, row.aliased_bytes, row.layer_bytes, row.temp_bytes, row.temp_growth)),
            *(_cell(row.kernels_per_layer, ".1f"), _cell(row.launches), _cell(row.loops)),
            style="red" if row.failures else "",
        )
    return made


def _cell(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)
