"""Continuous batching around the one step: slots, admission, prefill, the plan of each step, retirement.

Everything here is host code on Python integers. The device holds the model state and runs compiled programs, one per
bucket; which of them runs follows from what the sequences need, and nothing is ever compiled for a particular mix.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.compiles import compiles
from atlas_jax.decode.step import Bucket, Plan, fold_pending, prefill, step
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.depth.policies import Off, Policy, PolicyError
from atlas_jax.kernels.backends import Backend, Kernels, choose
from atlas_jax.model.mixers import Params, leaf_dtype
from atlas_jax.model.state import ModelState, init_state

FinishReason = Literal["stop", "length"]


class RequestError(ValueError):
    """A request that the engine cannot serve; the message names the field and the bound. Nothing is lost."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: most tokens to emit; the context may end the answer earlier.
      temperature: 0 for greedy (anything under 1e-5 is).
      seed: of the sampling noise; the same seed gives the same answer in any batch, at any depth.
      ignore_eos: go on through end tokens.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True)
class Emission:
    """What one step gave one request.

    Attributes:
      request: the id that `submit` returned.
      tokens: emitted tokens, in order.
      drafts: the drafts that were verified; the first `len(tokens) - 1` were accepted.
      finished: why the request ended with this step, if it did: "stop" (an end token) or "length".
    """

    request: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    finished: FinishReason | None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request: its emitted tokens, why it ended, and what its drafts were worth."""

    tokens: tuple[int, ...]
    finished: FinishReason
    acceptance: Acceptance


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine.

    Attributes:
      slots: most sequences active at once.
      context: most tokens of a sequence, prompt included.
      max_drafts: most drafts a step can verify per sequence.
      buckets: which shapes are compiled.
      prefill: widths of prefill programs, ascending; a prompt runs in chunks of the largest that it fills.
      dtype: of weights, activations and caches (recurrent states are at least float32).
      kernels: who computes the GDN ops; "auto" is the reference on CPUs and Pallas Triton on GPUs that it supports.
    """

    slots: int = 8
    context: int = 1024
    max_drafts: int = 3
    buckets: BucketConfig = BucketConfig()
    prefill: tuple[int, ...] = (32, 128, 512)
    dtype: Any = jnp.float32
    kernels: Literal["auto"] | Backend | Kernels = "auto"


@dataclasses.dataclass
class _Active:
    """A sequence in a slot. `length` positions are committed on the device; `last` is emitted but not yet consumed."""

    id: int
    request: Request
    slot: int
    length: int
    last: int
    stop_at: int  # most tokens, prompt included
    key: np.ndarray
    pending: int = 0
    drafts: tuple[int, ...] = ()
    emitted: list[int] = dataclasses.field(default_factory=list)
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)

    @property
    def room(self) -> int:
        return self.stop_at - self.length - 1


class Engine:
    """Serves requests with a model under a depth policy. Not thread-safe.

    Attributes:
      kernels: what `config.kernels` came to on this device; `describe()` says it in a line.
      acceptance: what drafts were worth, by the number of active sequences of the step.
      seconds: `[steps, seconds]` of decode steps, host work included, by the number of active sequences.
      prefill_seconds: time spent in prefill.
    """

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        config: EngineConfig = EngineConfig(),
        policy: Policy = Off(),
        *,
        propose: Callable[[Sequence[int], int], Sequence[int]] | None = None,
    ):
        """`propose(tokens so far, count)` replaces the head's drafts by the caller's own: a scripted drafter."""
        config.buckets.check(config.slots)
        if not config.prefill or list(config.prefill) != sorted(set(config.prefill)) or config.prefill[0] < 1:
            raise ValueError(f"prefill widths must be positive and ascending, not {config.prefill}")
        self.cfg, self.config = cfg, config
        self.kernels = choose(config.kernels)
        self._params = jax.device_put(_cast(params, config.dtype))
        self._programs: dict[Bucket | int | Literal["fold"], Any] = {}
        self._propose = propose
        self._waiting: deque[tuple[int, Request]] = deque()
        self._active: list[_Active] = []
        self._completed: dict[int, Completion] = {}
        self._next_id = 0
        self.reset_telemetry()
        self._warm_compiles: int | None = None
        self.policy = policy
        self._state = self._new_state()

    @property
    def policy(self) -> Policy:
        """The depth policy; may be changed between steps, losslessly."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        if policy.max_drafts > self.config.max_drafts:
            raise PolicyError(
                f"policy {policy.name} drafts up to {policy.max_drafts}; the engine was built for max_drafts="
                f"{self.config.max_drafts}"
            )
        if policy.head and not self.cfg.mtp_layers:
            raise PolicyError(f"policy {policy.name} needs a draft head and the model has none; use plain")
        self._policy = policy

    def reset_telemetry(self) -> None:
        """Forget all counts and times so far."""
        self.acceptance: dict[int, Acceptance] = {}
        self.seconds: dict[int, list[float]] = {}
        self.prefill_seconds = 0.0

    def warmup(
        self,
        policies: Iterable[Policy] | None = None,
        concurrency: int | None = None,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> float:
        """Compile every program that the policies (default: the current one) can reach; returns seconds.

        Up to `concurrency` (default: all slots) sequences may then be active. Programs compile side by side.
        `compiler_options` are XLA's; given, they hold for all of these programs, compiled already or not.
        """
        began = time.perf_counter()
        wanted: set[Bucket | int] = set(self.config.prefill)
        for policy in policies or [self.policy]:
            wanted |= self.config.buckets.reachable(policy, concurrency or self.config.slots)
        lowered = {key: self._lower(key) for key in wanted if compiler_options is not None or key not in self._programs}
        with ThreadPoolExecutor(max_workers=4) as pool:
            compiled = pool.map(lambda program: program.compile(compiler_options), lowered.values())
            self._programs |= dict(zip(lowered, compiled, strict=True))
        self._warm_compiles = compiles()
        return time.perf_counter() - began

    @property
    def compiles_after_warmup(self) -> int:
        """Compilations of this process since `warmup`; raises where there was none."""
        if self._warm_compiles is None:
            raise RuntimeError("call warmup() first")
        return compiles() - self._warm_compiles

    def submit(self, request: Request) -> int:
        """Queue a request and return its id. Raises `RequestError` for one that cannot be served."""
        self.check(request)
        self._next_id += 1
        self._waiting.append((self._next_id, request))
        return self._next_id

    def check(self, request: Request) -> None:
        """Raises `RequestError`, naming the field and the bound, for a request that this engine cannot serve."""
        if not len(request.prompt):
            raise RequestError("the prompt is empty; give at least one token (for example the start-of-text token)")
        if bad := [t for t in request.prompt if not 0 <= t < self.cfg.vocab_size]:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary of {self.cfg.vocab_size}")
        if len(request.prompt) >= self.config.context:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens and the context is {self.config.context}: no room to "
                "answer; shorten it or build the engine with a larger context"
            )
        if request.max_new_tokens < 0:
            raise RequestError(f"max_new_tokens is {request.max_new_tokens}; it must be 0 or more")
        if not (math.isfinite(request.temperature) and request.temperature >= 0):
            raise RequestError(f"temperature is {request.temperature}; it must be finite and 0 or more")

    def step(self) -> list[Emission]:
        """Admit what fits, then run one decode step over all active sequences. Empty when there is nothing to do."""
        emissions = []
        if self._waiting and len(self._active) < self.config.slots:
            began = time.perf_counter()
            emissions = self._admit()
            jax.block_until_ready(self._state)  # or the next decode step would be charged for it
            self.prefill_seconds += time.perf_counter() - began
        if self._active:
            began, width = time.perf_counter(), len(self._active)
            emissions += self._decode()
            spent = self.seconds.setdefault(width, [0, 0.0])
            spent[0] += 1
            spent[1] += time.perf_counter() - began
        return emissions

    @property
    def idle(self) -> bool:
        """Nothing active, nothing waiting."""
        return not self._active and not self._waiting

    def stream(self, requests: Iterable[Request]) -> Iterator[Emission]:
        """Submit the requests and yield emissions until all are finished. An interruption cancels what is left."""
        for request in list(requests):
            self.submit(request)
        try:
            while not self.idle:
                yield from self.step()
        finally:
            self.cancel_all()

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run the requests to their end, as many at once as there are slots; completions in the order given."""
        first = self._next_id + 1
        for _ in self.stream(requests):
            pass
        return [self.completion(i) for i in range(first, self._next_id + 1)]

    def completion(self, id: int) -> Completion:
        """Hand over a finished request, once. Raises `RequestError` for one that is not finished (or was taken)."""
        if id not in self._completed:
            raise RequestError(f"request {id} is not finished, was cancelled or has been taken")
        return self._completed.pop(id)

    def cancel_all(self) -> None:
        """Drop all unfinished requests. The engine stays usable, whatever was interrupted."""
        self._waiting.clear()
        self._active.clear()
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):  # interrupted inside a donating call
            self._state = self._new_state()

    def materialize(self) -> ModelState:
        """Fold everything pending and return the state: a slot then holds exactly its sequence's committed rows."""
        pending = np.zeros((2, self.config.slots), np.int32)
        pending[0] = self.config.slots
        for i, a in enumerate(self._active):
            pending[:, i] = a.slot, a.pending
            a.pending = 0
        self._state = self._program("fold")(self._params, self._state, pending)
        return self._state

    def _new_state(self) -> ModelState:
        return init_state(
            self.cfg,
            slots=self.config.slots,
            length=self.config.context,
            max_drafts=self.config.max_drafts,
            dtype=self.config.dtype,
            head=bool(self.cfg.mtp_layers),
        )

    def _admit(self) -> list[Emission]:
        emissions = []
        while self._waiting and len(self._active) < self.config.slots:
            id, request = self._waiting.popleft()
            if request.max_new_tokens == 0:
                self._completed[id] = Completion((), "length", Acceptance())
                emissions.append(Emission(id, (), (), "length"))
                continue
            taken = {active.slot for active in self._active}
            slot = next(i for i in range(self.config.slots) if i not in taken)
            self._prefill(slot, request.prompt)
            self._active.append(
                _Active(
                    id=id,
                    request=request,
                    slot=slot,
                    length=len(request.prompt) - 1,
                    last=int(request.prompt[-1]),
                    stop_at=min(len(request.prompt) + request.max_new_tokens, self.config.context),
                    key=_key(request.seed),
                )
            )
        return emissions

    def _prefill(self, slot: int, prompt: Sequence[int]) -> None:
        """Consume `prompt[:-1]`; the last token is row 0 of the sequence's first step.

        A prompt of one token runs a chunk without live rows: it clears what the slot's last sequence left.
        """
        start, end = 0, len(prompt) - 1
        widths = self.config.prefill
        while True:
            fitting = [width for width in widths if width <= end - start]
            width = fitting[-1] if fitting else widths[0]
            count = min(width, end - start)
            packed = np.zeros(4 + width, np.int32)
            packed[:3] = slot, start, count
            packed[3 : 4 + count] = prompt[start : start + count + 1]
            self._state = self._program(width)(self._params, self._state, packed)
            start += count
            if start == end:
                return

    def _decode(self) -> list[Emission]:
        active = self._active
        depth = self.policy.drafts(len(active))
        rows = [1 + min(len(a.drafts), depth, a.room - 1) for a in active]
        deepest = max(max(rows), depth + 1, max(a.pending for a in active) + 1)
        bucket = self.config.buckets.fit(len(active), deepest, sum(rows), self.policy.head or deepest > 1)
        packed = self._plan(active, rows, bucket)
        self._state, result = self._program(bucket)(self._params, self._state, packed)
        ints = np.asarray(result.ints)

        telemetry = self.acceptance.setdefault(len(active), Acceptance())
        emissions, left = [], []
        for i, a in enumerate(active):
            count = int(ints[i, 0])
            tokens = tuple(ints[i, 1 : 1 + count].tolist())
            verified = a.drafts[: rows[i] - 1]
            if not 1 <= count <= rows[i] or tokens[:-1] != verified[: count - 1]:
                raise AssertionError(f"request {a.id}: {rows[i]} rows emitted {tokens} from drafts {verified}")
            a.emitted += tokens
            a.length, a.last, a.pending = a.length + count, tokens[-1], count - 1
            a.drafts = tuple(ints[i, 1 + bucket.k :].tolist())
            if self._propose:
                a.drafts = tuple(self._propose([*a.request.prompt, *a.emitted], len(a.drafts)))
            for log in (telemetry, a.acceptance):
                log.record(len(verified), count)
            finished: FinishReason | None = None
            if tokens[-1] in self.cfg.eos_ids and not a.request.ignore_eos:
                finished = "stop"
            elif a.room == 0:
                finished = "length"
            if finished:
                self._completed[a.id] = Completion(tuple(a.emitted), finished, a.acceptance)
            else:
                left.append(a)
            emissions.append(Emission(a.id, tokens, verified, finished))
        self._active = left
        return emissions

    def _plan(self, active: list[_Active], rows: list[int], bucket: Bucket) -> np.ndarray:
        plan = Plan.empty(bucket.n, bucket.k, self.config.slots)
        for i, a in enumerate(active):
            plan.slots[i], plan.lengths[i], plan.pending[i] = a.slot, a.length, a.pending
            plan.num_rows[i], plan.room[i], plan.stops[i] = rows[i], a.room, not a.request.ignore_eos
            plan.tokens[i, : rows[i]] = (a.last, *a.drafts[: rows[i] - 1])
            plan.temperature[i], plan.keys[i] = a.request.temperature, a.key
        return plan.pack()

    def _program(self, key: Bucket | int | Literal["fold"]) -> Any:
        if key not in self._programs:
            self._programs[key] = self._lower(key).compile()
        return self._programs[key]

    def _lower(self, key: Bucket | int | Literal["fold"]) -> Any:
        """A step for a bucket, a prefill for a width, or the fold of everything pending; from shapes alone."""
        if isinstance(key, Bucket):
            fn: Any = functools.partial(step, cfg=self.cfg, bucket=key, ends=self.cfg.eos_ids, kernels=self.kernels)
            shape: tuple[int, ...] = (key.n, 9 + key.k)
        elif key == "fold":
            fn = functools.partial(fold_pending, cfg=self.cfg, fold=self.config.max_drafts, kernels=self.kernels)
            shape = (2, self.config.slots)
        else:
            fn = functools.partial(prefill, cfg=self.cfg, width=key, kernels=self.kernels)
            shape = (4 + key,)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self._params, self._state))
        return jax.jit(fn, donate_argnums=1).lower(*abstract, jax.ShapeDtypeStruct(shape, jnp.int32))


def _cast(params: Params, dtype: Any) -> Params:
    """Parameters in `dtype`, but decay parameters at least float32."""

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        wanted = leaf_dtype(path, dtype)
        if isinstance(leaf, jax.Array) and leaf.dtype == wanted:
            return leaf  # already where it is needed: large models are made on the device
        return np.asarray(leaf).astype(wanted)

    return jax.tree_util.tree_map_with_path(cast, params)


def _key(seed: int) -> np.ndarray:
    """A request's random key, two words; made on the host so that admission compiles nothing."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
