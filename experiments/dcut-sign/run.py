"""Does pruning drafts pay? The gain of D-Cut at each ratio against what one more row costs.

python experiments/dcut-sign/run.py             # writes data.csv and plot.png beside this file, in some minutes
"""

import csv
from pathlib import Path

from atlas_jax.depth.dcut import RATIOS, DCut
from atlas_jax.depth.ladder import LadderConfig
from atlas_jax.lab import plots
from atlas_jax.lab.cost import CostTable, StepTime
from atlas_jax.lab.simulate import Load, simulate
from atlas_jax.lab.trace import regime_trace

HERE = Path(__file__).parent
N, DRAFTS = 8, 3
ROW = (0.0, 0.005, 0.01, 0.02, 0.03, 0.045, 0.06, 0.08, 0.10)  # of plain's step at 8 sequences, each further row
HEAD = 0.06  # of it, each pass of the draft head


def made_costs(row: float) -> CostTable:
    """A step costs 1 and so much for every row beyond the first of each sequence, and for every draft proposed."""
    steps = [
        StepTime(n, k, rows, True, 1.0, 1.0 + HEAD * (k - 1) + row * (rows - n))
        for n in range(1, N + 1)
        for k in range(1, DRAFTS + 2)
        for rows in range(n, n * k + 1)
    ]
    return CostTable("made", "", "", (*steps, *(StepTime(n, 1, n, False, 1.0, 1.0) for n in range(1, N + 1))))


class Endless(CostTable):
    """A table without context."""

    def seconds(self, n: int, k: int, rows: int, context: float, head: bool = True) -> float:
        return super().seconds(n, k, rows, 1.0, head)


def main() -> None:
    rows = []
    figure, axes = plots.figure(columns=2)
    for ax, regime in zip(axes, ("prose", "tools"), strict=True):
        trace = regime_trace(regime, answers=192)
        gains: dict[float, list[float]] = {ratio: [] for ratio in RATIOS}
        for row in ROW:
            table = made_costs(row)
            costs = Endless(table.kind, table.model, table.device, table.steps)
            speed = {}
            for ratio in RATIOS:
                policy = DCut(LadderConfig(((N, DRAFTS),)), DRAFTS, ratio=ratio, max_seqs=N, canonical=None)
                result = simulate(policy, costs, trace, Load(N, requests=192))
                speed[ratio] = result.decode_tok_s
                rows.append((regime, row, ratio, result.decode_tok_s, result.tok_step))
            for ratio in RATIOS:
                gains[ratio].append(100 * (speed[ratio] / speed[1.0] - 1))
        for i, ratio in enumerate(RATIOS):
            ax.plot([100 * r for r in ROW], gains[ratio], "o-", ms=4, color=plots.COLOURS[i], label=f"ratio {ratio}")
        zero = _crossing(ROW, gains[0.75])
        where = "nowhere" if zero is None else f"from {100 * zero:.1f} % a row"
        free, dear = gains[0.75][0], gains[0.75][-1]
        print(f"{regime}: a ratio of 0.75 pays {where}; {free:+.1f} % at free rows, {dear:+.1f} % at 10 %")
        ax.set(title=f"{regime}, 8 sequences, 3 drafts", xlabel="cost of one more row, % of a plain step")
        ax.set(ylabel="tok/s against no pruning, %")
        ax.legend(frameon=False, fontsize=8)
    plots.save(figure, HERE / "plot.png")
    with (HERE / "data.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("regime", "row_cost", "ratio", "tok_s", "tok_step"))
        writer.writerows((*row[:3], f"{row[3]:.5g}", f"{row[4]:.4f}") for row in rows)


def _crossing(xs: tuple[float, ...], ys: list[float]) -> float | None:
    for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if y0 < 0 <= y1:
            return x0 + (x1 - x0) * -y0 / (y1 - y0)
    return None


if __name__ == "__main__":
    main()
