"""Acceptance rules: exact in law by enumeration over small vocabularies; and wrong as soon as the draft distribution
handed over is not the one that the drafts were drawn from. Through the engine: chi-square against plain decode."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from atlas_jax.decode import accept
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import Fixed, Off

V, K = 3, 3  # a vocabulary of three, up to two drafts
GRID = 240  # chances per draft: the thresholds below are multiples of 1 / 240


def conditionals(rng, greedy=False):
    """A distribution after every text of up to K - 1 tokens, in units of 1 / 12; some with zeros."""
    found = {}
    for length in range(K):
        for text in itertools.product(range(V), repeat=length):
            parts = np.eye(V)[rng.integers(V)] * 12 if greedy else rng.multinomial(12, rng.dirichlet([0.7] * V))
            found[text] = parts / 12
    return found


def law(rule, target, drawn, told, drafts_offered):
    """The exact law of the first K tokens that a step and plain continuation give, in closed form over all drafts.

    The chances are integrated on a grid of midpoints; the tokens behind a step follow the target.
    """
    total = np.zeros((V,) * K)
    grid = (np.arange(GRID) + 0.5) / GRID
    chances = np.array(list(itertools.product(grid, repeat=drafts_offered))).reshape(-1, drafts_offered)
    judge = jax.jit(jax.vmap(rule, in_axes=(None, None, None, None, 0)))
    for drafts in itertools.product(range(V), repeat=drafts_offered):
        weight = np.prod([drawn[drafts[:j]][drafts[j]] for j in range(drafts_offered)])
        if weight == 0:
            continue
        p = np.array([target[drafts[:j]] for j in range(drafts_offered + 1)])
        q = np.array([told[drafts[:j]] for j in range(drafts_offered)])
        ids, rows = np.array(drafts)[None], np.array([drafts_offered + 1])
        accepted, last = judge(p[None], q[None], ids, rows, chances[:, None])
        accepted, last = np.asarray(accepted)[:, 0], np.asarray(last)[:, 0]
        for a in range(drafts_offered + 1):
            rest = last[accepted == a].sum(axis=0) / len(chances)
            for token in range(V):
                text = (*drafts[:a], token)
                for tail in itertools.product(range(V), repeat=K - len(text)):
                    chance = np.prod([target[(*text, *tail[:j])][tail[j]] for j in range(len(tail))])
                    total[(*text, *tail)] += weight * rest[token] * chance
    return total


def plain_law(target):
    whole = np.zeros((V,) * K)
    for text in itertools.product(range(V), repeat=K):
        whole[text] = np.prod([target[text[:j]][text[j]] for j in range(K)])
    return whole


@pytest.fixture
def exact():
    with jax.enable_x64(True):
        yield


RULES = {"rejection": accept.rejection, "block": accept.block}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_the_law_is_the_targets(exact, rule, seed):
    """One and two drafts drawn from the head; and greedy (one-hot) drafts."""
    rng = np.random.default_rng(seed)
    target, drawn = conditionals(rng), conditionals(rng, greedy=seed == 2)
    for offered in (1, 2):
        found = law(RULES[rule], target, drawn, drawn, offered)
        # The grid resolves a threshold to 1 / 240 a draft, evenly to both sides.
        np.testing.assert_allclose(found, plain_law(target), atol=offered * 0.5 / GRID)


@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_draft_distribution_shows(exact, rule):
    """The test of the test: told a softer q, or one-hot drafts with another q, the law is off by far more (B28)."""
    rng = np.random.default_rng(0)
    target, drawn = conditionals(rng), conditionals(rng)
    told = {text: 0.5 * q + 0.5 / V for text, q in drawn.items()}
    greedy = {text: np.eye(V)[q.argmax()] for text, q in drawn.items()}
    for actual, claimed in ((drawn, told), (greedy, drawn)):
        off = np.abs(law(RULES[rule], target, actual, claimed, 2) - plain_law(target)).max()
        assert off > 10 / GRID


def test_block_accepts_at_least_as_many(exact):
    rng = np.random.default_rng(4)
    target, drawn = rng.dirichlet([0.5] * V, (4000, K)), rng.dirichlet([0.5] * V, (4000, K - 1))
    pick = lambda q: np.array([[rng.choice(V, p=row) for row in rows] for rows in q])
    drafts, chance = pick(drawn), rng.random((4000, K - 1))
    rows = np.full(4000, K)
    few = accept.rejection(target, drawn, drafts, rows, chance)[0].mean()
    many = accept.block(target, drawn, drafts, rows, chance)[0].mean()
    assert many > few + 0.01


@pytest.mark.parametrize("rule", RULES)
def test_edges(exact, rule):
    """A chance of exactly 0 does not accept what the target excludes; q = 0, p = q = 0 and p = q are finite (B27)."""
    p = np.array([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    for draft, q, want in ((0, [1.0, 0.0, 0.0], 0), (2, [0.0, 1.0, 0.0], 0), (1, [0.0, 1.0, 0.0], 1)):
        accepted, last = RULES[rule](
            p[None, :2], np.array([[q]]), np.array([[draft]]), np.array([2]), np.zeros((1, 1))
        )
        assert accepted[0] == want and np.isfinite(last).all() and last.sum() == pytest.approx(1)
        assert want or last[0, 0] == 0
    same = RULES[rule](p[None], p[None, :2], np.array([[1, 0]]), np.array([3]), np.full((1, 2), 0.999))
    assert same[0][0] == 2 and np.allclose(same[1], p[2])
    short = RULES[rule](p[None], p[None, :2], np.array([[1, 0]]), np.array([1]), np.zeros((1, 2)))
    assert short[0][0] == 0 and np.allclose(short[1], p[0])


@pytest.fixture(scope="module", params=RULES)
def sampling_engine(request, tiny):
    cfg, params = tiny
    cfg = dataclasses.replace(cfg, eos_ids=())
    params = {**params, "embed": params["embed"] * 3}  # a peaked target: first tokens that repeat
    config = EngineConfig(
        slots=16, context=32, max_drafts=2, buckets=BucketConfig(n=(16,), k=(1, 3)), prefill=(4,),
        acceptance=request.param,
    )  # fmt: skip
    return Engine(params, cfg, config)


@pytest.mark.slow
def test_the_engine_draws_from_the_same_law(sampling_engine):
    """The second and third token after one prompt, over 1,600 seeds: sampled drafts against plain decode, two-sample
    chi-square; and a scripted drafter, whose drafts are judged as the point masses that they are."""
    engine = sampling_engine

    def histogram(policy, propose=None, offset=0):
        engine.policy, engine._propose = policy, propose
        done = engine.generate([Request((3, 5), 4, Sampling(1.0, top_k=6, seed=i + offset)) for i in range(1600)])
        accepted = sum(a * count for c in done for (_, a), count in c.acceptance.histogram.items())
        pairs, counts = np.unique([c.tokens[1] * 61 + c.tokens[2] for c in done], return_counts=True)
        return dict(zip(pairs.tolist(), counts.tolist(), strict=True)), accepted

    def chi_square(a, b):
        common = [pair for pair in a.keys() | b.keys() if a.get(pair, 0) + b.get(pair, 0) >= 16]
        terms = [(a.get(p, 0) - b.get(p, 0)) ** 2 / (a.get(p, 0) + b.get(p, 0)) for p in common]
        return sum(terms), len(common)

    plain, _ = histogram(Off(), offset=10**6)
    likely = divmod(max(plain, key=plain.__getitem__), 61)
    for propose in (None, lambda known, count: likely[:count]):
        found, accepted = histogram(Fixed(2), propose)
        statistic, cells = chi_square(plain, found)
        assert cells > 5 and statistic < cells + 4 * (2 * cells) ** 0.5
        assert accepted > 20


def test_greedy_requests_are_still_exactly_plain(sampling_engine):
    engine = sampling_engine
    requests = [Request((i, 7), 12) for i in range(20)]
    engine.policy, engine._propose = Off(), None
    plain = [c.tokens for c in engine.generate(requests)]
    engine.policy = Fixed(2)
    assert [c.tokens for c in engine.generate(requests)] == plain
