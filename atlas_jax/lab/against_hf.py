"""Our decoding beside transformers' own `generate`: the same weights and prompts, request by request in turns.

transformers answers from a process of its own (`hf_worker`), in the environment of scripts/setup_hf.sh where this one
has none, so each side has the libraries that suit it; the other side sleeps meanwhile. One sequence at a time, greedy,
float32. Decoding is what comes after the first token (for us: after the first call, which gives the tokens of several
steps); whole requests, prefill included, are compared too. transformers gets the number of threads that suits it best.
No speed is given where its tokens are not ours, near ties apart.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from atlas_jax.config import ModelConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Policy
from atlas_jax.lab.bench import BenchError, Comparison, build_engine, compare, near_tie, with_plain
from atlas_jax.lab.text_table import text_table
from atlas_jax.model.mixers import Params

ROOT = Path(__file__).resolve().parents[2]
PROBE_TOKENS = 24
PROBES = 4


@dataclasses.dataclass(frozen=True)
class Answer:
    """Emitted tokens and when they came: `first` of them after `first_s` seconds, all after `total_s`."""

    tokens: tuple[int, ...]
    first: int
    first_s: float
    total_s: float


Runner = Callable[[Request], Answer]


@dataclasses.dataclass(frozen=True)
class Versus:
    """One regime under one policy, beside transformers.

    Attributes:
      tok_s, hf_tok_s: tokens a second of decoding, median of the repetitions; None, like the ratios, where tokens
        differ.
      ratio_to_hf, ratio_min, ratio_max: of the two, in the same repetition; median and range.
      request_ratio_to_hf: of whole requests, prefill included; median.
      equal: all tokens agree but for excused near ties.
      excused, unexcused, compared: divergences that a near tie excuses, the others, and tokens compared.
      hf_threads: how many threads transformers ran on.
      versions: of jax, torch and transformers.
    """

    regime: str
    policy: str
    tok_s: float | None
    hf_tok_s: float | None
    ratio_to_hf: float | None
    ratio_min: float | None
    ratio_max: float | None
    request_ratio_to_hf: float | None
    equal: bool
    excused: int
    unexcused: int
    compared: int
    repetitions: int
    hf_threads: int
    versions: Mapping[str, str]
    note: str = ""


class Reference:
    """transformers' own model of a directory, in float32, in a process of its own; close it, or use it with `with`.

    `python` is an interpreter that has torch and transformers; None: this one, or the one of scripts/setup_hf.sh.
    Raises `BenchError` where there is none, or where the process ends.
    """

    def __init__(self, directory: Path, cfg: ModelConfig, python: Path | None = None):
        command = [str(python or find_python()), "-m", "atlas_jax.lab.hf_worker", str(directory)]
        self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._ends = list(cfg.eos_ids) or None
        self.threads = 1
        try:
            self.versions: dict[str, str] = self._read()
        except BaseException:
            self.__exit__()
            raise

    def generate(self, request: Request) -> Answer:
        """Greedy tokens of the request."""
        asked = {
            "prompt": list(request.prompt),
            "max_new_tokens": request.max_new_tokens,
            "ends": None if request.ignore_eos else self._ends,
            "threads": self.threads,
        }
        assert self._worker.stdin is not None
        try:
            self._worker.stdin.write(json.dumps(asked) + "\n")
            self._worker.stdin.flush()
        except BrokenPipeError:
            pass  # the read tells
        found = self._read()
        return Answer(tuple(found["tokens"]), 1, found["first_s"], found["total_s"])

    def _read(self) -> dict[str, Any]:
        assert self._worker.stdout is not None
        line = self._worker.stdout.readline()
        if not line:
            raise BenchError(f"the process of transformers ended (status {self._worker.wait()}); see its words above")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.kill()
        self._worker.communicate()  # closes the pipes

    def choose_threads(self, request: Request) -> int:
        """Set and return the number of threads on which the request is decoded fastest."""
        request = dataclasses.replace(request, max_new_tokens=PROBE_TOKENS, ignore_eos=True)
        most = len(os.sched_getaffinity(0))
        seconds: dict[int, float] = {}
        for turn in range(PROBES + 1):
            for threads in sorted({1, max(1, most // 2), most}):
                self.threads = threads
                answer = self.generate(request)
                took = answer.total_s - answer.first_s
                seconds[threads] = min(took, seconds[threads]) if turn > 1 else took  # the first is a warm-up
        self.threads = min(seconds, key=lambda threads: seconds[threads])
        return self.threads


def find_python() -> Path:
    """An interpreter with torch and transformers: this one, or that of the environment of scripts/setup_hf.sh."""
    if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return Path(sys.executable)
    if not (theirs := ROOT / ".cache" / "hf" / "bin" / "python").exists():
        raise BenchError("transformers is not installed; scripts/setup_hf.sh makes an environment that has it")
    return theirs


def measure_against_hf(
    directory: Path,
    params: Params,
    cfg: ModelConfig,
    requests_by_regime: Mapping[str, Sequence[Request]],
    policies: Sequence[Policy],
    repetitions: int = 3,
    *,
    context: int = 768,
    say: Callable[[str], None] = lambda text: None,
) -> list[Versus]:
    """A row for each regime and policy (and plain). transformers reads `directory`, which holds the same weights."""
    if repetitions < 1 or not all(requests_by_regime.values()):
        raise BenchError("measure at least one request of each regime, at least once")
    policies = with_plain(policies)
    engine, seconds = build_engine(params, cfg, 1, policies, context)
    say(f"programs compiled in {seconds:.1f} s")
    with Reference(directory, cfg) as reference:
        threads = reference.choose_threads(next(iter(requests_by_regime.values()))[0])
        say(f"transformers is fastest on {threads} threads; {reference.versions}")
        return _in_turns(engine, reference, params, cfg, requests_by_regime, policies, repetitions, say)


def _in_turns(
    engine: Engine,
    reference: Reference,
    params: Params,
    cfg: ModelConfig,
    requests_by_regime: Mapping[str, Sequence[Request]],
    policies: Sequence[Policy],
    repetitions: int,
    say: Callable[[str], None],
) -> list[Versus]:
    def ours(policy: Policy) -> Runner:
        def answer(request: Request) -> Answer:
            engine.policy = policy
            tokens: list[int] = []
            first, first_s, began = 0, 0.0, time.perf_counter()
            id = engine.submit(request)
            while not engine.idle:
                tokens += [token for emission in engine.step() for token in emission.tokens]
                if not first and tokens:  # one call gives the tokens of several steps
                    first, first_s = len(tokens), time.perf_counter() - began
            total = time.perf_counter() - began
            engine.completion(id)
            return Answer(tuple(tokens), first, first_s, total)

        return answer

    runners = {policy.name: ours(policy) for policy in policies} | {"transformers": reference.generate}
    rows = []
    for regime, requests in requests_by_regime.items():
        for answer in runners.values():
            answer(requests[0])
        answers: dict[str, list[list[Answer]]] = {name: [] for name in runners}
        order = list(runners)
        for repetition in range(repetitions):
            for name in order:
                answers[name].append([])
            for i, request in enumerate(requests):
                turn = (repetition + i) % len(order)
                for name in order[turn:] + order[:turn]:
                    answers[name][-1].append(runners[name](request))
            say(f"{regime}: repetition {repetition + 1} of {repetitions}")
        tokens = {name: [answer.tokens for passes in found for answer in passes] for name, found in answers.items()}
        gap = near_tie(params, cfg, [*requests] * repetitions, tokens["transformers"])
        for policy in policies:
            found = compare(tokens["transformers"], tokens[policy.name], gap)
            rows.append(versus(regime, policy.name, answers[policy.name], answers["transformers"], found, reference))
    return rows


def versus(
    regime: str,
    policy: str,
    ours: Sequence[Sequence[Answer]],
    theirs: Sequence[Sequence[Answer]],
    found: Comparison,
    reference: Reference,
) -> Versus:
    """The row of one policy, from the answers of each repetition on either side."""
    mine, others = [_decode_rate(passes) for passes in ours], [_decode_rate(passes) for passes in theirs]
    ratios = [a / b for a, b in zip(mine, others, strict=True)]
    whole = [_request_rate(a) / _request_rate(b) for a, b in zip(ours, theirs, strict=True)]
    claim = lambda value: None if found.note else round(value, 4)
    return Versus(
        regime=regime,
        policy=policy,
        tok_s=claim(statistics.median(mine)),
        hf_tok_s=claim(statistics.median(others)),
        ratio_to_hf=claim(statistics.median(ratios)),
        ratio_min=claim(min(ratios)),
        ratio_max=claim(max(ratios)),
        request_ratio_to_hf=claim(statistics.median(whole)),
        equal=not found.note,
        excused=found.excused,
        unexcused=found.unexcused,
        compared=found.compared,
        repetitions=len(ours),
        hf_threads=reference.threads,
        versions={"jax": jax.__version__, **reference.versions},
        note=found.note,
    )


def table(rows: Sequence[Versus]) -> str:
    """The rows for people."""
    header = ("regime", "policy", "x transformers", "range", "tok/s", "theirs", "x, whole request", "equal", "excused")
    cells = [
        (
            *(row.regime, row.policy, row.ratio_to_hf),
            "-" if row.ratio_min is None else f"{row.ratio_min:.2f}-{row.ratio_max:.2f}",
            *(row.tok_s, row.hf_tok_s, row.request_ratio_to_hf, "yes" if row.equal else f"NO: {row.note}", row.excused),
        )
        for row in rows
    ]
    return text_table(header, cells)


def _decode_rate(answers: Sequence[Answer]) -> float:
    seconds = sum(answer.total_s - answer.first_s for answer in answers)
    if not seconds:
        raise BenchError("no request went beyond its first step; ask for more tokens")
    return sum(len(answer.tokens) - answer.first for answer in answers) / seconds


def _request_rate(answers: Sequence[Answer]) -> float:
    return sum(len(answer.tokens) for answer in answers) / sum(answer.total_s for answer in answers)
