"""The history of a default ladder, replayed: a chunk cap that looked like a cost of depth, a moving break-even, a line.

python experiments/ladder-history/run.py        # writes data.csv and plot.png beside this file
"""

import csv
from pathlib import Path

from atlas_jax.depth.adaptive import token_ratio
from atlas_jax.depth.capacity import chunk_ranges
from atlas_jax.depth.fit import tokens
from atlas_jax.lab import plots
from atlas_jax.lab.cost import judge, linear_fit, ratio
from atlas_jax.lab.roofline import DEVICES, WEIGHTS, step_seconds
from atlas_jax.lab.tables import find_costs
from atlas_jax.presets import preset

HERE = Path(__file__).parent
# Published by the Atlas project for 16 sequences on GB10: p1, p2_cond, token ratio and cost ratio of 16:2 over 16:1.
MEASURED = {
    "prose, L = 64": (0.840, 0.542, 1.186, 1.170),
    "prose, L = 128": (0.773, 0.539, 1.218, 1.234),
    "prose, L = 1024": (0.732, 0.567, 1.229, 1.258),
    "tool calls": (0.917, 0.877, 1.424, 1.223),
}
WON = {"deeper": "16:2", "tie": "tie", "shallower": "16:1"}
# Milliseconds of a step of 16 sequences by rows, worked out from throughputs of 2026-07-31 (costs/make_gb10_27b.py).
EARLIER = {16: 121.8, 32: 151.1, 48: 197.3, 64: 237.4}


def chunked(n: int, drafts: int, budget: int, context: float = 256) -> float:
    """Seconds of a verify step whose forwards hold `budget` rows each: one after the other, each reads all weights."""
    cfg, device, weight = preset("qwen3.5-27b"), DEVICES["gb10"], WEIGHTS["fp4"]
    k, seconds = drafts + 1, 0.0
    for chunk in chunk_ranges([k] * n, budget):
        seconds += step_seconds(cfg, device, weight, len(chunk), 1, len(chunk) * k, context, head=False)
    whole = (step_seconds(cfg, device, weight, n, k, n * k, context, head) for head in (True, False))
    return seconds + next(whole) - next(whole)  # and the draft head, which was never cut into chunks


def main() -> None:
    rows: list[tuple[str, str, str, float]] = []
    figure, axes = plots.figure(columns=3)

    p = (0.84, 0.80, 0.78)  # acceptance at 8 sequences in that build
    for label, budget in (("forwards of 16 rows", 16), ("forwards of 96 rows", 96)):
        speed = [8 * tokens(p, d) / chunked(8, d, budget) for d in range(1, 4)]
        rows += [("chunk cap", label, f"8:{d} tok/s", s) for d, s in enumerate(speed, start=1)]
        axes[0].plot(
            (1, 2, 3), speed, "o-", label=f"{label}: {', '.join(str(len(_cut(d, budget))) for d in (1, 2, 3))}"
        )
    axes[0].set(title="8 sequences, roofline of a 27B on GB10", xlabel="drafts", ylabel="tok/s", xticks=(1, 2, 3))
    axes[0].legend(frameon=False, fontsize=8, title="forwards for 1, 2, 3 drafts")

    points = []
    for name, (p1, p2, measured, cost) in MEASURED.items():
        formula = token_ratio(p1, p2)
        verdict, guess = WON[judge(measured, cost)], WON[judge(formula, cost)]
        points += [(f"{name}: {verdict}", cost, measured)]
        rows += [("break-even", name, "cost ratio", cost), ("break-even", name, "token ratio, measured", measured)]
        rows += [("break-even", name, "token ratio, formula", formula)]
        print(f"{name}: measured {measured / cost - 1:+.1%} -> {verdict}; formula {formula / cost - 1:+.1%} -> {guess}")
    plots.break_even(axes[1], points, "16:2 against 16:1")
    for p1, p2, _, cost in MEASURED.values():
        axes[1].plot(cost, token_ratio(p1, p2), "o", mfc="none", color="0.5")

    intercept, slope = linear_fit(list(EARLIER.items()))
    line = {r: intercept + slope * r for r in EARLIER}
    later = find_costs("gb10-27b")
    print(f"line: {intercept:.1f} ms + {slope:.2f} ms a row; 16:2 over 16:1 {line[48] / line[32]:.3f}", end=", ")
    print(f"table of the same day {EARLIER[48] / EARLIER[32]:.3f}, next day {ratio(later, 16, 2, 1, 128):.3f}")
    rows += [
        ("line", f"{r} rows", kind, ms) for kind, by in (("table", EARLIER), ("line", line)) for r, ms in by.items()
    ]
    axes[2].plot(list(EARLIER), list(EARLIER.values()), "o-", drawstyle="steps-mid", label="table, 2026-07-31")
    axes[2].plot(list(line), list(line.values()), "--", label="line through it")
    next_day = [1e3 * later.seconds(16, k, 16 * k, 128) for k in range(1, 5)]
    axes[2].plot(list(EARLIER), next_day, "s-", drawstyle="steps-mid", label="table, 2026-08-01")
    axes[2].set(title="16 sequences on GB10", xlabel="rows", ylabel="step, ms")
    axes[2].legend(frameon=False, fontsize=8)

    plots.save(figure, HERE / "plot.png")
    with (HERE / "data.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("part", "case", "what", "value"))
        writer.writerows((*row[:3], f"{row[3]:.5g}") for row in rows)
    for row in rows[:6]:
        print(*row)


def _cut(drafts: int, budget: int) -> list[range]:
    return chunk_ranges([drafts + 1] * 8, budget)


if __name__ == "__main__":
    main()
