"""Measures decoding on this machine: every policy beside plain decode, token by token the same or no speed at all.

    python scripts/bench_decode.py                                   # table, and one line of JSON at the end
    python scripts/bench_decode.py --policies fixed2 ladder --concurrency 1 4 --json    # only that line on stdout

Greedy answers to held-out prompts. The table's cost beside tok/step says which depth pays: it must be the smaller.
`--model` takes any directory as Hugging Face has them; without an MTP head only `--policies plain` can be measured.

    python scripts/bench_decode.py --against hf --policies plain fixed3 --regimes tools

Beside transformers' own generate on the same weights, one sequence at a time, request by request in turns
(scripts/setup_hf.sh makes the environment that it runs in). Tokens that differ get no ratio.

    python scripts/bench_decode.py --random-init qwen3.5-4b --forced-acceptance 0.8,0.7,0.6 --concurrency 1 8 32

Step costs at a released model's size with no checkpoint: random weights, and drafts that are right as often as asked
(the head still runs in full). Device, host and launches per step; on a GPU with XLA's command buffers on and off.
`--layers 4 --vocab 4096` cuts the model to something that a CPU runs in seconds. Needs the core dependencies only.

    python scripts/bench_decode.py --concurrency 8 --mesh tensor=2,data=4

On several devices; of several processes, started with the same flags but for `--process-id`, the first alone prints.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from atlas_jax import devices
from atlas_jax.compile_cache import keep_compiled
from atlas_jax.config import ConfigError, ModelConfig
from atlas_jax.decode.requests import Request, RequestError
from atlas_jax.depth.policies import GRAMMAR, Policy, PolicyError, parse_policy
from atlas_jax.devices import Devices, ProcessError
from atlas_jax.lab import against_hf
from atlas_jax.lab.advice import advise
from atlas_jax.lab.bench import BenchError, measure, use_cpu_threads
from atlas_jax.lab.cost import CostError
from atlas_jax.lab.forced import ForcedAcceptance
from atlas_jax.lab.prompts import load_requests
from atlas_jax.lab.report import console, table, to_json
from atlas_jax.lab.step_cost import COMMAND_BUFFERS, StepCost, measure_steps
from atlas_jax.lab.text_table import text_table
from atlas_jax.lab.trace import TraceError
from atlas_jax.model.mixers import Params
from atlas_jax.presets import PRESETS, param_count, preset, random_params
from atlas_jax.sharding import MeshError
from atlas_jax.weights.checkpoint import load_model
from atlas_jax.weights.shards import WeightError
from atlas_jax.weights.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Config:
    """What to measure, and how often."""

    model: Path = Path(__file__).resolve().parents[1] / "checkpoints" / "deep"
    regimes: tuple[str, ...] = ("prose", "tools")
    concurrency: tuple[int, ...] = (1, 8)
    policies: tuple[str, ...] = ("plain", "fixed1", "fixed2", "fixed3", "ladder")  # plain is always measured
    costs: str | None = None  # a table of scripts/measure_cost.py, for policies that weigh costs (survival, auto)
    acceptance: str | None = None  # p1,p2_cond,... or a trace, for auto; survival begins with it
    prompts: int = 24  # a regime; at least the largest concurrency
    repetitions: int = 5
    context: int = 768  # most tokens of a sequence, prompt included
    max_new_tokens: int | None = None  # of every request; None: 128 for prose, 96 for tools, 64 for random weights
    cpu_threads: int | None = None  # of XLA; None: 1, more is slower for the shipped model; all for random weights
    against: Literal["hf"] | None = None  # measure beside transformers' generate
    json: bool = False  # stdout gets nothing but the last line
    random_init: str | None = None  # a preset's name: random weights of that size instead of `model`
    forced_acceptance: str = "0.8,0.7,0.6"  # p1,p2_cond,p3_cond of the scripted drafter, with random weights
    layers: int | None = None  # keep only the preset's first layers
    vocab: int | None = None  # and only so many tokens
    dtype: str | None = None  # of random weights; None: bfloat16, on a CPU float32
    prompt_tokens: int = 64  # of a random prompt
    command_buffers: tuple[str, ...] = tuple(COMMAND_BUFFERS)  # on a GPU
    seed: int = 0
    devices: Devices = Devices()


def main(config: Config) -> dict[str, Any]:
    """Prints a table and a last line of JSON; returns what that line holds."""
    if config.against and (config.random_init or 1 not in config.concurrency):
        raise BenchError("transformers is measured on a checkpoint, one sequence at a time: --model, --concurrency 1")
    if config.devices != Devices() and (config.random_init or config.against):
        raise BenchError("a mesh is measured on a checkpoint, without --random-init and --against: drop its flags")
    result = measure_model(config) if config.random_init is None else measure_random(config)
    if devices.first():
        print(json.dumps(result), flush=True)
    return result


def measure_model(config: Config) -> dict[str, Any]:
    """A checkpoint on held-out prompts."""
    began = time.perf_counter()
    mesh = config.devices.join()
    use_cpu_threads(config.cpu_threads or 1)
    log, out = console(stderr=True), console(stderr=config.json)
    log.quiet = out.quiet = not devices.first()
    devices.begin(mesh, lambda text: log.print(text, highlight=False, markup=False, soft_wrap=True))
    cfg, params = load_model(config.model, allow_missing="head")
    sizes = {"context": config.context / 2, "longest": config.context}
    advice = advise(config.costs, config.acceptance, cfg, config.concurrency, **sizes)
    policies = [parse_policy(name, advice=advice) for name in config.policies]
    tokenizer = ChatTokenizer.load(config.model).tokenizer
    requests, offline = load_requests(config.regimes, tokenizer, config.prompts, config.max_new_tokens)
    if offline:
        log.print(f"The held-out texts cannot be had: {offline} Measuring on our own prompts.", markup=False)
    if config.against:
        result = measure_beside(config, params, cfg, requests, policies)
        return result | {"prompts": "own" if offline else "held-out", "total_s": round(time.perf_counter() - began, 1)}
    cells = measure(
        params,
        cfg,
        requests,
        config.concurrency,
        policies,
        config.repetitions,
        context=config.context,
        mesh=mesh,
        say=lambda text: log.print(text, highlight=False),
    )
    out.print(table(cells))
    for cell in cells:
        if not cell.equal:
            where = f"{cell.regime}, concurrency {cell.concurrency}, {cell.policy}"
            out.print(f"NOT EQUAL, so no speed is claimed: {where}: {cell.note}", markup=False, style="red")
    return {
        **to_json(cells),
        "prompts": "own" if offline else "held-out",
        "device": jax.devices()[0].device_kind,
        "mesh": str(mesh),
        "compile_s": round(sum({cell.concurrency: cell.warmup_s for cell in cells}.values()), 1),
        "total_s": round(time.perf_counter() - began, 1),
    }


def measure_beside(
    config: Config,
    params: Params,
    cfg: ModelConfig,
    requests: Mapping[str, Sequence[Request]],
    policies: Sequence[Policy],
) -> dict[str, Any]:
    """The same requests by transformers' generate, in turns with ours."""
    rows = against_hf.measure_against_hf(
        config.model,
        params,
        cfg,
        requests,
        policies,
        config.repetitions,
        context=config.context,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(against_hf.table(rows), file=sys.stderr if config.json else sys.stdout, flush=True)
    return {"against": "transformers", "cells": [_rounded(dataclasses.asdict(row)) for row in rows]}


def measure_random(config: Config) -> dict[str, Any]:
    """A preset with random weights and forced acceptance: a cost table."""
    began = time.perf_counter()
    assert config.random_init is not None
    if config.cpu_threads is not None:
        use_cpu_threads(config.cpu_threads)
    forced = ForcedAcceptance.parse(config.forced_acceptance, config.seed)
    cfg = preset(config.random_init, layers=config.layers, vocab=config.vocab)
    device = jax.devices()[0]
    dtype = jnp.dtype(config.dtype or ("float32" if device.platform == "cpu" else "bfloat16"))
    say = lambda text: print(text, file=sys.stderr, flush=True)
    say(keep_compiled().describe())
    size = f"{len(cfg.layers)} layers, {cfg.vocab_size} tokens, {param_count(cfg, head=True) / 1e9:.2f} B parameters"
    say(f"{config.random_init}: {size}, random in {dtype.name}")
    say(f"on {device.device_kind} ({device.platform}), jax {jax.__version__}")
    cells = measure_steps(
        random_params(cfg, config.seed, dtype),
        cfg,
        config.concurrency,
        [parse_policy(name) for name in config.policies],
        forced,
        dtype=dtype,
        command_buffers=config.command_buffers,
        prompt_tokens=config.prompt_tokens,
        max_new_tokens=config.max_new_tokens or 64,
        repetitions=config.repetitions,
        say=say,
    )
    print(cost_table(cells), file=sys.stderr if config.json else sys.stdout, flush=True)
    return {
        "model": config.random_init,
        "layers": len(cfg.layers),
        "vocab": cfg.vocab_size,
        "dtype": dtype.name,
        "weights": "random",
        "forced_acceptance": forced.conditional,
        "prompt_tokens": config.prompt_tokens,
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "cells": [{**_rounded(dataclasses.asdict(cell)), "speedup": round(cell.speedup, 4)} for cell in cells],
        "total_s": round(time.perf_counter() - began, 1),
    }


def cost_table(cells: Sequence[StepCost]) -> str:
    """The cells for people."""
    header = ("buffers", "n", "policy", "k", "step ms", "quartiles", "device", "dispatch", "wait", "host", "launches")
    header += ("loops", "cost", "tok/step", "asked", "x plain", "p1", "p2", "p3", "off script")
    rows = [
        (
            *(c.command_buffers, c.n, c.policy, c.k, c.step_ms, f"{c.step_ms_low:.3f}-{c.step_ms_high:.3f}"),
            *(c.device_ms, c.dispatch_ms, c.wait_ms, c.host_ms, c.launches, c.loops),
            *(c.cost, c.tok_step, c.tok_step_asked, c.speedup, c.p1, c.p2_cond, c.p3_cond, c.off_script),
        )
        for c in cells
    ]
    legend = """
Milliseconds of a step with all n sequences active, medians. device: launched back to back, never waiting for the host.
dispatch: until the program's call returned. wait: from then on, blocked on the device. host: the rest of the step.
cost: of plain's step. x plain: asked tok/step over cost. off script: share of proposals that a flipped near tie spoilt.
"""
    return text_table(header, rows) + legend.rstrip()


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}


def parse(args: Sequence[str] | None = None) -> Config:
    """The command line; every option is a field of `Config`."""
    default = Config()
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=GRAMMAR, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, default=default.model, help="directory of a checkpoint")
    add("--regimes", nargs="+", default=default.regimes, help="prose, tools")
    add("--concurrency", type=int, nargs="+", default=default.concurrency, help="sequences active at once")
    add("--policies", nargs="+", default=default.policies, help="see below; plain is always measured")
    add("--costs", help="table of this model and device, for survival and auto (scripts/measure_cost.py makes one)")
    add("--acceptance", help="p1,p2_cond,... or a trace, for auto")
    add("--prompts", type=int, default=default.prompts, help="prompts a regime, at least the largest concurrency")
    add("--repetitions", type=int, default=default.repetitions)
    add("--context", type=int, default=default.context, help="most tokens of a sequence, prompt included")
    add("--max-new-tokens", type=int, help="of every request [128 for prose, 96 for tools, 64 for random weights]")
    add("--cpu-threads", type=int, help="of XLA [1: more is slower for the shipped model; all for random weights]")
    add("--against", choices=("hf",), help="beside transformers' own generate, one sequence at a time")
    add("--json", action="store_true", help="stdout gets nothing but the last line")
    add("--random-init", choices=PRESETS, help="random weights of this size instead of --model")
    add("--forced-acceptance", default=default.forced_acceptance, help="p1,p2_cond,p3_cond [%(default)s]")
    add("--layers", type=int, help="with --random-init: keep only the first layers")
    add("--vocab", type=int, help="with --random-init: keep only so many tokens")
    add("--dtype", choices=("bfloat16", "float32"), help="of random weights [bfloat16; on a CPU float32]")
    add("--prompt-tokens", type=int, default=default.prompt_tokens, help="of a random prompt [%(default)s]")
    add("--command-buffers", nargs="+", choices=COMMAND_BUFFERS, default=default.command_buffers, help="on a GPU")
    add("--seed", type=int, default=default.seed)
    devices.add_arguments(parser)
    given = vars(parser.parse_args(args))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    several = devices.taken_from(given)
    return Config(**given, devices=several)


if __name__ == "__main__":
    wrong = (BenchError, ConfigError, CostError, MeshError, PolicyError, ProcessError, RequestError, TraceError)
    with devices.ending(*wrong, WeightError):
        main(parse())
