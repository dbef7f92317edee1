"""What speculation gains, measured: each policy beside plain decode, in one process, on the same requests.

A speed is claimed only where the tokens are plain's own. The repetitions of the policies are interleaved, so that a
machine that slows down slows all of them, and every ratio is taken within one repetition.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.depth.policies import Off, Policy
from atlas_jax.model.mixers import Params
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full
from atlas_jax.sharding import Mesh

TIE_BOUND = 1e-4  # a divergence at a smaller gap between plain's two best logits is rounding (float32)
MAX_EXCUSED_RATE = 1e-4  # of compared tokens; more than that is no rounding any more
ROUNDS = 8  # most steps in one call: a call costs as much as a step of a small model, and plain is to be at its best
PREFILL = (32, 64, 128, 256)  # a CPU gains nothing beyond, and pays for what it pads
SCORING_WIDTH = 128  # rows of the forward that settles a divergence are padded to a multiple

Tokens = Sequence[int]
Gap = Callable[[int, int, int], float]  # (request, position in its answer, the other token) -> logits


class BenchError(ValueError):
    """A measurement that would mean nothing; the message says why."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One policy in one regime at one concurrency, against plain decode.

    Attributes:
      tok_s: emitted tokens per second of decode steps, host work included, prefill apart; median over repetitions.
        None where the tokens are not plain's, and so are the ratios.
      ratio_to_plain: of tok_s, within a repetition; median, with `ratio_min` and `ratio_max` over the repetitions.
      tok_step: tokens per sequence-step.
      p1, p2_cond, p3_cond: acceptance of draft j where those before it were accepted; None where none was offered.
      step_cost: seconds of a step at full width over those of plain's; median over repetitions.
      equal: the same tokens as plain's first repetition, but for excused near ties (and those rarer than 1 in 10,000).
      excused, unexcused: divergences at a near tie, and others; over all repetitions.
      compared: tokens that were compared, over all repetitions.
      compiles_after_warmup: programs compiled while this cell was measured.
      tokens: emitted, over all repetitions.
      prefill_s: seconds of prefill in a repetition, median.
      warmup_s: seconds it took to compile all programs of this concurrency, shared by its cells.
      note: why `equal` is false, else empty.
    """

    regime: str
    concurrency: int
    policy: str
    tok_s: float | None
    ratio_to_plain: float | None
    ratio_min: float | None
    ratio_max: float | None
    tok_step: float
    p1: float | None
    p2_cond: float | None
    p3_cond: float | None
    step_cost: float
    equal: bool
    excused: int
    unexcused: int
    compared: int
    compiles_after_warmup: int
    tokens: int
    repetitions: int
    prefill_s: float
    warmup_s: float
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """One pass over the requests. `repetition` -1 is the discarded first one: only its compilations count.

    Seconds: `decode_s` of all steps, `full_step_s` of one step at full width (mean), `prefill_s` of all prompts.
    """

    policy: str
    repetition: int
    answers: tuple[tuple[int, ...], ...]
    decode_s: float
    full_step_s: float
    prefill_s: float
    acceptance: Acceptance
    compiles: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def tok_s(self) -> float:
        return self.tokens / self.decode_s


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Tokens compared and divergences found; a request is compared up to and including its first divergence."""

    compared: int = 0
    excused: int = 0
    unexcused: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.compared + other.compared, self.excused + other.excused, self.unexcused + other.unexcused
        )

    @property
    def note(self) -> str:
        """Why this is not equality, or nothing."""
        if self.unexcused:
            return f"{self.unexcused} divergences that no near tie excuses"
        if self.excused > MAX_EXCUSED_RATE * self.compared:
            return f"{self.excused} near ties in {self.compared} tokens, more than 1 in {1 / MAX_EXCUSED_RATE:,.0f}"
        return ""


def compare(plain: Sequence[Tokens], other: Sequence[Tokens], gap: Gap) -> Comparison:
    """Compare answers request by request. Where one ends and the other goes on, nothing is excused."""
    found = Comparison()
    for request, (mine, theirs) in enumerate(zip(plain, other, strict=True)):
        shared = min(len(mine), len(theirs))
        at = next((i for i in range(shared) if mine[i] != theirs[i]), shared)
        if at < shared:
            excused = gap(request, at, theirs[at]) < TIE_BOUND
            found += Comparison(at + 1, int(excused), int(not excused))
        else:
            found += Comparison(shared, 0, int(len(mine) != len(theirs)))
    return found


def near_tie(params: Params, cfg: ModelConfig, requests: Sequence[Request], answers: Sequence[Tokens]) -> Gap:
    """How far the two tokens of a divergence lie below the best score, by a forward over plain's own text.

    The larger of their two distances, in logits: at least the gap between the two best tokens, and large if either
    token was never in question.
    """

    @jax.jit
    def scores(params: Params, tokens: jax.Array, row: jax.Array) -> jax.Array:
        hidden, _ = trunk(params, cfg, tokens, Full(jnp.arange(tokens.shape[1])[None]))
        return logits(params, hidden[0, row])

    device_params = functools.cache(lambda: jax.device_put(params))

    @functools.cache
    def gap(request: int, at: int, other: int) -> float:
        text = [*requests[request].prompt, *answers[request][:at]]
        padded = np.zeros((1, -(-len(text) // SCORING_WIDTH) * SCORING_WIDTH), np.int32)
        padded[0, : len(text)] = text  # causal: what follows is never seen
        found = np.asarray(scores(device_params(), padded, np.int32(len(text) - 1)))
        return float(found.max() - min(found[answers[request][at]], found[other]))

    return gap


def use_cpu_threads(count: int) -> None:
    """Let XLA's CPU backend, which must not have started yet, run programs on `count` threads.

    A decode step of a small model is hundreds of kernels of a microsecond or two; handing them between threads costs
    more than it gains, for plain decode most of all. XLA sizes its pool by the cores that the process may use when the
    backend starts. Raises `BenchError` for a count that this machine does not have.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(allowed):
        raise BenchError(f"{count} CPU threads were asked for; this process may use 1 to {len(allowed)}")
    os.sched_setaffinity(0, allowed[:count])
    try:
        jax.devices()
    finally:
        os.sched_setaffinity(0, allowed)


def build_engine(
    params: Params, cfg: ModelConfig, concurrency: int, policies: Sequence[Policy], context: int, mesh: Mesh = Mesh()
) -> tuple[Engine, float]:
    """An engine of `concurrency` slots with all programs of the policies compiled, and the seconds that took.

    Raises `PolicyError` or `MeshError`, before anything is compiled, for what the model can't run.
    """
    drafts = max(policy.max_drafts for policy in policies)
    buckets = BucketConfig(
        n=tuple(2**i for i in range((concurrency - 1).bit_length() + 1)), k=tuple(range(1, drafts + 2))
    )
    sizes = EngineConfig(concurrency, context, drafts, buckets, prefill=PREFILL, rounds=ROUNDS, mesh=mesh)
    engine = Engine(params, cfg, sizes)
    for policy in reversed(policies):
        engine.policy = policy
    return engine, engine.warmup(policies)


def with_plain(policies: Sequence[Policy]) -> list[Policy]:
    """The policies, plain first: nothing is measured without its control."""
    return [Off(), *(policy for policy in policies if policy.name != Off().name)]


def measure(
    params: Params,
    cfg: ModelConfig,
    requests_by_regime: Mapping[str, Sequence[Request]],
    concurrencies: Sequence[int],
    policies: Sequence[Policy],
    repetitions: int = 5,
    *,
    context: int = 768,
    mesh: Mesh = Mesh(),
    say: Callable[[str], None] = lambda text: None,
) -> list[Cell]:
    """Cells of all regimes, concurrencies and policies (and plain), one engine a concurrency; `say` hears progress."""
    cells = []
    for concurrency in concurrencies:
        engine, seconds = build_engine(params, cfg, concurrency, with_plain(policies), context, mesh)
        say(f"concurrency {concurrency}: programs compiled in {seconds:.1f} s; {engine.kernels.describe()}")
        cells += measure_engine(engine, params, requests_by_regime, policies, repetitions, warmup_s=seconds, say=say)
    return cells


def measure_engine(
    engine: Engine,
    params: Params,
    requests_by_regime: Mapping[str, Sequence[Request]],
    policies: Sequence[Policy],
    repetitions: int,
    *,
    warmup_s: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Cell]:
    """Cells of one warmed-up engine, which is kept full: its concurrency is its number of slots."""
    policies, concurrency = with_plain(policies), engine.config.slots
    cells = []
    for regime, requests in requests_by_regime.items():
        _check(regime, requests, concurrency, repetitions)
        runs = [_run(engine, policy, requests[:concurrency], -1) for policy in policies]
        for repetition in range(repetitions):
            # One sequence at a time, the policies alternate request by request, so that a machine that slows down for a
            # second slows all of them. A full batch runs whole: cut into pieces it would drain between them.
            pieces = [[request] for request in requests] if concurrency == 1 else [requests]
            parts: dict[str, list[Run]] = {policy.name: [] for policy in policies}
            for i, piece in enumerate(pieces):
                turn = (repetition + i) % len(policies)
                for policy in policies[turn:] + policies[:turn]:
                    parts[policy.name].append(_run(engine, policy, piece, repetition))
            runs += map(_join, parts.values())
            say(f"{regime}, concurrency {concurrency}: repetition {repetition + 1} of {repetitions}")
        plain = next(run for run in runs if run.policy == Off().name and run.repetition == 0)
        gap = near_tie(params, engine.cfg, requests, plain.answers)  # compiles, if at all, when all is measured
        cells += summarize(regime, concurrency, runs, gap, warmup_s)
    return cells


def _check(regime: str, requests: Sequence[Request], concurrency: int, repetitions: int) -> None:
    if repetitions < 1:
        raise BenchError(f"repetitions is {repetitions}; measure at least one")
    if len(requests) < concurrency:
        raise BenchError(f"{regime}: {len(requests)} requests cannot keep {concurrency} slots full; give more prompts")
    if any(request.sampling.temperature > 0 for request in requests):
        raise BenchError(f"{regime}: only greedy requests are compared with plain; set temperature to 0")


def _run(engine: Engine, policy: Policy, requests: Sequence[Request], repetition: int) -> Run:
    before = engine.compiles_after_warmup
    engine.policy = policy
    engine.reset_telemetry()
    answers = tuple(completion.tokens for completion in engine.generate(requests))
    if not any(answers):
        raise BenchError("the requests asked for no tokens")
    telemetry = engine.telemetry
    full = telemetry.steps[engine.config.slots]
    return Run(
        policy=policy.name,
        repetition=repetition,
        answers=answers,
        decode_s=telemetry.decode_s,
        full_step_s=full.seconds / full.count,
        prefill_s=telemetry.prefill_s,
        acceptance=telemetry.total(),
        compiles=engine.compiles_after_warmup - before,
    )


def _join(parts: Sequence[Run]) -> Run:
    """Passes over pieces of the requests as one pass over all of them."""
    if len(parts) == 1:
        return parts[0]
    acceptance = Acceptance()
    for part in parts:
        acceptance.merge(part.acceptance)
    return dataclasses.replace(
        parts[0],
        answers=tuple(answer for part in parts for answer in part.answers),
        decode_s=sum(part.decode_s for part in parts),
        full_step_s=sum(part.full_step_s * part.acceptance.steps for part in parts) / acceptance.steps,
        prefill_s=sum(part.prefill_s for part in parts),
        acceptance=acceptance,
        compiles=sum(part.compiles for part in parts),
    )


def summarize(regime: str, concurrency: int, runs: Sequence[Run], gap: Gap, warmup_s: float = 0.0) -> list[Cell]:
    """The cells of one regime and concurrency, in the order in which the policies first ran."""
    plain = {run.repetition: run for run in runs if run.policy == Off().name and run.repetition >= 0}
    against_plain = lambda passes: sum((compare(plain[0].answers, run.answers, gap) for run in passes), Comparison())
    control = against_plain(plain.values()).note
    cells = []
    for policy in dict.fromkeys(run.policy for run in runs):
        passes = [run for run in runs if run.policy == policy and run.repetition >= 0]
        found = against_plain(passes)
        note = found.note or (control and f"plain does not repeat itself: {control}")
        ratios = [run.tok_s / plain[run.repetition].tok_s for run in passes]
        acceptance = Acceptance()
        for run in passes:
            acceptance.merge(run.acceptance)
        claimed = (statistics.median(run.tok_s for run in passes), statistics.median(ratios), min(ratios), max(ratios))
        tok_s, ratio, low, high = (None, None, None, None) if note else claimed
        cells.append(
            Cell(
                regime=regime,
                concurrency=concurrency,
                policy=policy,
                tok_s=tok_s,
                ratio_to_plain=ratio,
                ratio_min=low,
                ratio_max=high,
                tok_step=acceptance.tok_step or 0.0,
                p1=acceptance.conditional(1),
                p2_cond=acceptance.conditional(2),
                p3_cond=acceptance.conditional(3),
                step_cost=statistics.median(run.full_step_s / plain[run.repetition].full_step_s for run in passes),
                equal=not note,
                excused=found.excused,
                unexcused=found.unexcused,
                compared=found.compared,
                compiles_after_warmup=sum(run.compiles for run in runs if run.policy == policy),
                tokens=sum(run.tokens for run in passes),
                repetitions=len(passes),
                prefill_s=statistics.median(run.prefill_s for run in passes),
                warmup_s=warmup_s,
                note=note,
            )
        )
    return cells
