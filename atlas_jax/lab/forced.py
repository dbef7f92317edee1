"""Forced acceptance: drafts of a stated quality, whatever the head would say, so that steps can be timed at any rate.

With random weights a draft head is never right, and a step that accepts nothing is not the step of a trained model: it
leaves nothing pending. Here plain decode answers first; then a scripted drafter, which knows those answers, proposes
the true continuation as often as asked. The program is the one that serves: the head runs in full and its drafts are
then replaced on the host. Acceptance itself is not touched, so the tokens are still plain's.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

import numpy as np

from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Completion, Request
from atlas_jax.depth.policies import Off


class ForcedError(ValueError):
    """An acceptance that can't be forced; the message says why and what to change."""


@dataclasses.dataclass(frozen=True)
class ForcedAcceptance:
    """How often drafts are to be right.

    Attributes:
      conditional: `(p1, p2_cond, p3_cond, ...)`: probability that draft j is right, given the drafts before it were.
      seed: of the coins. A coin belongs to a request, a position and a draft: batch and policy don't enter it.
    """

    conditional: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.conditional or not all(0 <= p <= 1 for p in self.conditional):
            raise ForcedError(f"acceptance must be one or more probabilities, not {self.conditional}")

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> ForcedAcceptance:
        """From `"0.8,0.7,0.6"`."""
        try:
            return cls(tuple(float(part) for part in text.split(",")), seed)
        except ValueError as error:
            if isinstance(error, ForcedError):
                raise
            raise ForcedError(f"acceptance {text!r} is not p1,p2_cond,...: numbers with commas between them") from None

    def tok_step(self, drafts: int) -> float:
        """Expected tokens of a sequence-step that verifies that many drafts: `1 + p1 + p1 p2 + ...`."""
        if drafts > len(self.conditional):
            raise ForcedError(f"{drafts} drafts need {drafts} probabilities; there are {len(self.conditional)}")
        return 1 + sum(itertools.accumulate(self.conditional[:drafts], lambda a, b: a * b))


class ForcedDrafter:
    """The engine's `propose`: drafts from recorded answers, right as often as asked, then deliberately wrong.

    A request is found by its text, since that is all that `propose` is told. `record` comes first.

    Attributes:
      proposals: times it was asked for drafts.
      off_script: of these, times the text was no longer the recorded one, so that no right draft was known. Never in
        exact arithmetic; elsewhere a near tie may flip between the shapes of plain and of a verify step. Measured
        acceptance is lower for it, and must be read with this count.
      seconds: host time spent here, which is no part of a step.
    """

    def __init__(self, forced: ForcedAcceptance, vocab_size: int):
        self.forced, self.vocab_size = forced, vocab_size
        self._scripts: dict[tuple[int, ...], list[_Script]] = {}
        self._key_length = 0
        self._recording = False
        self.reset_counts()

    def reset_counts(self) -> None:
        """Forget all counts and times so far."""
        self.proposals, self.off_script, self.seconds = 0, 0, 0.0

    def record(self, engine: Engine, requests: Sequence[Request]) -> list[Completion]:
        """Answer the requests with plain decode, remember the answers as the script, and return them.

        Replaces what was recorded before; the engine comes back with the policy it had. Raises `ForcedError` where two
        requests have one prompt and two answers: their texts don't tell them apart.
        """
        before, engine.policy, self._recording = engine.policy, Off(), True
        try:
            answers = engine.generate(requests)
        finally:
            engine.policy, self._recording = before, False
        self.learn(requests, [answer.tokens for answer in answers])
        return answers

    def learn(self, requests: Sequence[Request], answers: Sequence[Sequence[int]]) -> None:
        """Take these answers as the script."""
        found: dict[tuple[int, ...], _Script] = {}
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            prompt = tuple(request.prompt)
            script = _Script(i, len(prompt), (*prompt, *answer))
            same = found.setdefault(prompt, script)
            if same.text != script.text:
                raise ForcedError(
                    f"requests {same.request} and {i} have the same prompt and different answers; change a prompt"
                )
        self._key_length = min(map(len, found), default=0)
        self._scripts = {}
        for prompt, script in found.items():
            self._scripts.setdefault(prompt[: self._key_length], []).append(script)

    def __call__(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` drafts behind `tokens` (prompt and answer so far); the engine asks for as many as its bucket has."""
        if count == 0 or self._recording:
            return ()
        began = time.perf_counter()
        self.proposals += 1
        drafts = self._propose(tuple(tokens), count)
        self.seconds += time.perf_counter() - began
        return drafts

    def _propose(self, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
        script = self._find(tokens)
        if script is None:
            self.off_script += 1
            return (0,) * count
        asked = self.forced.conditional
        coins = np.random.default_rng((self.forced.seed, script.request, len(tokens))).random(len(asked))
        right = next((j for j, p in enumerate(asked) if coins[j] >= p), len(asked))
        ahead = script.text[len(tokens) : len(tokens) + count]
        drafts = [token if j < right else (token + 1) % self.vocab_size for j, token in enumerate(ahead)]
        return (*drafts, *[0] * (count - len(drafts)))  # beyond the answer's end, where nothing is verified

    def _find(self, tokens: tuple[int, ...]) -> _Script | None:
        """The script that this text has followed so far; of several, which then read the same, the longest."""
        candidates = [
            script
            for script in self._scripts.get(tokens[: self._key_length], [])
            if tokens[: script.prompt_length] == script.text[: script.prompt_length]
        ]
        if not candidates:
            raise ForcedError("drafts are wanted for a prompt that was not recorded; record the same requests first")
        followed = [script for script in candidates if script.text[: len(tokens)] == tokens]
        return max(followed, key=lambda script: len(script.text), default=None)


@dataclasses.dataclass(frozen=True)
class _Script:
    request: int
    prompt_length: int
    text: tuple[int, ...]
