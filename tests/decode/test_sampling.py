"""Every sampling option gives the same tokens with and without speculation, and those of a sampler written again in
NumPy over one full forward; log-probabilities are the forward's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.decode.sequence import random_key
from atlas_jax.depth.policies import Fixed, Off
from atlas_jax.lab.oracle import Oracle

EVEN = np.arange(61) % 2 == 0


def never_twice(text):
    """A grammar with memory: no token that stands among the last three."""
    allowed = np.ones(61, bool)
    allowed[list(text[-3:])] = False
    return allowed


OPTIONS = {
    "greedy": Sampling(),
    "temperature": Sampling(0.9),
    "top_k": Sampling(1.0, top_k=5),
    "top_p": Sampling(1.2, top_p=0.6),
    "min_p": Sampling(1.2, min_p=0.1),
    "all three": Sampling(1.1, top_k=20, top_p=0.8, min_p=0.02),
    "presence": Sampling(presence_penalty=2.0),
    "negative presence": Sampling(presence_penalty=-2.0),
    "frequency": Sampling(0.7, frequency_penalty=0.8),
    "repetition": Sampling(repetition_penalty=1.6),
    "bias": Sampling(bias={5: 3.0, 17: -8.0, 60: -50.0}),
    "table": Sampling(0.8, allowed=EVEN),
    "function": Sampling(allowed=never_twice),
    "everything": Sampling(
        0.9, 30, 0.9, 0.01, 1.2, 0.3, -0.2, {3: 1.0, 60: -9.0}, lambda text: never_twice(text) & ~EVEN, seed=5
    ),
}


@pytest.fixture(scope="module")
def made(tiny):
    cfg, params = tiny
    config = EngineConfig(
        slots=4, context=64, max_drafts=3, buckets=BucketConfig(n=(4,), k=(1, 4)), prefill=(8,), dtype=jnp.float64,
        top_log_probs=3,
    )  # fmt: skip
    with jax.enable_x64(True):
        yield Engine(params, cfg, config), Oracle(params, cfg, length=64, batch=4, tie=1e-9)


def asked(sampling, count=4):
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(0, 60, n).tolist()) for n in (1, 4, 9, 12)[:count]]
    seeded = lambda i: dataclasses.replace(sampling, seed=9 + i)
    return [Request(p, 16, seeded(i), log_probs=True) for i, p in enumerate(prompts)]


def drafter(answers):
    """Half-right drafts, so that rows of every acceptance are judged."""
    texts = [(*r.prompt, *c.tokens) for r, c in answers]

    def propose(known, count):
        text = next((t for t in texts if t[: len(known)] == tuple(known)), ())
        right = list(text[len(known) : len(known) + count])
        right += [0] * (count - len(right))
        if len(known) % 3:
            right[len(known) % count] = (right[len(known) % count] + 1) % 60
        return right

    return propose


@pytest.mark.parametrize("name", OPTIONS)
def test_speculation_and_an_independent_sampler_agree(made, name):
    engine, oracle = made
    requests = asked(OPTIONS[name])
    engine.policy, engine._propose = Off(), None
    plain = engine.generate(requests)
    keys = [random_key(r.sampling.seed, 0, 0) for r in requests]
    for verdict, completion in zip(oracle.judge(requests, plain, keys), plain, strict=True):
        assert verdict.unexcused == 0 and not verdict.wrong and verdict.tokens == len(completion.tokens)
    engine.policy = Fixed(3)
    for propose in (None, drafter(list(zip(requests, plain, strict=True)))):
        engine._propose = propose
        found = engine.generate(requests)
        assert [c.tokens for c in found] == [c.tokens for c in plain]
        for mine, theirs in zip(found, plain, strict=True):
            np.testing.assert_allclose(mine.log_probs, theirs.log_probs, atol=1e-9)
            assert len(mine.log_probs) == len(mine.tokens) == len(mine.top)
    assert any(a > 0 for c in found for _, a in c.acceptance.histogram)


def test_the_options_matter(made):
    """No option is silently ignored: each changes some answer."""
    engine, _ = made
    engine.policy, engine._propose = Fixed(3), None
    of = lambda sampling: [c.tokens for c in engine.generate(asked(sampling))]
    greedy, sampled = of(Sampling()), of(Sampling(1.2))
    for name, options in OPTIONS.items():
        base = Sampling(options.temperature) if name != "temperature" else Sampling()
        if name != "greedy":
            assert of(options) != of(base), name
    assert greedy != sampled


def test_neighbours_with_other_options_change_nothing(made):
    """All options in one batch, alone, and in another order."""
    engine, _ = made
    engine.policy, engine._propose = Fixed(3), None
    requests = [asked(options, 3)[-1] for options in OPTIONS.values()]
    together = [c.tokens for c in engine.generate(requests)]
    assert [engine.generate([r])[0].tokens for r in requests[::3]] == together[::3]
    order = np.random.default_rng(0).permutation(len(requests))
    assert [c.tokens for c in engine.generate([requests[i] for i in order])] == [together[i] for i in order]


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-8, 1e-6])
def test_tiny_temperatures_are_greedy_everywhere(made, temperature):
    engine, _ = made
    engine.policy, engine._propose = Fixed(3), None
    greedy = [c.tokens for c in engine.generate(asked(Sampling()))]
    assert [c.tokens for c in engine.generate(asked(Sampling(temperature, top_p=0.5)))] == greedy


def test_seeds(made):
    """A seed gives one answer anywhere; unseeded rows of one prompt differ, and repeat with the engine's own seed."""
    engine, _ = made
    engine.policy, engine._propose = Fixed(3), None
    seeded = Request((3, 1, 4), 14, Sampling(1.5, seed=42))
    unseeded = Request((3, 1, 4), 14, Sampling(1.5))
    (alone,) = engine.generate([seeded])
    crowd = engine.generate([*[unseeded] * 5, seeded, unseeded])
    assert crowd[5].tokens == alone.tokens
    assert len({c.tokens for i, c in enumerate(crowd) if i != 5}) > 4
    engine._next_id -= 7
    assert [c.tokens for c in engine.generate([*[unseeded] * 5, seeded, unseeded])] == [c.tokens for c in crowd]


def test_log_probabilities_are_the_models_own(made, tiny):
    """Of every token, accepted drafts included, before penalties and temperature; the best three beside it (B31)."""
    engine, oracle = made
    engine.policy = Fixed(3)
    requests = asked(Sampling(0.9, presence_penalty=1.0))
    plain = engine.generate(requests)
    engine._propose = drafter(list(zip(requests, plain, strict=True)))
    for request, done in zip(requests, engine.generate(requests), strict=True):
        text = np.zeros((4, 64), np.int32)
        text[0, : len(request.prompt) + len(done.tokens)] = [*request.prompt, *done.tokens]
        rows = oracle._forward(oracle._params, text)[0, len(request.prompt) - 1 :][: len(done.tokens)]
        want = np.asarray(jax.nn.log_softmax(rows, axis=-1))
        np.testing.assert_allclose(done.log_probs, want[np.arange(len(want)), list(done.tokens)], atol=1e-6)
        for pairs, row in zip(done.top, want, strict=True):
            assert [t for t, _ in pairs] == np.argsort(-row, kind="stable")[:3].tolist()
            np.testing.assert_allclose([value for _, value in pairs], np.sort(row)[::-1][:3], atol=1e-6)


def test_a_function_that_fails_or_forbids_everything_ends_its_own_request(made):
    engine, _ = made
    engine.policy, engine._propose = Fixed(3), None

    def broken(text):
        if len(text) > 6:
            raise KeyError("grammar")
        return np.ones(61, bool)

    good = asked(Sampling())[2]
    nothing = Request((1, 2), 9, Sampling(allowed=lambda text: np.arange(61) < (61 if len(text) < 4 else 0)))
    done = engine.generate([good, Request((1, 2), 9, Sampling(allowed=broken)), nothing])
    assert done[0].tokens == engine.generate([good])[0].tokens and done[0].finished != "error"
    assert [c.finished for c in done[1:]] == ["error", "error"]
    assert "grammar" in done[1].error and len(done[1].tokens) == 5
    assert "forbids every token" in done[2].error and len(done[2].tokens) == 2
