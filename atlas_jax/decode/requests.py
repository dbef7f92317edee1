"""What a caller asks of the engine, and what it gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from atlas_jax.decode.sampling import Sampling
from atlas_jax.decode.telemetry import Acceptance

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestError(ValueError):
    """A request that the engine cannot serve; the message names the field and the bound. Nothing is lost."""


class QueueFull(RequestError):
    """The waiting line is full; take completions or wait, then submit again."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      prompt: token ids, at least one. To continue a finished request, give its prompt and its tokens.
      max_new_tokens: most tokens to emit; the context may end the answer earlier.
      sampling: how tokens are picked; greedy by default.
      ignore_eos: go on through the model's end tokens. `stop_ids` and `stop` still end the answer.
      stop_ids: further tokens that end the answer; the token is part of it.
      stop: texts that end the answer as soon as it contains one, wherever tokens begin and end. The answer is cut
        behind the token that completes the text. Needs an engine with `detokenize`.
      max_drafts: most drafts for this request, whatever the policy says; 0 turns speculation off for it.
      log_probs: answer the log-probability of each token under the model's own distribution.
      prefix: keep the state of the first so many prompt tokens for requests that begin alike (a system prompt); the
        whole prompt is kept anyway, as far as the engine has room for such states.
      label: of the traffic, for telemetry: tools, prose, ...
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    max_drafts: int | None = None
    log_probs: bool = False
    prefix: int = 0
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Emission:
    """What one step gave one request.

    Attributes:
      request: the id that `submit` returned.
      tokens: emitted tokens, in order.
      drafts: the drafts that were verified; the first `len(tokens) - 1` were accepted.
      finished: why the request ended with this step, if it did.
      log_probs: of the tokens, where the request asks for them.
      top: of each token, the likeliest tokens there and their log-probabilities, as many as the engine was built for.
    """

    request: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    finished: FinishReason | None
    log_probs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      tokens: all emitted tokens.
      finished: "stop" (an end token or text), "length" (a limit), "cancelled", or "error".
      acceptance: what its drafts were worth.
      stopped_by: the end token or the stop text.
      error: what went wrong, where something did; the tokens before it stand.
      reused: prompt tokens whose state was at hand.
    """

    tokens: tuple[int, ...]
    finished: FinishReason
    acceptance: Acceptance
    log_probs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    stopped_by: int | str | None = None
    error: str = ""
    reused: int = 0
