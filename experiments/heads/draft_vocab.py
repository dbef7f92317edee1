"""What a reduced draft vocabulary costs in acceptance and saves in time, for the head that the model has.

    python experiments/heads/draft_vocab.py --distilled runs/distilled.jsonl

The map is the most frequent tokens of the base's own answers to training prompts, control and special tokens always in;
the head is not trained anew. Acceptance is that of the real decode loop on held-out prompts, greedy, three drafts, one
sequence, the sizes interleaved prompt by prompt; the cost is a step's time over that of plain decode. Writes
`draft_vocab.json` and prints it as a table and a last line of JSON.
"""

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.engine import Engine, EngineConfig
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.depth.policies import Fixed, Off
from atlas_jax.lab.bench import use_cpu_threads
from atlas_jax.lab.prompts import load_requests
from atlas_jax.train import heads
from atlas_jax.train.texts import frequent_ids, read_jsonl
from atlas_jax.train.tokens import SPECIAL, load_tokenizer
from atlas_jax.weights.checkpoint import load_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Config:
    """Sizes, and how much is decoded."""

    distilled: tuple[Path, ...]  # JSONL of scripts/self_distill.py
    model: Path = ROOT / "checkpoints" / "small"
    head: Path | None = None  # another one than the model's
    sizes: tuple[int, ...] = (256, 512, 768, 1024, 1536)  # and all
    prompts: int = 16  # a regime
    depth: int = 3
    out: Path = HERE / "draft_vocab.json"


def main(config: Config) -> dict[str, Any]:
    """Prints the table and the line; returns what the line holds."""
    use_cpu_threads(1)
    cfg, params = load_model(config.model)
    if config.head:
        params = heads.load_head(config.head, params, cfg)
    tokenizer = load_tokenizer(config.model / "tokenizer.json")
    requests, offline = load_requests(("prose", "tools"), tokenizer, config.prompts)
    if offline:
        raise SystemExit(offline)
    texts = [text for path in config.distilled for text in read_jsonl(path, cfg.vocab_size)]
    always = sorted({*cfg.eos_ids, *(int(tokenizer.token_to_id(token)) for token in SPECIAL)})
    full = {**params, "mtp": {name: leaf for name, leaf in params["mtp"].items() if not name.startswith("draft_")}}
    entrants = {cfg.vocab_size: full}
    for size in config.sizes:
        ids = frequent_ids(texts, size, cfg.vocab_size, always)
        entrants[size] = {**full, "mtp": {**full["mtp"], "draft_ids": ids}}

    options = EngineConfig(1, 768, config.depth, BucketConfig(n=(1,), k=tuple(range(1, config.depth + 2))))
    engines = {size: Engine(entrant, cfg, options, Fixed(config.depth)) for size, entrant in entrants.items()}
    for engine in engines.values():
        engine.warmup([Off(), Fixed(config.depth)])
    rows = []
    for regime, asked in requests.items():
        logs: dict[int, Acceptance] = defaultdict(Acceptance)
        costs: dict[int, list[float]] = defaultdict(list)
        answers: dict[tuple[int, int], Any] = {}
        for i, request in enumerate(asked):
            plain = seconds_a_step(engines[cfg.vocab_size], Off(), request)[0]
            for size, engine in engines.items():
                spent, completion = seconds_a_step(engine, Fixed(config.depth), request)
                costs[size].append(spent / plain)
                logs[size].merge(completion.acceptance)
                answers[size, i] = completion.tokens
        for size, log in logs.items():
            equal = all(answers[size, i] == answers[cfg.vocab_size, i] for i in range(len(asked)))
            shared = np.isin(
                [token for i in range(len(asked)) for token in answers[size, i]],
                entrants[size]["mtp"].get("draft_ids", np.arange(cfg.vocab_size)),
            )
            cost = statistics.median(costs[size])
            figures = heads.rates(log, config.depth)
            tok_step = figures["tok_step"] or 0.0
            rows.append(
                {
                    **{"regime": regime, "size": size, "covered": round(float(shared.mean()), 4), "equal": equal},
                    **figures,
                    **{"step_cost": round(cost, 3), "tok_step_over_cost": round(tok_step / cost, 3)},
                }
            )
    names = ("regime", "size", "covered", "p1", "p2_cond", "p3_cond", "tok_step", "step_cost", "tok_step_over_cost")
    print(*names, "equal", sep="\t")
    for row in rows:
        print(*(row[name] for name in (*names, "equal")), sep="\t")
    config.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps({"rows": rows}), flush=True)
    return {"rows": rows}


def seconds_a_step(engine: Engine, policy: Any, request: Any) -> tuple[float, Any]:
    """Seconds of one decode step, host work included, and the completion."""
    engine.policy = policy
    engine.reset_telemetry()
    (completion,) = engine.generate([request])
    steps = engine.telemetry.steps[1]
    return steps.seconds / steps.count, completion


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
