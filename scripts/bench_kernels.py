"""Times the kernels on a GPU, against what memory allows and against other designs; or says what they must move.

    python scripts/bench_kernels.py --json             # only the last line, JSON, on stdout
    python scripts/bench_kernels.py --check            # correctness on this device instead of times

On a GPU the copy rate of the device comes first: a kernel bound by memory is held to that. Launches are chained in one
program, over more memory than the cache holds; medians, and quartiles. On a CPU nothing is timed: the table is the byte
model. Whatever could not be measured is listed under `not_measured`, with the reason. Exit status 1: something failed,
or is wrong. Needs the core dependencies only (the plot also matplotlib).
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from atlas_jax.kernels import backends
from atlas_jax.kernels.cache_attention.tiles import tile_for as attention_tile_for
from atlas_jax.kernels.gdn_chunk import check as chunk_check
from atlas_jax.kernels.gdn_step.specs import spec
from atlas_jax.kernels.gdn_step.tiles import tile_for
from atlas_jax.lab import fla_kernels
from atlas_jax.lab import kernel_bench as kb
from atlas_jax.lab.kernel_check import Skipped, check_kernels
from atlas_jax.lab.text_table import text_table
from atlas_jax.lab.timing import Timing, copy_rate, nominal_bandwidth

PARTS = ("steps", "attention", "rows", "chunk", "designs", "fla", "sweep")
FOREIGN = (
    ("gdn_step_rows", "fla_recurrent", "time over fla's recurrent kernel, T = 1 to 8: at most 1"),
    ("gdn_chunk", "fla_chunk", "time over fla's chunked kernels, 8k tokens: at most 1"),
)


@dataclasses.dataclass
class Result:
    """What the bench has found so far. After `deadline` (of `time.perf_counter`) nothing new is begun."""

    deadline: float
    cells: list[kb.Cell] = dataclasses.field(default_factory=list)
    sweep: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    not_measured: list[dict[str, str]] = dataclasses.field(default_factory=list)
    failed: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def skip(self, what: str, why: str) -> None:
        self.not_measured.append({"what": what, "why": why})

    def attempt(self, what: str, measure: Callable[[], Timing]) -> Timing | None:
        """A measurement, or None: a failure is recorded and does not stop the rest, and so is a lack of time."""
        if time.perf_counter() > self.deadline:
            return self.skip(what, "out of time, see --budget")
        try:
            return measure()
        except Exception as error:  # a compiler's, a driver's, anybody's
            self.failed.append({"what": what, "why": f"{type(error).__name__}: {' '.join(str(error)[:400].split())}"})
            say(f"FAILED {what}: {self.failed[-1]['why']}")
        return None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Prints tables and a last line of JSON; returns what that line holds."""
    began = time.perf_counter()
    out: Callable[[str], None] = say if args.json else print
    target = backends.Target.current()
    say(target.describe())
    if args.check:
        result = check(args, out)
    elif target.platform == "cpu":
        result = byte_model(out)
    else:
        result = bench(args, target, out)
    result = {"device": target.kind, "platform": target.platform, "jax": jax.__version__, **result}
    result["total_s"] = round(time.perf_counter() - began, 1)
    print(json.dumps(result), flush=True)
    return result


def check(args: argparse.Namespace, out: Callable[[str], None]) -> dict[str, Any]:
    """Every kernel against the answer in float64. On a CPU at small shapes, where only XLA runs unless interpreted."""
    checked, skipped = [], []
    shrink = args.interpret or jax.default_backend() == "cpu"
    deadline = time.perf_counter() + args.budget
    for found in check_kernels(interpret=args.interpret, shrink=shrink, quick=args.quick):
        if time.perf_counter() > deadline:
            why = f"out of time after {len(checked)} checks, see --budget"
            skipped.append({"what": "the checks that follow", "why": why})
            say(f"NOT CHECKED the checks that follow: {why}")
            break
        if isinstance(found, Skipped):
            skipped.append(dataclasses.asdict(found))
            say(f"NOT CHECKED {found.what}: {found.why}")
            continue
        checked.append(found)
        if not found.ok:
            say(f"WRONG {found.name}: {found.rel_err} {found.error}")
    rows = [
        (c.kernel, c.spec, c.backend, c.inputs, _sci(c.rel_err), _sci(c.bound), "ok" if c.ok else "NO") for c in checked
    ]
    out(text_table(("kernel", "spec", "backend", "inputs", "rel err", "bound", "ok"), rows))
    return {
        "checks": [{**dataclasses.asdict(c), "ok": c.ok} for c in checked],
        "failed": [{"what": c.name, "why": c.error or f"rel_err {c.rel_err}"} for c in checked if not c.ok],
        "not_checked": skipped,
    }


def byte_model(out: Callable[[str], None]) -> dict[str, Any]:
    """What every call must move at least, and the other designs; nothing is timed."""
    cells = [kb.chunk_cell(what, "xla") for what in kb.chunk_specs()]
    for what, pending in kb.step_specs():
        moved = {f"{name}_bytes": float(size) for name, size in kb.design_bytes(what, pending).items()}
        cells.append(dataclasses.replace(kb.step_cell(what, pending, "xla", None), against=moved))
    for attention, length in kb.attention_specs():
        copying = {"xla_bytes": float(kb.copying_bytes(attention, length))}
        cells.append(dataclasses.replace(kb.attention_cell(attention, length, "xla", None), against=copying))
    h200 = nominal_bandwidth("NVIDIA H200")
    assert h200 is not None
    others = ("snapshot", "recompute", "xla")
    rows = [
        (
            *(c.kernel, c.spec, c.n, c.rows, c.pending, c.bytes / 2**20, 1e6 * c.bytes / h200),
            *(c.against[f"{name}_bytes"] / c.bytes if f"{name}_bytes" in c.against else None for name in others),
        )
        for c in cells
    ]
    header = ("kernel", "spec", "n", "rows", "pending", "MiB", "us at 4.8 TB/s", *(f"x {name}" for name in others))
    out(text_table(header, rows))
    out("NOTHING WAS TIMED: no GPU here. This is the byte model: the least a call moves, and what other designs move.")
    nothing = [{"what": part, "why": "nothing is timed on a CPU"} for part in PARTS]
    return {
        "device": "byte-model",
        "copy_gb_s": None,
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "not_measured": nothing,
        "failed": [],
    }


def bench(args: argparse.Namespace, target: backends.Target, out: Callable[[str], None]) -> dict[str, Any]:
    """All parts on this GPU."""
    chosen = backends.choose(args.kernels, target)
    say(chosen.describe())
    options = {"repetitions": args.repetitions, "seconds": args.seconds}
    copy, nominal = copy_rate(**options), nominal_bandwidth(target.kind)
    say(f"copy rate {copy / 1e9:,.0f} GB/s" + (f" of {nominal / 1e9:,.0f} nominal" if nominal else ", nominal unknown"))
    result = Result(time.perf_counter() + args.budget)
    for part in PARTS:
        if part not in args.parts:
            result.skip(part, "not asked for")
    tile = tile_for(target.capability)

    def add(cell: kb.Cell, measure: Callable[[], Timing]) -> None:
        timing = result.attempt(f"{cell.kernel} {cell.spec} pending {cell.pending}", measure)
        if timing is not None:
            result.cells.append(cell.timed(timing, copy, nominal))

    if "steps" in args.parts:
        for what, pending in kb.step_specs():
            time_it = functools.partial(kb.time_step, what, pending, chosen.gdn_step, tile, **options)
            add(kb.step_cell(what, pending, chosen.gdn_step, tile), time_it)
    if "attention" in args.parts:
        _attention(result, add, chosen, target, options)
    if "rows" in args.parts:
        for what in kb.row_specs():
            cell = dataclasses.replace(kb.step_cell(what, 0, chosen.gdn_step, tile), kernel="gdn_step_rows")
            add(cell, functools.partial(kb.time_step, what, 0, chosen.gdn_step, tile, **options))
    if "chunk" in args.parts:
        for long in kb.chunk_specs():
            time_it = functools.partial(kb.time_chunk, long, chosen.gdn_chunk, target.capability, **options)
            add(kb.chunk_cell(long, chosen.gdn_chunk), time_it)
    if "designs" in args.parts:
        _others(result, chosen, target, options)
    if "fla" in args.parts:
        _fla(result)
    if "sweep" in args.parts:
        _sweep(result, copy, options)

    ratios = kb.ratios(result.cells)
    targets = verdicts(result.cells, ratios)
    show(result, ratios, targets, out)
    if args.plot:
        plot(result.cells, args.plot)
    return {
        "copy_gb_s": round(copy / 1e9, 1),
        "nominal_gb_s": nominal and round(nominal / 1e9, 1),
        "kernels": chosen.describe(),
        "cells": [dataclasses.asdict(cell) for cell in result.cells],
        "ratios": ratios,
        "sweep": result.sweep,
        "targets": targets,
        "not_measured": result.not_measured,
        "failed": result.failed,
    }


def show(
    result: Result, ratios: Sequence[dict[str, Any]], targets: dict[str, str], out: Callable[[str], None]
) -> None:
    """All of it for people."""
    header = ("kernel", "spec", "pending", "backend", "tile", "us", "quartiles", "MiB", "of copy", "nominal", "against")
    rows = [
        (
            *(c.kernel, c.spec, c.pending, c.backend, c.tile, c.us, f"{c.low:.2f}-{c.high:.2f}", c.bytes / 2**20),
            *(c.share_of_copy, c.share_of_nominal, _against(c) + (" (may be cached)" if c.resident else "")),
        )
        for c in result.cells
    ]
    out(text_table(header, rows))
    if ratios:
        out(text_table(("model", "n", "T=4 / T=1", "T=4, 3 pending / T=1"), [tuple(r.values()) for r in ratios]))
    if result.sweep:
        out(text_table(("spec", "pending", "tile", "us", "of copy"), [tuple(entry.values()) for entry in result.sweep]))
    for name, verdict in targets.items():
        out(f"target {name}: {verdict}")
    for entry in result.not_measured:
        out(f"not measured: {entry['what']}: {entry['why']}")


def _beside(result: Result, cell: kb.Cell, name: str, measure: Callable[[], Timing]) -> None:
    """Another implementation beside a cell of the same shape."""
    if (timing := result.attempt(f"{name} at {cell.spec} pending {cell.pending}", measure)) is not None:
        cell.against[name] = timing.us


def _others(result: Result, chosen: backends.Kernels, target: backends.Target, options: dict[str, Any]) -> None:
    """Other backends and other rollback designs, at the largest batch of one model and over a long prompt."""
    tile = tile_for(target.capability)
    no_triton = backends.obstacle("triton", target)
    for cell in result.cells:
        if cell.kernel == "gdn_chunk" and chosen.gdn_chunk != "xla":
            long = next(what for what in kb.chunk_specs() if what.name == cell.spec)
            _beside(result, cell, "xla", functools.partial(kb.time_chunk, long, "xla", **options))
        if cell.kernel != "gdn_step" or not cell.spec.startswith(f"{kb.DESIGN_MODEL} n{max(kb.STEP_BATCHES)} "):
            continue
        what = spec(kb.DESIGN_MODEL, cell.n, cell.rows)
        if no_triton:
            result.skip(f"rollback designs at {cell.spec}", f"they are Triton kernels: {no_triton}")
        elif cell.rows > 1:
            _beside(result, cell, "snapshot", functools.partial(kb.time_snapshot, what, tile, **options))
            _beside(result, cell, "recompute", functools.partial(kb.time_recompute, what, tile, **options))
        for backend in ("triton", "mosaic", "xla"):
            if backend == chosen.gdn_step:
                continue
            if why := backends.obstacle(backend, target):
                result.skip(f"{backend} at {cell.spec}", why)
                continue
            # A Mosaic program is always one warpgroup.
            cut = dataclasses.replace(tile, warps=4) if backend == "mosaic" else tile
            _beside(result, cell, backend, functools.partial(kb.time_step, what, cell.pending, backend, cut, **options))


def _attention(
    result: Result,
    add: Callable[[kb.Cell, Callable[[], Timing]], None],
    chosen: backends.Kernels,
    target: backends.Target,
    options: dict[str, Any],
) -> None:
    """Attention over the cache, and at the largest batch XLA's form beside it."""
    backend = chosen.cache_attention
    tile = attention_tile_for(target.capability)
    for what, length in kb.attention_specs():
        cell = kb.attention_cell(what, length, backend, tile)
        add(cell, functools.partial(kb.time_attention, what, length, backend, tile, **options))
        timed = bool(result.cells) and result.cells[-1].spec == cell.spec
        if timed and backend != "xla" and (cell.n, cell.rows) == (max(kb.STEP_BATCHES), 4):
            beside = functools.partial(kb.time_attention, what, length, "xla", tile, **options)
            _beside(result, result.cells[-1], "xla", beside)


def _fla(result: Result) -> None:
    """flash-linear-attention's kernels beside the cells of the same shapes, where they can be had."""
    try:
        say(fla_kernels.load())
    except fla_kernels.FlaMissing as error:
        return result.skip("flash-linear-attention", str(error))
    for cell in result.cells:
        if cell.kernel == "gdn_step_rows":
            what = next(what for what in kb.row_specs() if what.name == cell.spec)
            recurrent = lambda what=what: fla_kernels.time_recurrent(*kb.foreign_inputs(what), kb.sets_of_states(what))
            _beside(result, cell, "fla_recurrent", recurrent)
        if cell.kernel == "gdn_chunk" and "bfloat16" in cell.spec:
            long = next(what for what in kb.chunk_specs() if what.name == cell.spec)
            state, *rows = chunk_check.inputs(long, 0)
            chunked = lambda rows=rows, state=state: fla_kernels.time_chunk(tuple(rows), state)
            _beside(result, cell, "fla_chunk", chunked)
    return None


def _sweep(result: Result, copy: float, options: dict[str, Any]) -> None:
    """Columns x warps of the Triton kernel of a step; entries x warps x stages and programs of attention's."""
    if why := backends.obstacle("triton", backends.Target.current()):
        return result.skip("tile sweep", why)
    for rows, pending in ((1, 0), (4, 3)):
        what = spec(kb.DESIGN_MODEL, max(kb.STEP_BATCHES), rows)
        for tile in kb.SWEEP:
            name = f"{tile.columns}x{tile.warps}"
            time_it = functools.partial(kb.time_step, what, pending, "triton", tile, **options)
            if (timing := result.attempt(f"tile {name} at {what.name}", time_it)) is not None:
                entry = {"spec": what.name, "pending": pending, "tile": name, "us": timing.us}
                result.sweep.append({**entry, "share_of_copy": what.bytes(pending) / (timing.us * 1e-6) / copy})
    full = [(what, length) for what, length in kb.attention_specs() if what.name.startswith(kb.DESIGN_MODEL)]
    for attention, length in (full[1], full[-1]):  # four rows at the largest batch, one sequence with a long context
        for cut in kb.ATTENTION_SWEEP:
            name, at = kb.attention_tile_name(cut), f"{attention.name} at {length}"
            time_it = functools.partial(kb.time_attention, attention, length, "triton", cut, **options)
            if (timing := result.attempt(f"tile {name} at {at}", time_it)) is not None:
                entry = {"spec": at, "pending": 0, "tile": name, "us": timing.us}
                result.sweep.append({**entry, "share_of_copy": attention.bytes(length) / (timing.us * 1e-6) / copy})
    return None


def verdicts(cells: Sequence[kb.Cell], ratios: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The targets: met, missed (with the worst number), or not measured."""
    large = [r for r in ratios if r["n"] >= 32]
    share = [c.share_of_copy for c in cells if (c.kernel, c.rows) == ("gdn_step", 1) and c.n >= 32 and c.share_of_copy]
    rows, pending = [r["t4_p0"] for r in large], [r["t4_p3"] for r in large]
    measured: dict[str, tuple[float | None, Callable[[float], bool]]] = {
        "share of copy at T = 1, n >= 32: at least 0.85": (min(share, default=None), lambda x: x >= 0.85),
        "T = 4 over T = 1: at most 1.15": (max(rows, default=None), lambda x: x <= 1.15),
        "T = 4, 3 pending over T = 1: at most 1.3": (max(pending, default=None), lambda x: x <= 1.3),
    }
    for kernel, other, name in FOREIGN:
        slower = [c.us / c.against[other] for c in cells if c.kernel == kernel and c.us and other in c.against]
        measured[name] = (max(slower, default=None), lambda x: x <= 1)
    return {
        name: "not measured" if worst is None else f"{'met' if met(worst) else 'MISSED'}, worst {worst:.3f}"
        for name, (worst, met) in measured.items()
    }


def plot(cells: Sequence[kb.Cell], path: Path) -> None:
    """A PNG: share of the copy rate against batch, per model and number of rows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(kb.STEP_MODELS), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(kb.STEP_MODELS), squeeze=False, sharey=True)[0]
    for ax, model in zip(axes, kb.STEP_MODELS, strict=True):
        for rows, pending in kb.STEP_ROWS:
            line = [c for c in cells if c.kernel == "gdn_step" and c.spec.startswith(f"{model} ") and c.us]
            line = [c for c in line if (c.rows, c.pending) == (rows, pending)]
            label = f"T = {rows}, {pending} pending"
            ax.plot([c.n for c in line], [c.share_of_copy for c in line], "o-", label=label)
        ax.axhline(0.85, color="black", lw=1)
        ax.set(title=model, xlabel="sequences", xscale="log", ylim=(0, 1.1), ylabel="share of measured copy rate")
        ax.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _against(cell: kb.Cell) -> str:
    return ", ".join(f"{name} {us / cell.us:.2f}x" for name, us in cell.against.items()) if cell.us else ""


def _sci(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", action="store_true", help="stdout gets nothing but the last line")
    add("--check", action="store_true", help="correctness of every kernel on this device, no times")
    add("--interpret", action="store_true", help="with --check: interpret Pallas kernels, small shapes")
    add("--quick", action="store_true", help="with --check: three shapes an op and one kind of inputs")
    add("--kernels", default="auto", help="auto, triton, mosaic or xla")
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to time")
    add("--repetitions", type=int, default=9)
    add("--seconds", type=float, default=0.02, help="least duration of a repetition")
    add("--budget", type=float, default=3600, help="seconds after which nothing new is begun; what is left is listed")
    add("--plot", type=Path, help="a PNG of the shares")
    return parser.parse_args(args)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*Triton.*", category=DeprecationWarning)
    sys.exit(1 if main(parse())["failed"] else 0)
