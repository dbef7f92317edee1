"""Measures the default head and the single-step one by the real decode loop on held-out prompts, and compares them.

    python scripts/eval_head.py                    # table, and one line of JSON at the end
    python scripts/eval_head.py --json             # only that line on stdout
    python scripts/eval_head.py --write-cards      # also card.json beside each head

Greedy, three drafts. Each seed draws its own held-out prompts; figures are means over the seeds, `sd` their spread.
`bound` is what the default head would reach if it were handed the trunk's true hidden at every depth; `share_of_bound`
is how much of the way from the single-step head to there it has gone.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_jax.compile_cache import keep_compiled
from atlas_jax.config import ConfigError, ModelConfig
from atlas_jax.decode.engine import Request
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.depth.policies import PolicyError
from atlas_jax.lab.bench import use_cpu_threads
from atlas_jax.lab.prompts import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, own_prompts
from atlas_jax.lab.report import console
from atlas_jax.train import heads, hiddens
from atlas_jax.train.corpora import CorpusError, load_prose
from atlas_jax.train.replay import replay
from atlas_jax.train.texts import Text
from atlas_jax.train.tokens import prompts
from atlas_jax.train.tools_text import load_tools
from atlas_jax.train.unroll import Unroll
from atlas_jax.weights.checkpoint import load_model
from atlas_jax.weights.shards import WeightError
from atlas_jax.weights.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Which heads, and on how many prompts."""

    model: Path = ROOT / "checkpoints" / "small"  # the base and the default head
    single_step: Path = ROOT / "checkpoints" / "heads" / "single-step"
    head: Path | None = None  # another head in place of the default one
    prompts: int = 24  # a regime and seed
    seeds: int = 3
    depth: int = 3
    slots: int = 8
    context: int = 768
    cpu_threads: int = 1  # of XLA; more is slower for a model this small
    write_cards: bool = False
    json: bool = False  # stdout gets nothing but the last line


def main(config: Config) -> dict[str, Any]:
    """Prints a table and a last line of JSON; returns what that line holds."""
    log, out = console(stderr=True), console(stderr=config.json)
    use_cpu_threads(config.cpu_threads)
    log.print(keep_compiled().describe(), highlight=False, markup=False, soft_wrap=True)
    cfg, params = load_model(config.model, allow_missing="head")
    if config.head:
        params = heads.load_head(config.head, params, cfg)
    tokenizer = ChatTokenizer.load(config.model).tokenizer
    drawn, offline = draw(tokenizer, config)
    if offline:
        log.print(f"The held-out texts cannot be had: {offline} Measuring on our own prompts.", markup=False)
    requests = {f"{regime} {seed}": asked for seed, by in enumerate(drawn) for regime, asked in by.items()}

    entrants = {"default": params, "single_step": heads.load_head(config.single_step, params, cfg)}
    found: dict[str, dict[str, Acceptance]] = {}
    for name, entrant in entrants.items():
        log.print(f"decoding with the {name} head ...")
        found[name] = heads.acceptance(entrant, cfg, requests, config.depth, config.slots, config.context)
    log.print("the bound: the true hidden at every depth ...")
    found["bound"] = bound(params, cfg, requests, config)
    regimes = (*MAX_NEW_TOKENS, "pooled")
    figures = {name: {regime: over_seeds(logs, regime, config) for regime in regimes} for name, logs in found.items()}

    accepted = {name: {regime: f["mean_accepted"] for regime, f in by.items()} for name, by in figures.items()}
    result: dict[str, Any] = {
        "heads": {name: figures[name] for name in entrants},
        "bound": figures["bound"],
        "lift_over_single_step": {
            regime: round(accepted["default"][regime] / accepted["single_step"][regime] - 1, 4) for regime in regimes
        },
        "share_of_bound": {
            regime: share(*(accepted[name][regime] for name in ("single_step", "default", "bound")))
            for regime in regimes
        },
        "base": hiddens.base_mark(params),
        "prompts": "own" if offline else "held-out",
        "prompts_a_regime_and_seed": config.prompts,
        "seeds": len(drawn),
        "depth": config.depth,
    }
    out.print(table(result))
    if config.write_cards:
        if offline:
            raise SystemExit("cards tell of held-out prompts, and those cannot be had")
        write_cards(result, config)
    print(json.dumps(result), flush=True)
    return result


def draw(tokenizer: Any, config: Config) -> tuple[list[dict[str, list[Request]]], str | None]:
    """Requests of each seed by regime; own prompts, once, where the held-out texts can't be had; then also why not."""
    request = lambda regime, ids: Request(ids, MAX_NEW_TOKENS[regime])
    try:
        splits = (load_prose(), load_tools())
    except CorpusError as error:
        own = own_prompts(tokenizer)
        return [{r: [request(r, ids) for ids in own[r][: config.prompts]] for r in MAX_NEW_TOKENS}], str(error)
    draws = []
    for seed in range(config.seeds):
        by = {}
        for split in splits:
            cut = prompts(split, tokenizer, config.prompts, max_tokens=MAX_PROMPT_TOKENS, seed=seed)
            by[split.regime] = [request(split.regime, prompt.ids) for prompt in cut]
        draws.append(by)
    return draws, None


def bound(
    params: Any, cfg: ModelConfig, requests: Mapping[str, Sequence[Request]], config: Config
) -> dict[str, Acceptance]:
    """Replayed on the base's own answers: the decode loop has no true hiddens to hand out before they are computed."""
    answers = heads.plain_answers(params, cfg, requests, config.slots, config.context)
    texts = [
        Text.answer(request.prompt, reply, name)
        for name, asked in requests.items()
        for request, reply in zip(asked, answers[name], strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        cache = hiddens.cache_hiddens(params, cfg, texts, Path(folder))
        return replay(params, cfg, cache, Unroll(config.depth, hidden="true"))


def over_seeds(logs: Mapping[str, Acceptance], regime: str, config: Config) -> Figures:
    """Means over the seeds, and `sd`."""
    by_seed: dict[str, dict[str, Acceptance]] = {}
    for name, counts in logs.items():
        kind, seed = name.split()
        if regime in (kind, "pooled"):
            by_seed.setdefault(seed, {})[kind] = counts
    each = [heads.rates(heads.pooled(counts), config.depth) for counts in by_seed.values()]
    means = {name: round(statistics.fmean(rates[name] or 0.0 for rates in each), 4) for name in each[0]}
    spread = statistics.stdev if len(each) > 1 else lambda values: 0.0
    return {**means, "sd": {name: round(spread([rates[name] or 0.0 for rates in each]), 4) for name in each[0]}}


def share(low: float, value: float, high: float) -> float | None:
    """How much of the way from `low` to `high`; None where there is no way."""
    return round((value - low) / (high - low), 4) if high > low else None


def table(result: dict[str, Any]) -> Any:
    """The figures for people."""
    from rich.table import Table

    names = ("u1", "u2", "u3", "p1", "p2_cond", "p3_cond", "mean_accepted", "tok_step")
    made = Table("regime", "head", *names, "lift", "of bound")
    for regime in result["bound"]:
        for name, figures in (*result["heads"].items(), ("bound", result["bound"])):
            cells = [f"{figures[regime][key]:.3f}" for key in names]
            lift, part = result["lift_over_single_step"][regime], result["share_of_bound"][regime]
            more = (f"{lift:+.1%}", "-" if part is None else f"{part:.0%}") if name == "default" else ("", "")
            made.add_row(regime, name, *cells, *more)
    return made


def write_cards(result: dict[str, Any], config: Config) -> None:
    """`card.json` beside each head: its figures by regime, and how they were come by."""
    kept = ("base", "prompts", "prompts_a_regime_and_seed", "seeds", "depth")
    compared = ("bound", "lift_over_single_step", "share_of_bound")
    for name, folder in (("default", config.head or config.model), ("single_step", config.single_step)):
        card = {**result["heads"][name], "measured": {key: result[key] for key in kept}}
        if (folder / "head.json").exists():
            card["training"] = json.loads((folder / "head.json").read_text())
        if name == "default":
            card |= {key: result[key] for key in compared}
        (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")


if __name__ == "__main__":
    import tyro

    try:
        main(tyro.cli(Config, description=__doc__))
    except (ConfigError, heads.HeadError, PolicyError, WeightError) as error:
        sys.exit(f"error: {error}")
