"""Steps whose rows are of every kind, widths that come and go, steps that fail: each sequence is as if it were alone,
its tokens and its states."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from engine_checks import SCRIPTS, check_states, scripted, whole

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.ladder import LadderConfig
from atlas_jax.depth.policies import Fixed, Ladder, Off

DEPTH = 4
QUICK = {"xla_backend_optimization_level": 0}  # compile options: the programs run for milliseconds


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def reference(tiny, engine):
    """An engine to replay single sequences with, from their beginning."""
    cfg, params = tiny
    return Engine(params, cfg, dataclasses.replace(engine.config, slots=1, buckets=BucketConfig(n=(1,), k=(1, 5))))


@pytest.fixture
def served(engine):
    """The module's engine, and seven requests with their plain answers."""
    rng = np.random.default_rng(2)
    lengths = (1, 2, 5, 9, 3, 4, 17)
    requests = [Request(tuple(rng.integers(0, 60, n).tolist()), 40, ignore_eos=True) for n in lengths]
    engine.cancel_all()
    engine._lost, engine._trace, engine._propose, engine.policy = True, None, None, Off()
    alone = [(engine.generate([request])[0].tokens, "length") for request in requests]
    yield engine, requests, alone
    engine._trace = engine._propose = None


def test_one_step_holds_rows_of_every_kind_at_once(served, monkeypatch):
    """One in prefill, one without drafts, one with one, one with four that ends here (B14)."""
    engine, requests, alone = served
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, prefill_tokens=4))
    long = Request((*requests[6].prompt, *range(43)), 20, ignore_eos=True)
    wanted = [tokens for tokens, _ in alone[:3]] + [engine.generate([long])[0].tokens]
    engine.policy = Fixed(DEPTH)
    engine._propose = scripted([*whole(requests, alone), (*long.prompt, *wanted[3])], SCRIPTS["always right"])
    kinds = [
        dataclasses.replace(requests[0], max_drafts=0),
        dataclasses.replace(requests[1], max_drafts=1),
        dataclasses.replace(requests[2], max_new_tokens=16),
    ]
    ids = [engine.submit(request) for request in kinds]
    while sum(a.ready for a in engine._active) < 3:
        engine.step()
    ids.append(engine.submit(long))  # consumed in chunks of eight, one a step
    at_once = 0
    while not engine.idle:
        emissions = {e.request: e for e in engine.step()}
        in_prefill = any(not a.ready for a in engine._active)
        offered = [len(emissions[id].drafts) if id in emissions else None for id in ids[:3]]
        at_once += in_prefill and offered == [0, 1, DEPTH] and emissions[ids[2]].finished == "length"
    assert at_once == 1
    found = [engine.completion(id).tokens for id in ids]
    assert found == [*wanted[:2], wanted[2][:16], wanted[3]]


@pytest.mark.parametrize("seed", range(3))
def test_another_order_of_requests_is_another_order_of_answers(served, seed):
    """Rows with 0, 1, 3 and 4 drafts beside each other, in any order, are those of each alone (B12)."""
    engine, requests, alone = served
    engine.policy = Fixed(DEPTH)
    engine._propose = None if seed else scripted(whole(requests, alone), SCRIPTS["mixed"])
    mixed = [dataclasses.replace(r, max_drafts=(0, 1, 3, None)[i % 4]) for i, r in enumerate(requests)]
    order = np.random.default_rng(seed).permutation(len(mixed))
    assert [c.tokens for c in engine.generate([mixed[i] for i in order])] == [alone[i][0] for i in order]


def test_a_ladder_that_drops_to_plain_and_comes_back(served, reference):
    """Sequences come and go so that the width takes every step from 1 to 4 and back; the ladder asks for 4, 2, 1 and no
    drafts at these, drafts are right until two. After every step all states are those of a fresh prefill (B01)."""
    engine, requests, alone = served
    ladder = Ladder(LadderConfig(((1, 4), (2, 2), (3, 1)), cap=3), num_drafts=DEPTH)
    assert [ladder.drafts(n) for n in (1, 2, 3, 4)] == [4, 2, 1, 0]
    engine.policy, engine._propose = ladder, scripted(whole(requests, alone), SCRIPTS["right until 2"])
    widths = [1, 1, 2, 1, 3, 1, 4, 2, 2, 3, 2, 4, 3, 3, 4, 4, 1]  # each ordered pair of 1 to 4
    assert len(set(itertools.pairwise(widths))) == 16
    waiting, emitted, offered = itertools.cycle(range(7)), {}, []
    for width in widths:
        while engine.active > width:
            engine.cancel(engine._active[0].id)
        for _ in range(width - engine.active):
            index = next(waiting)
            emitted[engine.submit(requests[index])] = (index, [])
        emissions = engine.step()
        assert len(emissions) == width
        for emission in emissions:
            emitted[emission.request][1].extend(emission.tokens)
        offered.append(max(len(emission.drafts) for emission in emissions))
        check_states(engine, reference)
    assert set(offered) >= {0, 1, 2, 4}
    assert all(tuple(tokens) == alone[index][0][: len(tokens)] for index, tokens in emitted.values())


@pytest.mark.parametrize("where", ["after the call", "commit", "propose", "trace"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_fault_states_are_those_of_what_was_emitted(served, reference, monkeypatch, where, error):
    """Raised between a step's verify and its return, for its second sequence; the same sequences then go on without
    drafts, their states are those of their tokens, and every answer is whole (B08)."""
    engine, requests, alone = served
    right = scripted(whole(requests, alone), SCRIPTS["mixed"])
    engine.policy, engine._propose = Fixed(DEPTH), right
    ids = [engine.submit(request) for request in requests[:3]]
    for _ in range(3):
        engine.step()
    calls = itertools.count(1)

    def failing(inner):
        def call(*arguments):
            answer = inner(*arguments)
            if next(calls) == (2 if where in ("propose", "trace") else 1):
                raise error("injected")
            return answer

        return call

    with monkeypatch.context() as patch:
        if where == "after the call":
            programs = type(engine.programs)
            patch.setattr(programs, "__getitem__", lambda self, key, get=programs.__getitem__: failing(get(self, key)))
        elif where == "commit":
            patch.setattr(engine, "_commit", failing(engine._commit))
        elif where == "propose":
            engine._propose = failing(right)
        else:
            engine._trace = failing(lambda record: None)
        with pytest.raises(error, match="injected"):
            engine.step()
    engine._propose, engine._trace, engine.policy = right, None, Fixed(0)
    for _ in range(3):
        engine.step()
        check_states(engine, reference)
    engine.policy = Fixed(DEPTH)
    while not engine.idle:
        engine.step()
    assert [engine.completion(id).tokens for id in ids] == [tokens for tokens, _ in alone[:3]]


def test_a_seed_gives_its_answer_in_any_bucket_and_row(tiny, engine):
    """Alone in a bucket of one, and first, in the middle and last among seven unseeded ones in a bucket of four; the
    unseeded ones, of the same prompt, all differ (B30)."""
    cfg, params = tiny
    other = Engine(params, cfg, dataclasses.replace(engine.config, buckets=BucketConfig(n=(1, 4), k=(2,))), Fixed(1))
    other.warmup(compiler_options=QUICK)
    seeded = Request((3, 1, 4), 14, Sampling(1.5, seed=42), ignore_eos=True)
    unseeded = dataclasses.replace(seeded, sampling=Sampling(1.5))
    with jax.enable_x64(True):
        (alone,) = other.generate([seeded])
        for place in (0, 3, 7):
            crowd = [*[unseeded] * place, seeded, *[unseeded] * (7 - place)]
            done = [c.tokens for c in other.generate(crowd)]
            assert done.pop(place) == alone.tokens
            assert len({alone.tokens, *done}) == 8
