"""Other ways back to the last accepted row, the same answer: tokens of plain decode, states of a fresh prefill.

All in float64. The default way is what the rest of the engine's tests are about; here it is the reference.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_checks import EVERY_SWITCH, SCRIPTS, check_states, scripted, whole

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.plan import Bucket, Plan, StepConfig
from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.decode.state import init_state
from atlas_jax.decode.step import step
from atlas_jax.depth.policies import Fixed, Off
from atlas_jax.kernels.backends import BackendError, Kernels
from atlas_jax.model import rollback
from atlas_jax.model.state import GdnCache

OTHERS = ("snapshot", "recompute")
CONFIG = EngineConfig(
    slots=3, context=96, max_drafts=4, buckets=BucketConfig(n=(4,), k=(1, 5)), prefill=(8,), keep=6, rounds=5,
    dtype=jnp.float64,
)  # fmt: skip
QUICK = {"xla_backend_optimization_level": 0}  # compile options: the programs run for milliseconds


def text_of(tokens):
    """Two letters a token, so that a stop text can end inside an accepted run."""
    return "".join(f"{chr(97 + t % 26)}{chr(65 + t // 26)}" for t in tokens)


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(0)
    lengths, heats = (1, 3, 8, 9, 17), (0.0, 0.9, 0.0, 1.5, 0.0)
    return [
        Request(tuple(rng.integers(0, 60, n).tolist()), 24, Sampling(heat, seed=n))
        for n, heat in zip(lengths, heats, strict=True)
    ]


@pytest.fixture(scope="module")
def answers(tiny, requests):
    """What plain decode says under the default rollback."""
    cfg, params = tiny
    with jax.enable_x64(True):
        engine = Engine(params, cfg, dataclasses.replace(CONFIG, keep=0))
        engine.warmup(compiler_options=QUICK)
        done = outcome(engine.generate(requests))
    assert len({tokens for tokens, _ in done}) == len(done)
    return done


@pytest.fixture(scope="module")
def reference(tiny):
    """An engine of the default rollback to replay single sequences with, from their beginning."""
    cfg, params = tiny
    with jax.enable_x64(True):
        return Engine(params, cfg, dataclasses.replace(CONFIG, slots=1, keep=0, buckets=BucketConfig(n=(1,))))


@pytest.fixture(scope="module", params=OTHERS)
def made(request, tiny):
    cfg, params = tiny
    with jax.enable_x64(True):
        engine = Engine(params, cfg, dataclasses.replace(CONFIG, rollback=request.param), detokenize=text_of)
        engine.warmup([Off(), Fixed(0), Fixed(4)], compiler_options=QUICK)
        yield engine


@pytest.fixture
def engine(made):
    made.cancel_all()
    made._lost, made._propose = True, None  # no kept states from another test
    with jax.enable_x64(True):
        yield made


def outcome(completions):
    return [(c.tokens, c.finished) for c in completions]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [None, 0, 1, 2, 3, 4])
def test_tokens_equal_plain_at_every_depth(engine, requests, answers, depth):
    """Scripted drafters, right until j and then wrong, and the head's own drafts, those in several rounds a call."""
    engine.policy = Off() if depth is None else Fixed(depth)
    for right in [*SCRIPTS.values(), None] if depth else [None]:
        engine._propose = right and scripted(whole(requests, answers), right)
        assert outcome(engine.generate(requests)) == answers


def test_states_equal_replay_through_every_switch(engine, reference, requests, answers):
    """Every ordered pair of depths 0..4, drafts right until j for every j. States are looked at every third step, so
    that most steps begin with rows pending (O2)."""
    switches, pending, depths = [], set(), itertools.cycle(EVERY_SWITCH)
    for script in ("mixed", "always right", "mixed"):
        engine._propose = scripted(whole(requests, answers), SCRIPTS[script])
        ids = [engine.submit(r) for r in requests]
        while not engine.idle:
            switches.append(next(depths))
            engine.policy = Fixed(switches[-1])
            engine.step()
            if len(switches) % 3 == 0:
                pending |= {a.pending for a in engine._active}
                check_states(engine, reference)
        assert outcome(map(engine.completion, ids)) == answers
    assert len(set(itertools.pairwise(switches))) == 25 and pending == {0, 1, 2, 3, 4}


def test_what_no_live_row_owns_is_never_read(engine, requests, answers):
    """Before each step free slots are NaN, and of a live slot every snapshot but the one that was accepted (O4)."""
    engine._propose, engine.policy = scripted(whole(requests, answers), SCRIPTS["mixed"]), Fixed(3)
    ids = [engine.submit(r) for r in requests]
    while not engine.idle:
        pending = dict.fromkeys(range(CONFIG.slots + CONFIG.keep)) | {a.slot: a.pending for a in engine._active}

        def spoil(cache, pending=pending):
            if not isinstance(cache, GdnCache):
                return cache
            state, window = np.array(cache.state), np.array(cache.window)
            for slot, index in pending.items():
                if index is None:
                    state[slot] = window[slot] = np.nan
                elif state.ndim == 5:
                    state[slot, [j for j in range(state.shape[1]) if j != index]] = np.nan
            return GdnCache(jnp.asarray(state), jnp.asarray(window))

        engine._state = engine._state._replace(layers=tuple(map(spoil, engine._state.layers)))
        engine.step()
    assert outcome(map(engine.completion, ids)) == answers


def test_a_prompt_reuses_the_state_of_one_that_began_alike(engine):
    """A, then B, then A again, then A with its answer and more: the same tokens and acceptance as cold."""
    engine.policy = Fixed(3)
    rng = np.random.default_rng(5)
    a, b = (Request(tuple(rng.integers(0, 60, 21).tolist()), 12, ignore_eos=True) for _ in range(2))
    first, _, again = (engine.generate([r])[0] for r in (a, b, a))
    longer = Request((*a.prompt, *first.tokens, 3, 1, 4), 12)
    (continued,) = engine.generate([longer])
    assert (again.reused, continued.reused) == (20, 20 + 12)
    assert (again.tokens, again.acceptance.histogram) == (first.tokens, first.acceptance.histogram)
    engine._lost = True
    (cold,) = engine.generate([longer])
    assert (cold.tokens, cold.acceptance.histogram) == (continued.tokens, continued.acceptance.histogram)
    assert cold.reused == 0


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_an_answer_that_the_host_cut_can_be_continued(engine, kept):
    """A stop text inside an accepted run takes rows back after the step. Where they have been folded already, the state
    is not offered again; either way the rest is that of one long answer."""
    request = Request((5, 3, 8, 2), 30, ignore_eos=True)
    engine.policy = Off()
    (long,) = engine.generate([request])
    engine._lost, engine.policy = True, Fixed(4)
    engine._propose = lambda known, count: (*long.tokens, *[0] * 9)[len(known) - 4 :][:count]
    stop = text_of(long.tokens[1 : 1 + kept])
    assert stop not in text_of(long.tokens[:kept])
    (part,) = engine.generate([dataclasses.replace(request, stop=(stop,))])
    assert part.tokens == long.tokens[: 1 + kept] and part.acceptance.steps == 2
    (rest,) = engine.generate([Request((*request.prompt, *part.tokens), 29 - kept, ignore_eos=True)])
    assert part.tokens + rest.tokens == long.tokens
    assert rest.reused == (3 if engine.config.rollback == "recompute" else 4 + kept)


@pytest.mark.slow
@pytest.mark.parametrize("how", OTHERS)
def test_a_step_touches_only_its_own_slots(tiny, how):
    """Temporaries do not grow with the number of slots, and the whole state is donated and updated in place."""
    cfg, params = tiny
    bucket = Bucket(2, 2, 4, True)
    params = jax.tree.map(np.float32, params)
    sizes = []
    for slots in (4, 64):
        state = init_state(cfg, slots=slots, length=512, max_drafts=2, dtype=jnp.float32, head=True, rollback=how)
        packed = jax.ShapeDtypeStruct((bucket.n, Plan.width(bucket.k)), jnp.int32)
        fn = functools.partial(step, cfg=cfg, bucket=bucket, config=StepConfig(rollback=how))
        memory = jax.jit(fn, donate_argnums=1).lower(params, state, packed).compile(QUICK).memory_analysis()
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert memory.alias_size_in_bytes >= state_bytes
        sizes.append(memory.temp_size_in_bytes)
    few, many = sizes
    assert abs(many - few) < 4096 < state.layers[0].state.nbytes / 4


def test_a_pool_holds_as_many_states_as_its_rollback_needs(tiny):
    sizes = {"slots": 7, "length": 8, "max_drafts": 4, "dtype": jnp.float32, "head": False}
    shape = lambda how: init_state(tiny[0], **sizes, rollback=how).layers[0].state.shape
    assert [shape(how) for how in ("deferred", *OTHERS)] == [(7, 4, 8, 4), (7, 5, 4, 8, 4), (7, 4, 8, 4)]
    assert [rollback.states_moved(how, 4) for how in ("deferred", *OTHERS)] == [2, 5, 3]


@pytest.mark.parametrize("how", OTHERS)
def test_what_only_xla_can_do_is_refused_elsewhere(tiny, how):
    cfg, params = tiny
    for kernels in (Kernels(gdn_step="sequential"), Kernels(gdn_step="triton", interpret=True)):
        with pytest.raises(BackendError, match=f"'{how}' runs on the xla backend only.*{kernels.gdn_step}"):
            Engine(params, cfg, EngineConfig(rollback=how, kernels=kernels))
    with pytest.raises(ValueError, match="'invariant' needs rollback 'deferred'"):
        EngineConfig(rollback=how, numerics="invariant")
    with pytest.raises(BackendError, match="'undo' is none of 'deferred'"):
        Engine(params, cfg, EngineConfig(rollback="undo"))
