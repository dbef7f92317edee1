"""Measures the three ways to roll recurrent states back, in whole decode steps: state bytes, milliseconds, equality.

    python scripts/bench_rollback.py                                     # the small model; table, then a line of JSON
    python scripts/bench_rollback.py --n 1 8 32 --drafts 0 1 3 --json    # only that line on stdout
    python scripts/bench_rollback.py --random-init qwen3.5-0.8b --layers 4 --vocab 4096    # a released model's shapes

Random prompts, and drafts that are right as often as asked, the same ones for all. Needs the core dependencies only.
Interrupted, it says what it has measured so far.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from atlas_jax.lab.bench import use_cpu_threads
from atlas_jax.lab.forced import ForcedAcceptance
from atlas_jax.lab.rollback import ROLLBACKS, Cell, measure
from atlas_jax.lab.text_table import text_table
from atlas_jax.model.rollback import Rollback
from atlas_jax.presets import PRESETS, preset, random_params
from atlas_jax.weights.checkpoint import load_model


@dataclass(frozen=True)
class Config:
    """What to measure, and how often."""

    model: Path = Path(__file__).resolve().parents[1] / "checkpoints" / "small"
    random_init: str | None = None  # a preset's name: random weights of that size instead of `model`
    layers: int | None = None  # keep only the preset's first layers
    vocab: int | None = None  # and only so many tokens
    n: tuple[int, ...] = (1, 8)  # sequences active at once
    drafts: tuple[int, ...] = (0, 1, 3)  # verified per sequence; 0 is plain decode
    rollbacks: tuple[Rollback, ...] = ROLLBACKS  # the first is what the others are compared with
    repetitions: int = 5
    forced_acceptance: str = "0.8,0.7,0.6,0.5"  # p1,p2_cond,... of the scripted drafter
    prompt_tokens: int = 32
    max_new_tokens: int = 48
    dtype: str = "float32"  # of weights and activations; in bfloat16 near ties are common and nothing excuses them
    cpu_threads: int | None = None  # of XLA; None: 1 for `model`, all for random weights
    json: bool = False  # stdout gets nothing but the last line
    seed: int = 0


def main(config: Config) -> dict[str, Any]:
    """Prints a table and a last line of JSON; returns what that line holds."""
    if config.cpu_threads or config.random_init is None:
        use_cpu_threads(config.cpu_threads or 1)
    dtype = jnp.dtype(config.dtype)
    if config.random_init is None:
        cfg, params = load_model(config.model)
    else:
        cfg = preset(config.random_init, layers=config.layers, vocab=config.vocab)
        params = random_params(cfg, config.seed, dtype)
    device = jax.devices()[0]
    say = lambda text: print(text, file=sys.stderr, flush=True)
    say(f"on {device.device_kind} ({device.platform}), jax {jax.__version__}")
    cells: list[Cell] = []
    complete = False
    try:
        for cell in measure(
            params,
            cfg,
            config.n,
            config.drafts,
            ForcedAcceptance.parse(config.forced_acceptance, config.seed),
            rollbacks=config.rollbacks,
            dtype=dtype,
            prompt_tokens=config.prompt_tokens,
            max_new_tokens=config.max_new_tokens,
            repetitions=config.repetitions,
            say=say,
        ):
            cells.append(cell)
        complete = True
    except KeyboardInterrupt:
        say("interrupted; this is what had been measured:")
    print(rollback_table(cells), file=sys.stderr if config.json else sys.stdout, flush=True)
    result = {
        "model": config.random_init or config.model.name,
        "layers": len(cfg.layers),
        "dtype": dtype.name,
        "forced_acceptance": config.forced_acceptance,
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "complete": complete,
        "cells": [_rounded(dataclasses.asdict(cell)) for cell in cells],
    }
    print(json.dumps(result), flush=True)
    return result


def rollback_table(cells: Sequence[Cell]) -> str:
    """The cells for people."""
    header = ("n", "drafts", "rollback", "states MiB", "ms", "quartiles", "ratio", "range", "pool MiB", "temp MiB")
    header += ("tok/step", "equal", "excused", "unexcused")
    rows = [
        (
            *(c.n, c.drafts, c.rollback, c.state_bytes / 2**20, c.ms, f"{c.ms_low:.3f}-{c.ms_high:.3f}"),
            *(c.ratio, f"{c.ratio_min:.2f}-{c.ratio_max:.2f}", c.pool_bytes / 2**20, c.temp_bytes / 2**20),
            *(c.tok_step, "yes" if c.equal else "NO", c.excused, c.unexcused),
        )
        for c in cells
    ]
    legend = """
states: recurrent states that a step reads and writes, counted from shapes: per GDN layer and sequence, of one state,
deferred 2, snapshot 2 + drafts, recompute 3. ms: from a step's call until its answer, medians over steps with all n
sequences active and all drafts. ratio: to the first rollback, within a repetition. pool: memory of the states.
equal: the tokens of plain decode, but for excused near ties. The same command in another process can give ratios
outside this range: repeat it, with --rollbacks in another order, before believing one.
"""
    return text_table(header, rows) + legend.rstrip()


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}


def parse(args: Sequence[str] | None = None) -> Config:
    """The command line; every option is a field of `Config`."""
    default = Config()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=default.model, help="directory of a checkpoint")
    add("--random-init", choices=PRESETS, help="random weights of this size instead of --model")
    add("--layers", type=int, help="with --random-init: keep only the first layers")
    add("--vocab", type=int, help="with --random-init: keep only so many tokens")
    add("--n", type=int, nargs="+", default=default.n, help="sequences active at once")
    add("--drafts", type=int, nargs="+", default=default.drafts, help="verified per sequence; 0 is plain decode")
    add("--rollbacks", nargs="+", choices=ROLLBACKS, default=default.rollbacks, help="the first is the reference")
    add("--repetitions", type=int, default=default.repetitions)
    add("--forced-acceptance", default=default.forced_acceptance, help="p1,p2_cond,... of the drafts [%(default)s]")
    add("--prompt-tokens", type=int, default=default.prompt_tokens, help="of a random prompt [%(default)s]")
    add("--max-new-tokens", type=int, default=default.max_new_tokens, help="of every request [%(default)s]")
    add("--dtype", choices=("bfloat16", "float32"), default=default.dtype, help="of weights and activations")
    add("--cpu-threads", type=int, help="of XLA [1: more is slower for the shipped model; all for random weights]")
    add("--json", action="store_true", help="stdout gets nothing but the last line")
    add("--seed", type=int, default=default.seed)
    given = vars(parser.parse_args(args))
    return Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


if __name__ == "__main__":
    main(parse())
