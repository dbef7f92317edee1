"""Where answers end, inside runs of drafts that go on: exactly where plain decode ends them, for the reason that comes
first, and everything that counts tokens agrees."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from engine_checks import SCRIPTS, scripted, whole

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import Fixed, Off
from atlas_jax.lab.trace import write_records

DEPTH = 4


pytestmark = pytest.mark.usefixtures("quick")


def text_of(tokens):
    return "".join(f"{chr(97 + t % 26)}{t // 26}" for t in tokens)


@pytest.fixture
def served(engine, monkeypatch):
    """The module's engine with its defaults, and a request with the 12 tokens of its plain answer, none told twice."""
    monkeypatch.setattr(engine, "_detokenize", text_of)
    engine.cancel_all()
    engine.policy, engine._propose, engine._trace = Off(), None, None
    for first in range(60):
        request = Request((first, 3, 8), 12, ignore_eos=True)
        (done,) = engine.generate([request])
        if len(set(done.tokens)) == 12:
            break
    engine.policy = Fixed(DEPTH)
    yield engine, request, done.tokens
    engine._propose = engine._trace = None


@pytest.mark.parametrize("kind", ["end token", "stop id", "stop text"])
def test_what_comes_first_ends_the_answer(served, kind, monkeypatch):
    """An end at each of the first seven tokens, limits of 0 to 8 tokens, after runs of 0 to 4 right drafts: the end
    falls on every accepted draft, on the bonus token and on every correction. "stop" where it lies within the limit,
    else "length" (B20, B21). A stop text is one of two tokens that straddles steps."""
    engine, request, tokens = served
    roles = set()
    for right, end in itertools.product(range(DEPTH + 1), range(kind == "stop text", 7)):
        engine._propose = scripted([(*request.prompt, *tokens)], lambda round, right=right: right)
        asked = [dataclasses.replace(request, max_new_tokens=limit) for limit in range(9)]
        if kind == "end token":
            monkeypatch.setattr(engine, "cfg", dataclasses.replace(engine.cfg, eos_ids=(tokens[end],)))
            through = [done.tokens for done in engine.generate(asked)]
            assert through == [tokens[:limit] for limit in range(9)]  # `ignore_eos`
            asked = [dataclasses.replace(r, ignore_eos=False) for r in asked]
        elif kind == "stop id":
            asked = [dataclasses.replace(r, stop_ids=(tokens[end],)) for r in asked]
        else:
            asked = [dataclasses.replace(r, stop=(text_of(tokens[end - 1 : end + 1]),)) for r in asked]
        first = engine._next_id + 1
        for emission in engine.stream(asked):
            if emission.finished == "stop":
                place = len(emission.tokens) - 1
                roles.add((place, "accepted" if emission.drafts[place : place + 1] == emission.tokens[-1:] else "last"))
        for limit in range(9):
            done = engine.completion(first + limit)
            assert done.tokens == tokens[: min(end + 1, limit)]
            assert done.finished == ("stop" if end < limit else "length")
            assert (done.stopped_by is None) == (done.finished == "length")
    assert roles == {*((j, "accepted") for j in range(DEPTH)), *((j, "last") for j in range(DEPTH + 1))}


def test_two_hundred_answers_end_where_plain_ones_do(engine, monkeypatch):
    """End tokens that are likely: with drafts no answer ends earlier, later or for another reason (B23)."""
    monkeypatch.setattr(engine, "cfg", dataclasses.replace(engine.cfg, eos_ids=(60, 6, 12, 28)))
    rng = np.random.default_rng(0)
    requests = [Request(tuple(rng.integers(0, 60, 2 + i % 7).tolist()), 16) for i in range(200)]
    engine.cancel_all()
    engine.policy, engine._propose = Off(), None
    done = [(c.tokens, c.finished) for c in engine.generate(requests)]
    assert 50 < sum(finished == "stop" for _, finished in done) < 190
    engine.policy = Fixed(DEPTH)
    for propose in (None, scripted(whole(requests, done), SCRIPTS["always right"])):
        engine._propose = propose
        assert [(c.tokens, c.finished) for c in engine.generate(requests)] == done
    engine._propose = None


def test_everything_that_counts_tokens_counts_those_of_the_answers(served, tmp_path, monkeypatch):
    """However a request ends, the sums of its emissions, of its acceptance, of the telemetry and of the exported trace
    are the length of its answer; a line of the trace says what its step knew and did (B24)."""
    engine, request, tokens = served
    monkeypatch.setattr(engine, "cfg", dataclasses.replace(engine.cfg, eos_ids=(tokens[5],)))
    bad = Sampling(allowed=lambda text: np.ones(61, bool) if len(text) < 7 else None)
    texts = [(*request.prompt, *tokens)]
    engine._propose = lambda known, count: scripted(texts, lambda round: 2)(known, count)
    asked = {
        "end token": dataclasses.replace(request, ignore_eos=False),
        "stop text": dataclasses.replace(request, stop=(text_of(tokens[3:5]),)),
        "length": dataclasses.replace(request, label="long"),
        "error": dataclasses.replace(request, sampling=bad),
        "cancelled": request,
    }
    records, emitted = [], {}
    engine._trace = records.append
    engine.reset_telemetry()
    ids = {name: engine.submit(r) for name, r in asked.items()}
    while not engine.idle:
        for e in engine.step():
            emitted[e.request] = emitted.get(e.request, 0) + len(e.tokens)
        if emitted.get(ids["cancelled"], 0) > 3:
            engine.cancel(ids["cancelled"])
    done = {name: engine.completion(id) for name, id in ids.items()}
    assert [c.finished for c in done.values()] == ["stop", "stop", "length", "error", "cancelled"]
    write_records(tmp_path / "t.jsonl", "a model", records, policy="fixed4")
    head, *lines = map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines())
    assert head["model"] == "a model" and lines == records
    for name, completion in done.items():
        mine = [line for line in lines if line["request"] == ids[name]]
        length, known = len(completion.tokens), len(request.prompt) - 1
        assert completion.tokens == tokens[:length] and length > 3
        assert length == emitted[ids[name]] == completion.acceptance.tokens
        assert length == sum(line["accepted"] + 1 for line in mine)
        for line in mine:
            assert line["position"] == known and line["label"] == asked[name].label
            assert 0 <= line["accepted"] <= line["offered"] <= DEPTH and 1 <= line["width"] <= engine.config.slots
            known += line["accepted"] + 1
    total = engine.telemetry.total()
    assert total.tokens == sum(len(c.tokens) for c in done.values()) and total.steps == len(lines)


def test_the_trace_has_the_heads_word_on_each_draft(engine, tiny):
    """Log-probabilities of the offered drafts under the head, in the step in which they are verified."""
    config = dataclasses.replace(
        engine.config, draft_log_probs=True, slots=1, max_drafts=2, buckets=BucketConfig(n=(1,), k=(3,))
    )
    records, told = [], {}
    other = type(engine)(tiny[1], tiny[0], config, Fixed(2), trace=records.append)
    other.warmup(compiler_options={"xla_backend_optimization_level": 0})
    with jax.enable_x64(True):
        id = other.submit(Request((3, 1, 4), 20, ignore_eos=True))
        while not other.idle:
            for a in other._active:
                told[a.length] = a.draft_log_probs
            other.step()
        other.completion(id)
    assert len(records) > 5 and all(r["bucket"] for r in records)
    for record in records[1:]:
        want = told[record["position"]][: record["offered"]]
        assert len(want) == record["offered"] and all(p < 0 for p in want)
        np.testing.assert_allclose(record["log_probs"], want, atol=1e-4)
    assert records[0]["log_probs"] == [] and {r["offered"] for r in records} >= {0, 2}
