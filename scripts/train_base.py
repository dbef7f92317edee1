"""Trains the small base model of `checkpoints/`, then a first MTP head on the frozen base.

    python scripts/train_base.py                  # both stages; run it again after an interruption and it goes on
    python scripts/train_base.py --stage head     # the head alone, on the base in --out
    python scripts/train_base.py --stage base --layers 16 --grow checkpoints/small --run runs/deep --out deep

`--grow` starts a deeper base as the trained one, head included, by layers that change nothing at first.
`scripts/train_head.py` then trains the head for acceptance, on the base's own answers.

Runs live in `--run`; the finished model (bfloat16, Hugging Face layout) goes to `--out`.
"""

import json
import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from atlas_jax.config import ConfigError, ModelConfig
from atlas_jax.kernels.backends import choose
from atlas_jax.model.modules import Model
from atlas_jax.train.batches import packed_batch
from atlas_jax.train.corpora import CorpusError, load_prose
from atlas_jax.train.deepen import deepen
from atlas_jax.train.loop import Run, Schedule, train
from atlas_jax.train.losses import agreement, distillation
from atlas_jax.train.objectives import base_loss
from atlas_jax.train.tokens import load_tokenizer, tokenize
from atlas_jax.train.tools_text import load_tools
from atlas_jax.train.unroll import Unroll, from_tokens, head_loss
from atlas_jax.weights.checkpoint import load_model, save_model
from atlas_jax.weights.shards import WeightError

ROOT = Path(__file__).resolve().parents[1]

# The family's real layer pattern and head ratios (Hv / Hk = 2, Hq / Hkv = 2, a quarter of each head rotated).
SMALL = ModelConfig(
    vocab_size=2048,
    hidden_size=192,
    layers=("gdn", "gdn", "gdn", "attention") * 2,  # of which --layers makes more
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    rotary_dim=16,
    rope_theta=10000.0,
    gdn_key_heads=2,
    gdn_value_heads=4,
    gdn_key_dim=32,
    gdn_value_dim=64,
    ffn_size=384,
    tie_embeddings=True,
    max_positions=4096,
    eos_ids=(0, 2),
)

PERIOD = 4  # layers of the pattern


@dataclass(frozen=True)
class Config:
    """What to train, for how long, and where it goes."""

    stage: Literal["base", "head", "both"] = "both"
    layers: int = 8
    grow: Path | None = None  # a trained model to start from, by layers that change nothing at first
    base_steps: int = 1500
    head_steps: int = 400
    head_depth: int = 3  # drafts that the head is unrolled for
    batch: int = 4  # rows of `length` tokens
    length: int = 1024
    tools: float = 0.6  # share of rows that are tool transcripts
    reply_weight: float = 3.0  # of the tokens of assistant replies, against 1 for the rest
    peak: float = 3e-3
    seed: int = 0
    save_every: int = 100
    run: Path = ROOT / "runs" / "small"
    out: Path = ROOT / "checkpoints" / "small"
    tokenizer: Path = ROOT / "checkpoints" / "tokenizer.json"


def main(config: Config) -> dict[str, Any]:
    """Trains the stages asked for, writes the model, and prints a last line of JSON."""
    if config.layers < PERIOD or config.layers % PERIOD:
        raise ConfigError(f"--layers {config.layers}: whole periods of {PERIOD} layers, please")
    kernels = choose()
    print(kernels.describe())
    tokenizer = load_tokenizer(config.tokenizer)
    splits = (load_prose(), load_tools())
    train_sets = {split.regime: tokenize(split, tokenizer) for split in splits}
    held_out = {split.regime: tokenize(split, tokenizer, "held_out") for split in splits}
    batches = lambda step: packed_batch(
        train_sets, config.tools, step, config.batch, config.length, config.seed, config.reply_weight
    )
    cfg = replace(SMALL, layers=SMALL.layers[:PERIOD] * (config.layers // PERIOD))
    if config.grow is None:
        base = Model(cfg, rngs=nnx.Rngs(config.seed)).params()
    else:
        trained, params = load_model(config.grow)
        base, grown = deepen(params, trained, config.layers)
        if grown != cfg:
            raise ConfigError(f"{config.grow} has other sizes than this script's model")
    fresh_head = base.pop("mtp")

    def held_out_means(loss: Any, name: str = "held_out") -> Any:
        """Held-out mean per regime, plain weights, over the same eight batches each time."""
        compiled = jax.jit(loss)

        def evaluate(trained: Any, frozen: Any) -> dict[str, float]:
            result = {}
            for regime, tokens in held_out.items():
                pairs = []
                for step in range(8):
                    mix = float(regime == "tools")
                    batch = packed_batch({regime: tokens}, mix, step, config.batch, config.length, 1, reply_weight=1.0)
                    pairs.append([float(x) for x in compiled(trained, frozen, *batch)])
                total, weight = np.sum(pairs, axis=0)
                result[f"{name}_{regime}"] = round(float(total / weight), 4)
            return result

        return evaluate

    result: dict[str, Any] = {}
    settings = {name: getattr(config, name) for name in ("layers", "batch", "length", "tools", "reply_weight", "seed")}
    if config.stage in ("base", "both"):
        loss = lambda base, frozen, *batch: base_loss(base, cfg, *batch, kernels=kernels)
        evaluate = held_out_means(loss)
        base = train(
            loss,
            base,
            {},
            batches,
            Schedule(config.base_steps, config.peak),
            Run(config.run / "base", config.save_every, settings=settings),
            lambda trained: evaluate(trained, {}),
        )
        result |= {f"base_{k}": v for k, v in evaluate(base, {}).items()}
        save_model(config.out, jax.device_get(base | {"mtp": fresh_head}), cfg)
    if config.stage in ("head", "both"):
        # The base as served, bfloat16 rounding included: the head learns the hiddens that it will see.
        base = load_model(config.out)[1]
        base.pop("mtp")
        base_mark = sum(float(np.abs(np.float64(leaf)).sum()) for leaf in jax.tree.leaves(base))  # another base is told
        settings |= {"head_depth": config.head_depth, "base_mark": base_mark}

        def judged(head: Any, base: Any, *batch: Any, depth: int, measure: Any) -> Any:
            rows = from_tokens(base, cfg, *batch, kernels=kernels)
            return head_loss(base | {"mtp": head}, cfg, rows, how=Unroll(depth), measure=measure)

        loss = partial(judged, depth=config.head_depth, measure=distillation)
        matches = partial(judged, depth=1, measure=agreement)
        losses, agreements = held_out_means(loss), held_out_means(matches, "agreement")
        evaluate = lambda head: losses(head, base) | agreements(head, base)
        head = train(
            loss,
            fresh_head,
            base,
            batches,
            Schedule(config.head_steps, config.peak),
            Run(config.run / "head", config.save_every, settings=settings),
            evaluate,
        )
        result |= {f"head_{k}": v for k, v in evaluate(head).items()}
        save_model(config.out, jax.device_get(base | {"mtp": head}), cfg)
    shutil.copy(config.tokenizer, config.out / "tokenizer.json")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    import tyro

    try:
        main(tyro.cli(Config, description=__doc__))
    except (ConfigError, CorpusError, FloatingPointError, WeightError) as error:
        sys.exit(f"error: {error}")
