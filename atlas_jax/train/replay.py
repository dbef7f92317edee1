"""Acceptance of a head on answers that are known already: what the decode loop would count, without the loop.

Greedy answers of the base don't depend on the drafts. So the outcome of every draft from every place of an answer can
be computed in one teacher-forced pass, and a walk over it gives the steps of the decode loop, exactly but for near
ties. Fit for live figures, and for the bound of a head that is handed the true hiddens, which no decode loop could run.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jaxtyping import Array, Bool

from atlas_jax.config import ModelConfig
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.model import mtp
from atlas_jax.model.mixers import Params
from atlas_jax.train.hiddens import HiddenCache
from atlas_jax.train.unroll import Rows, Unroll, unroll


@functools.partial(jax.jit, static_argnums=(1, 3))
def hits(params: Params, cfg: ModelConfig, rows: Rows, how: Unroll) -> Bool[Array, "N A J"]:
    """Whether each draft of each chain, fed the text, is the text's token."""
    found = unroll(params, cfg, rows, how)
    drafts = [mtp.draft_tokens(params, mtp.draft_logits(params, depth.hidden).argmax(axis=-1)) for depth in found]
    right = [(draft == depth.targets) & (depth.weights > 0) for draft, depth in zip(drafts, found, strict=True)]
    return jax.numpy.stack(right, axis=-1)


def replay(
    params: Params, cfg: ModelConfig, answers: HiddenCache, how: Unroll, batch: int = 4
) -> dict[str, Acceptance]:
    """Acceptance by regime at `how.depth` drafts over cached greedy answers, one document each.

    The first step of an answer has no drafts; the last ones are cut where the answer ends, as the decode loop does.
    """
    result: dict[str, Acceptance] = {}
    for first in range(0, len(answers), batch):
        at = np.minimum(np.arange(first, first + batch), len(answers) - 1)
        rows = Rows(*(jax.numpy.asarray(getattr(answers, name)[at]) for name in Rows._fields))
        right = np.asarray(hits(params, cfg, rows, how))
        for row in range(min(batch, len(answers) - first)):
            anchors, segments = rows.anchors[row], rows.segments[row]
            length = segments.shape[0]
            live = np.flatnonzero(anchors < length)
            documents = segments[anchors[live]]
            for document in np.unique(documents):
                mine = live[documents == document]
                end = int(np.flatnonzero(segments == document)[-1])
                log = result.setdefault(answers.names[answers.regimes[at[row], end]], Acceptance())
                walk(right[row, mine], log, stopped=int(rows.tokens[row, end]) in cfg.eos_ids)
    return result


def walk(right: np.ndarray, log: Acceptance, stopped: bool) -> None:
    """Add the steps of one answer, whose chains are consecutive: `right[i, j]` is the draft of token `i + j + 1`.

    `stopped`: its last token is an end token. The decode loop doesn't know that before, so it cuts only the drafts of
    answers that end for their length.
    """
    count, depth = right.shape
    log.record(0, 1)  # the step that emits the answer's first token has no drafts to verify
    at = 0
    while at < count:
        offered = depth if stopped else min(depth, count - at - 1)
        accepted = int(np.argmin([*right[at, :offered], False]))
        emitted = min(accepted + 1, count - at)
        log.record(offered, emitted)
        at += emitted

