"""Replays a depth policy over a trace and a table of step costs: throughput, and what the oracle would have made of it.

    python scripts/simulate.py --policy survival --regime switching --concurrency 16
    python scripts/simulate.py --policy ladder/steps=1:3,8:2,16:1 --costs gb10-27b --seconds 86400   # a day
    python scripts/simulate.py --rate 2.5 --json                  # Poisson arrivals; stdout gets only the last line

No model, no accelerator. Costs: a table of experiments/costs, roofline/MODEL/DEVICE[/WEIGHTS], or a file. Regimes:
prose, tools, switching, a recorded trace of experiments/traces (NAME or NAME:LABEL), or a file.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from atlas_jax.depth.policies import GRAMMAR, Advice, Oracle, PolicyError, parse_policy
from atlas_jax.lab.cost import CostError
from atlas_jax.lab.simulate import Load, regret, simulate, summary
from atlas_jax.lab.tables import DEFAULT_COSTS, find_costs, find_trace
from atlas_jax.lab.text_table import text_table
from atlas_jax.lab.trace import TraceError


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Prints a table and a last line of JSON; returns what that line holds."""
    costs = find_costs(args.costs)
    trace = find_trace(args.regime, decay=args.decay, seed=args.trace_seed)
    if costs.kind == "measured":
        trace.expect(costs.model)
    load = Load(args.concurrency, args.seconds, rate=args.rate, seed=args.seed)
    deepest = min(costs.deepest, trace.depth)
    prompt = sum(answer.prompt for answer in trace.answers) / len(trace.answers)
    advice = Advice(costs, trace.acceptance(), costs.widths, prompt, costs.one_a_call)
    policy = parse_policy(args.policy, min(args.num_drafts, deepest), advice)
    options: dict[str, Any] = {"switch_s": args.switch_cost}
    oracle = Oracle(costs.one_a_call, policy.max_drafts or min(args.num_drafts, deepest))
    runs = {"oracle": simulate(oracle, costs, trace, load, **options)}
    if args.clairvoyant:
        runs["clairvoyant"] = simulate(oracle, costs, trace, load, truth="outcome", **options)
    runs["plain"] = simulate(parse_policy("plain"), costs, trace, load, **options)
    result = runs[policy.name] = simulate(policy, costs, trace, load, **options)

    rows = []
    for name, run in runs.items():
        p = [None if x is None else round(x, 3) for x in (*run.p, None, None, None)[:3]]
        latency = run.latency or (None, None)
        gain = run.tok_s / runs["plain"].tok_s
        rows.append((name, run.tok_s, gain, run.tok_step, *p, regret(run, runs["oracle"]), run.switches, *latency))
    header = ("policy", "tok/s", "x plain", "tok/step", "p1", "p2", "p3", "regret", "switches", "median s", "p99 s")
    about = ", ".join(f"{key} {value}" for key, value in costs.about if key != "source")
    out = sys.stderr if args.json else sys.stdout
    print(f"{costs.kind} costs: {costs.device} ({about or costs.model})", file=out)
    print(f"regime {trace.name}, {load.concurrency} sequences, {result.seconds:,.0f} s simulated\n", file=out)
    print(text_table(header, rows), file=out)
    line = summary(dataclasses.replace(result, policy=args.policy), args.regime, load, runs["oracle"])
    print(json.dumps(line), flush=True)
    return line


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=GRAMMAR, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", default="ladder", help="see below [%(default)s]")
    add("--regime", default="switching", help="[%(default)s]")
    add("--concurrency", type=int, default=16, help="most sequences active at once [%(default)s]")
    add("--costs", default=DEFAULT_COSTS, help="[%(default)s]")
    add("--seconds", type=float, default=60.0, help="of simulated time [%(default)s]")
    add("--rate", type=float, help="requests per second, Poisson; without it every end brings the next request")
    add("--decay", type=float, default=0.0, help="share of acceptance lost per 1,000 tokens of context [%(default)s]")
    add("--num-drafts", type=int, default=3, help="most drafts of policies and oracle [%(default)s]")
    add("--switch-cost", type=float, default=0.0, help="seconds that a step pays that goes deeper [%(default)s]")
    add("--clairvoyant", action="store_true", help="also an oracle that knows which drafts will be accepted")
    add("--seed", type=int, default=0, help="of arrivals and of the place to begin [%(default)s]")
    add("--trace-seed", type=int, default=0, help="of made traces [%(default)s]")
    add("--json", action="store_true", help="stdout gets nothing but the last line")
    return parser.parse_args(args)


if __name__ == "__main__":
    try:
        main(parse())
    except (CostError, PolicyError, TraceError, ValueError) as error:
        sys.exit(f"error: {error}")
