"""Cells of a bench for people and programs: a table, a plot, a line of JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_jax.depth.policies import Off
from atlas_jax.lab.bench import Cell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def to_json(cells: Sequence[Cell]) -> dict[str, Any]:
    """`{"cells": [...]}` with every field of every cell, rounded to what the measurement carries."""
    digits = {"tok_s": 1, "warmup_s": 1}
    rounded = lambda name, value: round(value, digits.get(name, 4)) if isinstance(value, float) else value
    return {"cells": [{k: rounded(k, v) for k, v in dataclasses.asdict(cell).items()} for cell in cells]}


def console(stderr: bool = False) -> Console:
    """A rich console, wide enough for the table where the output is no terminal."""
    from rich.console import Console

    made = Console(stderr=stderr)
    if not made.is_terminal:
        made.width = 120
    return made


def table(cells: Sequence[Cell]) -> Table:
    """The cells as a table; a policy that does not emit plain's tokens shows no speed."""
    from rich.table import Table

    caption = (
        "tok/s: emitted tokens per second of decode steps (prefill apart), median over repetitions. x plain: ratio "
        "within a repetition, median and range. cost: a step's time at full width over plain's; speculation pays "
        "where tok/step exceeds it. p1, p2, p3: acceptance of draft j given those before it. near ties: divergences "
        "where plain's two best logits are within 1e-4, excused."
    )
    made = Table(caption=caption, caption_justify="left")
    made.add_column("regime")
    made.add_column("C", justify="right")
    made.add_column("policy")
    for name in ("tok/s", "x plain", "tok/step", "cost", "p1", "p2", "p3", "equal", "near ties", "recompiles"):
        made.add_column(name, justify="right")
    number = lambda value, form: "-" if value is None else format(value, form)
    for i, cell in enumerate(cells):
        if cell.equal:
            ratio, low, high = (number(x, ".2f") for x in (cell.ratio_to_plain, cell.ratio_min, cell.ratio_max))
            speed = (number(cell.tok_s, ",.0f"), "1" if cell.policy == Off().name else f"{ratio} ({low}-{high})")
        else:
            speed = ("NOT EQUAL", "-")
        made.add_row(
            cell.regime,
            str(cell.concurrency),
            cell.policy,
            *speed,
            f"{cell.tok_step:.2f}",
            f"{cell.step_cost:.2f}",
            *(number(p, ".2f") for p in (cell.p1, cell.p2_cond, cell.p3_cond)),
            "yes" if cell.equal else "NO",
            str(cell.excused),
            str(cell.compiles_after_warmup),
            style="" if cell.equal else "red",
            end_section=i + 1 < len(cells) and _group(cells[i + 1]) != _group(cell),
        )
    return made


def _group(cell: Cell) -> tuple[str, int]:
    return cell.regime, cell.concurrency


_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999")  # told apart by everyone
_MARKERS = "osD^vP*"


def plot(cells: Sequence[Cell], path: Path) -> None:
    """A PNG with two panels a regime: the speed-up at each concurrency, and the tokens of a step against its cost."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    regimes = list(dict.fromkeys(cell.regime for cell in cells))
    concurrencies = sorted({cell.concurrency for cell in cells})
    policies = [name for name in dict.fromkeys(cell.policy for cell in cells) if name != Off().name]
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(policies)}
    marker = {c: _MARKERS[i % len(_MARKERS)] for i, c in enumerate(concurrencies)}
    shown = [cell for cell in cells if cell.equal and cell.policy in colour]

    figure = Figure(figsize=(0.8 + 4.6 * len(regimes), 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(regimes), squeeze=False, sharey="row")
    fastest = 1.1 * max([1.2, *(cell.ratio_max or 0.0 for cell in shown)])
    top = 1.1 * max([2.0, *(max(cell.step_cost, cell.tok_step) for cell in shown)])
    for column, regime in enumerate(regimes):
        speed, trade = axes[0, column], axes[1, column]
        speed.axhline(1, color="black", lw=1)
        for cell in (cell for cell in shown if cell.regime == regime):
            ratio, low, high = cell.ratio_to_plain or 0.0, cell.ratio_min or 0.0, cell.ratio_max or 0.0
            shift = 0.14 * (policies.index(cell.policy) - (len(policies) - 1) / 2)
            at = concurrencies.index(cell.concurrency) + shift
            style = {"marker": marker[cell.concurrency], "color": colour[cell.policy]}
            speed.errorbar(at, ratio, [[ratio - low], [high - ratio]], capsize=4, ms=5, **style)
            size = 7 + 1.8 * (len(policies) - 1 - policies.index(cell.policy))  # so that one below another is seen
            trade.plot(cell.step_cost, cell.tok_step, ls="", ms=size, **style)
        speed.set(title=regime, xlabel="concurrency (sequences)", xlim=(-0.5, len(concurrencies) - 0.5))
        speed.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
        speed.set_ylim(0, fastest)
        trade.plot([0, top], [0, top], color="black", lw=1)
        trade.fill_between([0, top], [0, top], top, color="black", alpha=0.05, lw=0)
        trade.text(0.03, 0.94, "speculation pays", color="0.35", fontsize=9, transform=trade.transAxes)
        trade.plot(1, 1, "x", color="black", ms=8)
        trade.set(xlim=(0.5, top), ylim=(0.5, top), xlabel="step cost (time of a step / plain's)")
        for ax in (speed, trade):
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("tok/s / plain's tok/s (median, range)")
    axes[1, 0].set_ylabel("tokens per sequence-step (plain: 1)")
    keys = [Line2D([], [], color=colour[name], marker="o", ls="", label=name) for name in policies]
    keys += [Line2D([], [], color="0.4", marker=marker[c], ls="", label=f"C = {c}") for c in concurrencies]
    keys.append(Line2D([], [], color="black", marker="x", lw=1, label="plain, break-even"))
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 3 * len(regimes)), frameon=False)
    missing = [f"{c.regime} C={c.concurrency} {c.policy}" for c in cells if not c.equal]
    if missing:
        figure.suptitle("NOT EQUAL to plain, so not shown: " + ", ".join(missing), color="red", fontsize=9, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
