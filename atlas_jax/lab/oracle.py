"""What a request must be answered, found without the engine: one full forward over its text, and a sampler in NumPy.

Nothing of `decode` runs here: no cache, no step, no batch, no drafts. Every emitted token must be what the sampler
picks from the forward's scores at its place, given the text before it. Rows of other shapes round differently, so a
pick may flip at a near tie; that is excused below a stated gap, and counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.decode.requests import Completion, Request
from atlas_jax.decode.sampling import GREEDY_BELOW, Sampling
from atlas_jax.model.mixers import Params
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full

TIE_BOUND = 1e-4  # of the scores that decide, noise included (float32)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """On one answer.

    Attributes:
      tokens: that were judged; the judgement ends at the first one that is not the sampler's.
      excused, unexcused: picks that differ, at a near tie and otherwise.
      wrong: what else is wrong with the answer, in words.
    """

    tokens: int
    excused: int = 0
    unexcused: int = 0
    wrong: str = ""


def pick(
    scores: np.ndarray, text: Sequence[int], prompt: int, sampling: Sampling, noise: np.ndarray
) -> tuple[int, np.ndarray]:
    """The sampler, one position, in float64: the token and the values it was the largest of.

    Args:
      scores: `[V]` of the position.
      text: all tokens before it, of which the first `prompt` are the prompt.
      noise: `[V]` standard Gumbel; not used where the request is greedy.
    """
    values = np.asarray(scores, np.float64).copy()
    for token, bias in sampling.bias.items():
        values[token] += bias
    seen = np.unique(np.asarray(text, np.int64))
    factor = np.where(values[seen] > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
    values[seen] *= factor
    emitted, counts = np.unique(np.asarray(text[prompt:], np.int64), return_counts=True)
    values[emitted] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    if sampling.allowed is not None:
        allowed = sampling.allowed(text) if callable(sampling.allowed) else sampling.allowed
        values[~np.asarray(allowed)] = -np.inf
    if sampling.temperature < GREEDY_BELOW:
        return int(values.argmax()), values
    values /= sampling.temperature
    if sampling.min_p:
        values[values < values.max() + np.log(sampling.min_p)] = -np.inf
    if 0 < sampling.top_k < len(values):
        values[values < np.sort(values)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(-values, kind="stable")
        chances = np.exp(values[order] - values[order[0]])
        before = np.cumsum(chances / chances.sum()) - chances / chances.sum()
        last = max(int((before < sampling.top_p).sum()) - 1, 0)
        values[values < values[order[last]]] = -np.inf
    values = values + noise
    return int(values.argmax()), values


class Oracle:
    """Judges answers of one model; compiles once. `length` is the engine's `context`."""

    def __init__(self, params: Params, cfg: ModelConfig, length: int, batch: int = 8, tie: float = TIE_BOUND):
        self.cfg, self.length, self.batch, self.tie = cfg, length, batch, tie
        self._params = jax.device_put(params)

        def forward(params: Params, tokens: jax.Array) -> jax.Array:
            hidden, _ = trunk(params, cfg, tokens, Full(jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)))
            return logits(params, hidden)

        def noise(keys: jax.Array, dtype: jax.Array) -> jax.Array:
            def row(key: jax.Array, position: jax.Array) -> jax.Array:
                folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
                return jax.random.gumbel(folded, (cfg.vocab_size,), dtype.dtype)

            return jax.vmap(lambda key: jax.vmap(lambda p: row(key, p))(jnp.arange(length)))(keys)

        self._forward, self._noise = jax.jit(forward), jax.jit(noise)

    def warmup(self) -> None:
        """Compile both programs now."""
        scores = self._forward(self._params, np.zeros((self.batch, self.length), np.int32))
        jax.block_until_ready(self._noise(np.zeros((self.batch, 2), np.uint32), scores))

    def judge(
        self, requests: Sequence[Request], completions: Sequence[Completion], keys: Sequence[np.ndarray]
    ) -> list[Verdict]:
        """A verdict per request. `keys` are the random keys of the requests, two words each."""
        verdicts: list[Verdict] = []
        for start in range(0, len(requests), self.batch):
            part = slice(start, start + self.batch)
            verdicts += self._judge(requests[part], completions[part], keys[part])
        return verdicts

    def _judge(
        self, requests: Sequence[Request], completions: Sequence[Completion], keys: Sequence[np.ndarray]
    ) -> list[Verdict]:
        tokens = np.zeros((self.batch, self.length), np.int32)
        words = np.zeros((self.batch, 2), np.uint32)
        for i, (request, done) in enumerate(zip(requests, completions, strict=True)):
            text = [*request.prompt, *done.tokens]
            tokens[i, : len(text)], words[i] = text, keys[i]
        scores = self._forward(self._params, tokens)
        sampled = any(request.sampling.temperature >= GREEDY_BELOW for request in requests)
        noise = np.asarray(self._noise(words, scores)) if sampled else None
        host = np.asarray(scores)
        return [
            self._one(request, done, host[i], None if noise is None else noise[i])
            for i, (request, done) in enumerate(zip(requests, completions, strict=True))
        ]

    def _one(self, request: Request, done: Completion, scores: np.ndarray, noise: np.ndarray | None) -> Verdict:
        text, prompt = list(request.prompt), len(request.prompt)
        silent = np.zeros(self.cfg.vocab_size)
        for judged, token in enumerate(done.tokens):
            at = len(text) - 1  # the row that predicts the token at at + 1
            best, values = pick(
                scores[at], text, prompt, request.sampling, silent if noise is None else noise[at + 1]
            )
            if best != token:
                near = values[best] - values[token] < self.tie
                return Verdict(judged + 1, int(near), int(not near))
            text.append(token)
        return Verdict(len(done.tokens), wrong=self._ending(request, done))

    def _ending(self, request: Request, done: Completion) -> str:
        """What is wrong with how the answer ends; stop texts are the caller's to check."""
        ends = {*request.stop_ids, *(() if request.ignore_eos else self.cfg.eos_ids)}
        first = next((i for i, token in enumerate(done.tokens) if token in ends), None)
        if first is not None and first < len(done.tokens) - 1:
            return f"goes on behind the end token at {first}"
        if len(done.tokens) > request.max_new_tokens:
            return f"{len(done.tokens)} tokens where {request.max_new_tokens} were asked for"
        most = min(request.max_new_tokens, self.length - len(request.prompt))
        if done.finished == "length" and len(done.tokens) < most:
            return f"finished 'length' after {len(done.tokens)} tokens, with room for {most}"
        if done.finished == "length" and first is not None:
            return "finished 'length' at an end token"
        if done.finished == "stop" and isinstance(done.stopped_by, int) and done.tokens[-1] != done.stopped_by:
            return f"stopped by {done.stopped_by}, which is not its last token"
        return f"finished {done.finished!r}: {done.error}" if done.finished == "error" else ""
