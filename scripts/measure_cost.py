"""Measures what a decode step costs on this machine, by shape and context: the table that policies and the lab go by.

    python scripts/measure_cost.py                # checkpoints/deep; about 10 minutes on 2 CPU cores
    python scripts/measure_cost.py --random-init qwen3.5-4b --widths 1 8 32 --contexts 512 8192
    python scripts/measure_cost.py --out costs.json --json            # stdout gets nothing but the last line

Plain decode and every depth take turns on the same running sequences. An interrupted run goes on where it was.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from atlas_jax.compile_cache import keep_compiled
from atlas_jax.config import ConfigError
from atlas_jax.decode.engine import Engine
from atlas_jax.depth.policies import Off
from atlas_jax.lab.bench import use_cpu_threads
from atlas_jax.lab.cost import CostError, CostTable, model_id
from atlas_jax.lab.measure_cost import Plan, about_this, device_id, engine_config, measure_costs
from atlas_jax.lab.text_table import text_table
from atlas_jax.presets import PRESETS, preset, random_params
from atlas_jax.train.heads import fresh_head
from atlas_jax.weights.checkpoint import load_model
from atlas_jax.weights.shards import WeightError

ROOT = Path(__file__).resolve().parents[1]


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the table; prints it and a last line of JSON; returns what that line holds."""
    threads = args.cpu_threads or (None if args.random_init else 1)
    if threads:
        use_cpu_threads(threads)
    dtype = jnp.dtype(args.dtype or ("float32" if jax.devices()[0].platform == "cpu" else "bfloat16"))
    if args.random_init:
        cfg = preset(args.random_init, layers=args.layers, vocab=args.vocab)
        params = random_params(cfg, 0, dtype)
    else:
        cfg, params = load_model(args.model, allow_missing="head")
        if not cfg.mtp_layers:
            print(f"{args.model} has no MTP head: measured with a fresh one, which costs the same", file=sys.stderr)
            cfg = dataclasses.replace(cfg, mtp_layers=1)
            params["mtp"] = fresh_head(cfg)
    name = args.random_init or args.model.resolve().name
    out = args.out or ROOT / "runs" / "costs" / f"{name}-{jax.devices()[0].platform}.json"
    say = lambda text: print(text, file=sys.stderr, flush=True)
    say(keep_compiled().describe())
    plan = Plan(tuple(args.widths), args.deepest, tuple(args.contexts), args.visits, rounds=args.rounds)
    done = None
    if out.is_file() and not args.again:
        done = CostTable.load(out).expect(model=model_id(cfg), device=device_id())
        say(f"{out} has widths {done.widths} already; --again measures them anew")
    about = about_this(dtype, name=name, threads=str(threads or "all"))
    engine = Engine(params, cfg, engine_config(plan, dtype), Off())
    say(engine.kernels.describe())
    table = measure_costs(engine, plan, about=about, done=done, keep=lambda t: t.save(out), say=say)
    print(render(table), file=sys.stderr if args.json else sys.stdout)
    line = {
        "out": str(out),
        "model": table.model,
        "device": table.device,
        "widths": table.widths,
        "drafts": table.deepest,
        "step_times": len(table.steps),
        "aa_spread": float(dict(table.about)["aa_spread"]),
    }
    print(json.dumps(line), flush=True)
    return line


def render(table: CostTable) -> str:
    """Milliseconds of a step within a call of several and of one alone; cost over plain's at the same place."""
    plain = {(s.n, s.context): s.seconds for s in table.steps if not s.head}
    rows = [
        (
            *(s.n, f"{s.context:.0f}", f"{s.k - 1} drafts" if s.head else "plain", 1e3 * s.seconds),
            f"{1e3 * (s.low or s.seconds):.3f}-{1e3 * (s.high or s.seconds):.3f}",
            *(1e3 * (s.alone or s.seconds), s.samples, s.seconds / plain[s.n, s.context]),
        )
        for s in sorted(table.steps)
    ]
    return text_table(("n", "context", "step", "ms", "quartiles", "alone", "calls", "cost"), rows)


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    plan = Plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=ROOT / "checkpoints" / "deep", help="directory of a checkpoint")
    add("--random-init", choices=PRESETS, help="random weights of this size instead")
    add("--layers", type=int, help="with --random-init: keep only the first layers")
    add("--vocab", type=int, help="with --random-init: keep only so many tokens")
    add("--dtype", choices=("bfloat16", "float32"), help="of weights [bfloat16; on a CPU float32]")
    add("--widths", type=int, nargs="+", default=plan.widths, help="sequences active at once")
    add("--contexts", type=int, nargs="+", default=plan.contexts, help="tokens of a sequence before it is measured")
    add("--deepest", type=int, default=plan.deepest, help="most drafts [%(default)s]")
    add("--visits", type=int, default=plan.visits, help="turns of each arm [%(default)s]")
    add("--rounds", type=int, default=plan.rounds, help="steps of a call, as EngineConfig.rounds [%(default)s]")
    add("--cpu-threads", type=int, help="of XLA [1: more is slower for the shipped model; all for random weights]")
    add("--out", type=Path, help="file of the table [runs/costs/NAME-PLATFORM.json]")
    add("--again", action="store_true", help="measure anew what the file has")
    add("--json", action="store_true", help="stdout gets nothing but the last line")
    return parser.parse_args(args)


if __name__ == "__main__":
    try:
        main(parse())
    except (ConfigError, CostError, WeightError) as error:
        sys.exit(f"error: {error}")
