"""Requests from queue to completion: limits and stops, cancels, faults, reuse of states; nobody else ever notices."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import QueueFull, Request, RequestError
from atlas_jax.decode.sampling import Sampling
from atlas_jax.decode.stops import first_stop
from atlas_jax.depth.policies import Fixed, Off


def text_of(tokens):
    """Three letters a token, so that stop texts straddle tokens; token 7 has no text, as special tokens have none."""
    return "".join("" if t == 7 else f"{chr(97 + t % 26)}{chr(97 + t // 26)}-" for t in tokens)


def requests_of(count, seed=0, **options):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 20, count)
    return [Request(tuple(rng.integers(0, 60, n).tolist()), 14, label=f"l{n % 2}", **options) for n in lengths]


@pytest.fixture(scope="module")
def made(tiny):
    """An engine of 3 slots and 8 kept states, a queue of 6; and plain answers to 8 requests."""
    cfg, params = tiny
    config = EngineConfig(
        slots=3, context=64, max_drafts=3, buckets=BucketConfig(n=(4,), k=(1, 4)), prefill=(4, 8), prefill_tokens=4,
        queue=6, keep=8, dtype=jnp.float64,
    )  # fmt: skip
    with jax.enable_x64(True):
        engine = Engine(params, cfg, config, Off(), detokenize=text_of)
        requests = requests_of(8)
        answers = [(c.tokens, c.finished) for c in engine.generate(requests)]
        engine.policy = Fixed(3)
        yield engine, requests, answers


@pytest.fixture
def served(made):
    engine, requests, answers = made
    engine.cancel_all()
    engine._lost = True  # no kept states from another test
    engine.policy = Fixed(3)
    with jax.enable_x64(True):
        yield engine, requests, answers
    engine._propose = None


def outcome(completions):
    return [(c.tokens, c.finished) for c in completions]


def test_a_full_queue_refuses_and_loses_nothing(served):
    engine, requests, answers = served
    ids = [engine.submit(r) for r in requests[:6]]
    with pytest.raises(QueueFull, match="6 requests wait"):
        engine.submit(requests[6])
    while not engine.idle:
        engine.step()
    assert outcome(map(engine.completion, ids)) == answers[:6]
    assert outcome(engine.generate(requests)) == answers  # more than queue and slots hold


@pytest.mark.parametrize("when", [0, 1, 4])
def test_cancelling_is_noticed_by_nobody_else(served, when):
    """One waiting, one in prefill or decoding; the rest answers as ever, and a cancelled one keeps what it had."""
    engine, requests, answers = served
    ids = [engine.submit(r) for r in requests[:5]]
    for _ in range(when):
        engine.step()
    assert engine.cancel(ids[4]) and engine.cancel(ids[1]) and not engine.cancel(10**9)
    while not engine.idle:
        engine.step()
    done = list(map(engine.completion, ids))
    assert [done[i].finished for i in (1, 4)] == ["cancelled"] * 2
    assert done[1].tokens == answers[1][0][: len(done[1].tokens)]
    assert outcome(done[i] for i in (0, 2, 3)) == [answers[i] for i in (0, 2, 3)]
    assert not engine.cancel(ids[0])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(4))
def test_a_fault_in_the_middle_of_a_step_loses_no_request(served, monkeypatch, error, at):
    """Raised after the device has donated the state: in prefill and decode calls, before and after others. What was
    submitted goes on from the tokens that it had (B08)."""
    engine, requests, answers = served
    ids = [engine.submit(r) for r in requests[:5]]
    calls = 0
    inner = type(engine.programs).__getitem__

    def failing(programs, key):
        program = inner(programs, key)

        def call(*arguments):
            nonlocal calls
            calls += 1
            answer = program(*arguments)
            if calls in (3 * at + 1, 3 * at + 11):
                raise error("injected")
            return answer

        return call

    monkeypatch.setattr(type(engine.programs), "__getitem__", failing)
    faults = 0
    while not engine.idle:
        try:
            engine.step()
        except error:
            faults += 1
    assert faults == 2
    assert outcome(map(engine.completion, ids)) == answers[:5]


def test_a_fault_after_the_answer_and_before_the_record_is_one_too(served, monkeypatch):
    """The device has committed, the host has not: trusting either would lose tokens or emit them twice."""
    engine, requests, answers = served
    ids = [engine.submit(r) for r in requests[:3]]
    inner, calls = engine._commit, 0

    def failing(*arguments):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return inner(*arguments)

    monkeypatch.setattr(engine, "_commit", failing)
    with pytest.raises(KeyboardInterrupt):
        while not engine.idle:
            engine.step()
    while not engine.idle:
        engine.step()
    assert outcome(map(engine.completion, ids)) == answers[:3]


@pytest.mark.parametrize("what", [0, 1, 2])
def test_a_slot_that_disagrees_stops_its_request_alone(served, what):
    """The ledger of one slot is falsified: its sequence ends with an error that says where, the others as ever."""
    engine, requests, answers = served
    ids = [engine.submit(r) for r in requests[:3]]
    while sum(a.ready for a in engine._active) < 3:
        engine.step()
    victim = engine._active[1]
    had = tuple(victim.emitted)
    engine._state = engine._state._replace(ledger=engine._state.ledger.at[victim.slot, what].add(1))
    while not engine.idle:
        engine.step()
    done = list(map(engine.completion, ids))
    assert done[1].finished == "error" and f"request {ids[1]} at position" in done[1].error
    assert done[1].tokens == had
    assert outcome(done[i] for i in (0, 2)) == [answers[i] for i in (0, 2)]
    assert outcome(engine.generate(requests[:4])) == answers[:4]


def test_stop_texts_end_wherever_tokens_do(served):
    """Every text of 1 to 7 letters that an answer holds, straddling tokens and steps: cut behind the token that
    completes its first occurrence, in plain and speculative decode alike; what comes later was never there."""
    engine, requests, answers = served
    index = max(range(8), key=lambda i: len(answers[i][0]))
    tokens = answers[index][0]
    whole = text_of(tokens)
    for length in (1, 2, 4, 7):
        for start in range(2, len(whole) - length, 5):
            stop = whole[start : start + length]
            want = next(n for n in range(len(tokens) + 1) if stop in text_of(tokens[:n]))
            (done,) = engine.generate([dataclasses.replace(requests[index], stop=("#", stop))])
            assert (done.tokens, done.finished, done.stopped_by) == (tokens[:want], "stop", stop)
    assert first_stop(text_of, ("a-b",), [7] * 40, [7, 7]) is None


def test_stop_tokens_end_on_the_device(served):
    engine, requests, answers = served
    index = max(range(8), key=lambda i: len(set(answers[i][0])))
    tokens = answers[index][0]
    for place, token in enumerate(tokens[:6]):
        if token in tokens[:place]:
            continue
        (done,) = engine.generate([dataclasses.replace(requests[index], stop_ids=(59, token), ignore_eos=True)])
        assert (done.tokens, done.finished, done.stopped_by) == (tokens[: place + 1], "stop", token)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_request_may_draft_less(served, most):
    engine, requests, answers = served
    mixed = [dataclasses.replace(r, max_drafts=most if i % 2 else None) for i, r in enumerate(requests)]
    done = engine.generate(mixed)
    assert outcome(done) == answers
    assert all(max(offered for offered, _ in c.acceptance.histogram) <= most for c in done[1::2])
    assert any(offered == 3 for c in done[::2] for offered, _ in c.acceptance.histogram)


def acceptance(completion):
    return completion.acceptance.histogram


def test_a_prompt_that_begins_like_another_reuses_its_state(served):
    """A, then B, then A again: the same tokens and the same acceptance as cold, and next to no prefill (B18)."""
    engine, *_ = served
    rng = np.random.default_rng(5)
    a, b = (Request(tuple(rng.integers(0, 60, 21).tolist()), 12) for _ in range(2))
    longer = Request((*a.prompt, 3, 1, 4, 1, 5), 12)
    other = Request((*a.prompt[:15], 9, 2, 6), 12)
    first, _, again, extended, diverging = (engine.generate([r])[0] for r in (a, b, a, longer, other))
    assert again.reused == 20 and extended.reused == 20 and first.reused == diverging.reused == 0
    assert (again.tokens, acceptance(again)) == (first.tokens, acceptance(first))
    engine._lost = True  # forgets all states
    cold = [engine.generate([r])[0] for r in (longer, other)]
    assert [(c.tokens, acceptance(c)) for c in cold] == [(c.tokens, acceptance(c)) for c in (extended, diverging)]
    assert not any(c.reused for c in cold)


def test_a_shared_prefix_is_kept_where_the_request_says(served):
    engine, *_ = served
    rng = np.random.default_rng(6)
    system = tuple(rng.integers(0, 60, 13).tolist())
    one, two = (Request((*system, *rng.integers(0, 60, 4).tolist()), 10, prefix=len(system)) for _ in range(2))
    engine.generate([one])
    (warm,) = engine.generate([two])
    assert warm.reused == len(system) - 1
    engine._lost = True
    (cold,) = engine.generate([two])
    assert (cold.tokens, acceptance(cold), cold.reused) == (warm.tokens, acceptance(warm), 0)


@pytest.mark.parametrize("stop", [None, "text", "token"])
def test_a_finished_request_can_be_continued(served, stop):
    """Its state equals prompt + answer: going on gives what one long answer gives, from where it was cut, with what was
    still pending folded or, behind a stop text, dropped."""
    engine, *_ = served
    request = Request((5, 3, 8, 2), 30, ignore_eos=True)
    (whole,) = engine.generate([request])
    engine._propose = lambda known, count: whole.tokens[len(known) - 4 : len(known) - 4 + count] + (0,) * 4
    ends = {"text": {"stop": (text_of(whole.tokens)[8:15],)}, "token": {"stop_ids": (whole.tokens[6],)}, None: {}}
    engine._lost = True
    (part,) = engine.generate([dataclasses.replace(request, max_new_tokens=9, **ends[stop])])
    assert 0 < len(part.tokens) <= 9
    (rest,) = engine.generate(
        [Request((*request.prompt, *part.tokens), 30 - len(part.tokens), ignore_eos=True)]
    )
    assert part.tokens + rest.tokens == whole.tokens
    assert rest.reused == 4 + len(part.tokens) - 1


def test_prompts_and_decoding_take_turns(served):
    """While others decode, a long prompt is consumed a few tokens a step; nobody stands still for it."""
    engine, requests, _ = served
    first = engine.submit(requests[0])
    while not any(a.ready for a in engine._active):
        engine.step()
    late = engine.submit(Request((4,) * 40, 3))
    turns = 0
    while any(a.id == late for a in engine._active) is False or not engine._active[-1].ready:
        emitted = engine.step()
        turns += 1
        assert any(e.request == first for e in emitted) or not any(a.id == first for a in engine._active)
    assert turns >= 3
    engine.cancel_all()


def test_telemetry_counts_what_was_emitted(served):
    """Sums over widths and labels are those of the completions, whatever ended them (B24, B56)."""
    engine, requests, _ = served
    engine.reset_telemetry()
    records = []
    engine._trace = records.append
    done = engine.generate([*requests, dataclasses.replace(requests[0], stop=("-",))])
    engine._trace = None
    total = engine.telemetry.total()
    assert total.tokens == sum(len(c.tokens) for c in done) == sum(r["accepted"] + 1 for r in records)
    assert total.steps == sum(c.acceptance.steps for c in done) == len(records)
    assert {label for _, label in engine.telemetry.acceptance} == {"l0", "l1"}
    assert total.tokens == sum(engine.telemetry.total(label=label).tokens for label in ("l0", "l1"))
    for row in engine.telemetry.rows():
        assert all(0 <= rate <= 1 for rate in row["u"] + [p for p in row["p"] if p is not None])
        assert row["host_ms"] > 0 and row["device_ms"] > 0
        assert sum(row["buckets"].values()) == row["steps"]
    for id in {r["request"] for r in records}:
        mine = [r for r in records if r["request"] == id]
        assert all(b["position"] == a["position"] + a["accepted"] + 1 for a, b in itertools.pairwise(mine))


BAD = {
    "top_k": Sampling(top_k=-1),
    "top_p": Sampling(top_p=0.0),
    "min_p": Sampling(min_p=1.5),
    "repetition_penalty": Sampling(repetition_penalty=0.0),
    "presence_penalty": Sampling(presence_penalty=float("inf")),
    "bias names token 61": Sampling(bias={61: 1.0}),
    "bias of token 3": Sampling(bias={3: float("nan")}),
    "allowed must be": Sampling(allowed=np.ones(5, bool)),
    "forbids every token": Sampling(allowed=np.zeros(61, bool)),
}


@pytest.mark.parametrize("word", BAD)
def test_settings_that_make_no_sense_are_refused(served, word):
    with pytest.raises(RequestError, match=word):
        served[0].submit(Request((1,), sampling=BAD[word]))


def test_more_requests_that_are_refused(served, tiny):
    engine, *_ = served
    for bad, word in (
        (Request((1,), stop_ids=tuple(range(9))), "end_ids"),
        (Request((1,), stop=("",)), "empty text"),
        (Request((1,), max_drafts=-1), "max_drafts"),
        (Request((1,), stop_ids=(61,)), "stop_ids: token id 61"),
    ):
        with pytest.raises(RequestError, match=word):
            engine.submit(bad)
    engine._detokenize, kept = None, engine._detokenize
    with pytest.raises(RequestError, match="detokenize"):
        engine.submit(Request((1,), stop=("x",)))
    engine._detokenize = kept
    with pytest.raises(ValueError, match="rounds is 0"):
        EngineConfig(rounds=0)
