"""Measures a cost table on the device at hand, with the engine that serves.

At each width and context all arms (plain decode, and every depth) take turns on the same running sequences, a few calls
each: a machine that slows down slows all of them. Calls of one step and of several are timed apart, since a call costs
something beside its steps. Plain runs as two arms; how far the two come apart is what a difference must exceed to be
one.
"""

from __future__ import annotations

import dataclasses
import datetime
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Fixed, Off, Outcome, Policy
from atlas_jax.lab.bench import ROUNDS
from atlas_jax.lab.cost import CostError, CostTable, StepTime, model_id

SETTLE = 2  # steps after a change of depth until what the last depth left pending is gone


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure: `visits` to each arm, each of `alone` calls of one step and `calls` of `rounds` steps."""

    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    deepest: int = 4
    contexts: tuple[int, ...] = (64, 704)
    visits: int = 6
    calls: int = 2
    alone: int = 3
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        for name in ("widths", "contexts"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise CostError(f"{name} must be positive, not {getattr(self, name)}")
        if min(self.deepest, self.visits, self.calls, self.alone, self.rounds) < 1:
            raise CostError("deepest, visits, calls, alone and rounds are 1 or more")

    @property
    def arms(self) -> list[Policy]:
        return [Off(), *map(Fixed, range(self.deepest + 1)), Off()]

    @property
    def room(self) -> int:
        """Most tokens that a sequence can emit in a visit to all arms; the next visit begins with a new one."""
        steps = SETTLE + self.alone + self.calls * self.rounds
        return steps * sum(self.deepest + 1 for _ in self.arms) + 1


@dataclasses.dataclass(frozen=True)
class Asked:
    """A policy that is asked before every step, as one with a memory is: its calls have one step each."""

    policy: Policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def start(self) -> tuple[()]:
        return ()

    def observe(self, state: tuple[()], outcome: Outcome) -> tuple[()]:
        return state


def device_id() -> str:
    """The device's kind; of a CPU its model."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"cpu: {names[0] if names else platform.processor() or platform.machine()}"


def about_this(dtype: Any, **more: str) -> tuple[tuple[str, str], ...]:
    """What a measured table says of itself: versions, dtype, commit, date."""
    git = lambda *args: subprocess.run(
        ["git", *args], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return (
        ("jax", jax.__version__),
        ("dtype", np.dtype(dtype).name if not hasattr(dtype, "dtype") else str(dtype.dtype)),
        ("commit", commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")),
        ("date", datetime.date.today().isoformat()),
        *more.items(),
    )


def measure_costs(
    engine: Engine,
    plan: Plan,
    *,
    about: Sequence[tuple[str, str]] = (),
    done: CostTable | None = None,
    keep: Callable[[CostTable], None] = lambda table: None,
    say: Callable[[str], None] = lambda text: None,
) -> CostTable:
    """The table of an engine of `engine_config` on this device; the engine comes back with no requests, plain.

    `done` is what an interrupted run had: its widths and contexts are not measured again. `keep` gets the table after
    each of them. Raises `CostError` where `done` is of another model or device.
    """
    model, device = model_id(engine.cfg), device_id()
    if done is not None:
        done.expect(model=model, device=device)
        if done.rounds != plan.rounds:
            raise CostError(f"the table has calls of {done.rounds} steps, not {plan.rounds}; measure it anew")
    steps = list(done.steps) if done is not None else []
    table, per_token, spread = done, done.prefill if done is not None else np.inf, 0.0
    # A context is where the sequences begin; they grow while they are measured, the more the longer it takes.
    contexts = lambda width: {step.context for step in steps if step.n == width}
    missing = [width for width in plan.widths if len(contexts(width)) < len(plan.contexts)]
    if missing:
        began = time.perf_counter()
        engine.warmup(plan.arms, max(missing))
        say(f"compiled in {time.perf_counter() - began:.0f} s")
    for width in missing:
        steps = [step for step in steps if step.n != width]
        for context in plan.contexts:
            found, prefill, apart = _measure(engine, width, context, plan)
            steps, per_token, spread = [*steps, *found], min(per_token, prefill), max(spread, apart)
            say(f"{width} sequences, context {found[0].context:.0f}: plain {1e3 * found[0].seconds:.2f} ms a step")
        before = float(dict(done.about).get("aa_spread", 0)) if done is not None else 0.0
        noted = {**dict(about), "aa_spread": f"{max(spread, before):.4f}"}
        told, rounds = tuple(noted.items()), plan.rounds
        table = CostTable("measured", model, device, tuple(steps), float(per_token), "longest", told, rounds)
        keep(table)
    if table is None:
        raise CostError("nothing was measured")
    engine.policy = Off()
    return table


def engine_config(plan: Plan, dtype: Any, context: int = 0) -> EngineConfig:
    """Of the engine that is measured: a bucket for each width and depth, room for `context` tokens if that is more.

    One engine for all widths: a step costs the same however many slots there are beside its own.
    """
    return EngineConfig(
        slots=max(plan.widths),
        context=max(context, max(plan.contexts) + plan.room),
        max_drafts=plan.deepest,
        buckets=BucketConfig(n=tuple(sorted(plan.widths)), k=tuple(range(1, plan.deepest + 2))),
        prefill=tuple(w for w in EngineConfig.prefill if w <= max(plan.contexts)) or EngineConfig.prefill[:1],
        prefill_tokens=max(plan.widths) * max(plan.contexts),
        rounds=plan.rounds,
        dtype=dtype,
    )


def _measure(engine: Engine, width: int, context: int, plan: Plan) -> tuple[list[StepTime], float, float]:
    """Step times of all arms at one context, seconds of a prompt token, and how far the two plain arms come apart."""
    rng = np.random.default_rng(context)
    prompts = rng.integers(0, engine.cfg.vocab_size, (width, context + 1)).tolist()
    lengths: dict[int, int] = {}
    prefill = np.inf
    contexts: list[int] = []

    def call(policy: Policy) -> float | None:
        """Seconds of a step of one call; None where it ran in another shape than the policy's own."""
        engine.reset_telemetry()
        for emission in engine.step():
            lengths[emission.request] += len(emission.tokens)
        contexts.append(max(lengths.values()))
        steps = engine.telemetry.steps[width]
        (bucket,) = steps.buckets
        own = (bucket.n, bucket.k, bucket.head) == (width, policy.max_drafts + 1, policy.head)
        return steps.seconds / steps.count if own else None

    alone: list[list[float]] = [[] for _ in plan.arms]
    within: list[list[float]] = [[] for _ in plan.arms]
    for visit in range(plan.visits):
        engine.policy = Asked(Off())
        engine.reset_telemetry()
        lengths = {engine.submit(Request(tuple(p), plan.room, ignore_eos=True)): context + 1 for p in prompts}
        engine.step()
        prefill = min(prefill, engine.telemetry.prefill_s / max(engine.telemetry.prefilled, 1))
        turn = visit % len(plan.arms)
        for arm in (*range(turn, len(plan.arms)), *range(turn)):
            policy = plan.arms[arm]
            engine.policy = Asked(policy)
            for _ in range(SETTLE):
                call(policy)
            alone[arm] += [s for _ in range(plan.alone) if (s := call(policy)) is not None]
            engine.policy = policy
            within[arm] += [s for _ in range(plan.calls) if (s := call(policy)) is not None]
        engine.cancel_all()
    for policy, *times in zip(plan.arms, alone, within, strict=True):
        if not all(times):
            raise CostError(f"{width} sequences at context {context}: no step ran in the shape of {policy.name}")
    first, second = float(np.median(within[0])), float(np.median(within[-1]))
    for times in (alone, within):
        times[0] += times.pop()
    mean, found = float(np.mean(contexts)), []
    for policy, single, several in zip(plan.arms, alone, within, strict=False):
        low, median, high = map(float, np.percentile(several, (25, 50, 75)))
        k = policy.max_drafts + 1
        shape = (width, k, width * k, policy.head)
        found.append(StepTime(*shape, mean, median, low, high, len(several), float(np.median(single))))
    return found, float(prefill), abs(second / first - 1)
