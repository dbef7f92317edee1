"""The ablation by real decode: the arms of `lab.ablate` in the engine, on held-out prompts, token by token plain's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Fixed, Ladder, Off, Policy
from atlas_jax.lab.ablate import AA, PLAIN, Cell, Row, append_rows, parse_grid, read_rows
from atlas_jax.lab.bench import BenchError, measure_engine
from atlas_jax.lab.cost import CostTable, model_id
from atlas_jax.lab.measure_cost import Plan, engine_config
from atlas_jax.lab.simulate import Load, simulate
from atlas_jax.lab.trace import Trace, write_records
from atlas_jax.model.mixers import Params

LEAST = 8  # requests of a run; as many as there are slots where those are more


def arms(grid: Sequence[str], num_drafts: int) -> dict[str, Policy]:
    """Policies by arm. The A/A arm is the first ladder with a cap that changes nothing but its name."""
    configs = parse_grid(grid, num_drafts)
    first = next(iter(configs.values()))
    found: dict[str, Policy] = {PLAIN: Off()}
    found |= {ladder: Ladder(config, num_drafts) for ladder, config in configs.items()}
    found[AA] = Ladder(dataclasses.replace(first, cap=first.max_seqs + 1), num_drafts)
    return found


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
    engine = Engine(
        params,
        cfg,
        EngineConfig(
            slots=concurrency, context=_context(requests), max_drafts=depth, draft_log_probs=True, dtype=np.float32
        ),
        Fixed(depth),
        trace=records.append,
    )
    engine.generate([dataclasses.replace(r, label=regime) for regime, own in requests.items() for r in own])
    write_records(path, model_id(cfg), records, policy=engine.policy.name, concurrency=concurrency)


@dataclasses.dataclass(frozen=True)
class Check:
    """A measured cell beside the simulator's, tokens per second of decode steps."""

    ladder: str
    concurrency: int
    regime: str
    measured: float
    low: float
    high: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1

    def within(self, bound: float) -> bool:
        """Whether the simulator is off by no more than the bound, or the measurement's own range."""
        return abs(self.error) <= bound or self.low <= self.simulated <= self.high


def validate(
    cells: Sequence[Cell], grid: Sequence[str], num_drafts: int, costs: CostTable, traces: Mapping[str, Trace]
) -> list[Check]:
    """Simulate what was measured: the same requests, arms and concurrencies, from costs and trace alone."""
    policies, checks = arms(grid, num_drafts), []
    for cell in cells:
        load = Load(cell.concurrency, requests=max(cell.concurrency, LEAST))
        # The measured engine had one batch bucket.
        own = dataclasses.replace(costs, steps=tuple(step for step in costs.steps if step.n == cell.concurrency))
        found = simulate(policies[cell.ladder], own, traces[cell.regime], load)
        speeds = (cell.tok_s_median, cell.tok_s_min, cell.tok_s_max, found.decode_tok_s)
        checks.append(Check(cell.ladder, cell.concurrency, cell.regime, *speeds))
    return checks


def ablate_decoded(
    path: Path,
    source: str,
    params: Params,
    cfg: ModelConfig,
    requests: Mapping[str, Sequence[Request]],
    grid: Sequence[str],
    plan: Plan,
    *,
    repetitions: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """All rows of a grid at the plan's widths, all arms interleaved; repetitions that the CSV has are not run again.

    The engines are those whose steps the plan measures: one batch bucket each, drains padded to it.

    Raises `BenchError` where an arm's tokens are not plain's: no speed is compared then.
    """
    policies = arms(grid, plan.deepest)
    have = {row.key: row for row in read_rows(path)}
    key = lambda regime, c, arm, repetition: (source, regime, c, arm, repetition)
    for c in plan.widths:
        missing = [
            (regime, repetition)
            for repetition in range(repetitions)
            for regime in requests
            if any(key(regime, c, arm, repetition) not in have for arm in policies)
        ]
        if not missing:
            say(f"concurrency {c}: measured before")
            continue
        engine = Engine(params, cfg, engine_config(c, plan, np.float32, _context(requests)), Off())
        seconds = engine.warmup(policies.values())
        say(f"concurrency {c}: compiled in {seconds:.0f} s")
        for regime, repetition in missing:
            own = requests[regime][: max(c, LEAST)]
            cells = measure_engine(engine, params, {regime: own}, list(policies.values()), 1)
            by_name: dict[str, Any] = {cell.policy: cell for cell in cells}
            rows = []
            for arm, policy in policies.items():
                cell = by_name[policy.name]
                if cell.tok_s is None:
                    raise BenchError(f"{regime}, concurrency {c}, {arm}: {cell.note}")
                rows.append(Row(*key(regime, c, arm, repetition), cell.tok_s, cell.tok_step))
            rows = [row for row in rows if row.key not in have]
            append_rows(path, rows)
            have |= {row.key: row for row in rows}
            say(f"concurrency {c}, {regime}: repetition {repetition + 1} of {repetitions}")
    return [
        have[key(regime, c, arm, repetition)]
        for regime in requests
        for c in plan.widths
        for arm in policies
        for repetition in range(repetitions)
    ]


def _context(requests: Mapping[str, Sequence[Request]]) -> int:
    return max(len(request.prompt) + request.max_new_tokens for own in requests.values() for request in own) + 8
