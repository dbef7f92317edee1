"""Acceptance traces: what drafts at each position of an answer would have been worth, so that policies can be replayed.

A trace knows, per position of each answer, how many drafts in a row would be accepted there, what the head said of them
and how likely they really were. Replaying another policy then meets the same text. Traces are recorded by the engine
(JSON lines, one per sequence and step) or made from given acceptance. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atlas_jax.depth.survival import BIN_EDGES

FORMAT = "atlas_jax trace 1"
Row = tuple[float, ...]


class TraceError(ValueError):
    """A trace that can't be read, or is of another model; the message says which."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request, and its drafts per position t (tokens emitted before).

    Attributes:
      label: regime.
      prompt: tokens of the prompt.
      run: drafts in a row that are accepted at t, up to the trace's depth; its length is the answer's.
      log_probs: of each draft under the head.
      truth: probability that each is accepted, given those before it.
      expected: the mean of `truth` for text like this.
    """

    label: str
    prompt: int
    run: tuple[int, ...]
    log_probs: tuple[Row, ...]
    truth: tuple[Row, ...]
    expected: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Trace:
    """Answers in the order in which their requests arrive, all of `depth` drafts a position.

    `model` is its `lab.cost.model_id`, empty where the trace was made and not recorded.
    """

    name: str
    depth: int
    answers: tuple[Answer, ...]
    model: str = ""

    def expect(self, model: str) -> Trace:
        """This trace, if it is of that model or of none. Raises `TraceError` otherwise."""
        if self.model and self.model != model:
            raise TraceError(
                f"trace {self.name} was recorded from model {self.model!r}, not {model!r}; acceptance doesn't carry "
                "over: record one of this model, or use a made one (prose, tools, switching)"
            )
        return self

    def acceptance(self) -> tuple[float, ...]:
        """Conditional acceptance `(p1, p2_cond, ...)` over all positions; 0 where nothing was ever reached."""
        runs = np.concatenate([answer.run for answer in self.answers])
        reached = [int((runs >= j).sum()) for j in range(self.depth + 1)]
        return tuple(b / a if a else 0.0 for a, b in itertools.pairwise(reached))

    def only(self, label: str) -> Trace:
        """The answers of one regime."""
        kept = tuple(answer for answer in self.answers if answer.label == label)
        if not kept:
            raise TraceError(f"trace {self.name} has no {label!r}; it has {sorted({a.label for a in self.answers})}")
        return dataclasses.replace(self, name=f"{self.name}:{label}", answers=kept)


@dataclasses.dataclass(frozen=True)
class Regime:
    """A kind of text, by the acceptance that its drafts meet.

    Attributes:
      conditional: `(p1, p2_cond, p3_cond)`; the last one goes on for deeper drafts.
      spread: how far single drafts lie from that mean: their chances follow a Beta distribution of this concentration.
        Small: most are nearly certain or nearly hopeless, as a head's are; large: all alike.
      sharpness, noise: what the head says is its draft's log-odds times the one, plus normal noise of the other. 1 and
        0 would be a calibrated head.
      decay: share of each probability that is lost per 1,000 tokens of context.
    """

    name: str
    conditional: tuple[float, ...]
    spread: float = 2.0
    sharpness: float = 1.3
    noise: float = 0.7
    decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.conditional or not all(0 < p < 1 for p in self.conditional):
            raise TraceError(f"regime {self.name}: acceptance must lie between 0 and 1, not {self.conditional}")
        if not (self.spread > 0 and self.sharpness > 0 and self.noise >= 0 and 0 <= self.decay < 1):
            raise TraceError(f"regime {self.name}: spread and sharpness above 0, noise 0 or more, decay from 0 to 1")


# Published for a 27B model: prose p1 0.73-0.84, p2_cond 0.54-0.57; tool calls 0.917, 0.877. p3 follows p2.
PROSE = Regime("prose", (0.78, 0.54, 0.54))
TOOLS = Regime("tools", (0.917, 0.877, 0.86))


def synthesise(
    regimes: Sequence[Regime],
    *,
    name: str | None = None,
    answers: int = 384,
    switch_every: int = 96,
    tokens: tuple[int, int] = (64, 320),
    prompt: int = 128,
    depth: int = 4,
    seed: int = 0,
) -> Trace:
    """A trace of `answers` answers of `tokens` (from, to) tokens each; the regime changes every `switch_every` answers.

    Position by position and draft by draft, a chance is drawn around the regime's, then a coin. The same seed gives
    the same trace.
    """
    made = []
    for i in range(answers):
        regime = regimes[(i // switch_every) % len(regimes)]
        rng = np.random.default_rng((seed, i))
        length = int(rng.integers(tokens[0], tokens[1] + 1))
        mean = np.array([regime.conditional[min(j, len(regime.conditional) - 1)] for j in range(depth)])
        lost = (1 - regime.decay) ** ((prompt + np.arange(length)) / 1000)
        expected = mean * lost[:, None]
        truth = np.clip(rng.beta(regime.spread * expected, regime.spread * (1 - expected)), 1e-4, 1 - 1e-4)
        odds = regime.sharpness * np.log(truth / (1 - truth)) + regime.noise * rng.standard_normal(truth.shape)
        log_probs = -np.logaddexp(0, -odds)
        right = rng.random(truth.shape) < truth
        run = np.cumprod(right, axis=1).sum(axis=1)
        made.append(Answer(regime.name, prompt, tuple(run.tolist()), _rows(log_probs), _rows(truth), _rows(expected)))
    return Trace(name or "+".join(regime.name for regime in regimes), depth, tuple(made))


def regime_trace(name: str, *, decay: float = 0.0, seed: int = 0, **options: Any) -> Trace:
    """`prose`, `tools` or `switching` (blocks of either in turn). Raises `TraceError` for another name."""
    regimes = {"prose": (PROSE,), "tools": (TOOLS,), "switching": (PROSE, TOOLS)}.get(name)
    if regimes is None:
        raise TraceError(f"no regime {name!r}; there are prose, tools, switching, or a recorded trace's file")
    decayed = [dataclasses.replace(regime, decay=decay) for regime in regimes]
    return synthesise(decayed, name=name, seed=seed, **options)


def _rows(values: np.ndarray) -> tuple[Row, ...]:
    return tuple(map(tuple, np.round(values, 4).tolist()))


def write_records(path: Path, model: str, records: Iterable[dict[str, Any]], **about: Any) -> None:
    """Write what the engine's `trace` heard, behind a line that names the model; gzip where the path ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(line) for line in ({"format": FORMAT, "model": model, **about}, *records))
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def load_trace(path: Path, *, seed: int = 0) -> Trace:
    """A trace from records. Raises `TraceError` for a file that is none.

    The records show one policy's steps; for other positions the same text is assumed to be as hard: a draft of the
    token at some place is right from wherever it is drafted. Where a step accepted all it offered, a coin of the
    trace's own acceptance, fixed by the seed, says whether the next draft would have been right. So record with a fixed
    depth, the deepest of interest. `truth` is what drafts of that position and log-probability came to.
    """
    try:
        raw = path.read_bytes()
        lines = [json.loads(line) for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()]
        head, records = lines[0], lines[1:]
        if head["format"] != FORMAT:
            raise TraceError(f"{path} is not an {FORMAT}: its format is {head['format']!r}")
        return from_records(path.name.split(".")[0], head["model"], records, seed=seed)
    except OSError as error:
        raise TraceError(f"no trace at {path}: {error.strerror or error}") from None
    except (KeyError, TypeError, IndexError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(f"{path} is no trace: {error!r}") from None


def from_records(name: str, model: str, records: Sequence[dict[str, Any]], *, seed: int = 0) -> Trace:
    """As `load_trace`, from the records themselves."""
    depth = max((record["offered"] for record in records), default=0)
    if not depth:
        raise TraceError(f"trace {name} offers no drafts at all: record it with a policy that drafts")
    rates = _rates(records, depth)
    calibrate = _calibration(records, depth, rates)
    by_request: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        by_request.setdefault(record["request"], []).append(record)
    answers = []
    for request, own in by_request.items():
        own.sort(key=lambda record: record["position"])
        rng = np.random.default_rng((seed, request))
        label = own[0].get("label") or name
        runs, chances = _spread(own, depth, rates, rng)
        truth = tuple(tuple(calibrate(j, row[j]) for j in range(depth)) for row in chances)
        answers.append(Answer(label, own[0]["position"], tuple(runs), tuple(chances), truth, ()))
    means: dict[str, Row] = {}
    for label in {answer.label for answer in answers}:
        same = [row for answer in answers if answer.label == label for row in answer.truth]
        means[label] = tuple(np.mean(same, axis=0).tolist())
    answers = [dataclasses.replace(a, expected=(means[a.label],) * len(a.run)) for a in answers]
    return Trace(name, depth, tuple(answers), model)


def _rates(records: Sequence[dict[str, Any]], depth: int) -> list[float]:
    """Conditional acceptance per position; that of the one before where a position was never reached."""
    rates: list[float] = []
    for j in range(depth):
        reached = [r["accepted"] > j for r in records if r["offered"] > j and r["accepted"] >= j]
        rates.append(sum(reached) / len(reached) if reached else rates[-1] if rates else 0.0)
    return rates


def _calibration(records: Sequence[dict[str, Any]], depth: int, rates: Sequence[float]) -> Any:
    """`(draft, log-probability)` to the acceptance of drafts like it, drawn towards the draft's mean where rare."""
    counts = np.zeros((depth, len(BIN_EDGES) + 1, 2))
    for r in records:
        for j in range(min(r["offered"], r["accepted"] + 1, len(r["log_probs"]))):
            counts[j, np.searchsorted(BIN_EDGES, r["log_probs"][j], side="right")] += (r["accepted"] > j, 1)
    table = (counts[..., 0] + 4 * np.array(rates)[:, None]) / (counts[..., 1] + 4)
    return lambda j, log_prob: float(table[j, np.searchsorted(BIN_EDGES, log_prob, side="right")])


def _spread(
    own: Sequence[dict[str, Any]], depth: int, rates: Sequence[float], rng: np.random.Generator
) -> tuple[list[int], list[Row]]:
    """Runs and log-probabilities for every position of one answer, from the steps that visited some of them."""
    usual = tuple(float(np.log(max(rate, 1e-4))) for rate in rates)
    runs: list[int] = []
    chances: list[Row] = []
    for before, record in zip([None, *reversed(own)], reversed(own), strict=False):
        offered, accepted = record["offered"], record["accepted"]
        if before is not None and before["position"] != record["position"] + accepted + 1:
            raise TraceError(
                f"request {record['request']}: the steps around position {record['position']} don't join up"
            )
        known = tuple(record["log_probs"]) or usual[:offered]
        ahead_runs, ahead_chances = (runs[-1], chances[-1]) if runs else (0, usual)
        if accepted == offered:  # what came next was not drafted: would it have been right?
            right = rng.random() < rates[min(offered, depth - 1)]
            known, accepted = (
                (*known, usual[min(offered, depth - 1)], *ahead_chances),
                offered + right * (1 + ahead_runs),
            )
        for j in range(record["accepted"], -1, -1):
            runs.append(min(max(accepted - j, 0), depth))
            chances.append((*known[j:], *usual[max(len(known) - j, 0) :])[:depth])
    return runs[::-1], chances[::-1]
