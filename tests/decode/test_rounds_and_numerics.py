"""Several rounds in one call change nothing but the number of calls; one bucket for everything changes no bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.plan import Bucket
from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import Fixed, Off

GRID = {"slots": 3, "context": 64, "max_drafts": 3, "prefill": (8,), "buckets": BucketConfig(n=(4,), k=(1, 4))}


def requests(count=7, **options):
    rng = np.random.default_rng(3)
    heats = (0.0, 0.8, 1.3)
    return [
        Request(
            tuple(rng.integers(0, 60, 1 + i % 9).tolist()),
            20,
            Sampling(heats[i % 3], presence_penalty=i % 2, seed=i),
            stop_ids=(i,),
            max_drafts=i % 4 if i % 2 else None,
            **options,
        )
        for i in range(count)
    ]


def counting(engine):
    """Calls of step programs, by bucket."""
    calls = []
    inner = engine.programs.__class__.__getitem__

    class Counted(engine.programs.__class__):
        def __getitem__(self, key):
            calls.append(key)
            return inner(self, key)

    engine.programs = Counted(**{f.name: getattr(engine.programs, f.name) for f in dataclasses.fields(engine.programs)})
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Off(), Fixed(0), Fixed(3)], ids=lambda p: p.name)
def test_rounds_change_nothing_but_the_number_of_calls(tiny, policy):
    """Ends, limits, request limits on drafts, penalties and noise within a call; telemetry counts steps, not calls."""
    cfg, params = tiny
    with jax.enable_x64(True):
        found = {}
        for rounds in (1, 6):
            engine = Engine(params, cfg, EngineConfig(**GRID, rounds=rounds, dtype=jnp.float64), policy)
            calls = counting(engine)
            done = engine.generate(requests(3, log_probs=True))
            steps = sum(s.count for s in engine.telemetry.steps.values())
            counts = [(c.acceptance.histogram, c.acceptance.tokens, c.finished, c.stopped_by) for c in done]
            found[rounds] = [c.tokens for c in done], counts, steps
            for completion in done:
                assert len(completion.log_probs) == len(completion.tokens)
            if rounds == 1:
                one = len([c for c in calls if isinstance(c, Bucket)])
                assert one == steps
            else:
                assert len([c for c in calls if isinstance(c, Bucket)]) < 0.6 * one
        assert found[1] == found[6]


def test_the_host_keeps_its_say(tiny):
    """One round where a stop text, a host function, a scripted drafter, a waiting request or a prompt wants a word."""
    cfg, params = tiny
    with jax.enable_x64(True):
        engine = Engine(params, cfg, EngineConfig(**GRID, rounds=6, dtype=jnp.float64), Fixed(3), detokenize=str)
        free = Request((1, 2), 30, ignore_eos=True)
        ready = lambda: [a for a in engine._active if a.ready]

        def rounds(request, others=0):
            engine.cancel_all()
            for each in [request, *[free] * others]:
                engine.submit(each)
            engine.step()
            found = engine._rounds(ready())
            engine.cancel_all()
            return found

        assert rounds(free) == rounds(free, 1) == 6
        assert rounds(dataclasses.replace(free, stop=("zzz",))) == 1
        assert rounds(dataclasses.replace(free, sampling=Sampling(allowed=lambda text: np.ones(61, bool)))) == 1
        assert rounds(free, 5) == 1
        engine._propose = lambda known, count: [0] * count
        assert rounds(free) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_invariant_numerics_are_bit_equal(tiny, dtype):
    """Tokens and log-probabilities, plain against speculative with drafts of every quality, no bit of difference; in
    the fast numerics the same comparison does differ (in float32: a bfloat16 logit hides it)."""
    cfg, params = tiny
    asked = requests(9, log_probs=True)
    differ = {}
    for numerics in ("invariant", "fast") if dtype == jnp.float32 else ("invariant",):
        engine = Engine(params, cfg, EngineConfig(**GRID, numerics=numerics, dtype=dtype), Off())
        engine.warmup([Off(), Fixed(3)])
        plain = engine.generate(asked)
        texts = [(*r.prompt, *c.tokens) for r, c in zip(asked, plain, strict=True)]

        def half_right(known, count, texts=texts):
            text = next((t for t in texts if t[: len(known)] == tuple(known)), tuple(known))
            ahead = [*text[len(known) : len(known) + count], *[0] * count][:count]
            return ahead if len(known) % 2 else [*ahead[:1], *[(t + 1) % 60 for t in ahead[1:]]]

        differ[numerics] = 0
        for policy, propose in ((Fixed(3), None), (Fixed(3), half_right)):
            engine.policy, engine._propose = policy, propose
            for a, b in zip(engine.generate(asked), plain, strict=True):
                differ[numerics] += (a.tokens, a.log_probs) != (b.tokens, b.log_probs)
        if numerics == "invariant":
            assert sum(isinstance(key, Bucket) for key in engine.programs.compiled) == 1
    assert differ["invariant"] == 0
    assert differ.get("fast", 1) > 0
