"""Our decoding beside transformers' own `generate`: the same weights and prompts, interleaved, in one process.

Needs torch and transformers (scripts/setup_hf.sh makes an environment with both). One sequence at a time, greedy,
float32. Decoding is what comes after the first token, on either side; whole requests, prefill included, are compared
too. transformers gets the number of threads that suits it best. No speed is given where its tokens are not ours, near
ties apart.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atlas_jax.config import ModelConfig
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Policy
from atlas_jax.lab.bench import BenchError, Comparison, build_engine, compare, near_tie, with_plain
from atlas_jax.lab.text_table import text_table
from atlas_jax.model.mixers import Params

PROBE_TOKENS = 24


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
    note: str = ""


class Reference:
    """transformers' own model of a directory, in float32."""

    def __init__(self, directory: Path, cfg: ModelConfig):
        try:
            import torch
            import transformers
        except ImportError as error:
            where = "run in the environment that scripts/setup_hf.sh makes"
            raise BenchError(f"{error.name} is not installed here; {where}") from None
        transformers.logging.set_verbosity_error()
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._ends = list(cfg.eos_ids) or None
        self._config = transformers.GenerationConfig

    def generate(self, request: Request) -> Answer:
        """Greedy tokens of the request."""
        ids = self._torch.tensor([list(request.prompt)])
        ends = None if request.ignore_eos else self._ends
        config = self._config(
            max_new_tokens=request.max_new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=0, use_cache=True
        )
        clock = _Clock()
        with self._torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), generation_config=config, streamer=clock
            )
        total = time.perf_counter() - clock.began
        return Answer(tuple(out[0, len(request.prompt) :].tolist()), 1, clock.first_s, total)

    def choose_threads(self, request: Request) -> int:
        """Set and return the number of threads on which the request is answered fastest."""
        request = dataclasses.replace(request, max_new_tokens=PROBE_TOKENS, ignore_eos=True)
        most = len(os.sched_getaffinity(0))
        seconds: dict[int, float] = {}
        for threads in sorted({1, max(1, most // 2), most}):
            self._torch.set_num_threads(threads)
            self.generate(request)
            seconds[threads] = min(self.generate(request).total_s for _ in range(2))
        best = min(seconds, key=lambda threads: seconds[threads])
        self._torch.set_num_threads(best)
        return best


class _Clock:
    """A streamer of transformers' that notes when the first token came; the prompt comes before it."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first_s = 0.0
        self._puts = 0

    def put(self, value: object) -> None:
        self._puts += 1
        if self._puts == 2:
            self.first_s = time.perf_counter() - self.began

    def end(self) -> None:
        pass


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
    reference = Reference(directory, cfg)
    engine, seconds = build_engine(params, cfg, 1, policies, context)
    threads = reference.choose_threads(next(iter(requests_by_regime.values()))[0])
    say(f"programs compiled in {seconds:.1f} s; transformers is fastest on {threads} threads")

    def ours(policy: Policy) -> Runner:
        def answer(request: Request) -> Answer:
            engine.policy = policy
            tokens: list[int] = []
            began, first, first_s = time.perf_counter(), 0, 0.0
            for emission in engine.stream([request]):
                tokens += emission.tokens
                if not first:
                    first, first_s = len(tokens), time.perf_counter() - began
                if emission.finished:
                    engine.completion(emission.request)
            return Answer(tuple(tokens), first, first_s, time.perf_counter() - began)

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
            rows.append(versus(regime, policy.name, answers[policy.name], answers["transformers"], found, threads))
    return rows


def versus(
    regime: str,
    policy: str,
    ours: Sequence[Sequence[Answer]],
    theirs: Sequence[Sequence[Answer]],
    found: Comparison,
    threads: int,
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
        hf_threads=threads,
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
