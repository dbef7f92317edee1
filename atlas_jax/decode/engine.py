"""Continuous batching around the one step: admission, prefill in turns, the plan of each step, retirement.

Everything here is host code on Python integers. The device holds the decode state and runs compiled programs, one per
bucket; which of them runs follows from what the sequences need, and nothing is ever compiled for a particular mix.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax import sharding
from atlas_jax.config import ModelConfig
from atlas_jax.decode.compiles import compiles
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.plan import Bucket, Plan, Round, StepConfig, fetch
from atlas_jax.decode.programs import Key, Programs
from atlas_jax.decode.requests import Completion, Emission, FinishReason, QueueFull, Request, RequestError
from atlas_jax.decode.sampling import table_problem
from atlas_jax.decode.sequence import Active, random_key
from atlas_jax.decode.slots import Kept, Slots
from atlas_jax.decode.state import DecodeState, init_state
from atlas_jax.decode.stops import first_stop
from atlas_jax.decode.telemetry import Acceptance, Steps, Telemetry
from atlas_jax.depth.policies import Off, Outcome, Policy, PolicyError, Queued
from atlas_jax.kernels.backends import choose
from atlas_jax.model import rollback
from atlas_jax.model.mixers import Params, leaf_dtype
from atlas_jax.model.mtp import with_draft_head


class Engine:
    """Serves requests with a model under a depth policy. Not thread-safe.

    Attributes:
      kernels: what `config.kernels` came to on this device; `describe()` says it in a line.
      telemetry: what drafts were worth and what steps took; `reset_telemetry` forgets it.
    """

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        config: EngineConfig = EngineConfig(),
        policy: Policy = Off(),
        *,
        propose: Callable[[Sequence[int], int], Sequence[int]] | None = None,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        trace: Callable[[dict[str, Any]], None] | None = None,
    ):
        """Put the parameters on the device, in the dtype of the config.

        Args:
          propose: `(tokens so far, count)` to drafts, in place of the head's own: a scripted drafter.
          detokenize: tokens to text; stop texts need it.
          trace: hears one record per sequence and step, what a depth policy could have known and what came of it.
        """
        if config.acceptance != "match" and not cfg.mtp_layers:
            raise ValueError(f"acceptance {config.acceptance!r} judges drafts of a head and the model has none")
        self.cfg, self.config = cfg, config
        self.kernels = choose(config.kernels)
        if config.numerics == "invariant":
            self.kernels = dataclasses.replace(self.kernels, gdn_step="sequential")
        rollback.check(config.rollback, self.kernels)
        self._devices = self._build_mesh()
        params = sharding.grouped(_cast(with_draft_head(params), config.dtype), cfg, config.mesh.tensor)
        self._params = jax.device_put(params) if self._devices is None else sharding.place(params, self._devices)
        self._propose, self._detokenize, self._trace = propose, detokenize, trace
        self._waiting: deque[tuple[int, Request]] = deque()
        self._active: list[Active] = []
        self._completed: dict[int, Completion] = {}
        self._next_id = 0
        self._steps = 0
        self._lost = False  # whether the device's state may not be what the sequences say
        self._stepping = False
        self._doomed: set[int] = set()  # cancelled while a step runs
        self.reset_telemetry()
        self._warm_compiles: int | None = None
        self.policy = policy
        self._state = self._new_state()
        self._slots = Slots(config.slots + config.keep, config.keep)
        shape = StepConfig(config.acceptance, config.top_log_probs, config.rounds, config.end_ids, config.rollback)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._state)
        self.programs = Programs(
            cfg,
            shape,
            self.kernels,
            config.max_drafts,
            config.slots,
            self._params,
            abstract,
            config.mesh,
            self._devices,
        )

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
        self._policy, self._policy_state = policy, policy.start()

    def reset_telemetry(self) -> None:
        """Forget all counts and times so far."""
        self.telemetry = Telemetry()

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
        wanted: set[Key] = {*self.config.prefill, "bias", "masks"}
        if self.config.keep:
            wanted |= {"fold", "copy"}
        for policy in policies or [self.policy]:
            if self.config.numerics == "invariant":
                reached = {self.config.invariant_bucket(bool(self.cfg.mtp_layers))}
            else:
                reached = self._reachable(policy, concurrency or self.config.slots)
            wanted |= {self._answering(bucket, policy) for bucket in reached}
        self.programs.compile(wanted, compiler_options)
        self._warm_compiles = compiles()
        return time.perf_counter() - began

    @property
    def compiles_after_warmup(self) -> int:
        """Compilations of this process since `warmup`; raises where there was none."""
        if self._warm_compiles is None:
            raise RuntimeError("call warmup() first")
        return compiles() - self._warm_compiles

    # ---- requests

    def submit(self, request: Request) -> int:
        """Queue a request and return its id. Raises `RequestError` for one that cannot be served, `QueueFull`."""
        self.check(request)
        if len(self._waiting) >= self.config.queue:
            raise QueueFull(f"{len(self._waiting)} requests wait already, the most that this engine queues")
        self._next_id += 1
        self._waiting.append((self._next_id, request))
        return self._next_id

    def check(self, request: Request) -> None:
        """Raises `RequestError`, naming the field and the bound, for a request that this engine cannot serve."""
        if not len(request.prompt):
            raise RequestError("the prompt is empty; give at least one token (for example the start-of-text token)")
        for name, tokens in (("prompt", request.prompt), ("stop_ids", request.stop_ids)):
            if bad := [t for t in tokens if not 0 <= t < self.cfg.vocab_size]:
                raise RequestError(f"{name}: token id {bad[0]} is outside the vocabulary of {self.cfg.vocab_size}")
        if len(request.prompt) >= self.config.context:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens and the context is {self.config.context}: no room to "
                "answer; shorten it or build the engine with a larger context"
            )
        for name in ("max_new_tokens", "max_drafts", "prefix"):
            if (getattr(request, name) or 0) < 0:
                raise RequestError(f"{name} is {getattr(request, name)}; it must be 0 or more")
        if problem := request.sampling.problem(self.cfg.vocab_size):
            raise RequestError(problem)
        if len(self._ends(request)) > self.config.end_ids:
            raise RequestError(
                f"the request has {len(self._ends(request))} end tokens, the model's own included, and the engine was "
                f"built for {self.config.end_ids}; build it with a larger end_ids"
            )
        if request.stop and self._detokenize is None:
            raise RequestError("stop texts need an engine built with detokenize=")
        if "" in request.stop:
            raise RequestError("stop holds an empty text, which every answer contains")

    @property
    def idle(self) -> bool:
        """Nothing active, nothing waiting."""
        return not self._active and not self._waiting

    @property
    def active(self) -> int:
        """Sequences that hold a slot."""
        return len(self._active)

    def stream(self, requests: Iterable[Request]) -> Iterator[Emission]:
        """Submit the requests as the queue takes them and yield what all steps emit until they are finished.

        An interruption cancels what is left of them.
        """
        waiting, open_ids = deque(requests), set[int]()
        try:
            while waiting or open_ids:
                while waiting and len(self._waiting) < self.config.queue:
                    open_ids.add(self.submit(waiting[0]))
                    waiting.popleft()
                emissions = self.step()
                # Not by the emissions alone: what is cancelled between two steps ends without one.
                open_ids &= {id for id, _ in self._waiting} | {a.id for a in self._active}
                yield from emissions
        finally:
            for id in open_ids:
                self.cancel(id)

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run the requests to their end, as many at once as there are slots; completions in the order given."""
        first = self._next_id + 1
        for _ in self.stream(requests):
            pass
        return [self.completion(i) for i in range(first, self._next_id + 1)]

    def completion(self, id: int) -> Completion:
        """Hand over a finished request, once. Raises `RequestError` for one that is not finished (or was taken)."""
        if id not in self._completed:
            raise RequestError(f"request {id} is not finished, was never submitted or has been taken")
        return self._completed.pop(id)

    def cancel(self, id: int) -> bool:
        """End a request now, with what it has; false if it is not waiting or running. Others don't notice.

        Called by one of the caller's own functions inside a step, it takes effect when that step ends.
        """
        for waiting in self._waiting:
            if waiting[0] == id:
                self._waiting.remove(waiting)
                self._completed[id] = Completion((), "cancelled", Acceptance())
                return True
        for a in self._active:
            if a.id == id:
                if self._stepping:
                    self._doomed.add(id)
                else:
                    self._finish(a, "cancelled")
                return True
        return False

    def cancel_all(self) -> None:
        """End all unfinished requests."""
        for id in [id for id, _ in self._waiting] + [a.id for a in self._active]:
            self.cancel(id)

    # ---- steps

    def step(self) -> list[Emission]:
        """Admit what fits, run some prefill, then one decode step (or a few rounds of it) over all ready sequences.

        Empty when there is nothing to do. Whatever is raised in here, Ctrl-C included, loses no request: sequences go
        on from the tokens that they had, their states computed anew.
        """
        if self._lost:
            self._replay()
        self._lost = self._stepping = True  # until this step has come to its end
        emissions = []
        try:
            emissions += self._admit()
            self._prefill()
            if ready := [a for a in self._active if a.ready]:
                emissions += self._decode(ready)
            self._lost = False
        finally:
            self._stepping = False
            emissions += [self._finish(a, "cancelled") for a in self._active if a.id in self._doomed]
            self._doomed.clear()
        return emissions

    def materialize(self) -> DecodeState:
        """Fold everything pending and return the state: a slot then holds exactly its sequence's committed rows."""
        self._fold([(a.slot, a.pending, a.length, a.head) for a in self._active])
        for a in self._active:
            a.pending = 0
        return self._state

    def _build_mesh(self) -> jax.sharding.Mesh | None:
        """The config's mesh, checked; None for one device."""
        mesh = self.config.mesh
        mesh.check(self.cfg, self.config.slots + self.config.keep)
        if mesh.size == 1:
            return None
        return mesh.build()

    def _reachable(self, policy: Policy, concurrency: int) -> set[Bucket]:
        """Buckets that up to so many sequences can need, however they lie on the shards of the data."""
        buckets = self.config.buckets
        if self.config.mesh.data == 1:
            return buckets.reachable(policy, concurrency)
        # The depth follows from all sequences, the rest of the shape from those of the fullest shard.
        everywhere = dataclasses.replace(buckets, n=tuple(range(1, concurrency + 1)), ragged=False)
        depths = {bucket.k for bucket in everywhere.reachable(policy, concurrency)}
        shards = range(1, min(concurrency, self.config.slots_per_shard) + 1)
        counts = lambda n, k: range(n, n * k + 1) if buckets.ragged else (n * k,)
        return {buckets.fit(n, k, rows, policy.head) for n in shards for k in depths for rows in counts(n, k)}

    def _new_state(self) -> DecodeState:
        make = functools.partial(
            init_state,
            self.cfg,
            slots=self.config.slots + self.config.keep,
            length=self.config.context,
            max_drafts=self.config.max_drafts,
            dtype=self.config.dtype,
            head=bool(self.cfg.mtp_layers),
            proposals=self.config.acceptance != "match",
            rollback=self.config.rollback,
        )
        return make() if self._devices is None else sharding.zeros(jax.eval_shape(make), self._devices)

    def _replay(self) -> None:
        """After an interruption: no state is trusted; every sequence is computed anew from its tokens."""
        self._state = self._new_state()
        self._slots = Slots(self.config.slots + self.config.keep, self.config.keep)
        for a in self._active:
            a.begin_anew(self._slots.take())
            self._set_bias(a)

    def _ends(self, request: Request) -> frozenset[int]:
        return frozenset(request.stop_ids) | (frozenset() if request.ignore_eos else frozenset(self.cfg.eos_ids))

    def _admit(self) -> list[Emission]:
        emissions = []
        while self._waiting and len(self._active) < self.config.slots:
            id, request = self._waiting.popleft()
            if request.max_new_tokens == 0:
                self._completed[id] = Completion((), "length", Acceptance())
                emissions.append(Emission(id, (), (), "length"))
                continue
            a = Active(
                id=id,
                request=request,
                slot=self._slots.take(),
                text=list(request.prompt),
                stop_at=min(len(request.prompt) + request.max_new_tokens, self.config.context),
                ends=self._ends(request),
                key=random_key(request.sampling.seed, self.config.seed, id),
            )
            self._active.append(a)
            self._reuse(a)
            self._set_bias(a)
        return emissions

    def _reuse(self, a: Active) -> None:
        """Begin with the longest kept state that the prompt begins with."""
        kept = self._slots.longest(a.text)
        if kept is None:
            return
        length = len(kept.tokens) - 1
        # With nothing pending too: where a stop text took rows back, the slot's ledger does not know it yet.
        self._fold([(kept.slot, kept.pending, length, kept.head)])
        kept.pending = 0
        self._state = self.programs["copy"](self._params, self._state, np.array([kept.slot, a.slot], np.int32))
        a.length, a.head, a.reused = length, kept.head, length
        a.blank = length == 0
        a.kept = len(kept.tokens) == len(a.text)
        self.telemetry.reused += length

    def _set_bias(self, a: Active) -> None:
        if bias := a.request.sampling.bias:
            table = np.zeros(self.cfg.vocab_size, np.float32)
            table[list(bias)] = list(bias.values())
            self._state = self.programs["bias"](self._state, np.int32(a.slot), table)

    def _prefill(self) -> None:
        """Some chunks of the prompts that wait for it, in the order in which they came."""
        waiting = [a for a in self._active if not a.ready]
        if not waiting:
            return
        began = time.perf_counter()
        decoding = len(waiting) < len(self._active)
        budget = self.config.prefill_tokens
        for a in waiting:
            while not a.ready and (budget > 0 or not decoding):
                budget -= self._chunk(a)
            if a.ready and not a.kept:
                self._keep_copy(a, a.text)
                a.kept = True
        jax.block_until_ready(self._state)  # or the next decode step would be charged for it
        self.telemetry.prefill_s += time.perf_counter() - began

    def _chunk(self, a: Active) -> int:
        """Consume one chunk of a sequence's text, all but its last token; that one is row 0 of its first step.

        A text of one token runs a chunk without live rows: it clears what the slot's last sequence left.
        """
        prefix = a.request.prefix - 1
        end = prefix if a.length < prefix < len(a.text) - 1 else len(a.text) - 1
        widths = self.config.prefill
        fitting = [width for width in widths if width <= end - a.length]
        width = fitting[-1] if fitting else widths[0]
        count = min(width, end - a.length)
        packed = np.zeros(4 + width, np.int32)
        packed[:3] = a.slot, a.length, count
        packed[3 : 4 + count] = a.text[a.length : a.length + count + 1]
        self._state = self.programs[width](self._params, self._state, packed)
        a.head = a.head + count if a.head == a.length and self.cfg.mtp_layers else a.head
        a.length, a.blank = a.length + count, False
        self.telemetry.prefilled += count
        if a.length == prefix:
            self._keep_copy(a, a.text[: prefix + 1])
        return max(count, 1)

    def _keep_copy(self, a: Active, tokens: Sequence[int]) -> None:
        """Keep the state as it is now for prompts that begin with these tokens. Nothing may be pending."""
        if not self.config.keep or self._slots.has(tokens):
            return
        slot = self._slots.take()
        self._state = self.programs["copy"](self._params, self._state, np.array([a.slot, slot], np.int32))
        self._slots.keep_state(Kept(tuple(tokens), slot, 0, a.head))

    def _fold(self, what: Sequence[tuple[int, int, int, int]]) -> None:
        """Fold pending rows, given per sequence as `(slot, rows, committed positions, head entries)`."""
        packed = np.zeros((4, self.config.slots), np.int32)
        packed[0] = self.config.slots + self.config.keep
        packed[:, : len(what)] = np.array(what, np.int32).reshape(-1, 4).T
        self._state = self.programs["fold"](self._params, self._state, packed)

    def _decode(self, ready: list[Active]) -> list[Emission]:
        began = time.perf_counter()
        emissions, ready, rows, propose = self._decide(ready)
        if not ready:
            return emissions
        bucket = self._fit(ready, rows, propose)
        mesh = self.config.mesh
        plan = Plan.empty(bucket.n * mesh.data, bucket.k, self.config.slots + self.config.keep, self.config.end_ids)
        places = mesh.places([a.slot for a in ready], bucket.n)
        for i, a, count in zip(places, ready, rows, strict=True):
            a.fill(plan, i, count, bucket, scripted=self._propose is not None)
        plan.rounds[:] = self._rounds(ready)
        program = self.programs[bucket]
        called = time.perf_counter()
        self._state, result = program(self._params, self._state, plan.packed)
        answers = fetch(result, bucket.k, log_probs=any(a.request.log_probs for a in ready))
        answered = time.perf_counter()

        # All of the answer is at hand before any of it is recorded.
        rounds = 0
        for answer in answers:
            if answer.ran:
                emissions += self._commit(ready, rows, places, answer, bucket)
                rows = [1 + min(len(a.drafts), max(a.most_drafts, 0)) for a in ready]
                rounds += 1
        steps = self.telemetry.steps.setdefault(len(ready), Steps())
        steps.count += rounds
        steps.buckets[bucket] += rounds
        steps.device_s += answered - called
        steps.host_s += called - began + time.perf_counter() - answered
        return emissions

    def _decide(self, ready: list[Active]) -> tuple[list[Emission], list[Active], list[int], int]:
        """Ask the policy. Returns what ended, what goes on with how many rows each, and drafts to propose."""
        chances = lambda a: a.draft_log_probs if self.policy.needs_log_probs else ()
        most = lambda a: max(0, min(a.most_drafts, self.config.max_drafts))
        decision = self.policy.decide(
            self._policy_state, [Queued(len(a.drafts), chances(a), a.length, most(a)) for a in ready]
        )
        emissions, going, rows = [], [], []
        for a, verify in zip(ready, decision.verify, strict=True):
            count = 1 + verify
            if a.request.sampling.allowed is not None:
                try:
                    count = self._set_masks(a, count)
                except Exception as error:  # of the caller's function: its own request's, nobody else's
                    emissions.append(self._finish(a, "error", error=f"allowed: {error}"))
                    continue
            going.append(a)
            rows.append(count)
        return emissions, going, rows, decision.propose

    def _fit(self, ready: list[Active], rows: list[int], propose: int) -> Bucket:
        """The bucket of a step."""
        if self.config.numerics == "invariant":
            bucket = self.config.invariant_bucket(bool(self.cfg.mtp_layers))
        else:
            deepest = max(max(rows), propose + 1, max(a.pending for a in ready) + 1)
            fullest = functools.partial(self.config.mesh.fullest, [a.slot for a in ready])
            n, total = fullest([1] * len(ready)), fullest(rows)
            bucket = self.config.buckets.fit(n, deepest, total, self.policy.head or deepest > 1)
        return self._answering(bucket, self.policy)

    def _commit(
        self, ready: list[Active], rows: list[int], places: list[int], answer: Round, bucket: Bucket
    ) -> list[Emission]:
        """Record one round: what each sequence emitted, and what it drafts next."""
        emissions, offered, accepted, chances = [], [], [], []
        self._steps += 1
        width = len(ready)
        for i, a, ran in zip(places, ready, rows, strict=True):
            if a.id in self._doomed:
                continue
            tokens, verified, before = answer.tokens(i), a.drafts[: ran - 1], a.length
            compared = self.config.acceptance == "match"
            if problem := a.violation(ran, tokens, verified, answer.fault(i), compared):
                emissions.append(self._finish(a, "error", error=problem))
                continue
            stopped = self._stopped(a, tokens)
            if stopped is not None:
                # The rest is dropped before it is folded; where it has been folded, the state is no use to anyone.
                a.blank |= self.config.rollback == "recompute" and stopped[0] < len(tokens)
                tokens = tokens[: stopped[0]]
            count = len(tokens)
            filled = bucket.head and a.head == a.length
            a.text += tokens
            a.length, a.pending = a.length + count, count - 1
            a.head = a.length if filled else a.head
            log_probs, top = answer.log_probs(i, count) if a.request.log_probs else [], answer.top(i, count)
            a.log_probs += log_probs
            a.top += top
            for log in (self.telemetry.acceptance.setdefault((width, a.request.label), Acceptance()), a.acceptance):
                log.record(len(verified), count)
            queued = a.draft_log_probs
            a.drafts, a.draft_log_probs = answer.drafts(i), answer.draft_log_probs(i)
            if self._propose:
                a.drafts = tuple(self._propose(list(a.text), len(a.drafts)))
                a.draft_log_probs = (0.0,) * len(a.drafts) if a.draft_log_probs else ()
            offered.append(len(verified))
            accepted.append(count - 1)
            chances.append(queued if self.policy.needs_log_probs else ())
            if self._trace:
                self._trace(
                    {
                        "request": a.id,
                        "label": a.request.label,
                        "step": self._steps,
                        "position": before,
                        "width": width,
                        "offered": len(verified),
                        "accepted": count - 1,
                        "log_probs": [round(x, 4) for x in queued[: len(verified)]],
                        "drafts_next": len(a.drafts),
                        "bucket": [bucket.n, bucket.k, bucket.rows],
                    }
                )
            finished, by = (None, None) if a.id in self._doomed else self._finished(a, stopped)
            emissions.append(Emission(a.id, tuple(tokens), verified, finished, tuple(log_probs), tuple(top)))
            if finished:
                self._finish(a, finished, by=by)
        outcome = Outcome(width, tuple(offered), tuple(accepted), tuple(chances))
        self._policy_state = self.policy.observe(self._policy_state, outcome)
        return emissions

    def _finished(
        self, a: Active, stopped: tuple[int, str] | None
    ) -> tuple[FinishReason | None, int | str | None]:
        """Whether and why a sequence has ended, and the text or token that ended it."""
        if stopped is not None:
            return "stop", stopped[1]
        if a.text[-1] in a.ends:
            return "stop", a.text[-1]
        return ("length", None) if a.room == 0 else (None, None)

    def _stopped(self, a: Active, tokens: list[int]) -> tuple[int, str] | None:
        """How many of the new tokens complete a stop text, and which; None if none does."""
        if not a.request.stop:
            return None
        assert self._detokenize is not None
        return first_stop(self._detokenize, a.request.stop, a.emitted, tokens)

    def _finish(
        self, a: Active, finished: FinishReason, *, by: int | str | None = None, error: str = ""
    ) -> Emission:
        """Retire a sequence; its state stays for a continuation, as far as there is room for it."""
        self._completed[a.id] = a.completion(finished, by, error)
        self._active = [other for other in self._active if other is not a]
        if a.ready and finished in ("stop", "length") and not self._lost_head(a):
            self._slots.keep_state(Kept(tuple(a.text), a.slot, a.pending, a.head))
        else:
            self._slots.give_back(a.slot)
        return Emission(a.id, (), (), finished)

    def _lost_head(self, a: Active) -> bool:
        """Plain steps leave gaps in the head's cache; what is kept for reuse must draft as a cold run would."""
        return bool(self.cfg.mtp_layers) and a.head != a.length

    def _set_masks(self, a: Active, rows: int) -> int:
        """Give the step the allowed tokens of each row; returns the rows whose drafts are allowed.

        Where the caller's function fails, or allows nothing, behind drafts that may yet be rejected, they are not
        verified: plain decode might never have asked.
        """
        allowed = a.request.sampling.allowed
        table = np.zeros((self.config.max_drafts + 1, self._state.masks.shape[2] * 32), bool)
        for j in range(rows):
            try:
                found = np.asarray(allowed(a.text + list(a.drafts[:j])) if callable(allowed) else allowed)
                if problem := table_problem(found, self.cfg.vocab_size):
                    raise RequestError(problem)
            except Exception:
                if j == 0:
                    raise
                rows = j
                break
            table[j, : self.cfg.vocab_size] = found
            if j + 1 < rows and not found[a.drafts[j]]:
                rows = j + 1
                break
        bits = np.packbits(table, axis=1, bitorder="little").view(np.uint32)
        self._state = self.programs["masks"](self._state, np.int32(a.slot), bits)
        return rows

    def _rounds(self, ready: list[Active]) -> int:
        """Steps that this call may take: several only where nothing on the host has a say between them."""
        watched = self._propose or self._waiting or len(ready) < len(self._active)
        if watched or self._policy_state is not None or self.policy.ragged:
            return 1
        asked = any(a.request.stop or a.request.sampling.allowed is not None for a in ready)
        return 1 if asked else self.programs.config.rounds

    def _answering(self, bucket: Bucket, policy: Policy) -> Bucket:
        """The bucket with the log-probabilities that the policy or the config asks for."""
        log_probs = bucket.head and (policy.needs_log_probs or self.config.draft_log_probs)
        return dataclasses.replace(bucket, log_probs=log_probs)


def _cast(params: Params, dtype: Any) -> Params:
    """Parameters in `dtype`, but decay parameters at least float32."""

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        wanted = leaf_dtype(path, dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.dtype(jnp.int32)
        if isinstance(leaf, jax.Array) and leaf.dtype == wanted:
            return leaf  # already where it is needed: large models are made on the device
        return np.asarray(leaf).astype(wanted)

    return jax.tree_util.tree_map_with_path(cast, params)
