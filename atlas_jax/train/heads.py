"""Draft heads as things of their own: fresh ones, files with nothing but a head, the decode loop's verdict on them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from atlas_jax.config import ModelConfig
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Completion, Request
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.depth.policies import Fixed, Off, Policy
from atlas_jax.model.mixers import Params
from atlas_jax.model.modules import MtpHead
from atlas_jax.model.mtp import check_draft_ids
from atlas_jax.train.hiddens import base_mark
from atlas_jax.weights import checkpoint


class HeadError(ValueError):
    """A head that doesn't belong to this base or is no head; the message says which and why."""


def fresh_head(cfg: ModelConfig, seed: int = 0) -> Params:
    """A new head, float32: for a base that came without one, or to start over."""
    return nnx.to_pure_dict(nnx.state(MtpHead(cfg, rngs=nnx.Rngs(seed)), nnx.Param))


def save_head(
    directory: Path, params: Params, cfg: ModelConfig, facts: Mapping[str, Any] = {}, dtype: Any = ml_dtypes.bfloat16
) -> None:
    """Write `params["mtp"]` under its original `mtp.*` names, and `head.json`: the base's digest and `facts`.

    The folder appears whole or not at all; one that is there already is replaced.
    """
    head = {name: leaf for name, leaf in params["mtp"].items() if name != "draft_head"}
    if "draft_ids" in head:
        check_draft_ids(head["draft_ids"], cfg)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as folder:
        part, old = Path(folder) / "new", Path(folder) / "old"
        checkpoint.save_head(part, head, cfg, dtype)
        (part / "head.json").write_text(json.dumps({"base": base_mark(params), **facts}, indent=1) + "\n")
        if directory.exists():
            os.replace(directory, old)
        os.replace(part, directory)


def load_head(directory: Path, params: Params, cfg: ModelConfig, dtype: Any = np.float32) -> Params:
    """`params` with the head in `directory` in place of its own. Raises `HeadError` for the head of another base."""
    facts = directory / "head.json"
    if not facts.is_file():
        raise HeadError(f"{directory} holds no head: it has no head.json")
    made_for, mark = json.loads(facts.read_text())["base"], base_mark(params)
    if made_for != mark:
        raise HeadError(f"{directory} was trained on the base {made_for}, and this one is {mark}: train it anew")
    head = checkpoint.load_head(directory, dtype)[1]
    if "draft_ids" in head:
        check_draft_ids(head["draft_ids"], cfg)
    return {**params, "mtp": head}


def install_head(model: Path, head: Path) -> None:
    """Put the head in folder `head` into the model directory, in one file or in shards: see `checkpoint.install`.

    Raises `HeadError` for the head of another base.
    """
    cfg, params = checkpoint.load_model(model, allow_missing="head")
    load_head(head, params, cfg)  # refuses what doesn't belong here
    checkpoint.install(model, head)


def decode(
    params: Params,
    cfg: ModelConfig,
    requests: Mapping[str, Sequence[Request]],
    policy: Policy,
    slots: int,
    context: int,
) -> dict[str, list[Completion]]:
    """Answers by the real decode loop, regime by regime; in one bucket, since speed is of no interest here."""
    buckets = BucketConfig(n=(slots,), k=(policy.max_drafts + 1,))
    engine = Engine(params, cfg, EngineConfig(slots, context, policy.max_drafts, buckets), policy)
    return {regime: engine.generate(asked) for regime, asked in requests.items()}


def acceptance(
    params: Params,
    cfg: ModelConfig,
    requests: Mapping[str, Sequence[Request]],
    depth: int = 3,
    slots: int = 8,
    context: int = 768,
) -> dict[str, Acceptance]:
    """What the drafts were worth in the real decode loop, by regime."""
    result = {}
    for regime, completions in decode(params, cfg, requests, Fixed(depth), slots, context).items():
        result[regime] = Acceptance()
        for completion in completions:
            result[regime].merge(completion.acceptance)
    return result


def plain_answers(
    params: Params, cfg: ModelConfig, requests: Mapping[str, Sequence[Request]], slots: int = 8, context: int = 768
) -> dict[str, list[tuple[int, ...]]]:
    """The base's own answers, which no head changes."""
    found = decode(params, cfg, requests, Off(), slots, context)
    return {regime: [completion.tokens for completion in completions] for regime, completions in found.items()}


def pooled(logs: Mapping[str, Acceptance]) -> Acceptance:
    """All regimes' counts together."""
    total = Acceptance()
    for log in logs.values():
        total.merge(log)
    return total


def rates(log: Acceptance, depth: int = 3) -> dict[str, float | None]:
    """`{u1.., p1, p2_cond.., mean_accepted, tok_step}`; accepted drafts are averaged over steps that offered any."""
    found = {f"u{j}": log.unconditional(j) for j in range(1, depth + 1)}
    found |= {"p1" if j == 1 else f"p{j}_cond": log.conditional(j) for j in range(1, depth + 1)}
    offering = log.count(1, 0)
    found["mean_accepted"] = (log.tokens - log.steps) / offering if offering else None
    found["tok_step"] = log.tok_step
    return {name: None if value is None else round(value, 4) for name, value in found.items()}


def cast(tree: Any, dtype: Any) -> Any:
    """Floating leaves in `dtype`: masters stay float32 where only the computation is narrower."""
    narrow = lambda x: x.astype(dtype) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else x
    return jax.tree.map(narrow, tree)
