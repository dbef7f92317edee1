"""Losslessness: whatever is drafted, accepted, rejected, batched or switched, tokens and states are those of plain
decode. All in float64, where equality is exact for tokens and 1e-9 for states (oracles O1 to O4)."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_checks import EVERY_SWITCH, SCRIPTS, check_states, scripted, whole

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.plan import Bucket
from atlas_jax.decode.requests import Request, RequestError
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import Fixed, Off, PolicyError
from atlas_jax.model.state import GdnCache

CHUNK = 8  # the widest prefill program of the fixture
LENGTHS = [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 21]


def prompts(count=None, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 60, length).tolist()) for length in LENGTHS[:count]]


def plain(engine, requests):
    engine.policy, engine._propose = Off(), None
    return [(c.tokens, c.finished) for c in engine.generate(requests)]


@pytest.fixture(scope="module")
def answers(engine):
    requests = [Request(p, max_new_tokens=24) for p in prompts()]
    done = plain(engine, requests)
    assert len({tokens for tokens, _ in done}) > 4  # the model is no constant
    return requests, done


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_tokens_equal_plain_at_every_depth(engine, answers, depth, script):
    """Prompts of 1, 2, 3, chunk - 1, chunk, chunk + 1, ... tokens; 8 requests through 4 slots, so widths vary."""
    requests, done = answers
    engine.policy, engine._propose = Fixed(depth), scripted(whole(requests, done), SCRIPTS[script])
    completions = engine.generate(requests)
    assert [(c.tokens, c.finished) for c in completions] == done
    if script == "always right" and depth == 4:
        assert sum(c.acceptance.tokens for c in completions) / sum(c.acceptance.steps for c in completions) > 2.5
    if script == "always wrong":
        assert all(c.acceptance.tokens == c.acceptance.steps for c in completions)


@pytest.mark.parametrize("depth", [1, 3])
def test_tokens_equal_plain_with_the_heads_own_drafts(engine, answers, depth):
    requests, done = answers
    engine.policy, engine._propose = Fixed(depth), None
    assert [(c.tokens, c.finished) for c in engine.generate(requests)] == done


@pytest.mark.parametrize("temperature", [1e-6, 0.7, 3.0])
def test_sampled_tokens_equal_plain(engine, temperature):
    """At any temperature a request draws the same tokens with speculation on and off; tiny temperatures are greedy."""
    requests = [Request(p, 24, Sampling(temperature, seed=7 * i)) for i, p in enumerate(prompts())]
    done = plain(engine, requests)
    engine.policy = Fixed(3)
    assert [(c.tokens, c.finished) for c in engine.generate(requests)] == done
    greedy = plain(engine, [dataclasses.replace(r, sampling=Sampling()) for r in requests])
    assert (done == greedy) == (temperature < 1e-5)
    alone = plain(engine, requests[3:4])
    assert alone == done[3:4]  # neither neighbours nor slot nor bucket enter the noise


def test_states_equal_replay_after_every_step_and_every_switch(engine, tiny):
    """The depth changes through every ordered pair of 0..4; after each step all states equal a replay (O2)."""
    requests = [Request(p, max_new_tokens=70) for p in prompts(4)]
    done = plain(engine, requests)
    engine._propose = scripted(whole(requests, done), SCRIPTS["mixed"])
    cfg, params = tiny
    reference = Engine(params, cfg, dataclasses.replace(engine.config, slots=1, buckets=BucketConfig(n=(1,))))
    ids = [engine.submit(r) for r in requests]
    switches = []
    for depth in itertools.cycle(EVERY_SWITCH):
        if engine.idle:
            break
        engine.policy = Fixed(depth)
        engine.step()
        check_states(engine, reference)
        switches.append(depth)
    assert len(set(itertools.pairwise(switches))) == 25
    assert [(c.tokens, c.finished) for c in map(engine.completion, ids)] == done


def test_switching_between_plain_and_speculation(engine, answers):
    requests, done = answers
    engine._propose = scripted(whole(requests, done), SCRIPTS["right until 2"])
    engine.cancel_all()
    ids = [engine.submit(r) for r in requests]
    for policy in itertools.cycle([Off(), Fixed(3), Off(), Off(), Fixed(1), Fixed(4)]):
        if engine.idle:
            break
        engine.policy = policy
        engine.step()
    assert [(c.tokens, c.finished) for c in map(engine.completion, ids)] == done


@pytest.mark.parametrize("poison", [np.nan, 1e4])
def test_poisoned_free_slots_and_dead_rows_change_nothing(engine, answers, poison):
    """Everything that no live row owns is overwritten with NaN before each step: free slots, the cache beyond each
    length, windows of retired sequences (O4)."""
    requests, done = answers
    engine._propose = scripted(whole(requests, done), SCRIPTS["mixed"])
    engine.policy = Fixed(3)
    engine.cancel_all()
    ids = [engine.submit(r) for r in requests[:5]]
    while not engine.idle:
        live = {a.slot: a for a in engine._active}
        slots, context = engine.config.slots, engine.config.context
        dead = np.ones((slots, context), bool)
        for slot, a in live.items():
            dead[slot, : a.length] = False
        free = np.array([s not in live for s in range(slots)])

        def spoil(cache, dead=dead, free=free):
            if isinstance(cache, GdnCache):
                hide = lambda x: jnp.where(free.reshape(-1, *[1] * (x.ndim - 1)), poison, x)
                return GdnCache(hide(cache.state), hide(cache.window))
            return type(cache)(jnp.where(dead[:, None, None, :, None], poison, cache.kv))

        state = engine._state
        engine._state = state._replace(layers=tuple(map(spoil, state.layers)), head=spoil(state.head))
        engine.step()
    assert [(c.tokens, c.finished) for c in map(engine.completion, ids)] == done[:5]


@pytest.mark.slow
def test_ragged_rows_equal_full_ones(engine, tiny, answers):
    """Flat rows packed into fewer than n * k: each sequence drafts its own number."""
    requests, done = answers
    cfg, params = tiny
    buckets = BucketConfig(n=(4,), k=(3,), ragged=True)
    ragged = Engine(params, cfg, dataclasses.replace(engine.config, max_drafts=2, buckets=buckets), Fixed(2))
    inner = scripted(whole(requests, done), SCRIPTS["mixed"])
    lengths = itertools.cycle([0, 2, 1, 2, 1, 0, 0])
    ragged._propose = lambda tokens, count: inner(tokens, count)[: next(lengths)]
    assert [(c.tokens, c.finished) for c in ragged.generate(requests)] == done
    assert len({b.rows for b in ragged.programs.compiled if isinstance(b, Bucket)}) > 2


def test_a_thousand_rejections_leave_the_state_exact(tiny):
    """One sequence, right-until-j with j cycling; the state's distance from a fresh prefill does not grow (B05)."""
    cfg, params = tiny
    config = EngineConfig(slots=1, context=2600, max_drafts=3, prefill=(256,), dtype=jnp.float64)
    with jax.enable_x64(True):
        engine = Engine(params, cfg, config)
        request = Request((1, 2, 3), max_new_tokens=2500, ignore_eos=True)
        ((tokens, _),) = plain(engine, [request])
        answer = (*request.prompt, *tokens)
        engine.policy = Fixed(3)
        engine._propose = scripted([answer], lambda r: r % 3)
        engine.submit(request)
        reference = Engine(params, cfg, config)
        rejections = 0
        while not engine.idle:
            (emission,) = engine.step()
            rejections += len(emission.tokens) - 1 < len(emission.drafts)
            if rejections in (100, 1000) and len(emission.tokens) - 1 < len(emission.drafts):
                check_states(engine, reference)
        assert rejections > 1000
        assert engine.completion(2).tokens == tokens


@pytest.mark.parametrize("room", range(7))
def test_limits_cut_the_run_not_the_answer(engine, answers, room):
    """`max_new_tokens` and the context end an answer at exactly that many tokens, inside an accepted run too."""
    requests, done = answers
    index = max(range(len(done)), key=lambda i: len(done[i][0]))
    request, (tokens, _) = requests[index], done[index]
    assert len(tokens) == 24
    engine.policy, engine._propose = Fixed(4), scripted(whole(requests, done), SCRIPTS["always right"])
    (short,) = engine.generate([dataclasses.replace(request, max_new_tokens=room)])
    assert short.tokens == tokens[:room] and short.finished == "length"


@pytest.mark.parametrize("room", range(1, 7))
def test_the_context_bounds_the_answer(engine, room):
    """Prompt and answer together never pass the context: exactly the tokens that fit, as in plain decode (B22)."""
    request = Request((5,) * (engine.config.context - room), 50, ignore_eos=True)
    ((tokens, reason),) = plain(engine, [request])
    assert len(tokens) == room and reason == "length"
    answer = (*request.prompt, *tokens, 0, 0, 0, 0)
    engine.policy, engine._propose = Fixed(4), lambda known, count: answer[len(known) : len(known) + count]
    (completion,) = engine.generate([request])
    assert completion.tokens == tokens


def test_an_end_token_ends_the_answer_once(tiny, engine, answers):
    """The end token as first token, at each place of an accepted run of 4 and as its bonus: cut there, "stop"; and
    `ignore_eos` runs through it (B20, B21)."""
    requests, done = answers
    place = 5
    index = next(i for i, (tokens, _) in enumerate(done) if len(tokens) == 24 and tokens[place] not in tokens[:place])
    request, (tokens, _) = requests[index], done[index]
    cfg = dataclasses.replace(tiny[0], eos_ids=(tokens[place],))
    config = dataclasses.replace(engine.config, slots=1, buckets=BucketConfig(n=(1,), k=(5,)))
    drafter = scripted([(*request.prompt, *tokens)], lambda r: 9)
    other = Engine(tiny[1], cfg, config, Fixed(4), propose=drafter)
    for known in range(place + 1):  # the first step emits one token, the second up to five
        longer = dataclasses.replace(request, prompt=(*request.prompt, *tokens[:known]), max_new_tokens=24 - known)
        (cut,) = other.generate([longer])
        assert cut.tokens == tokens[known : place + 1] and cut.finished == "stop"
        (through,) = other.generate([dataclasses.replace(longer, ignore_eos=True)])
        assert through.tokens == tokens[known:] and through.finished == "length"


def test_after_warmup_no_traffic_compiles(tiny):
    cfg, params = tiny
    with jax.enable_x64(True):
        buckets = BucketConfig(n=(1, 4))
        config = EngineConfig(slots=3, context=64, max_drafts=1, buckets=buckets, prefill=(4,), dtype=jnp.float64)
        engine = Engine(params, cfg, config)
        policies = [Off(), Fixed(0), Fixed(1)]
        assert engine.warmup(policies) > 0
        for policy in policies:
            engine.policy = policy
            heats = zip(prompts(5, seed=4), (0, 1, 0, 2, 0), strict=True)
            engine.generate([Request(p, 9, Sampling(t)) for p, t in heats])
        assert engine.compiles_after_warmup == 0


BAD = [
    (Request(()), "empty"),
    (Request((1,) * 96), "context"),
    (Request((1, 61)), "61 is outside the vocabulary"),
    (Request((-1,)), "-1 is outside"),
    (Request((1,), max_new_tokens=-1), "max_new_tokens"),
    (Request((1,), sampling=Sampling(-0.5)), "temperature"),
    (Request((1,), sampling=Sampling(float("nan"))), "temperature"),
]


@pytest.mark.parametrize(("request_", "word"), BAD, ids=[w for _, w in BAD])
def test_bad_requests_are_refused_and_nothing_is_lost(engine, answers, request_, word):
    requests, done = answers
    with pytest.raises(RequestError, match=word):
        engine.submit(request_)
    with pytest.raises(RequestError, match="not finished"):
        engine.completion(10**9)
    assert plain(engine, requests[:2]) == done[:2]


def test_unknown_policies_and_buckets_are_refused(engine):
    with pytest.raises(PolicyError, match="max_drafts=4"):
        engine.policy = Fixed(5)
    with pytest.raises(ValueError, match="no bucket for 33"):
        engine.config.buckets.fit(33, 1, 33, False)
    with pytest.raises(ValueError, match="exceed the largest"):
        engine.config.buckets.check(64)


