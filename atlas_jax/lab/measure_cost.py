"""Measures a cost table on the device at hand, with the engine that serves.

At each width and context all arms (plain decode, and every depth) take turns on the same running sequences, a few steps
each: a machine that slows down slows all of them, and nothing is prefilled twice. Plain runs as two arms; how far the
two come apart is what a difference must exceed to be one.
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

from atlas_jax.config import ModelConfig
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Fixed, Off, Policy
from atlas_jax.lab.cost import CostError, CostTable, StepTime, model_id
from atlas_jax.model.mixers import Params

SETTLE = 2  # steps after a change of depth until what the last depth left pending is gone


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure: `visits` of `steps` steps to each arm."""

    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    deepest: int = 4
    contexts: tuple[int, ...] = (64, 512)
    visits: int = 7
    steps: int = 6

    def __post_init__(self) -> None:
        for name in ("widths", "contexts"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise CostError(f"{name} must be positive, not {getattr(self, name)}")
        if min(self.deepest, self.visits, self.steps) < 1:
            raise CostError("deepest, visits and steps are 1 or more")

    @property
    def arms(self) -> list[Policy]:
        return [Off(), *map(Fixed, range(self.deepest + 1)), Off()]

    @property
    def room(self) -> int:
        """Most tokens that a sequence can emit while it is measured."""
        return (self.visits * len(self.arms) + 1) * (self.steps + SETTLE) * (self.deepest + 1)


def device_id() -> str:
    """The device's kind; of a CPU its model and the number of threads that XLA may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"cpu: {names[0] if names else platform.processor() or platform.machine()}"


def empty_about(dtype: Any, **more: str) -> tuple[tuple[str, str], ...]:
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
    params: Params,
    cfg: ModelConfig,
    plan: Plan,
    *,
    dtype: Any,
    about: Sequence[tuple[str, str]] = (),
    done: CostTable | None = None,
    keep: Callable[[CostTable], None] = lambda table: None,
    say: Callable[[str], None] = lambda text: None,
) -> CostTable:
    """The table of a model on this device.

    `done` is what an interrupted run had: its widths and contexts are not measured again. `keep` gets the table after
    each of them. Raises `CostError` where `done` is of another model or device.
    """
    model, device = model_id(cfg), device_id()
    if done is not None:
        done.expect(model=model, device=device)
    steps = list(done.steps) if done is not None else []
    table, per_token, spread = done, done.prefill if done is not None else np.inf, 0.0
    for width in plan.widths:
        # A context is where the sequences begin; they grow while they are measured, the more the longer it takes.
        have = {s.context for s in steps if s.n == width}
        if len(have) >= len(plan.contexts):
            continue
        steps = [s for s in steps if s.n != width]
        began = time.perf_counter()
        engine = Engine(params, cfg, engine_config(width, plan, dtype), Off())
        engine.warmup(plan.arms)
        say(f"{width} sequences: compiled in {time.perf_counter() - began:.0f} s")
        for context in plan.contexts:
            found, prefill, apart = _measure(engine, width, context, plan)
            steps, per_token, spread = [*steps, *found], min(per_token, prefill), max(spread, apart)
            say(f"{width} sequences, context {found[0].context:.0f}: plain {1e3 * found[0].seconds:.2f} ms")
        noted = {
            **dict(about),
            "aa_spread": f"{max(spread, float(dict(done.about).get('aa_spread', 0)) if done else 0):.4f}",
        }
        table = CostTable("measured", model, device, tuple(steps), float(per_token), "longest", tuple(noted.items()))
        keep(table)
    if table is None:
        raise CostError("nothing was measured")
    return table


def engine_config(width: int, plan: Plan, dtype: Any, context: int = 0) -> EngineConfig:
    """Of the engine that is measured: one batch bucket, every depth, room for `context` tokens if that is more."""
    return EngineConfig(
        slots=width,
        context=max(context, max(plan.contexts) + plan.room),
        max_drafts=plan.deepest,
        buckets=BucketConfig(n=(width,), k=tuple(range(1, plan.deepest + 2))),
        prefill=tuple(w for w in EngineConfig.prefill if w <= max(plan.contexts)) or EngineConfig.prefill[:1],
        prefill_tokens=width * max(plan.contexts),
        dtype=dtype,
    )


def _measure(engine: Engine, width: int, context: int, plan: Plan) -> tuple[list[StepTime], float, float]:
    """Step times of all arms at one context, seconds of a prompt token, and how far the two plain arms come apart."""
    rng = np.random.default_rng(context)
    engine.reset_telemetry()
    for prompt in rng.integers(0, engine.cfg.vocab_size, (width, context + 1)).tolist():
        engine.submit(Request(tuple(prompt), plan.room, ignore_eos=True))
    lengths = dict.fromkeys(range(width), 0)
    while len(emissions := engine.step()) < width:
        pass
    per_token = engine.telemetry.prefill_s / max(engine.telemetry.prefilled, 1)
    lengths = dict.fromkeys((e.request for e in emissions), context)
    times: dict[int, list[float]] = {arm: [] for arm in range(len(plan.arms))}
    contexts: list[int] = []
    for visit in range(plan.visits):
        turn = visit % len(plan.arms)
        for arm in (*range(turn, len(plan.arms)), *range(turn)):
            policy = engine.policy = plan.arms[arm]
            for step in range(SETTLE + plan.steps):
                engine.reset_telemetry()
                began = time.perf_counter()
                emissions = engine.step()
                spent = time.perf_counter() - began
                for emission in emissions:
                    lengths[emission.request] += len(emission.tokens)
                (bucket,) = engine.telemetry.steps[width].buckets
                if step >= SETTLE and bucket.k == policy.max_drafts + 1 and bucket.head == policy.head:
                    times[arm].append(spent)
                    contexts.append(max(lengths.values()))
    engine.cancel_all()
    if missing := [plan.arms[arm].name for arm, taken in times.items() if not taken]:
        raise CostError(f"{width} sequences at context {context}: no step ran in the shape of {missing[0]}")
    mean, found = float(np.mean(contexts)), []
    for arm, policy in enumerate(plan.arms[:-1]):
        taken = times[arm] + (times[len(plan.arms) - 1] if arm == 0 else [])
        low, median, high = np.percentile(taken, (25, 50, 75))
        k = policy.max_drafts + 1
        shape = (width, k, width * k, policy.head)
        found.append(StepTime(*shape, mean, float(median), float(low), float(high), len(taken)))
    first, second = (float(np.median(times[arm])) for arm in (0, len(plan.arms) - 1))
    return found, per_token, abs(second / first - 1)
