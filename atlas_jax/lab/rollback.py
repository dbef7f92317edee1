"""What each way to roll recurrent states back costs in whole decode steps: bytes of states, milliseconds, equal tokens.

The engines differ in `EngineConfig.rollback` alone and serve the same requests with the same drafts, right as often as
`lab.forced` makes them; their repetitions are interleaved. The kernels are the xla backend's for all of them, because
only `deferred` has others (`lab.rollback_kernels` compares the designs as kernels).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import jax
import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.decode.state import DecodeState
from atlas_jax.depth.policies import Fixed, Off, Policy
from atlas_jax.kernels.backends import choose
from atlas_jax.lab.bench import BenchError, Comparison, Gap, compare, near_tie
from atlas_jax.lab.forced import ForcedAcceptance, ForcedDrafter
from atlas_jax.lab.step_cost import random_requests
from atlas_jax.model.mixers import Params
from atlas_jax.model.rollback import Rollback, states_moved
from atlas_jax.model.state import GdnCache

ROLLBACKS: tuple[Rollback, ...] = get_args(Rollback)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One rollback at n sequences that verify so many drafts each (0: plain decode, no head).

    Attributes:
      state_bytes: of recurrent states read and written in a step of n full sequences (`state_bytes`).
      ms: of a step with all n sequences active, from its call until the answer is on the host: median over all
        repetitions, with `ms_low` and `ms_high` the quartiles.
      equal: tokens are those of plain decode under the first rollback, but for excused near ties (`lab.bench`).
      ratio: of the median ms of a repetition to that of the first rollback in it; median, with least and most. The
        range is that of one process: another may lie outside it (0.74 once and 0.98 again, on a CPU), so repeat the
        process.
      pool_bytes: what the recurrent states of all n slots take in memory, at the deepest depth measured.
      temp_bytes: temporaries of the step's program.
      steps, tok_step: how many steps were timed, and tokens per sequence in them.
      excused, unexcused: divergences at a near tie, and others, in `compared` tokens.
    """

    rollback: Rollback
    n: int
    drafts: int
    state_bytes: int
    ms: float
    equal: bool
    ms_low: float
    ms_high: float
    ratio: float
    ratio_min: float
    ratio_max: float
    pool_bytes: int
    temp_bytes: int
    steps: int
    tok_step: float
    excused: int
    unexcused: int
    compared: int


def state_bytes(rollback: Rollback, state: DecodeState, n: int, rows: int) -> int:
    """Bytes of recurrent states that a step of n sequences with `rows` rows each reads and writes, from shapes.

    `n * (GDN layers) * Hv * Dk * Dv * itemsize` times the states moved: deferred 2, whatever the rows (read, write);
    snapshot `1 + rows` (read one, write one behind each row); recompute 3 (read to verify, read again, write). Windows,
    which are the same for all, and the rows' own inputs are not counted: in released models a row is about 1 % of a
    state.
    """
    one = sum(math.prod(pool.shape[-3:]) * pool.dtype.itemsize for pool in _pools(state))
    return n * one * states_moved(rollback, rows)


def measure(
    params: Params,
    cfg: ModelConfig,
    widths: Sequence[int],
    drafts: Sequence[int],
    forced: ForcedAcceptance,
    *,
    rollbacks: Sequence[Rollback] = ROLLBACKS,
    dtype: Any,
    prompt_tokens: int = 32,
    max_new_tokens: int = 48,
    repetitions: int = 5,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Cell]:
    """Cells of every rollback at each width and number of drafts, those that were measured together at a time.

    `say` hears progress. Raises `BenchError` for a measurement that would mean nothing, `ForcedError` for more drafts
    than `forced` has probabilities for.
    """
    if repetitions < 1 or not rollbacks or not widths or not drafts:
        raise BenchError("measure at least one rollback, width and number of drafts, at least once")
    if min(widths) < 1 or min(drafts) < 0:
        raise BenchError(f"widths {tuple(widths)} must be at least 1 and drafts {tuple(drafts)} at least 0")
    forced.tok_step(max(drafts))  # raises
    if prompt_tokens < 2 or max_new_tokens < 3 * (max(drafts) + 1):
        raise BenchError(f"give 2 prompt tokens and {3 * (max(drafts) + 1)} new ones: a few steps at full width")
    params = jax.device_put(params)  # once: the engines share it
    requests = random_requests(cfg, max(widths), prompt_tokens, max_new_tokens, seed=forced.seed)
    for n in widths:
        drafter = ForcedDrafter(forced, cfg.vocab_size)
        engines = {}
        for rollback in rollbacks:
            config = EngineConfig(
                slots=n,
                context=prompt_tokens + max_new_tokens,
                max_drafts=max(drafts),
                buckets=BucketConfig(n=(n,), k=tuple(sorted({1, *(depth + 1 for depth in drafts)}))),
                prefill=(prompt_tokens - 1,),
                rollback=rollback,
                dtype=dtype,
                kernels=dataclasses.replace(choose("auto"), gdn_step="xla"),
            )
            engines[rollback] = Engine(params, cfg, config, propose=drafter)
            script = [Off()] if rollback == rollbacks[0] else []
            seconds = engines[rollback].warmup([*script, *map(_policy, drafts)])
            say(f"{n} sequences, {rollback}: programs compiled in {seconds:.1f} s")
        plain = [done.tokens for done in drafter.record(engines[rollbacks[0]], requests[:n])]
        gap = near_tie(params, cfg, requests[:n], plain)
        for depth in drafts:
            yield from _cells(engines, drafter, requests[:n], depth, plain, gap, repetitions)
            say(f"{n} sequences, {depth} drafts: measured")


def _policy(drafts: int) -> Policy:
    return Fixed(drafts) if drafts else Off()


def _pools(state: DecodeState) -> list[Any]:
    return [cache.state for cache in state.layers if isinstance(cache, GdnCache)]


@dataclasses.dataclass(frozen=True)
class _Pass:
    """The requests served once: milliseconds of each full step, tokens emitted in these, and the answers."""

    ms: list[float]
    emitted: int
    answers: list[tuple[int, ...]]


def _cells(
    engines: dict[Rollback, Engine],
    drafter: ForcedDrafter,
    requests: Sequence[Request],
    drafts: int,
    plain: Sequence[Sequence[int]],
    gap: Gap,
    repetitions: int,
) -> Iterator[Cell]:
    passes: dict[Rollback, list[_Pass]] = {rollback: [] for rollback in engines}
    order, asked = list(engines), drafter.forced
    for engine in engines.values():
        _serve(engine, requests, drafts)  # not counted
    for repetition in range(repetitions):
        drafter.forced = dataclasses.replace(asked, seed=asked.seed + repetition)  # other coins, other pending counts
        turn = repetition % len(order)
        for rollback in order[turn:] + order[:turn]:
            passes[rollback].append(_serve(engines[rollback], requests, drafts))
    drafter.forced = asked

    n, first = len(requests), [statistics.median(one.ms) for one in passes[order[0]]]
    for rollback, engine in engines.items():
        (program,) = (
            program for key, program in engine.programs.compiled.items()
            if (getattr(key, "k", None), getattr(key, "head", None)) == (drafts + 1, drafts > 0)
        )  # fmt: skip
        found = sum((compare(plain, one.answers, gap) for one in passes[rollback]), Comparison())
        ratios = [statistics.median(one.ms) / base for one, base in zip(passes[rollback], first, strict=True)]
        ms = np.concatenate([one.ms for one in passes[rollback]])
        low, middle, high = np.percentile(ms, (25, 50, 75)).tolist()
        yield Cell(
            rollback=rollback,
            n=n,
            drafts=drafts,
            state_bytes=state_bytes(rollback, engine._state, n, drafts + 1),
            ms=middle,
            equal=not found.note,
            ms_low=low,
            ms_high=high,
            ratio=statistics.median(ratios),
            ratio_min=min(ratios),
            ratio_max=max(ratios),
            pool_bytes=sum(pool.nbytes for pool in _pools(engine._state)),
            temp_bytes=program.memory_analysis().temp_size_in_bytes,
            steps=len(ms),
            tok_step=sum(one.emitted for one in passes[rollback]) / (len(ms) * n),
            excused=found.excused,
            unexcused=found.unexcused,
            compared=found.compared,
        )


def _serve(engine: Engine, requests: Sequence[Request], drafts: int) -> _Pass:
    """Steps count where all requests are active and verify `drafts` drafts each; never the first, which has none."""
    engine.policy = _policy(drafts)
    ids = [engine.submit(request) for request in requests]
    engine.step()  # admission, prefill, and one row a sequence
    ms: list[float] = []
    emitted = 0
    while not engine.idle:
        engine.reset_telemetry()
        emissions = engine.step()
        steps = engine.telemetry.steps.get(len(requests))
        if steps and all(len(emission.drafts) == drafts for emission in emissions):
            ms.append(1e3 * steps.device_s)
            emitted += sum(len(emission.tokens) for emission in emissions)
    if not ms:
        raise BenchError(f"no step had {len(requests)} sequences with {drafts} drafts each; ask for more new tokens")
    return _Pass(ms, emitted, [engine.completion(id).tokens for id in ids])
