"""Traces: made ones have the rates they were asked for, recorded ones give back what the records say."""

import json

import numpy as np
import pytest

from atlas_jax.lab.tables import find_trace
from atlas_jax.lab.trace import (
    PROSE,
    TOOLS,
    Regime,
    TraceError,
    from_records,
    load_trace,
    regime_trace,
    synthesise,
    write_records,
)


@pytest.mark.parametrize("regime", [PROSE, TOOLS, Regime("rare", (0.3, 0.2, 0.1, 0.05))])
def test_made_traces_have_the_acceptance_that_was_asked_for(regime):
    trace = synthesise([regime], answers=150, depth=3)
    asked = [*regime.conditional, regime.conditional[-1]][:3]
    assert trace.acceptance() == pytest.approx(asked, abs=0.03)
    truth = np.concatenate([answer.truth for answer in trace.answers])
    runs = np.concatenate([answer.run for answer in trace.answers])
    assert truth.mean(axis=0) == pytest.approx(asked, abs=0.02)
    # The truth is the chance of the coin: among drafts given about 0.8, about 0.8 are accepted.
    near = np.abs(truth[:, 0] - 0.8) < 0.05
    assert (runs[near] >= 1).mean() == pytest.approx(0.8, abs=0.05)


def test_what_the_head_says_is_worth_something_but_not_calibrated():
    trace = synthesise([PROSE], answers=60)
    said, truth = (
        np.exp(np.concatenate([getattr(a, name) for a in trace.answers]))[:, 0] for name in ("log_probs", "truth")
    )
    truth = np.log(truth)
    assert 0.7 < np.corrcoef(said, truth)[0, 1] < 0.99
    assert (said > 0.9).mean() > (truth > 0.9).mean()  # too sure of itself


def test_regimes_come_in_blocks_and_decay_with_context():
    switching = regime_trace("switching", answers=8, switch_every=2)
    assert [answer.label for answer in switching.answers] == ["prose", "prose", "tools", "tools"] * 2
    assert switching.only("tools").acceptance()[1] > 0.8 > 0.6 > switching.only("prose").acceptance()[1]
    decayed = synthesise([Regime("x", (0.9,), decay=0.5)], answers=40, tokens=(2000, 2000), prompt=0)
    runs = np.array([answer.run for answer in decayed.answers])
    assert (runs[:, :50] >= 1).mean() == pytest.approx(0.9, abs=0.03)
    assert (runs[:, -50:] >= 1).mean() == pytest.approx(0.225, abs=0.03)


def test_the_same_seed_makes_the_same_trace():
    assert regime_trace("prose", answers=3, seed=4) == regime_trace("prose", answers=3, seed=4)
    assert regime_trace("prose", answers=3, seed=4) != regime_trace("prose", answers=3, seed=5)


def record(request, position, offered, accepted, label="prose"):
    return {
        "request": request,
        "label": label,
        "position": position,
        "offered": offered,
        "accepted": accepted,
        "log_probs": [-0.1 * (j + 1) for j in range(offered)],
    }


def test_records_give_back_the_steps_that_they_are_of(tmp_path):
    """At the positions that were visited: the accepted drafts, and the head's word on them; lengths add up."""
    rng = np.random.default_rng(0)
    records, visited = [], {}
    for request in range(40):
        position, k = 10, 0
        for _ in range(20):
            run = int(np.cumprod(rng.random(3) < (0.8, 0.6, 0.5)).sum())
            records.append(record(request, position, k, min(run, k), "prose" if request % 2 else "tools"))
            visited[request, position - 10] = min(run, k), k
            position, k = position + min(run, k) + 1, 3
        visited[request, "end"] = position - 10, 0
    write_records(tmp_path / "t.jsonl.gz", "a model", records, policy="fixed3")
    trace = load_trace(tmp_path / "t.jsonl.gz")
    assert (trace.name, trace.model, trace.depth, len(trace.answers)) == ("t", "a model", 3, 40)
    for (request, at), (accepted, offered) in visited.items():
        answer = trace.answers[request]
        if at == "end":
            assert len(answer.run) == len(answer.log_probs) == len(answer.truth) == accepted
        else:
            assert answer.run[at] == accepted if accepted < offered else answer.run[at] >= accepted
            assert answer.log_probs[at][:offered] == tuple(-0.1 * (j + 1) for j in range(offered))
    # A draft is right from wherever it is drafted: runs fall by one a token until they end.
    for answer in trace.answers:
        for here, there in zip(answer.run, answer.run[1:], strict=False):
            assert there >= here - 1
    assert trace.only("tools").answers == trace.answers[::2]
    assert load_trace(tmp_path / "t.jsonl.gz", seed=1).answers != trace.answers


def test_replaying_the_recorded_policy_meets_the_recorded_acceptance():
    """Visiting the positions that were visited, whatever was filled in between."""
    rng = np.random.default_rng(1)
    records, counts = [], [0, 0]
    for request in range(30):
        position = 5
        for _ in range(30):
            run = int(np.cumprod(rng.random(2) < (0.7, 0.7)).sum())
            records.append(record(request, position, 2, run))
            counts[0] += run
            counts[1] += 1
            position += run + 1
    replayed = [0, 0]
    for answer in from_records("t", "m", records).answers:
        at = 0
        while at < len(answer.run):
            run = min(answer.run[at], 2)
            replayed[0] += run
            replayed[1] += 1
            at += run + 1
    assert replayed == counts


def test_what_is_no_trace_is_refused(tmp_path):
    trace = from_records("t", "a model", [record(0, 3, 1, 1), record(0, 5, 1, 0)])
    assert trace.expect("a model") is trace and regime_trace("prose", answers=1).expect("any").model == ""
    with pytest.raises(TraceError, match="from model 'a model', not 'b'"):
        trace.expect("b")
    with pytest.raises(TraceError, match="no drafts at all"):
        from_records("t", "m", [record(0, 3, 0, 0)])
    with pytest.raises(TraceError, match="don't join up"):
        from_records("t", "m", [record(0, 3, 1, 1), record(0, 6, 1, 0)])
    with pytest.raises(TraceError, match="has no 'tools'"):
        trace.only("tools")
    with pytest.raises(TraceError, match="there are prose, tools, switching"):
        find_trace("nothing of this name")
    for name, text in (
        ("a.jsonl", ""),
        ("b.jsonl", "{"),
        ("c.jsonl", json.dumps({"format": "else"})),
        ("d.jsonl", json.dumps({"format": "atlas_jax trace 1", "model": "m"}) + '\n{"request": 1}'),
        ("e.jsonl.gz", "not gzip"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(TraceError):
            load_trace(tmp_path / name)
    with pytest.raises(TraceError, match="decay"):
        (tmp_path / "f.jsonl").write_text("x")
        find_trace(str(tmp_path / "f.jsonl"), decay=0.1)
    for bad in ((), (0.5, 1.0)):
        with pytest.raises(TraceError, match="between 0 and 1"):
            Regime("bad", bad)


def test_the_recorded_trace_that_ships_can_be_read():
    """And its regimes differ: tool calls are easier at every depth that it was much read at."""
    prose, tools = (find_trace(f"small:{label}") for label in ("prose", "tools"))
    assert prose.depth == tools.depth == 4 and prose.model == tools.model != ""
    assert all(a < b for a, b in zip(prose.acceptance()[:3], tools.acceptance()[:3], strict=True))
