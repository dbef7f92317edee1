"""Decoding, replayed without a model: a trace says what is accepted, a cost table how long it takes, a policy how deep.

Events are admissions (with their prefill), steps and departures; the clock is the table's. Several steps share a call
where the engine would let them (`EngineConfig.rounds`). The same trace, seed and policy give the same run. Nothing here
imports JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Literal

import numpy as np

from atlas_jax.depth.interface import Decision, Outcome, Policy, PolicyError, Queued
from atlas_jax.depth.survival import Oracle
from atlas_jax.lab.cost import CostTable
from atlas_jax.lab.trace import Answer, Trace

Truth = Literal["chance", "outcome"]


@dataclasses.dataclass(frozen=True)
class Load:
    """Who asks, and for how long.

    Attributes:
      concurrency: most sequences active at once.
      seconds: simulated time after which the run ends, wherever it is.
      requests: or the number of answers after whose end it ends, drained.
      rate: requests per second of a Poisson process (open loop); None: each end brings the next request (closed loop).
      seed: of arrivals, and of where in the trace the run begins.
    """

    concurrency: int
    seconds: float | None = None
    requests: int | None = None
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; it must be 1 or more")
        if (self.seconds is None) == (self.requests is None):
            raise ValueError("give seconds or requests, and not both")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate is {self.rate}; it must be above 0")


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
      tok_s: emitted tokens per second, prefill and idle time included.
      decode_tok_s: per second of decode steps alone.
      full: tokens and seconds of the decode steps with all of the concurrency active.
      tok_step: tokens per sequence-step.
      p: conditional acceptance per draft, None where none was offered.
      steps: decode steps.
      switches: steps that proposed another depth than the last step at the same width.
      latency: seconds from arrival to the last token, median and 99th percentile; None where nothing ended.
      depths: steps by drafts proposed.
      timeline: `(second, width, proposed, accepted per sequence)` of every step, where it was asked for.
    """

    policy: str
    tok_s: float
    decode_tok_s: float
    full: tuple[int, float]
    tok_step: float
    p: tuple[float | None, ...]
    steps: int
    tokens: int
    seconds: float
    switches: int
    latency: tuple[float, float] | None
    depths: tuple[tuple[int, int], ...]
    timeline: tuple[tuple[float, int, int, float], ...] = ()


class _Active:
    """A sequence: its answer, tokens emitted, drafts queued, drafts of the last step still to be folded."""

    __slots__ = ("answer", "arrived", "at", "drafts", "length", "pending", "prompt", "run")

    def __init__(self, answer: Answer, arrived: float):
        self.answer, self.arrived = answer, arrived
        self.run, self.length, self.prompt = answer.run, len(answer.run), answer.prompt
        self.at = self.drafts = self.pending = 0


def simulate(
    policy: Policy,
    costs: CostTable,
    trace: Trace,
    load: Load,
    *,
    switch_s: float = 0.0,
    truth: Truth = "chance",
    timeline: bool = False,
) -> Result:
    """Run a policy over a trace.

    `switch_s` is charged when a step proposes more than the last one did at the same width: what an engine pays that
    captures or compiles on the way. `truth` "outcome" tells an `Oracle` which queued drafts will be accepted instead of
    how likely each is: a clairvoyant, for scale. Raises `PolicyError` where the trace is not as deep as the policy.
    """
    if policy.max_drafts > trace.depth:
        raise PolicyError(
            f"policy {policy.name} drafts up to {policy.max_drafts}; trace {trace.name} has {trace.depth}"
        )
    rng = np.random.default_rng(load.seed)
    # Seeds begin at different places, but in the same order: regimes come in blocks.
    next_answer = int(rng.integers(len(trace.answers))) if load.seed else 0
    due = 0.0 if load.rate is None else float(rng.exponential(1 / load.rate))
    clock = decode = 0.0
    tokens = sequence_steps = steps = switches = admitted = 0
    histogram = [[0] * (trace.depth + 1) for _ in range(trace.depth + 1)]  # [offered][accepted]
    depths: dict[int, int] = {}
    latencies: list[float] = []
    moments: list[tuple[float, int, int, float]] = []
    active: list[_Active] = []
    left = 0  # steps that the current call may still take
    full_tokens, full_decode = 0, 0.0
    state, last_width, last_depth = policy.start(), 0, 0
    informed, mean_context = policy.needs_log_probs, costs.context_rule == "mean"
    until = math.inf if load.seconds is None else load.seconds
    requests = math.inf if load.requests is None else load.requests

    while clock < until:
        # Admission, between calls: in a closed loop an end, which ends the call, brings the next request.
        while not left and len(active) < load.concurrency and admitted < requests:
            if load.rate is not None and due > clock:
                break
            active.append(_Active(trace.answers[next_answer % len(trace.answers)], clock if load.rate is None else due))
            next_answer, admitted = next_answer + 1, admitted + 1
            clock += costs.prefill * active[-1].prompt
            due += 0.0 if load.rate is None else float(rng.exponential(1 / load.rate))
        if not active:
            if admitted >= requests:
                break
            clock = due
            continue

        n = len(active)
        if informed:
            decision = policy.decide(state, [_queued(a, policy, truth) for a in active])
        else:
            decision = _uniform(policy, state, active)
        propose = decision.propose
        k, rows, context = propose, n, 0
        accepted, ended = [], False
        for a, offered in zip(active, decision.verify, strict=True):
            context = context + a.prompt + a.at if mean_context else max(context, a.prompt + a.at)
            k = max(k, offered, a.pending)
            rows += offered
            good = min(a.run[a.at], offered, a.length - a.at - 1)
            accepted.append(good)
            histogram[offered][good] += 1
            a.pending = good
        shape = (n, k + 1, rows, context / n if mean_context else context, policy.head)
        if left:
            spent = costs.further(*shape)
        else:
            # As the engine: a policy that learns, or prunes, is asked before every step.
            left = 1 if state is not None or policy.ragged else costs.rounds
            spent = costs.one_a_call.seconds(*shape)
        left -= 1
        if last_width == n and propose != last_depth:
            switches += 1
            spent += switch_s * (propose > last_depth)
        last_width, last_depth = n, propose
        clock += spent
        decode += spent
        steps += 1
        depths[propose] = depths.get(propose, 0) + 1
        if state is not None:
            told = [a.answer.log_probs[a.at][: a.drafts] if informed else () for a in active]
            state = policy.observe(state, Outcome(n, decision.verify, tuple(accepted), tuple(told)))
        for a in active:
            a.at += a.pending + 1
            a.drafts = k
            ended = ended or a.at >= a.length
        if ended:
            left = 0
            latencies += [clock - a.arrived for a in active if a.at >= a.length]
            active = [a for a in active if a.at < a.length]
        emitted = sum(accepted) + n
        tokens += emitted
        if n == load.concurrency:
            full_tokens, full_decode = full_tokens + emitted, full_decode + spent
        sequence_steps += n
        if timeline:
            moments.append((clock, n, propose, emitted / n - 1))

    if not tokens:
        raise ValueError("no step was simulated: give more seconds, or a higher rate")
    at_least = lambda offered, good: sum(sum(row[good:]) for row in histogram[offered:])
    reached = [(at_least(j, j), at_least(j, j - 1)) for j in range(1, trace.depth + 1)]
    return Result(
        policy=policy.name,
        tok_s=tokens / clock,
        decode_tok_s=tokens / decode,
        full=(full_tokens, full_decode),
        tok_step=tokens / sequence_steps,
        p=tuple(good / whole if whole else None for good, whole in reached),
        steps=steps,
        tokens=tokens,
        seconds=clock,
        switches=switches,
        latency=tuple(np.percentile(latencies, (50, 99)).tolist()) if latencies else None,
        depths=tuple(sorted(depths.items())),
        timeline=tuple(moments),
    )


def _uniform(policy: Policy, state: Any, active: Sequence[_Active]) -> Decision:
    """The decision of a policy that asks for no log-probabilities, and so for one depth, from one question."""
    room = [a.length - a.at - 1 for a in active]
    depth = policy.decide(state, (Queued(policy.max_drafts, (), 0, max(room)),) * len(active)).propose
    return Decision(tuple(map(min, [a.drafts for a in active], room, repeat(depth))), depth)


def _queued(a: _Active, policy: Policy, truth: Truth) -> Queued:
    answer, at = a.answer, a.at
    drafts, most = min(a.drafts, len(answer.truth[at])), a.length - at - 1
    if not isinstance(policy, Oracle):
        return Queued(drafts, answer.log_probs[at][:drafts], a.prompt + at, most)
    if truth == "chance":
        known = tuple(map(math.log, answer.truth[at][:drafts]))
    else:
        known = tuple(0.0 if j < a.run[at] else -math.inf for j in range(drafts))
    return Queued(drafts, known, a.prompt + at, most, tuple(map(math.log, answer.expected[at][: policy.max_drafts])))


def regret(result: Result, oracle: Result) -> float:
    """Share of the oracle's throughput that a policy leaves; negative where it does better."""
    return 1 - result.tok_s / oracle.tok_s


def summary(result: Result, regime: str, load: Load, oracle: Result) -> dict[str, Any]:
    """What `scripts/simulate.py` ends with."""
    return {
        "policy": result.policy,
        "regime": regime,
        "concurrency": load.concurrency,
        "tok_s": round(result.tok_s, 4),
        "tok_step": round(result.tok_step, 4),
        "regret_to_oracle": round(regret(result, oracle), 5),
        "switches": result.switches,
        "seed": load.seed,
    }
