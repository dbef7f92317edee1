"""The five pictures of a ladder: who wins at which concurrency, why, and where that changes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_jax.depth.fit import best_drafts
from atlas_jax.depth.interface import Costs
from atlas_jax.lab.cost import CostTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by everyone; depth d has colour d wherever depths are drawn.
COLOURS = ("#777777", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
MARKERS = "xosD^vP*"

Points = Mapping[str, Sequence[tuple[float, float, float, float]]]  # name -> (x, median, low, high)


def figure(width: float = 6.4, height: float = 4.4, columns: int = 1, rows: int = 1) -> tuple[Any, list[Axes]]:
    """A figure without a display, and its axes, row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(made)
    axes = list(made.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    return made, axes


def save(made: Any, path: Path) -> None:
    """Write a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=120, metadata={"Software": None})


def speed(ax: Axes, points: Points, title: str, best: Sequence[tuple[float, str]] = ()) -> None:
    """Speed over plain against concurrency per policy; crossings of the winner are marked, `best` is written above."""
    xs = sorted({x for line in points.values() for x, *_ in line})
    ax.axhline(1, color="black", lw=1)
    for i, (name, line) in enumerate(points.items()):
        at, middle, low, high = zip(*sorted(line), strict=True)
        bars = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
        style: Any = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        ax.errorbar(at, middle, bars, capsize=3, ms=5, lw=1.3, label=name, **style)
    for a, b in itertools.pairwise(xs):
        if _winner(points, a) != _winner(points, b):
            ax.axvline((a * b) ** 0.5, color="0.5", ls=":", lw=1)
    top = ax.get_ylim()[1]
    for x, text in best:
        ax.annotate(text, (x, top), ha="center", va="top", fontsize=8, color="0.3")
    ax.set_xscale("log", base=2)
    ax.set_xticks(xs, [f"{x:g}" for x in xs])
    ax.set(title=title, xlabel="concurrency C (sequences)", ylabel="tok/s over plain's (median, range)")
    ax.legend(frameon=False, fontsize=8)


def _winner(points: Points, x: float) -> str:
    here = {name: median for name, line in points.items() for at, median, *_ in line if at == x}
    return max(here, key=lambda name: here[name])


def break_even(ax: Axes, points: Sequence[tuple[str, float, float]], title: str) -> None:
    """Token ratio against cost ratio of a rung: above the diagonal it pays. `points` are (name, cost, tokens)."""
    reach = [1.0, *(x for _, *both in points for x in both)]
    low, high = 0.97 * min(reach), 1.03 * max(reach)
    ax.plot([low, high], [low, high], color="black", lw=1)
    ax.fill_between([low, high], [low, high], high, color="black", alpha=0.05, lw=0)
    for i, (name, cost, tokens) in enumerate(points):
        ax.plot(cost, tokens, MARKERS[1 + i // 7 % 7], color=COLOURS[1 + i % 7], label=name)
    ax.text(0.04, 0.95, "depth pays", transform=ax.transAxes, va="top", color="0.35")
    ax.set(title=title, xlabel="cost ratio (step time, deep / shallow)", ylabel="token ratio (deep / shallow)")
    ax.set(xlim=(low, high), ylim=(low, high))
    ax.legend(frameon=False, fontsize=8)


def heat(
    ax: Axes,
    costs: Costs,
    p1: float,
    widths: Sequence[int],
    p2s: Sequence[float],
    context: float,
    deepest: int,
    title: str,
) -> list[list[int]]:
    """Best depth over n and p2_cond, later drafts as good as the second; returns the depths, by p2 and n."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    best = [[best_drafts(costs, (p1, *[p2] * (deepest - 1)), n, context) for n in widths] for p2 in p2s]
    colours = ListedColormap(COLOURS[: deepest + 1])
    ax.grid(False)
    ax.imshow(best, origin="lower", aspect="auto", cmap=colours, norm=BoundaryNorm(range(deepest + 2), deepest + 1))
    for i, j in itertools.product(range(len(p2s)), range(len(widths))):
        ax.text(j, i, str(best[i][j]), ha="center", va="center", color="white", fontsize=8)
    ax.set_xticks(range(len(widths)), map(str, widths))
    ax.set_yticks(range(len(p2s)), [f"{p:.2f}" for p in p2s])
    ax.set(title=title, xlabel="active sequences n", ylabel="p2_cond")
    return best


def staircase(ax: Axes, costs: CostTable, title: str) -> None:
    """Step time against rows, a line a width, every shape of the table at its smallest context."""
    for i, n in enumerate(costs.widths):
        mine = [s for s in costs.steps if s.n == n and s.head]
        least = min(s.context for s in mine)
        steps = sorted(
            (s.rows, 1e3 * s.seconds, s.low, s.high) for s in mine if s.context == least and s.rows == n * s.k
        )
        rows, ms, *_ = zip(*steps, strict=True)
        ax.plot(rows, ms, marker="o", ms=4, drawstyle="steps-mid", lw=1.2, color=COLOURS[i % 8], label=f"n = {n}")
        for row, _, low, high in steps:
            if low is not None and high is not None:
                ax.plot([row, row], [1e3 * low, 1e3 * high], color=COLOURS[i % 8], lw=1)
        plain = [1e3 * s.seconds for s in costs.steps if s.n == n and not s.head and s.context == least]
        if plain:
            ax.plot(n, statistics.median(plain), "x", color=COLOURS[i % 8])
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(title=title, xlabel="rows of the step, n (drafts + 1)", ylabel="step, ms (x: plain decode)")
    ax.legend(frameon=False, fontsize=8, ncols=2)


def by_context(
    ax: Axes, costs: Costs, acceptance: Mapping[str, Any], widths: Sequence[int], contexts: Sequence[float], title: str
) -> dict[str, list[list[int]]]:
    """Best depth against context, a line a width and text; `acceptance[name](context)` gives the drafts' rates."""
    found: dict[str, list[list[int]]] = {}
    for style, (name, rates) in zip(("-", "--", ":"), acceptance.items(), strict=False):
        for i, n in enumerate(widths):
            best = [best_drafts(costs, rates(context), n, context) for context in contexts]
            found.setdefault(name, []).append(best)
            shift = 0.06 * (i - (len(widths) - 1) / 2)
            colour = COLOURS[1 + i % 7]
            ax.plot(
                contexts, [d + shift for d in best], style, marker="o", ms=3, color=colour, label=f"{name}, n = {n}"
            )
    ax.set_xscale("log", base=2)
    ax.set(title=title, xlabel="context (tokens)", ylabel="best number of drafts", yticks=range(4), ylim=(-0.3, 3.4))
    ax.legend(frameon=False, fontsize=7, ncols=2)
    return found
