"""What a reduced draft vocabulary costs in acceptance and saves in time, for the head that the model has.

    python experiments/heads/draft_vocab.py --distilled runs/distilled.jsonl

The map is the most frequent tokens of the base's own answers to training prompts, control and special tokens always in;
the head is not trained anew. Acceptance is that of the real decode loop on held-out prompts, greedy, three drafts.
Speed is that of one sequence beside plain decode, as `scripts/bench_decode.py` measures it, the sizes in turns request
by request. Writes `draft_vocab.json` and prints it as a table and a last line of JSON.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from race import over_repetitions, race, speeds

from atlas_jax.compile_cache import keep_compiled
from atlas_jax.depth.policies import Fixed
from atlas_jax.lab.bench import build_engine, use_cpu_threads, with_plain
from atlas_jax.lab.prompts import load_requests
from atlas_jax.lab.text_table import text_table
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
    regimes: tuple[str, ...] = ("prose", "tools")
    prompts: int = 16  # a regime
    depth: int = 3
    repetitions: int = 3
    context: int = 768  # most tokens of a sequence, prompt included
    out: Path = HERE / "draft_vocab.json"


def main(config: Config) -> dict[str, Any]:
    """Prints the table and the line; returns what the line holds."""
    use_cpu_threads(1)
    print(keep_compiled().describe(), flush=True)
    cfg, params = load_model(config.model)
    if config.head:
        params = heads.load_head(config.head, params, cfg)
    tokenizer = load_tokenizer(config.model / "tokenizer.json")
    requests, offline = load_requests(config.regimes, tokenizer, config.prompts)
    if offline:
        raise SystemExit(offline)
    texts = [text for path in config.distilled for text in read_jsonl(path, cfg.vocab_size)]
    always = sorted({*cfg.eos_ids, *(int(tokenizer.token_to_id(token)) for token in SPECIAL)})
    full = {**params, "mtp": {name: leaf for name, leaf in params["mtp"].items() if not name.startswith("draft_")}}
    entrants = {cfg.vocab_size: full}
    for size in config.sizes:
        ids = frequent_ids(texts, size, cfg.vocab_size, always)
        entrants[size] = {**full, "mtp": {**full["mtp"], "draft_ids": ids}}
    answers = heads.plain_answers(full, cfg, requests)
    found = {size: heads.acceptance(entrant, cfg, requests, config.depth) for size, entrant in entrants.items()}
    engines = {}
    for size, entrant in entrants.items():
        engines[size], seconds = build_engine(entrant, cfg, 1, with_plain([Fixed(config.depth)]), config.context)
        print(f"{size} tokens: compiled in {seconds:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for regime, asked in requests.items():
        cells = race(lambda _: engines, full, regime, asked, config.depth, config.repetitions, print)
        fast = speeds(cells)
        written = np.concatenate([np.array(answer) for answer in answers[regime]])
        for size, entrant in entrants.items():
            covered = np.isin(written, entrant["mtp"]["draft_ids"]).mean() if size != cfg.vocab_size else 1.0
            rates = heads.rates(found[size][regime], config.depth)
            how = {"prompts": config.prompts, "repetitions": config.repetitions}
            rows.append({"regime": regime, "size": size, **how, "covered": round(float(covered), 4), **rates})
            rows[-1] |= over_repetitions(fast[size])
    print(text_table(list(rows[0]), [list(row.values()) for row in rows]))
    before = json.loads(config.out.read_text())["rows"] if config.out.exists() else []
    rows = [row for row in before if row["regime"] not in config.regimes] + rows
    result = {"jax": jax.__version__, "rows": rows}
    config.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
