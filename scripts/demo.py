"""The same text in fewer steps: the small model with and without speculation, in a few minutes on two CPU cores.

    python scripts/demo.py            # one answer side by side, a table, a plot; one line of JSON at the end
    python scripts/demo.py --json     # only that line on stdout

The first run fetches the held-out texts; without a network the demo says so and takes prompts of our own.
"""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from atlas_jax.compile_cache import keep_compiled
from atlas_jax.config import ConfigError
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Emission, Request
from atlas_jax.depth.policies import Off, Policy, PolicyError, parse_policy
from atlas_jax.lab.advice import advise
from atlas_jax.lab.bench import build_engine, measure_engine, use_cpu_threads, with_plain
from atlas_jax.lab.cost import CostError
from atlas_jax.lab.prompts import TextStream, load_requests
from atlas_jax.lab.report import console, plot, table, to_json
from atlas_jax.lab.trace import TraceError
from atlas_jax.weights.checkpoint import load_model
from atlas_jax.weights.shards import WeightError
from atlas_jax.weights.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Config:
    """How much to show."""

    model: Path = ROOT / "checkpoints" / "deep"
    out: Path = ROOT / "runs" / "demo"  # where demo.json and demo.png go
    regimes: tuple[str, ...] = ("prose", "tools")
    concurrency: tuple[int, ...] = (1, 8)
    policies: tuple[str, ...] = ("plain", "fixed1", "fixed3", "ladder")
    costs: str | None = None  # a table of scripts/measure_cost.py, for policies that weigh costs (survival, auto)
    acceptance: str | None = None  # p1,p2_cond,... or a trace, for auto; survival begins with it
    prompts: int = 16  # a regime; at least the largest concurrency
    repetitions: int = 3
    context: int = 768  # most tokens of a sequence, prompt included
    max_new_tokens: int | None = None  # of every request; None: 128 for prose, 96 for tools
    cpu_threads: int = 1  # of XLA; more is slower for a model this small
    json: bool = False  # stdout gets nothing but the last line


def main(config: Config) -> dict[str, Any]:
    """Shows one answer twice, prints a table and a last line of JSON, writes both and a plot; returns the JSON."""
    began = time.perf_counter()
    out = console(stderr=config.json)
    say = lambda text, **style: out.print(text, markup=False, highlight=False, **style)
    use_cpu_threads(config.cpu_threads)
    say(keep_compiled().describe(), soft_wrap=True)
    cfg, params = load_model(config.model, allow_missing="head")
    sizes = {"context": config.context / 2, "longest": config.context}
    advice = advise(config.costs, config.acceptance, cfg, config.concurrency, **sizes)
    policies = with_plain([parse_policy(name, advice=advice) for name in config.policies])
    tokenizer = ChatTokenizer.load(config.model).tokenizer
    requests, offline = load_requests(config.regimes, tokenizer, config.prompts, config.max_new_tokens)
    if offline:
        say(f"OFFLINE: {offline}\nThe demo goes on with prompts of our own, not held-out text.\n", style="bold yellow")

    cells = []
    for concurrency in config.concurrency:
        say(f"compiling for concurrency {concurrency} ...")
        engine, seconds = build_engine(params, cfg, concurrency, policies, config.context)
        say(f"compiled in {seconds:.0f} s; from here on nothing is compiled")
        if not cells and len(policies) > 1:
            shown = requests.get("tools") or next(iter(requests.values()))
            side_by_side(engine, policies[-1], shown[0], tokenizer, out)
        cells += measure_engine(engine, params, requests, policies, config.repetitions, warmup_s=seconds, say=say)

    out.print(table(cells))
    for cell in cells:
        if not cell.equal:
            say(f"NOT EQUAL: {cell.regime}, concurrency {cell.concurrency}, {cell.policy}: {cell.note}", style="red")
    result = {
        **to_json(cells),
        "prompts": "own" if offline else "held-out",
        "device": jax.devices()[0].device_kind,
        "compile_s": round(sum({cell.concurrency: cell.warmup_s for cell in cells}.values()), 1),
    }
    plot(cells, config.out / "demo.png")
    result["total_s"] = round(time.perf_counter() - began, 1)
    (config.out / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    say(f"{result['total_s']:.0f} s in all, {result['compile_s']:.0f} of them compiling")
    say(f"written: {config.out / 'demo.json'}\nwritten: {config.out / 'demo.png'}", soft_wrap=True)
    print(json.dumps(result), flush=True)
    return result


def side_by_side(engine: Engine, policy: Policy, request: Request, tokenizer: "Tokenizer", out: "Console") -> None:
    """One answer under plain and under the policy, replayed at the same number of steps per second."""
    from rich.live import Live

    runs: dict[str, list[Emission]] = {}
    for each in (Off(), policy):
        engine.policy = each
        runs[each.name] = list(engine.stream([request]))
    question = tokenizer.decode(list(request.prompt)[-60:]).strip()
    out.print("\nThe end of a prompt:", style="bold")
    out.print(question, markup=False, highlight=False)
    out.print("\nThe answer, at the same pace of steps:", style="bold")
    steps = max(map(len, runs.values()))
    if out.is_terminal:
        with Live(_frame(runs, 0, tokenizer), console=out, refresh_per_second=30) as live:
            for step in range(1, steps + 1):
                live.update(_frame(runs, step, tokenizer))
                time.sleep(0.03)
    else:
        out.print(_frame(runs, steps, tokenizer))
    texts = {tuple(_tokens(emissions)) for emissions in runs.values()}
    out.print("The same tokens.\n" if len(texts) == 1 else "NOT the same tokens; see `equal` below.\n", style="bold")


def _frame(runs: dict[str, list[Emission]], step: int, tokenizer: "Tokenizer") -> "Table":
    """Both answers after `step` steps."""
    from rich.table import Table
    from rich.text import Text

    frame, texts = Table(show_lines=False), []
    for name, emissions in runs.items():
        seen = emissions[:step]
        tokens = list(_tokens(seen))
        rate = len(tokens) / max(len(seen), 1)
        frame.add_column(f"{name}: {len(tokens)} tokens in {len(seen)} steps, {rate:.2f} a step", ratio=1)
        stream = TextStream(tokenizer)
        texts.append(Text("".join(map(stream.feed, tokens))))
    frame.add_row(*texts)
    return frame


def _tokens(emissions: Iterable[Emission]) -> Iterable[int]:
    return (token for emission in emissions for token in emission.tokens)


if __name__ == "__main__":
    import tyro

    try:
        main(tyro.cli(Config, description=__doc__))
    except (ConfigError, CostError, PolicyError, TraceError, WeightError) as error:
        sys.exit(f"error: {error}")
