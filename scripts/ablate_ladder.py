"""Which ladder is best here? A grid of ladders over concurrency and regime, beside plain decode and an A/A arm.

    python scripts/ablate_ladder.py                                   # simulated, from shipped costs; under a minute
    python scripts/ablate_ladder.py --grid 32:1 32:2 4:3,16:1@16      # ladders as ATLAS_MTP_K_LADDER writes them, @cap
    python scripts/ablate_ladder.py --part 0/2 --out a                # simulated on two machines: 1/2 to b on another,
    python scripts/ablate_ladder.py --merge a b --out both            # then this, with the same flags
    python scripts/ablate_ladder.py --decode                          # measured: this machine, checkpoints/small

`--decode` first measures a cost table, fits a ladder to it (`auto`) and puts it among the others. Rows are kept in
OUT/rows.csv; an interrupted run goes on where it was. A winner is named only where ranges are disjoint.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas_jax.depth.fit import fit_ladder, tokens
from atlas_jax.depth.ladder import DEFAULT_STEPS, format_ladder
from atlas_jax.depth.policies import PolicyError
from atlas_jax.lab import plots
from atlas_jax.lab.ablate import (
    AA,
    PLAIN,
    Cell,
    Verdict,
    ablate_simulated,
    best_ladder,
    describe,
    merge_rows,
    parse_grid,
    standings,
    summarize,
    verdicts,
)
from atlas_jax.lab.cost import CostError, CostTable
from atlas_jax.lab.tables import DEFAULT_COSTS, find_costs, find_trace
from atlas_jax.lab.text_table import text_table
from atlas_jax.lab.trace import Trace, TraceError, load_trace

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = format_ladder(DEFAULT_STEPS)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Runs what is missing; writes rows.csv and plots; prints a table and a last line of JSON, and returns it."""
    began = time.perf_counter()
    say = lambda text: print(text, file=sys.stderr, flush=True)
    out = sys.stderr if args.json else sys.stdout
    grid = list(dict.fromkeys(args.grid or (DEFAULT, *(f"32:{d}" for d in range(1, args.num_drafts + 1)))))
    auto = None
    places = [(regime, c) for regime in args.regimes for c in args.concurrency]
    if args.part:
        from atlas_jax.devices import share

        places = share(places, args.part)
    if args.merge:
        merge_rows([folder / "rows.csv" for folder in args.merge], args.out / "rows.csv")
    if args.decode:
        rows, costs, acceptance, grid, auto = decode(args, grid, say)
    else:
        costs = find_costs(args.costs)
        rows = ablate_simulated(
            args.out / "rows.csv",
            args.costs,
            grid,
            places,
            repetitions=args.repetitions,
            num_drafts=args.num_drafts,
            seconds=args.seconds,
            processes=args.processes,
            say=say,
        )
        if args.part:
            line = {"part": args.part, "rows": len(rows), "out": str(args.out)}
            print(f"part {args.part}: {len(rows)} runs in {args.out}; --merge makes the answer of all parts", file=out)
            print(json.dumps(line), flush=True)
            return line
        acceptance = {regime: find_trace(regime).acceptance()[: args.num_drafts] for regime in args.regimes}
    parsed = parse_grid(grid, args.num_drafts)
    cells = summarize(rows)
    found = verdicts(cells, parsed, args.num_drafts)
    print(table(cells), file=out)
    if args.decode:
        print("\n" + simulated(args, cells, grid, costs), file=out)
    print("\n" + "\n".join(describe(found)), file=out)
    standing = [] if auto is None else standings(cells, parsed, auto)
    for at in standing:
        good = "good" if at.good() else "NOT good"
        print(
            f"auto at C = {at.concurrency}: {at.over_plain:.3f} times plain, {at.over_best:.3f} times the best fixed "
            f"depth ({at.depth}), A/A {at.aa_spread:.1%}: {good}",
            file=out,
        )
    draw(args.out, cells, found, costs, acceptance, args.num_drafts)
    print(f"plots and rows in {args.out}; {time.perf_counter() - began:.0f} s", file=out)
    best = best_ladder(found)
    line = {
        "best_ladder": format_ladder(best.steps),
        "cap": best.max_seqs,
        "decided": all(v.decided for v in found),
        "auto": auto,
        "auto_good": all(at.good() for at in standing) if standing else None,
        "cells": [
            {
                "ladder": cell.ladder,
                "concurrency": cell.concurrency,
                "regime": cell.regime,
                "tok_s_median": round(cell.tok_s_median, 3),
                "tok_s_min": round(cell.tok_s_min, 3),
                "tok_s_max": round(cell.tok_s_max, 3),
            }
            for cell in cells
        ],
    }
    print(json.dumps(line), flush=True)
    return line


def decode(args: argparse.Namespace, grid: list[str], say: Any) -> Any:
    """Rows by decoding, the measured costs and acceptance, the grid with the fitted ladder, and that ladder."""
    import jax
    import numpy as np

    from atlas_jax.compile_cache import keep_compiled
    from atlas_jax.decode.engine import Engine
    from atlas_jax.lab.ablate_decode import LEAST, ablate_decoded, context_of, record
    from atlas_jax.lab.bench import use_cpu_threads
    from atlas_jax.lab.measure_cost import Plan, about_this, device_id, engine_config, measure_costs
    from atlas_jax.lab.prompts import load_requests
    from atlas_jax.weights.checkpoint import load_model
    from atlas_jax.weights.tokenizer import ChatTokenizer

    use_cpu_threads(1)
    say(keep_compiled().describe())  # an interrupted run does not compile its programs again
    cfg, params = load_model(args.model)
    tokenizer = ChatTokenizer.load(args.model).tokenizer
    requests, offline = load_requests(args.regimes, tokenizer, max(LEAST, *args.concurrency), args.max_new_tokens)
    if offline:
        say(f"The held-out texts cannot be had: {offline} Measuring on our own prompts.")
    lengths = sorted(len(request.prompt) for own in requests.values() for request in own)
    plan = Plan(tuple(args.concurrency), args.num_drafts, (lengths[0], lengths[-1]), args.visits)
    # The engine whose steps are measured is the one that decodes.
    engine = Engine(params, cfg, engine_config(plan, np.float32, context_of(requests)))
    # `costs.json` with all widths is not measured again, and one of another machine is an error.
    kept, source = args.out / "costs.json", f"{device_id()}, jax {jax.__version__}"
    costs = CostTable.load(kept) if kept.is_file() else None
    about = about_this(np.float32, name=args.model.resolve().name, threads="1")
    common: dict[str, Any] = {"repetitions": args.repetitions, "say": say}
    # Width by width, what a step costs and what decoding makes of it: a machine's speed drifts over minutes.
    for width in plan.widths:
        here = dataclasses.replace(plan, widths=(width,))
        save = lambda table: table.save(kept)
        costs = measure_costs(engine, here, about=about, done=costs, keep=save, say=say)
        ablate_decoded(args.out / "rows.csv", source, engine, params, requests, grid, here, **common)
    assert costs is not None
    recorded = args.out / "trace.jsonl.gz"
    if not recorded.is_file():
        say(f"recording a trace at {args.num_drafts} drafts")
        record(recorded, params, cfg, requests, args.num_drafts)
    acceptance = {regime: own.acceptance() for regime, own in traces(args, costs).items()}
    # One ladder for all regimes: fitted to the mean of their tokens a step.
    pooled = pool(list(acceptance.values()), args.num_drafts)
    fit = fit_ladder(costs, pooled, args.concurrency, lengths[len(lengths) // 2])
    say(f"auto: {fit.describe()}")
    auto = f"{format_ladder(fit.steps)}@{fit.cap}"
    grid = list(dict.fromkeys([*grid, auto]))
    rows = ablate_decoded(args.out / "rows.csv", source, engine, params, requests, grid, plan, **common)
    return rows, costs, acceptance, grid, auto


def traces(args: argparse.Namespace, costs: CostTable) -> dict[str, Trace]:
    """The recorded trace by regime."""
    trace = load_trace(args.out / "trace.jsonl.gz").expect(costs.model)
    return {regime: trace.only(regime) for regime in args.regimes}


def simulated(args: argparse.Namespace, cells: Sequence[Cell], grid: Sequence[str], costs: CostTable) -> str:
    """The simulator's speed beside each measured one, from costs and trace alone; also as OUT/validation.csv."""
    from atlas_jax.lab.ablate_decode import validate

    checks = validate(cells, grid, args.num_drafts, costs, traces(args, costs))
    header = ("regime", "C", "ladder", "measured", "range", "simulated", "error", "A/A")
    rows = [
        (
            *(c.regime, c.concurrency, c.ladder, c.measured, f"{c.low:,.0f}-{c.high:,.0f}"),
            *(c.simulated, f"{c.error:+.1%}", f"{c.noise:.1%}"),
        )
        for c in checks
    ]
    with (args.out / "validation.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        speeds = ("measured", "low", "high", "simulated")
        writer.writerow(("ladder", "concurrency", "regime", *speeds, "aa_spread", "error"))
        for c in checks:
            values = (*dataclasses.astuple(c), c.error)
            writer.writerow(round(value, 4) if isinstance(value, float) else value for value in values)
    good = sum(c.within(0.05) for c in checks)
    told = f"simulated against measured: within 5 % or the A/A spread in {good} of {len(checks)} cells"
    return f"{text_table(header, rows)}\n{told}"


def pool(curves: Sequence[Sequence[float]], depth: int) -> tuple[float, ...]:
    """Conditional acceptance whose tokens a step are the mean of those of the curves, at every depth."""
    mean = [sum(tokens(curve, d) for curve in curves) / len(curves) for d in range(depth + 1)]
    gains = [b - a for a, b in itertools.pairwise(mean)]
    before = [1.0, *gains]
    return tuple(gain / last if last else 0.0 for gain, last in zip(gains, before, strict=False))


def table(cells: Sequence[Cell]) -> str:
    """The cells for people."""
    rows = [
        (
            *(c.regime, c.concurrency, c.ladder, c.tok_s_median, f"{c.tok_s_min:,.1f}-{c.tok_s_max:,.1f}"),
            *(sorted(c.ratios)[len(c.ratios) // 2], f"{min(c.ratios):.3f}-{max(c.ratios):.3f}", c.tok_step),
        )
        for c in cells
    ]
    return text_table(("regime", "C", "ladder", "tok/s", "range", "x plain", "range", "tok/step"), rows)


def draw(
    out: Path,
    cells: Sequence[Cell],
    found: Sequence[Verdict],
    costs: CostTable,
    acceptance: dict[str, tuple[float, ...]],
    num_drafts: int,
) -> None:
    """The plots, as PNGs in `out`."""
    regimes = list(dict.fromkeys(cell.regime for cell in cells))
    figure, axes = plots.figure(columns=len(regimes))
    for ax, regime in zip(axes, regimes, strict=True):
        points: dict[str, list[tuple[float, float, float, float]]] = {}
        for cell in (cell for cell in cells if cell.regime == regime and cell.ladder != PLAIN):
            middle = sorted(cell.ratios)[len(cell.ratios) // 2]
            points.setdefault(cell.ladder, []).append((cell.concurrency, middle, min(cell.ratios), max(cell.ratios)))
        points[AA] = points.pop(AA, [])
        best = [(v.concurrency, f"{v.depth}" + ("" if v.decided else "?")) for v in found]
        plots.speed(ax, {name: line for name, line in points.items() if line}, f"{regime}; above: best drafts", best)
    ladder = best_ladder(found)
    figure.suptitle(f"Best ladder: {format_ladder(ladder.steps)}, plain decode above C = {ladder.max_seqs}")
    plots.save(figure, out / "speed.png")

    widths = [n for n in costs.widths if n <= max(v.concurrency for v in found)]
    context = min(step.context for step in costs.steps)
    figure, axes = plots.figure(columns=2, rows=2)
    time = lambda n, d: costs.seconds(n, d + 1, n * (d + 1), context, d > 0)  # 0: plain decode, without a head
    points = [
        (f"{regime}, n = {n}, {d} over {d - 1}", time(n, d) / time(n, d - 1), tokens(p, d) / tokens(p, d - 1))
        for regime, p in acceptance.items()
        for n in (widths[0], widths[-1])
        for d in range(1, num_drafts + 1)
    ]
    plots.break_even(axes[0], points, "Does one more draft pay?")
    p1 = max(p[0] for p in acceptance.values())
    p2s = [x / 20 for x in range(6, 20)]
    plots.heat(axes[1], costs, p1, widths, p2s, context, num_drafts, f"Best number of drafts at p1 = {p1:.2f}")
    plots.staircase(axes[2], costs, f"What rows cost ({costs.kind})")
    contexts = sorted({step.context for step in costs.steps})
    rates = {regime: (lambda context, p=p: p) for regime, p in acceptance.items()}
    plots.by_context(axes[3], costs, rates, widths[:: max(1, len(widths) // 3)], contexts, "Best drafts by context")
    plots.save(figure, out / "why.png")


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--grid", nargs="+", help=f"ladders [{DEFAULT} 32:1 32:2 32:3]; LADDER@CAP sets a cap")
    add("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    add("--regimes", nargs="+", default=["prose", "tools"], help="[prose tools]")
    add("--decode", action="store_true", help="measure here instead of simulating")
    add("--model", type=Path, default=ROOT / "checkpoints" / "small", help="with --decode: directory of a checkpoint")
    add("--max-new-tokens", type=int, default=64, help="with --decode, of every request [%(default)s]")
    add("--visits", type=int, default=5, help="with --decode: turns of each arm of the cost table [%(default)s]")
    add("--costs", default=DEFAULT_COSTS, help="of the simulation [%(default)s]")
    add("--seconds", type=float, default=20.0, help="of simulated time in each run [%(default)s]")
    add("--repetitions", type=int, default=3, help="[%(default)s]")
    add("--num-drafts", type=int, default=3, help="most drafts [%(default)s]")
    add("--processes", type=int, default=2, help="of the simulation [%(default)s]")
    add("--part", default="", help="i/n: simulate every n-th pair of regime and concurrency from the i-th on, from 0")
    add("--merge", type=Path, nargs="+", help="folders of all parts: take their runs, simulate what none has")
    add("--out", type=Path, help="folder of rows.csv and plots [runs/ablate-simulated or runs/ablate-decoded]")
    add("--json", action="store_true", help="stdout gets nothing but the last line")
    parsed = parser.parse_args(args)
    if parsed.decode and (parsed.part or parsed.merge):
        parser.error("--decode compares speeds of one machine; --part and --merge are for the simulation")
    if parsed.part and parsed.merge:
        parser.error("--part makes what --merge takes: one or the other")
    parsed.out = parsed.out or ROOT / "runs" / ("ablate-decoded" if parsed.decode else "ablate-simulated")
    parsed.out.mkdir(parents=True, exist_ok=True)
    return parsed


if __name__ == "__main__":
    try:
        main(parse())
    except (CostError, PolicyError, TraceError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
