"""What happens between a step's call and its return stays there: a cancel out of a callback, a slot that is not what
the plan says. Nobody else notices, and no slot is lost or given twice."""

import dataclasses

import jax
import numpy as np
import pytest

from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import Fixed, Off

pytestmark = pytest.mark.usefixtures("quick")


def text_of(tokens):
    return "".join(chr(97 + t % 26) for t in tokens)


@pytest.fixture
def served(engine):
    engine.cancel_all()
    engine._lost, engine.policy = True, Off()
    engine._propose = engine._trace = engine._detokenize = None
    requests = [Request((3, 9, 4, *range(i)), 20 + i, ignore_eos=True) for i in range(6)]
    answers = [c.tokens for c in engine.generate(requests)]
    engine.policy = Fixed(4)
    engine._propose = drafter(requests, answers)
    yield engine, requests, answers
    engine._propose = engine._trace = engine._detokenize = None


def drafter(requests, answers):
    """Right until two: rows are pending in most steps. What it does not know it answers with zeros."""
    texts = [(*r.prompt, *tokens) for r, tokens in zip(requests, answers, strict=True)]

    def propose(known, count):
        text = next((t for t in texts if t[: len(known)] == tuple(known)), ())
        ahead = [*text[len(known) : len(known) + count], *[0] * count][:count]
        return [t if j < 2 else (t + 1) % 60 for j, t in enumerate(ahead)]

    return propose


def run(engine, ids):
    while not engine.idle:
        engine.step()
    done = [engine.completion(id) for id in ids]
    assert sorted(engine._slots._free) == list(range(engine.config.slots))
    return done


@pytest.mark.parametrize("whom", [0, 1], ids=["itself", "another that ends in this step"])
@pytest.mark.parametrize("where", ["propose", "trace", "detokenize", "allowed"])
def test_a_callback_may_cancel(served, where, whom):
    """The first request's callback, in the step in which the second one would have ended: cancelled it is, once."""
    engine, requests, answers = served
    asked = [*requests[:1], dataclasses.replace(requests[1], max_new_tokens=1), *requests[2:]]
    cancelled = []

    def cancel(result):
        if not cancelled and engine._active:
            cancelled.append(engine.cancel(ids[whom]))
        return result

    if where == "propose":
        inner = engine._propose
        engine._propose = lambda known, count: cancel(inner(known, count))
    elif where == "trace":
        engine._trace = cancel
    elif where == "detokenize":
        engine._detokenize = lambda tokens: cancel(text_of(tokens))
        asked[0] = dataclasses.replace(asked[0], stop=("#",))
    else:
        every = Sampling(allowed=lambda text: cancel(np.ones(61, bool)))
        asked[0] = dataclasses.replace(asked[0], sampling=every)
    ids = [engine.submit(request) for request in asked]
    done = run(engine, ids)
    assert cancelled == [True] and done[whom].finished == "cancelled"
    for i, (completion, request) in enumerate(zip(done, asked, strict=True)):
        if i != whom:
            assert (completion.tokens, completion.finished) == (answers[i][: request.max_new_tokens], "length")


@pytest.mark.parametrize("column", range(3), ids=["length", "pending", "head"])
def test_a_slot_that_disagrees_is_left_alone(served, column):
    """Bit by bit, with rows pending in it: whoever it belongs to still has it."""
    engine, requests, answers = served
    ids = [engine.submit(request) for request in requests[:2]]
    while not (engine._active and engine._active[0].pending):
        engine.step()
    slot = engine._active[0].slot
    engine._state = engine._state._replace(ledger=engine._state.ledger.at[slot, column].add(1))
    before = jax.device_get(jax.tree.map(lambda pool: pool[slot], engine._state))
    assert {e.request for e in engine.step() if e.finished == "error"} == {ids[0]}
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(lambda pool: pool[slot], engine._state))
    done = run(engine, ids)
    assert (done[1].tokens, done[1].finished) == (answers[1], "length")


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_plan_that_names_anothers_slot_harms_its_own_request_alone(served, wrong):
    engine, requests, answers = served
    ids = [engine.submit(request) for request in requests[:3]]
    while not (engine._active and engine._active[0].pending):
        engine.step()
    first, second = engine._active[wrong], engine._active[1 - wrong]
    first.slot, kept = second.slot, first.slot
    engine.step()
    engine._slots._free.remove(second.slot)  # the wrong one was given back
    engine._slots._free.append(kept)
    done = run(engine, ids)
    assert done[wrong].finished == "error" and "does not hold" in done[wrong].error
    assert [done[i].tokens for i in (1 - wrong, 2)] == [answers[i] for i in (1 - wrong, 2)]
