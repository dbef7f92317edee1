"""Does the best depth change with the length of the context? By rooflines of four models, acceptance decaying or not.

python experiments/depth-by-context/run.py      # writes data.csv and plot.png beside this file
"""

import csv
from collections.abc import Callable
from pathlib import Path

from atlas_jax.lab import plots
from atlas_jax.lab.roofline import CONTEXTS
from atlas_jax.lab.tables import find_costs
from atlas_jax.lab.trace import PROSE, TOOLS

HERE = Path(__file__).parent
MODELS = (
    *("roofline/qwen3.5-4b/h200", "roofline/qwen3.5-27b/gb10/fp4", "roofline/qwen3.5-35b-a3b/h200"),
    "roofline/qwen3.5-397b-a17b/h200",
)
WIDTHS = (1, 8, 32)
DECAY = 0.01  # of each acceptance, per 1,000 tokens: half is left at 65,536


def decaying(conditional: tuple[float, ...], decay: float) -> Callable[[float], tuple[float, ...]]:
    """Acceptance of three drafts as a function of context."""
    return lambda context: tuple(p * (1 - decay) ** (context / 1000) for p in conditional)


def main() -> None:
    rows = []
    figure, axes = plots.figure(columns=len(MODELS), rows=2, width=4.6, height=3.8)
    for row, decay in enumerate((0.0, DECAY)):
        rates = {regime.name: decaying(regime.conditional, decay) for regime in (PROSE, TOOLS)}
        for column, name in enumerate(MODELS):
            title = f"{name.removeprefix('roofline/')}\n{f'losing {decay:.0%} per 1,000' if decay else 'no decay'}"
            best = plots.by_context(axes[row * len(MODELS) + column], find_costs(name), rates, WIDTHS, CONTEXTS, title)
            for regime, lines in best.items():
                for n, depths in zip(WIDTHS, lines, strict=True):
                    rows += [(name, decay, regime, n, int(c), d) for c, d in zip(CONTEXTS, depths, strict=True)]
                    print(f"{name:34s} decay {decay:4.2f} {regime:6s} n={n:3d}", depths)
    plots.save(figure, HERE / "plot.png")
    with (HERE / "data.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("costs", "decay_per_1000", "regime", "n", "context", "best_drafts"))
        writer.writerows(rows)


if __name__ == "__main__":
    main()
