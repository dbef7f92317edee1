"""Heads as files, what training may touch, and that a replay counts what the decode loop counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY
from train.models import random_params
from weights.release import CFG as RELEASE
from weights.release import write_release

from atlas_jax.decode.requests import Request
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.model.mtp import draft_logits
from atlas_jax.train import heads, hiddens
from atlas_jax.train.hiddens import CacheError
from atlas_jax.train.loop import Run, Schedule, train
from atlas_jax.train.losses import cross_entropy, negative_log_acceptance
from atlas_jax.train.replay import replay, walk
from atlas_jax.train.texts import Text
from atlas_jax.train.unroll import Rows, Unroll, head_loss
from atlas_jax.weights.checkpoint import load_model
from atlas_jax.weights.layout import Naming

CFG = dataclasses.replace(TINY, vocab_size=8)  # so few tokens that random drafts are right now and then


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(np.asarray, random_params(CFG, 3))


@pytest.fixture(scope="module")
def requests():
    draw = lambda seed, length: tuple(np.random.default_rng(seed).integers(3, 8, length).tolist())
    asked = [Request(draw(seed, length), 18) for seed, length in enumerate((1, 5, 9, 17, 30))]
    return {"a": asked[:3], "b": asked[3:]}


@pytest.fixture(scope="module")
def answers(params, requests):
    return heads.plain_answers(params, CFG, requests, slots=1, context=64)


@pytest.fixture(scope="module")
def texts(requests, answers):
    return [
        Text.answer(request.prompt, reply, regime)
        for regime, asked in requests.items()
        for request, reply in zip(asked, answers[regime], strict=True)
    ]


@pytest.fixture(scope="module")
def cache(params, texts, tmp_path_factory):
    return hiddens.cache_hiddens(params, CFG, texts, tmp_path_factory.mktemp("cache"), length=64, batch=2)


def test_a_replay_counts_what_the_decode_loop_counts(params, requests, cache):
    """Offered, accepted, steps, by regime: judged on given text and accepted in serving are the same."""
    served = heads.acceptance(params, CFG, requests, depth=3, slots=1, context=64)
    assert replay(params, CFG, cache, Unroll(3)) == served
    assert heads.rates(heads.pooled(served))["mean_accepted"] > 0.1  # the case is a case


def test_a_walk_is_cut_like_the_decode_loop():
    right = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]], bool)
    log = Acceptance()
    walk(right, log, stopped=True)  # 3 tokens from place 0; at 3 all that is left, and it ends the answer
    assert dict(log.histogram) == {(0, 0): 1, (3, 2): 2} and log.tokens == 7
    log = Acceptance()
    walk(right, log, stopped=False)  # at 3 the limit leaves room for two drafts and their bonus
    assert dict(log.histogram) == {(0, 0): 1, (3, 2): 1, (2, 2): 1} and log.tokens == 7


def test_training_a_head_touches_the_head_alone(params, cache, tmp_path):
    """20 steps: the base bit for bit as it was, no optimizer state for it, and every leaf of the head has moved."""
    base = {name: leaf for name, leaf in params.items() if name != "mtp"}
    before = jax.tree.map(np.copy, base)
    loss = lambda head, base, *batch: head_loss(
        {**base, "mtp": head}, CFG, Rows(*batch), how=Unroll(1), measure=cross_entropy
    )
    schedule = Schedule(20, warmup=2, muon=False)
    batches = hiddens.batches([cache], 2, 16, 0)
    start = jax.tree.map(jnp.asarray, params["mtp"])
    trained = train(loss, start, base, batches, schedule, Run(tmp_path), report=lambda row: None)
    jax.tree.map(np.testing.assert_array_equal, base, before)
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), trained, params["mtp"])
    assert all(jax.tree.leaves(moved))
    size = lambda tree: sum(np.size(leaf) for leaf in jax.tree.leaves(tree))
    assert size(schedule.optimizer().init(start)) < 2.1 * size(start)


def test_masters_are_float32_where_the_computation_is_bfloat16(params, cache, tmp_path):
    """Every leaf moves, by less than bfloat16 could hold; a checkpoint keeps that, and a resume is bit-identical."""
    base = {name: leaf for name, leaf in params.items() if name != "mtp"}

    def loss(head, base, tokens, weights, segments, hidden, anchors):
        narrow = heads.cast({**base, "mtp": head}, jnp.bfloat16)
        rows = Rows(tokens, weights, segments, hidden.astype(jnp.bfloat16), anchors)
        return head_loss(narrow, CFG, rows, how=Unroll(1), measure=cross_entropy)

    batches, schedule = hiddens.batches([cache], 2, 16, 0), Schedule(20, peak=1e-4, warmup=2, muon=False)
    start = jax.tree.map(jnp.asarray, params["mtp"])

    def run(directory, batches=batches):
        return train(loss, start, base, batches, schedule, Run(directory, 10, 5), report=lambda row: None)

    def cut(i):
        if i == 13:
            raise RuntimeError("power cut")
        return batches(i)

    straight = run(tmp_path / "straight")
    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path / "cut", cut)
    jax.tree.map(np.testing.assert_array_equal, run(tmp_path / "cut"), straight)
    for after, before in zip(jax.tree.leaves(straight), jax.tree.leaves(start), strict=True):
        assert after.dtype == np.float32 and (np.asarray(after) != before).mean() > 0.5
    one = 1 + np.asarray(straight["norm"])  # what bfloat16 weights of this norm, which begin about 1, would have missed
    assert (one.astype(jnp.bfloat16) == (1 + start["norm"]).astype(jnp.bfloat16)).mean() > 0.5


def test_gradients_add_up_over_micro_batches(params, cache):
    """Four rows at once and one by one, ragged weights, one of them without any: the same gradient to 1e-6."""
    take = hiddens.batches([cache], 4, 12, 0)(0)
    take = (take[0], take[1] * np.array([1, 0.5, 0, 2], np.float32)[:, None], *take[2:])
    base = {name: leaf for name, leaf in params.items() if name != "mtp"}

    @jax.jit
    def gradient(head, batch):
        loss = lambda head: head_loss(
            {**base, "mtp": head}, CFG, Rows(*batch), how=Unroll(1), measure=negative_log_acceptance
        )
        return jax.grad(loss, has_aux=True)(head)

    whole, weight = gradient(params["mtp"], take)
    parts = [gradient(params["mtp"], tuple(x[i : i + 1] for x in take)) for i in range(4)]
    assert float(parts[2][1]) == 0 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(parts[2][0]))
    assert sum(float(part[1]) for part in parts) == pytest.approx(float(weight))
    summed = jax.tree.map(lambda *leaves: sum(leaves), *(part[0] for part in parts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a / weight, b / weight, atol=1e-6), whole, summed)


@pytest.mark.parametrize("vocab", [None, 5])
def test_a_head_comes_back_from_disk(params, tmp_path, vocab):
    """Alone, under `mtp.*` names, the map of a reduced vocabulary with it; logits after are logits before."""
    ids = None if vocab is None else np.sort(np.random.default_rng(0).permutation(8)[:vocab]).astype(np.int32)
    own = params if ids is None else {**params, "mtp": {**params["mtp"], "draft_ids": ids}}
    heads.save_head(tmp_path / "head", own, CFG, {"steps": 3}, dtype=np.float32)
    heads.save_head(tmp_path / "head", own, CFG, {"steps": 3}, dtype=np.float32)  # over itself
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]
    other = {**params, "mtp": heads.fresh_head(CFG, 9)}
    back = heads.load_head(tmp_path / "head", other, CFG)
    jax.tree.map(np.testing.assert_array_equal, back["mtp"], own["mtp"])
    hidden = np.random.default_rng(1).standard_normal((3, CFG.hidden_size)).astype(np.float32)
    np.testing.assert_array_equal(draft_logits(back, hidden), draft_logits(own, hidden))


def test_a_head_of_another_base_is_refused(params, tmp_path):
    heads.save_head(tmp_path / "head", params, CFG)
    other = {**params, "embed": params["embed"] + 1}
    with pytest.raises(heads.HeadError, match="trained on the base"):
        heads.load_head(tmp_path / "head", other, CFG)
    with pytest.raises(heads.HeadError, match="holds no head"):
        heads.load_head(tmp_path, params, CFG)
    with pytest.raises(ValueError, match="of another model"):  # a map with tokens that this model lacks
        heads.save_head(tmp_path / "map", {**params, "mtp": {**params["mtp"], "draft_ids": np.array([1, 400])}}, CFG)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_head_is_installed_into_its_base_and_no_other(shards, tmp_path):
    """Whole or in shards, told by the base's digest: the head's tensors change, the trunk's digest does not."""
    base = tmp_path / "base"
    write_release(base, RELEASE, Naming(), shards=shards)
    cfg, params = load_model(base)
    trained = {**params, "mtp": heads.fresh_head(cfg, 3)}
    heads.save_head(tmp_path / "head", trained, cfg)
    heads.install_head(base, tmp_path / "head")
    _, after = load_model(base)
    assert hiddens.base_mark(after) == hiddens.base_mark(params)
    jax.tree.map(np.testing.assert_array_equal, after["mtp"], heads.load_head(tmp_path / "head", params, cfg)["mtp"])
    assert (after["mtp"]["fc"] != params["mtp"]["fc"]).any()
    heads.save_head(tmp_path / "other", {**trained, "embed": params["embed"] + 1}, cfg)
    with pytest.raises(heads.HeadError, match="trained on the base"):
        heads.install_head(base, tmp_path / "other")


def test_a_cache_goes_on_where_it_stopped_and_knows_its_base(params, texts, cache, tmp_path):
    """Interrupted after its first flush it ends the same; another base, other texts or no supervision are told."""

    def stop(done, rows):
        raise KeyboardInterrupt

    long = [*texts] * 20
    with pytest.raises(KeyboardInterrupt):
        hiddens.cache_hiddens(params, CFG, long, tmp_path, length=64, batch=2, progress=stop)
    with pytest.raises(CacheError, match="no finished cache"):
        hiddens.load_hiddens(tmp_path)
    seen = []
    again = hiddens.cache_hiddens(
        params, CFG, long, tmp_path, length=64, batch=2, progress=lambda done, rows: seen.append(done)
    )
    straight = hiddens.cache_hiddens(params, CFG, long, tmp_path / "other", length=64, batch=2)
    assert len(again) == len(straight) > 32 and seen[0] > 32  # the first 32 rows were not done twice
    for name in ("tokens", "weights", "segments", "anchors", "hidden"):
        np.testing.assert_array_equal(getattr(again, name), getattr(straight, name))
    with pytest.raises(CacheError, match="another content"):
        hiddens.cache_hiddens(params, CFG, texts, tmp_path, length=64, batch=2)
    with pytest.raises(CacheError, match="another base"):
        hiddens.cache_hiddens({**params, "embed": params["embed"] + 1}, CFG, long, tmp_path, length=64, batch=2)
    with pytest.raises(CacheError, match="none of the"):
        mute = [Text(text.tokens, 0 * text.weights) for text in texts]
        hiddens.cache_hiddens(params, CFG, mute, tmp_path / "mute", length=64)


def test_cached_rows_are_the_texts_and_chains_begin_where_serving_begins_them(texts, cache):
    """Every document is found whole; its anchors run from the row before its answer to two before its end."""
    found = set()
    for row in range(len(cache)):
        for segment in np.unique(cache.segments[row]):
            at = np.flatnonzero(cache.segments[row] == segment)
            for i, text in enumerate(texts):
                if len(at) == len(text.tokens) and (cache.tokens[row, at] == text.tokens).all():
                    found.add(i)
                    anchors = cache.anchors[row][np.isin(cache.anchors[row], at)] - at[0]
                    np.testing.assert_array_equal(anchors, np.arange(text.first - 1, len(at) - 2))
    assert found == set(range(len(texts)))


def test_batches_take_every_row_once_an_epoch_and_depend_on_the_index_alone(cache):
    rows, one = len(cache), hiddens.batches([cache], 1, 5, 7)
    order = [one(i) for i in range(2 * rows)]
    key = lambda batch: batch[0].tobytes()
    assert sorted(map(key, order[:rows])) == sorted(map(key, order[rows:]))
    again = hiddens.batches([cache], 1, 5, 7)(rows + 1)
    for a, b in zip(again, order[rows + 1], strict=True):
        np.testing.assert_array_equal(a, b)
    wide = hiddens.batches([cache], 2, 5, 7)(1)
    np.testing.assert_array_equal(wide[0], np.concatenate([order[2][0], order[3][0]]))
    live = wide[4][wide[4] < 64]
    assert len(live) and set(np.diff(wide[4][0][wide[4][0] < 64])) <= {1}  # a stretch
