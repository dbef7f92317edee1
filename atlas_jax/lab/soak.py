"""Random traffic for a long run: arrivals, lengths, options, cancels, depth switches; an oracle judges it all."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from atlas_jax.config import ModelConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Completion, Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.decode.sequence import random_key
from atlas_jax.depth.policies import Off, Policy
from atlas_jax.lab.oracle import Oracle
from atlas_jax.model.mixers import Params
from atlas_jax.model.modules import Model


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a run is made of.

    Attributes:
      requests: in all.
      prompt, answer: most tokens of each; lengths are drawn evenly from 1 on.
      cancels: share of requests that are cancelled at a random moment.
      switches: share of steps before which the policy changes.
      burst: most requests that arrive between two steps.
      sampled: share of requests with a temperature; half as many have penalties, bias, masks and the rest.
    """

    requests: int
    prompt: int = 40
    answer: int = 24
    cancels: float = 0.05
    switches: float = 0.1
    burst: int = 6
    sampled: float = 0.5
    seed: int = 0


@dataclasses.dataclass
class Soak:
    """What a run came to: `equal` are the answers without any divergence, `violations` requests that ended in error."""

    requests: int = 0
    equal: int = 0
    excused: int = 0
    unexcused: int = 0
    violations: int = 0
    cancelled: int = 0
    plain_checked: int = 0
    plain_different: int = 0
    tokens: int = 0
    tok_step: float = 0.0
    compiles_after_warmup: int = 0
    rss_start_mb: float = 0.0
    rss_end_mb: float = 0.0
    seconds: float = 0.0
    first_wrong: str = ""


def random_request(
    rng: np.random.Generator, cfg: ModelConfig, traffic: Traffic, texts: Sequence[Sequence[int]]
) -> Request:
    """A request with random length and options; its prompt is a piece of one of the texts."""
    text = texts[int(rng.integers(len(texts)))]
    length = int(rng.integers(1, traffic.prompt + 1))
    start = int(rng.integers(0, max(1, len(text) - length)))
    coin: Callable[[float], bool] = lambda p: bool(rng.random() < p)
    options: dict[str, Any] = {}
    if coin(traffic.sampled):
        options |= {"temperature": float(rng.uniform(0.3, 1.5))}
        options |= {"top_k": int(rng.integers(1, 60))} if coin(0.3) else {}
        options |= {"top_p": float(rng.uniform(0.3, 1.0))} if coin(0.3) else {}
        options |= {"min_p": float(rng.uniform(0.0, 0.2))} if coin(0.3) else {}
    if coin(traffic.sampled / 2):
        options |= {"presence_penalty": float(rng.uniform(-1, 2))} if coin(0.5) else {}
        options |= {"frequency_penalty": float(rng.uniform(-0.5, 1))} if coin(0.5) else {}
        options |= {"repetition_penalty": float(rng.uniform(0.8, 1.5))} if coin(0.5) else {}
        if coin(0.3):
            options |= {"bias": {int(t): float(rng.normal(0, 4)) for t in rng.integers(0, cfg.vocab_size, 3)}}
        if coin(0.2):
            table = rng.random(cfg.vocab_size) < 0.7
            table[int(rng.integers(cfg.vocab_size))] = True
            options |= {"allowed": table}
    return Request(
        tuple(text[start : start + length]),
        int(rng.integers(1, traffic.answer + 1)),
        Sampling(**options, seed=int(rng.integers(2**40)) if coin(0.5) else None),
        ignore_eos=coin(0.3),
        stop_ids=tuple(rng.integers(0, cfg.vocab_size, 2).tolist()) if coin(0.2) else (),
        max_drafts=int(rng.integers(0, 3)) if coin(0.1) else None,
        log_probs=coin(0.1),
        prefix=length // 2 if coin(0.1) else 0,
        label=("greedy", "sampled")["temperature" in options],
    )


def soak(
    engine: Engine,
    oracle: Oracle,
    policies: Sequence[Policy],
    traffic: Traffic,
    texts: Sequence[Sequence[int]],
    say: Callable[[Soak], None] = lambda found: None,
) -> Soak:
    """Run the traffic through a warmed-up engine; policies are switched in mid-flight. `say` hears progress.

    Answers are judged as they come, so that memory does not grow with the run, and every fortieth is decoded again,
    plainly and alone.
    """
    rng = np.random.default_rng(traffic.seed)
    found, began = Soak(rss_start_mb=rss_mb()), time.perf_counter()
    open_requests: dict[int, Request] = {}
    cancelled: set[int] = set()
    finished: list[tuple[int, Request, Completion]] = []
    engine.reset_telemetry()

    def settle() -> None:
        """Judge what has finished."""
        keys = [random_key(request.sampling.seed, engine.config.seed, id) for id, request, _ in finished]
        verdicts = oracle.judge([r for _, r, _ in finished], [c for _, _, c in finished], keys)
        for (id, request, done), verdict in zip(finished, verdicts, strict=True):
            found.requests += 1
            found.tokens += len(done.tokens)
            found.excused += verdict.excused
            found.unexcused += verdict.unexcused + bool(verdict.wrong and done.finished != "error")
            found.violations += done.finished == "error"
            found.cancelled += done.finished == "cancelled"
            found.equal += not (verdict.excused or verdict.unexcused or verdict.wrong)
            if (verdict.unexcused or verdict.wrong) and not found.first_wrong:
                found.first_wrong = f"request {id}: {verdict} {request} {done.tokens}"
        finished.clear()
        say(found)

    submitted = 0
    while submitted < traffic.requests or not engine.idle:
        for _ in range(int(rng.integers(0, traffic.burst + 1))):
            if submitted < traffic.requests and len(open_requests) < engine.config.queue:
                request = random_request(rng, engine.cfg, traffic, texts)
                id = engine.submit(request)
                open_requests[id], submitted = request, submitted + 1
        if rng.random() < traffic.switches:
            engine.policy = policies[int(rng.integers(len(policies)))]
        if open_requests and rng.random() < traffic.cancels:
            id = int(rng.choice(list(open_requests)))
            if engine.cancel(id):
                cancelled.add(id)
        ended = {emission.request for emission in engine.step() if emission.finished} | cancelled
        for id in ended:
            finished.append((id, open_requests.pop(id), engine.completion(id)))
        cancelled.clear()
        if len(finished) >= 200:
            settle()
    settle()
    found.tok_step = engine.telemetry.total().tok_step or 0.0
    _again_plainly(engine, traffic, texts, found)
    found.compiles_after_warmup = engine.compiles_after_warmup
    found.rss_end_mb, found.seconds = rss_mb(), time.perf_counter() - began
    return found


def _again_plainly(engine: Engine, traffic: Traffic, texts: Sequence[Sequence[int]], found: Soak) -> None:
    """A sample of the same kind of requests: speculative, all at once, against plain, one at a time."""
    rng = np.random.default_rng(traffic.seed + 1)
    sample = [random_request(rng, engine.cfg, traffic, texts) for _ in range(max(8, traffic.requests // 100))]
    sample = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, seed=i)) for i, r in enumerate(sample)]
    together = engine.generate(sample)
    engine.policy = Off()
    for request, done in zip(sample, together, strict=True):
        (alone,) = engine.generate([request])
        found.plain_checked += 1
        found.plain_different += alone.tokens != done.tokens


def tiny_model(seed: int) -> tuple[ModelConfig, Params]:
    """Two layers with random weights, float64: picks vary, states matter, and no rounding can hide a mistake."""
    cfg = ModelConfig(
        vocab_size=61,
        hidden_size=24,
        layers=("gdn", "attention"),
        q_heads=4,
        kv_heads=2,
        head_dim=8,
        rotary_dim=4,
        rope_theta=1e4,
        gdn_key_heads=2,
        gdn_value_heads=4,
        gdn_key_dim=8,
        gdn_value_dim=4,
        ffn_size=32,
        eos_ids=(60,),
    )
    rng = np.random.default_rng(seed)
    wider = lambda x: np.asarray(x, np.float64) + rng.standard_normal(x.shape) * (0.3 if x.ndim > 1 else 0.1)
    return cfg, jax.tree.map(wider, Model(cfg, rngs=nnx.Rngs(seed)).params())


def rss_mb() -> float:
    """Resident memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20
