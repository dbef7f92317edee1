"""Measures decoding on this machine: every policy beside plain decode, token by token the same or no speed at all.

    python scripts/bench_decode.py                                   # table, and one line of JSON at the end
    python scripts/bench_decode.py --policies fixed2 ladder --concurrency 1 4 --json    # only that line on stdout

Greedy answers to held-out prompts. The table's cost beside tok/step says which depth pays: it must be the smaller.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from atlas_jax.depth.policies import parse_policy
from atlas_jax.lab.bench import measure, use_cpu_threads
from atlas_jax.lab.prompts import load_requests
from atlas_jax.lab.report import console, table, to_json
from atlas_jax.train.tokens import load_tokenizer
from atlas_jax.weights.checkpoint import load_model


@dataclass(frozen=True)
class Config:
    """What to measure, and how often."""

    model: Path = Path(__file__).resolve().parents[1] / "checkpoints" / "small"
    regimes: tuple[str, ...] = ("prose", "tools")
    concurrency: tuple[int, ...] = (1, 8)
    policies: tuple[str, ...] = ("plain", "fixed1", "fixed2", "fixed3", "ladder")  # plain is always measured
    prompts: int = 24  # a regime; at least the largest concurrency
    repetitions: int = 5
    context: int = 768  # most tokens of a sequence, prompt included
    max_new_tokens: int | None = None  # of every request; None: 128 for prose, 96 for tools
    cpu_threads: int = 1  # of XLA; more is slower for a model as small as the shipped one
    json: bool = False  # stdout gets nothing but the last line


def main(config: Config) -> dict[str, Any]:
    """Prints a table and a last line of JSON; returns what that line holds."""
    began = time.perf_counter()
    log, out = console(stderr=True), console(stderr=config.json)
    use_cpu_threads(config.cpu_threads)
    policies = [parse_policy(name) for name in config.policies]
    cfg, params = load_model(config.model)
    tokenizer = load_tokenizer(config.model / "tokenizer.json")
    requests, offline = load_requests(config.regimes, tokenizer, config.prompts, config.max_new_tokens)
    if offline:
        log.print(f"The held-out texts cannot be had: {offline} Measuring on our own prompts.", markup=False)
    cells = measure(
        params,
        cfg,
        requests,
        config.concurrency,
        policies,
        config.repetitions,
        context=config.context,
        say=lambda text: log.print(text, highlight=False),
    )
    out.print(table(cells))
    for cell in cells:
        if not cell.equal:
            where = f"{cell.regime}, concurrency {cell.concurrency}, {cell.policy}"
            out.print(f"NOT EQUAL, so no speed is claimed: {where}: {cell.note}", markup=False, style="red")
    result = {
        **to_json(cells),
        "prompts": "own" if offline else "held-out",
        "device": jax.devices()[0].device_kind,
        "compile_s": round(sum({cell.concurrency: cell.warmup_s for cell in cells}.values()), 1),
        "total_s": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
