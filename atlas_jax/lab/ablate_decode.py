"""The ablation by real decode: the arms of `lab.ablate` in the engine, on held-out prompts, token by token plain's."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Fixed, Policy
from atlas_jax.lab.ablate import AA, PLAIN, Cell, Row, append_rows, arm_policy, parse_grid, read_rows
from atlas_jax.lab.bench import BenchError, Comparison, compare, near_tie
from atlas_jax.lab.cost import CostTable, model_id
from atlas_jax.lab.measure_cost import Plan
from atlas_jax.lab.simulate import Load, simulate
from atlas_jax.lab.trace import Trace, write_records
from atlas_jax.model.mixers import Params

LEAST = 8  # requests of a run; as many as are active at once where those are more


def arms(grid: Sequence[str], num_drafts: int) -> dict[str, Policy]:
    """Policies by arm."""
    configs = parse_grid(grid, num_drafts)
    return {arm: arm_policy(arm, configs, num_drafts) for arm in (PLAIN, *grid, AA)}


def record(
    path: Path,
    params: Params,
    cfg: ModelConfig,
    requests: Mapping[str, Sequence[Request]],
    depth: int,
    concurrency: int = 4,
) -> None:
    """Write a trace of all requests at a fixed depth; the regimes are its labels."""
    records: list[dict[str, Any]] = []
    sizes = EngineConfig(
        slots=concurrency,
        context=context_of(requests),
        max_drafts=depth,
        # Nothing is timed here: one step and one prefill to compile.
        buckets=BucketConfig(n=(concurrency,), k=(depth + 1,), ragged=False),
        prefill=(128,),
        draft_log_probs=True,
        dtype=np.float32,
    )
    engine = Engine(params, cfg, sizes, Fixed(depth), trace=records.append)
    engine.generate([dataclasses.replace(r, label=regime) for regime, own in requests.items() for r in own])
    write_records(path, model_id(cfg), records, policy=engine.policy.name, concurrency=concurrency)


@dataclasses.dataclass(frozen=True)
class Check:
    """A measured cell beside the simulator's: tokens per second while all sequences are active.

    `noise` is how far the A/A arm came apart from its twin in this place, at most.
    """

    ladder: str
    concurrency: int
    regime: str
    measured: float
    low: float
    high: float
    simulated: float
    noise: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1

    def within(self, bound: float) -> bool:
        """Whether the simulator is off by no more than the bound, or the A/A spread where that is larger."""
        return abs(self.error) <= max(bound, self.noise)


def validate(
    cells: Sequence[Cell], grid: Sequence[str], num_drafts: int, costs: CostTable, traces: Mapping[str, Trace]
) -> list[Check]:
    """Simulate what was measured: the same requests, arms and concurrencies, from costs and trace alone."""
    policies, checks = arms(grid, num_drafts), []
    ratios = {(cell.ladder, cell.concurrency, cell.regime): cell.ratios for cell in cells}
    for cell in cells:
        c, trace = cell.concurrency, traces[cell.regime]
        load = Load(c, requests=c)
        parts = [
            simulate(policies[cell.ladder], costs, dataclasses.replace(trace, answers=tuple(piece)), load).full
            for piece in pieces(trace.answers, c)
        ]
        simulated = sum(tokens for tokens, _ in parts) / sum(seconds for _, seconds in parts)
        twins = zip(ratios[AA, c, cell.regime], ratios[grid[0], c, cell.regime], strict=True)
        noise = max(abs(a / b - 1) for a, b in twins)
        speeds = (cell.tok_s_median, cell.tok_s_min, cell.tok_s_max)
        checks.append(Check(cell.ladder, c, cell.regime, *speeds, simulated, noise))
    return checks


T = TypeVar("T")


def pieces(requests: Sequence[T], concurrency: int) -> list[Sequence[T]]:
    """The first requests (`LEAST`, or `concurrency` if that is more) in groups that fill the slots and then drain.

    Raises `BenchError` where they don't fill the slots once.
    """
    if len(requests) < concurrency:
        raise BenchError(f"{len(requests)} prompts cannot keep {concurrency} sequences active; give more")
    count = min(max(concurrency, LEAST), len(requests)) // concurrency
    return [requests[i * concurrency : (i + 1) * concurrency] for i in range(count)]


def ablate_decoded(
    path: Path,
    source: str,
    engine: Engine,
    params: Params,
    requests: Mapping[str, Sequence[Request]],
    grid: Sequence[str],
    plan: Plan,
    *,
    repetitions: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """All rows of a grid at the plan's widths; repetitions that the CSV has are not run again.

    Arms of the same depth at a width are one program and are run once for all of them (A/A apart). Within a repetition
    they take turns group by group. `Row.tok_s` counts the steps in which all C sequences are active: what a service at
    that concurrency sees, where an end brings the next request; the drain of a batch would be held against depth.
    Raises `BenchError` where an arm's tokens are not plain's: no speed is compared then.
    """
    policies, compared = arms(grid, plan.deepest), Comparison()
    have = {row.key: row for row in read_rows(path)}
    key = lambda regime, c, arm, repetition: (source, regime, c, arm, repetition)

    def add(rows: list[Row]) -> None:
        new = [row for row in rows if row.key not in have]
        append_rows(path, new)
        have.update({row.key: row for row in new})

    for c in plan.widths:
        same: dict[Any, list[str]] = {}
        for arm, policy in policies.items():
            same.setdefault((arm == AA, policy.head, policy.depths(c)), []).append(arm)
        entrants = {twins[0]: policies[twins[0]] for twins in same.values()}
        warm = False
        for repetition in range(repetitions):
            for regime in requests:
                cells = [[key(regime, c, arm, repetition) for arm in twins] for twins in same.values()]
                if any(not any(cell in have for cell in twins) for twins in cells):
                    if not warm:
                        engine.warmup(policies.values(), c)
                        for policy in entrants.values():  # what only a first run pays
                            _run(engine, policy, pieces(requests[regime], c)[0])
                        warm = True
                    found, equal = _turns(engine, params, entrants, requests[regime], c, repetition)
                    compared += equal
                    add([Row(*key(regime, c, arm, repetition), *speeds) for arm, speeds in found.items()])
                    say(f"concurrency {c}, {regime}: repetition {repetition + 1} of {repetitions}")
                for twins in cells:
                    run = next(have[cell] for cell in twins if cell in have)
                    add([dataclasses.replace(run, ladder=arm) for *_, arm, _ in twins])
    if compared.note:
        raise BenchError(compared.note)
    say(f"{compared.compared:,} tokens compared with plain's: equal, {compared.excused} near ties excused")
    return [
        have[key(regime, c, arm, repetition)]
        for regime in requests
        for c in plan.widths
        for arm in policies
        for repetition in range(repetitions)
    ]


def _turns(
    engine: Engine,
    params: Params,
    policies: Mapping[str, Policy],
    requests: Sequence[Request],
    c: int,
    repetition: int,
) -> tuple[dict[str, tuple[float, float]], Comparison]:
    """Tokens a second and tokens a step of each arm, all on the same requests, and how the tokens compare."""
    groups, order = pieces(requests, c), list(policies)
    tokens, steps, seconds = Counter[str](), Counter[str](), dict.fromkeys(order, 0.0)
    answers: dict[str, list[tuple[int, ...]]] = {arm: [] for arm in order}
    for i, group in enumerate(groups):
        turn = (repetition + i) % len(order)
        for arm in order[turn:] + order[:turn]:
            answers[arm] += _run(engine, policies[arm], group)
            full = engine.telemetry.total(c)
            tokens[arm] += full.tokens
            steps[arm] += full.steps
            seconds[arm] += engine.telemetry.steps[c].seconds
    asked = [request for group in groups for request in group]
    gap = near_tie(params, engine.cfg, asked, answers[PLAIN])
    same = Comparison()
    for arm in order:
        found = compare(answers[PLAIN], answers[arm], gap)
        if found.unexcused:
            raise BenchError(f"{arm}, concurrency {c}: not plain's tokens, so no speed is compared: {found.note}")
        same += found
    return {arm: (tokens[arm] / seconds[arm], tokens[arm] / steps[arm]) for arm in order}, same


def _run(engine: Engine, policy: Policy, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    engine.policy = policy
    engine.reset_telemetry()
    return [completion.tokens for completion in engine.generate(requests)]


def context_of(requests: Mapping[str, Sequence[Request]]) -> int:
    """Tokens of a sequence that the longest request may need."""
    return max(len(request.prompt) + request.max_new_tokens for own in requests.values() for request in own) + 8
