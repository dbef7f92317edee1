"""Policies where the text changes its regime: what each leaves to an oracle that knows every draft's chance.

python experiments/regime-switches/run.py       # writes data.csv and plot.png beside this file, in some minutes
"""

import csv
import functools
import sys
from pathlib import Path
from typing import Any

from atlas_jax.depth.policies import Advice, parse_policy
from atlas_jax.lab import plots
from atlas_jax.lab.cost import CostTable
from atlas_jax.lab.simulate import Load, Result, regret, simulate
from atlas_jax.lab.tables import find_costs, find_trace
from atlas_jax.lab.trace import Trace

HERE = Path(__file__).parent
# Costs, concurrency, simulated seconds: four blocks of text and more.
CASES = (
    ("gb10-27b", 16, 800.0),
    ("roofline/qwen3.5-35b-a3b/h200", 8, 40.0),
    ("roofline/qwen3.5-35b-a3b/h200", 32, 24.0),
)
POLICIES = (
    *("plain", "fixed1", "fixed2", "fixed3", "ladder", "adaptive_rung", "adaptive_rung/probe_ticks=32"),
    *("dcut/steps=32:3/max_seqs=32/canonical=none", "survival", "auto"),
)
SEEDS = (0, 1)


def main() -> None:
    rows, shown = [], {}
    for name, concurrency, seconds in CASES:
        costs = find_costs(name)
        for regime in ("prose", "tools", "switching"):
            trace = find_trace(regime)
            advice = Advice(costs, trace.acceptance()[:3], costs.widths, 256)
            for seed in SEEDS:
                load = Load(concurrency, seconds, seed=seed)
                run = functools.partial(_run, advice=advice, costs=costs, trace=trace, load=load)
                oracle = run("oracle", timeline=regime == "switching" and seed == 0)
                found: dict[str, Result] = {"clairvoyant": run("oracle", truth="outcome"), "oracle": oracle}
                for policy in POLICIES:
                    found[policy] = run(policy, timeline=regime == "switching" and seed == 0)
                for policy, result in found.items():
                    values: tuple[Any, ...] = (result.tok_s, result.tok_step, regret(result, oracle), result.switches)
                    rows.append((name, concurrency, regime, policy, seed, *values))
                if regime == "switching" and seed == 0:
                    shown[name, concurrency] = found
            print(name, concurrency, regime, file=sys.stderr, flush=True)
    draw(rows, shown)
    with (HERE / "data.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        header = (
            "costs",
            "concurrency",
            "regime",
            "policy",
            "seed",
            "tok_s",
            "tok_step",
            "regret_to_oracle",
            "switches",
        )
        writer.writerow(header)
        writer.writerows((*row[:5], f"{row[5]:.5g}", f"{row[6]:.4f}", f"{row[7]:.5f}", row[8]) for row in rows)
    for name, concurrency, _ in CASES:
        for policy in ("clairvoyant", *POLICIES):
            worst = [
                max(row[7] for row in rows if row[:4] == (name, concurrency, regime, policy))
                for regime in ("prose", "tools", "switching")
            ]
            print(f"{name} C={concurrency} {policy:45s}", "  ".join(f"{100 * x:6.2f} %" for x in worst))


def _run(policy: str, *, advice: Advice, costs: CostTable, trace: Trace, load: Load, **options: Any) -> Result:
    return simulate(parse_policy(policy, advice=advice), costs, trace, load, **options)


def draw(rows: list[tuple[Any, ...]], shown: dict[Any, dict[str, Result]]) -> None:
    """Regret by policy and regime; below, what the policies propose as the regime changes."""
    figure, axes = plots.figure(columns=len(CASES), rows=2, width=6.0)
    for ax, (name, concurrency, _) in zip(axes[: len(CASES)], CASES, strict=True):
        names = ("clairvoyant", *POLICIES)
        for i, regime in enumerate(("prose", "tools", "switching")):
            for j, policy in enumerate(names):
                values = [100 * row[7] for row in rows if row[:4] == (name, concurrency, regime, policy)]
                label = regime if j == 0 else None
                ax.plot(
                    values, [j + 0.22 * (i - 1)] * len(values), "osD"[i], color=plots.COLOURS[i + 1], ms=4, label=label
                )
        ax.axvline(0, color="black", lw=1)
        ax.axvline(5, color="0.6", lw=1, ls=":")
        ax.set_yticks(range(len(names)), [policy.replace("/", "\n/", 1)[:44] for policy in names], fontsize=7)
        ax.set_xscale("symlog", linthresh=5)
        ax.set_xticks([-5, -2, 0, 2, 5, 10, 30], ["-5", "-2", "0", "2", "5", "10", "30"])
        ax.set(title=f"{name}, C = {concurrency}", xlabel="regret to the oracle, %")
        ax.invert_yaxis()
        ax.legend(frameon=False, fontsize=8)
    for ax, (name, concurrency, _) in zip(axes[len(CASES) :], CASES, strict=True):
        for i, policy in enumerate(("oracle", "survival", "adaptive_rung", "adaptive_rung/probe_ticks=32")):
            moments = shown[name, concurrency][policy].timeline[::20]
            times, depths = [m[0] for m in moments], [m[2] + 0.07 * (i - 1.5) for m in moments]
            ax.plot(times, depths, lw=1.1, color=plots.COLOURS[i + 1], label=policy)
        ax.set(title="switching", xlabel="simulated second", ylabel="drafts proposed", yticks=range(4), ylim=(0, 3.9))
        ax.legend(frameon=False, fontsize=7, ncols=2, loc="upper center")
    plots.save(figure, HERE / "plot.png")


if __name__ == "__main__":
    main()
