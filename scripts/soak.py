"""A long run of random traffic, every answer judged by a full forward and a sampler of its own.

    python scripts/soak.py --requests 10000 --slots 32
    python scripts/soak.py --requests 50000 --slots 8 --random-init    # two small layers in float64: nothing is excused

Requests arrive in bursts, with random lengths and every sampling option; some are cancelled; the depth policy changes
in mid-flight. The last line is JSON: `{requests, equal, excused, unexcused, violations, compiles_after_warmup,
rss_start_mb, rss_end_mb, ...}`. The exit status is 1 where anything unexcused happened, or plain decode answers
otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--keep", type=int, default=8, help="slots for states that prompts may begin with")
    parser.add_argument("--prompt", type=int, default=40, help="most tokens of a prompt")
    parser.add_argument("--answer", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--policies", default="plain,fixed0,fixed1,fixed2,fixed3,ladder")
    parser.add_argument("--rounds", type=int, default=4, help="most steps in one call to the device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "small")
    parser.add_argument("--random-init", action="store_true", help="a tiny model with random weights, in float64")
    parser.add_argument("--cpu-threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    args = parser.parse_args(argv)

    from atlas_jax.lab.bench import use_cpu_threads

    use_cpu_threads(args.cpu_threads)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from rich.console import Console
    from rich.progress import Progress

    from atlas_jax import Engine, EngineConfig, load_model, parse_policy
    from atlas_jax.compile_cache import keep_compiled
    from atlas_jax.decode.buckets import BucketConfig
    from atlas_jax.lab.oracle import TIE_BOUND, Oracle
    from atlas_jax.lab.prompts import own_prompts
    from atlas_jax.lab.soak import Soak, Traffic, soak, tiny_model
    from atlas_jax.weights.tokenizer import ChatTokenizer

    console = Console(stderr=True, quiet=args.json)
    console.print(keep_compiled().describe(), highlight=False, markup=False, soft_wrap=True)
    if args.random_init:
        jax.config.update("jax_enable_x64", True)
        cfg, params = tiny_model(args.seed)
        texts = np.random.default_rng(args.seed).integers(0, cfg.vocab_size, (64, 4 * args.prompt)).tolist()
    else:
        cfg, params = load_model(args.model)
        tokenizer = ChatTokenizer.load(args.model).tokenizer
        texts = [text for regime in own_prompts(tokenizer).values() for text in regime]
    policies = [parse_policy(name) for name in args.policies.split(",")]
    deepest = max(policy.max_drafts for policy in policies)
    length = args.prompt + args.answer
    widths = tuple(2**i for i in range((args.slots - 1).bit_length() + 1) if 2**i >= 4) or (4,)
    engine = Engine(
        params,
        cfg,
        EngineConfig(
            slots=args.slots,
            context=length,
            max_drafts=deepest,
            buckets=BucketConfig(n=widths, k=(1, deepest + 1)),
            prefill=(8, 32),
            prefill_tokens=128,
            keep=args.keep,
            rounds=args.rounds,
            dtype=jnp.float64 if args.random_init else jnp.float32,
        ),
        policies[0],
    )
    oracle = Oracle(params, cfg, length, batch=32, tie=1e-9 if args.random_init else TIE_BOUND)
    oracle.warmup()  # first: the engine counts compilations from its own warm-up on
    console.print(f"{engine.kernels.describe()}; compiled in {engine.warmup(policies):.1f} s")
    traffic = Traffic(args.requests, args.prompt, args.answer, seed=args.seed)
    with Progress(console=console, disable=args.json) as progress:
        task = progress.add_task("requests", total=args.requests)
        say = lambda found: progress.update(task, completed=found.requests)
        found: Soak = soak(engine, oracle, policies, traffic, texts, say)
    result = {name: round(x, 2) if isinstance(x, float) else x for name, x in dataclasses.asdict(found).items()}
    for name, value in result.items():
        console.print(f"{name:>24}  {value}", soft_wrap=True)
    print(json.dumps(result), flush=True)
    wrong = found.unexcused + found.violations + found.plain_different + found.compiles_after_warmup
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
