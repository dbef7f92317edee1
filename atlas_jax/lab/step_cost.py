"""What one decode step costs, by bucket: on the device, in launches, and on the host around it.

For models whose text means nothing (`presets.random_params`): drafts are right as often as `lab.forced` makes them. The
engine serves as ever; its programs are wrapped to see when a step was handed to the device and when it was done.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.plan import Bucket, Plan
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Off, Policy
from atlas_jax.lab.forced import ForcedAcceptance, ForcedDrafter, ForcedError
from atlas_jax.lab.hlo import count_launches
from atlas_jax.model.mixers import Params

# XLA's default records kernels into CUDA graphs ("command buffers"); an empty list of commands turns that off.
COMMAND_BUFFERS: dict[str, dict[str, str]] = {"on": {}, "off": {"xla_gpu_enable_command_buffer": ""}}


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One policy at one width. Milliseconds are medians over steps with all n sequences active, prefill apart.

    Attributes:
      n, k, rows: the bucket that most of these steps ran in.
      command_buffers: "on" or "off"; "-" where there are none (not a GPU).
      steps: how many were timed.
      step_ms: a whole step of the engine, with `step_ms_low` and `step_ms_high` the quartiles.
      device_ms: a step of the same program launched many times without waiting in between: what the device needs.
      dispatch_ms: until the call of the program returned.
      wait_ms: from then on, blocked until the device was done.
      host_ms: the rest of the step: plan, bookkeeping. The scripted drafter's own time is in none of these.
      launches, loops: of one run of the program (`lab.hlo`).
      cost: step_ms over plain's, at the same width and with the same command buffers.
      tok_step, p1, p2_cond, p3_cond: measured, the first step (no drafts) and the last (cut) of a request included.
      tok_step_asked: what the forced acceptance comes to at this policy's depth.
      off_script: share of proposals that knew no right draft, because a near tie had flipped before; they lower p.
    """

    policy: str
    n: int
    k: int
    rows: int
    command_buffers: str
    steps: int
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    device_ms: float
    dispatch_ms: float
    wait_ms: float
    host_ms: float
    launches: int
    loops: int
    cost: float
    tok_step: float
    p1: float | None
    p2_cond: float | None
    p3_cond: float | None
    tok_step_asked: float
    off_script: float
    compile_s: float

    @property
    def speedup(self) -> float:
        """Tokens per second over plain's, at the acceptance that was asked for."""
        return self.tok_step_asked / self.cost


class _Timed:
    """A compiled step that records `(call, wait)` seconds of every run."""

    def __init__(self, program: Any):
        self.program = program
        self.seconds: list[tuple[float, float]] = []
        self.packed: np.ndarray | None = None

    def __call__(self, params: Params, state: Any, packed: np.ndarray) -> Any:
        began = time.perf_counter()
        answer = self.program(params, state, packed)
        called = time.perf_counter()
        jax.block_until_ready(answer)
        self.seconds.append((called - began, time.perf_counter() - called))
        self.packed = packed
        return answer


def random_requests(cfg: ModelConfig, count: int, prompt_tokens: int, max_new_tokens: int, seed: int) -> list[Request]:
    """Greedy requests on random tokens that run to their limit."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, cfg.vocab_size, (count, prompt_tokens)).tolist()
    return [Request(tuple(prompt), max_new_tokens, ignore_eos=True) for prompt in prompts]


def measure_steps(
    params: Params,
    cfg: ModelConfig,
    widths: Sequence[int],
    policies: Sequence[Policy],
    forced: ForcedAcceptance,
    *,
    dtype: Any,
    command_buffers: Sequence[str] = ("on",),
    prompt_tokens: int = 64,
    max_new_tokens: int = 64,
    repetitions: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> list[StepCost]:
    """Costs of every policy (plain first, always) at every width, with each setting of the command buffers.

    `command_buffers` are names of `COMMAND_BUFFERS` and mean nothing on a CPU, where they are left out. Raises
    `ForcedError` for a policy that verifies more drafts than `forced` has probabilities for.
    """
    policies = [Off(), *(policy for policy in policies if policy.name != Off().name)]
    deepest = max(policy.max_drafts for policy in policies)
    if deepest > len(forced.conditional):
        raise ForcedError(f"policies verify up to {deepest} drafts; {forced.conditional} has no probability for all")
    if prompt_tokens < 2 or max_new_tokens < 8:
        raise ForcedError("steps are timed behind a prefill and at full width: give 2 prompt tokens and 8 new ones")
    settings = {name: COMMAND_BUFFERS[name] for name in command_buffers}
    if jax.default_backend() == "cpu":
        settings = {"-": {}}
    drafter = ForcedDrafter(forced, cfg.vocab_size)
    depths = {depth for policy in policies for n in range(1, max(widths) + 1) for depth in policy.depths(n)}
    engine = Engine(
        params,
        cfg,
        EngineConfig(
            slots=max(widths),
            context=prompt_tokens + max_new_tokens,
            max_drafts=deepest,
            buckets=BucketConfig(n=tuple(sorted({1, *widths})), k=tuple(sorted({1, *(depth + 1 for depth in depths)}))),
            prefill=(prompt_tokens - 1,),
            dtype=dtype,
        ),
        propose=drafter,
    )
    say(engine.kernels.describe())
    requests = random_requests(cfg, max(widths), prompt_tokens, max_new_tokens, seed=forced.seed)
    cells: list[StepCost] = []
    for setting, options in settings.items():
        seconds = engine.warmup(policies, compiler_options=options)
        programs = engine.programs.compiled
        programs |= {key: _Timed(program) for key, program in programs.items() if isinstance(key, Bucket)}
        say(f"command buffers {setting}: programs compiled in {seconds:.1f} s")
        for width in widths:
            drafter.record(engine, requests[:width])
            plain: StepCost | None = None
            for policy in policies:
                cell = _measure(engine, drafter, policy, requests[:width], repetitions, setting, seconds, plain)
                plain = plain or cell
                cells.append(cell)
            say(f"command buffers {setting}: {width} sequences measured")
    return cells


def _measure(
    engine: Engine,
    drafter: ForcedDrafter,
    policy: Policy,
    requests: Sequence[Request],
    repetitions: int,
    setting: str,
    compile_s: float,
    plain: StepCost | None,
) -> StepCost:
    n, engine.policy = len(requests), policy
    timed: dict[Bucket, _Timed] = {
        key: program for key, program in engine.programs.compiled.items() if isinstance(key, Bucket)
    }
    engine.reset_telemetry()
    drafter.reset_counts()
    steps: dict[Bucket, list[tuple[float, float, float]]] = {}  # (step, call, wait) seconds
    asked = drafter.forced
    for repetition in range(repetitions):
        drafter.forced = dataclasses.replace(asked, seed=asked.seed + repetition)  # other coins, other pending counts
        for request in requests:
            engine.submit(request)
        engine.step()  # admission and prefill, and one row a sequence
        while not engine.idle:
            before = {key: len(program.seconds) for key, program in timed.items()}
            drafting, began = drafter.seconds, time.perf_counter()
            emissions = engine.step()
            spent = time.perf_counter() - began - (drafter.seconds - drafting)
            (ran,) = (key for key, program in timed.items() if len(program.seconds) > before[key])
            if len(emissions) == n:
                steps.setdefault(ran, []).append((spent, *timed[ran].seconds[-1]))
    drafter.forced = asked
    bucket = max(steps, key=lambda key: len(steps[key]))
    whole, call, wait = (np.array(column) * 1e3 for column in zip(*steps[bucket], strict=True))
    acceptance = engine.telemetry.total()
    found = count_launches(timed[bucket].program.as_text())
    step_ms = float(np.median(whole))
    low, high = np.percentile(whole, (25, 75))
    return StepCost(
        policy=policy.name,
        n=n,
        k=bucket.k,
        rows=bucket.rows,
        command_buffers=setting,
        steps=len(whole),
        step_ms=step_ms,
        step_ms_low=float(low),
        step_ms_high=float(high),
        device_ms=_back_to_back(engine, timed[bucket], bucket),
        dispatch_ms=float(np.median(call)),
        wait_ms=float(np.median(wait)),
        host_ms=float(np.median(whole - call - wait)),
        launches=found.launches,
        loops=found.loops,
        cost=step_ms / (plain.step_ms if plain else step_ms),
        tok_step=acceptance.tok_step or 0.0,
        p1=acceptance.conditional(1),
        p2_cond=acceptance.conditional(2),
        p3_cond=acceptance.conditional(3),
        tok_step_asked=asked.tok_step(max(policy.depths(n))),
        off_script=drafter.off_script / max(drafter.proposals, 1),
        compile_s=compile_s,
    )


def _back_to_back(engine: Engine, timed: _Timed, bucket: Bucket, runs: int = 10, chains: int = 3) -> float:
    """Milliseconds of a step when the device never waits for the host. All requests must be finished.

    The same plan again and again, each time with a ledger that agrees with it: what this leaves in the slots is cleared
    by the next prefill.
    """
    assert timed.packed is not None
    plan = Plan.of(timed.packed, bucket.k)
    ledger = np.array(engine._state.ledger)
    live = plan.num_rows > 0
    ledger[plan.slots[live]] = np.stack([plan.lengths, plan.pending, plan.head], axis=1)[live]
    per_run = []
    for _ in range(chains):
        ledgers = [jax.device_put(ledger) for _ in range(runs)]
        began = time.perf_counter()
        for agreeing in ledgers:
            state = engine._state._replace(ledger=agreeing)
            engine._state, _ = timed.program(engine._params, state, timed.packed)
        jax.block_until_ready(engine._state)
        per_run.append((time.perf_counter() - began) / runs)
    return 1e3 * statistics.median(per_run)
