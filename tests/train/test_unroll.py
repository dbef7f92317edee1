"""Chains of drafts in training: which guesses are judged, that they are serving's, and that only the head learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY
from train.models import random_params

from atlas_jax.model import mtp
from atlas_jax.model.state import init_state
from atlas_jax.model.trunk import logits
from atlas_jax.model.views import Prefill, Step
from atlas_jax.train import losses
from atlas_jax.train.unroll import Rows, Unroll
from atlas_jax.train.unroll import from_tokens as from_tokens_eager
from atlas_jax.train.unroll import head_loss as head_loss_eager
from atlas_jax.train.unroll import unroll as unroll_eager
from atlas_jax.train.unroll import unrolled as unrolled_eager

unroll = jax.jit(unroll_eager, static_argnums=(1, 3))
unrolled = jax.jit(unrolled_eager, static_argnums=(1, 3, 4))
head_loss = jax.jit(head_loss_eager, static_argnums=1, static_argnames=("how", "measure"))
from_tokens = jax.jit(from_tokens_eager, static_argnums=1)
CFG = dataclasses.replace(TINY, vocab_size=23, hidden_size=16, gdn_key_dim=4, ffn_size=24)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2]])


@pytest.fixture(scope="module")
def params():
    return random_params(CFG)


@pytest.fixture(scope="module")
def rows(params):
    tokens = np.random.default_rng(0).integers(0, 23, SEGMENTS.shape)
    return from_tokens(params, CFG, tokens, np.arange(1.0, 10.0)[None], SEGMENTS)


def test_the_judged_guesses_are_those_counted_by_hand(params, rows):
    """Documents are tokens 0-2, 3-6 and 7-8. Written out: (anchor -> token judged) of each depth, by its weight."""
    by_hand = [{0: 2, 3: 5, 4: 6}, {3: 6}, {}]
    for index, depth in enumerate(unroll(params, CFG, rows, Unroll(3))):
        expected = np.zeros((1, 9))
        for anchor, judged in by_hand[index].items():
            expected[0, anchor] = rows.weights[0, judged]
            assert depth.targets[0, anchor] == rows.tokens[0, judged]
            np.testing.assert_array_equal(depth.teacher[0, anchor], rows.hidden[0, judged - 1])
        np.testing.assert_array_equal(depth.weights, expected)
    for how, weight in ((Unroll(3, decay=0.5), 3 + 6 + 7 + 0.5 * 7), (Unroll(2, step_weights=(0.0, 2.0)), 14)):
        assert head_loss(params, CFG, rows, how=how, measure=losses.forward_kl)[1] == weight


def test_chosen_anchors_are_rows_of_all_of_them_and_padding_is_nothing(params, rows):
    chosen = rows._replace(anchors=jnp.array([[4, 9, 0, 12, 99, 9, 9, 9, 9]]))
    for some, whole in zip(unroll(params, CFG, chosen, Unroll(3)), unroll(params, CFG, rows, Unroll(3)), strict=True):
        np.testing.assert_allclose(some.hidden[0, [0, 2]], whole.hidden[0, [4, 0]], atol=1e-6)
        np.testing.assert_array_equal(some.weights[0, :4], [whole.weights[0, 4], 0, whole.weights[0, 0], 0])
        assert not some.weights[0, 4:].any()


def test_the_loss_does_not_see_padding_of_a_row(params, rows):
    """More padded tokens and hiddens, NaN among them, more padded anchors: the same sums."""
    wide = Rows(
        jnp.pad(rows.tokens, ((0, 0), (0, 4))),
        jnp.pad(rows.weights, ((0, 0), (0, 4))),
        jnp.pad(jnp.asarray(rows.segments), ((0, 0), (0, 4)), constant_values=7),
        jnp.pad(rows.hidden, ((0, 0), (0, 4), (0, 0)), constant_values=1e4),
        jnp.pad(rows.anchors, ((0, 0), (0, 3)), constant_values=99),
    )
    run = lambda batch: head_loss(params, CFG, batch, how=Unroll(3, decay=0.5), measure=losses.forward_kl)
    np.testing.assert_allclose(run(wide), run(rows), rtol=1e-6)


@pytest.mark.parametrize("feed", ["text", "own"])
def test_the_head_trains_and_nothing_else_does(params, rows, feed):
    loss = lambda p: head_loss(p, CFG, rows, how=Unroll(2, feed=feed), measure=losses.negative_log_acceptance)[0]
    gradient = jax.jit(jax.grad(loss))(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient["mtp"]))
    rest = {name: value for name, value in gradient.items() if name != "mtp"}  # the shared embedding among them
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(rest))


def test_the_unroll_trains_what_serving_drafts(params):
    """Depth by depth to 8: logits of the unroll against those of prefill and single chained steps on the same text."""
    length, start, depth = 14, 4, 8
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 23, (1, length)))
    rows = from_tokens(params, CFG, tokens, jnp.ones((1, length)), jnp.zeros((1, length), int))
    chains = unroll(params, CFG, rows._replace(anchors=jnp.array([[start]])), Unroll(depth))
    trained = [mtp.draft_logits(params, each.hidden)[0, 0] for each in chains]

    cache = init_state(CFG, slots=1, length=16, max_drafts=0, dtype=jnp.float32, head=True).head
    slot, count = jnp.array([0]), jnp.array([start])
    prefill = Prefill(slot, jnp.array([0]), count, start)
    entries = mtp.head_entries(params, CFG, tokens[:, 1 : start + 1], rows.hidden[:, :start], prefill.positions)
    cache, served = prefill.write(cache, *entries), rows.hidden[:, start]

    @jax.jit
    def single(cache, served, token, position):
        cell = jnp.array([0])
        view = Step(slot, position, jnp.array([1]), jnp.array([0]), cell[:, None], cell, False)
        return mtp.head(params, CFG, token, served, view, cache)

    for ahead in range(depth):
        served, cache = single(cache, served, tokens[:, start + 1 + ahead], jnp.array([start + ahead]))
        np.testing.assert_allclose(logits(params, served)[0], trained[ahead], atol=1e-5)


def test_own_drafts_are_judged_while_they_keep_to_the_text(params):
    """With a text that follows the drafts for a while, on-policy chains equal those fed the text, and then weigh 0."""
    tokens = np.random.default_rng(2).integers(0, 23, (1, 9))
    start, depth = 3, 4
    anchors = jnp.array([[start, *[9] * 8]])
    for ahead in range(2):  # the text says what the head drafts at depth 1 and 2, and something else at 3
        rows = from_tokens(params, CFG, jnp.array(tokens), jnp.ones((1, 9)), jnp.zeros((1, 9), int))
        hiddens = unroll(params, CFG, rows._replace(anchors=anchors), Unroll(3))[ahead].hidden
        tokens[0, start + 2 + ahead] = int(mtp.draft_logits(params, hiddens[0, 0]).argmax())
    rows = from_tokens(params, CFG, jnp.array(tokens), jnp.ones((1, 9)), jnp.zeros((1, 9), int))
    rows = rows._replace(anchors=anchors)
    draft = int(mtp.draft_logits(params, unroll(params, CFG, rows, Unroll(3))[2].hidden[0, 0]).argmax())
    tokens[0, start + 4] = (draft + 1) % 23
    rows = rows._replace(tokens=jnp.asarray(tokens))  # the head's chain so far doesn't depend on it
    own, text = (unroll(params, CFG, rows, Unroll(depth, feed=feed)) for feed in ("own", "text"))
    assert [float(each.weights[0, 0]) for each in text] == [1, 1, 1, 1]
    assert [float(each.weights[0, 0]) for each in own] == [1, 1, 1, 0]
    for a, b in zip(own[:3], text[:3], strict=True):
        np.testing.assert_array_equal(a.hidden[0, 0], b.hidden[0, 0])


def test_true_hiddens_at_depth_two_are_a_first_draft_one_row_later(params, rows):
    """As far as inputs go: the token and the hidden. (Its own entry is the same one too, so the output is equal.)"""
    rows = rows._replace(segments=jnp.zeros_like(rows.tokens))
    first, second = unroll(params, CFG, rows, Unroll(2, hidden="true"))
    np.testing.assert_allclose(second.hidden[0, :6], first.hidden[0, 1:7], atol=1e-5)


def test_a_reduced_draft_vocabulary_scores_its_tokens_and_skips_the_others(params, rows):
    ids = jnp.array([0, 3, *range(5, 19), 22], jnp.int32)
    small = {**params, "mtp": {**params["mtp"], "draft_ids": ids}}
    hidden = rows.hidden[0]
    np.testing.assert_array_equal(mtp.draft_logits(small, hidden), logits(params, hidden)[:, ids])
    served = mtp.with_draft_head(small)
    np.testing.assert_array_equal(mtp.draft_logits(served, hidden), mtp.draft_logits(small, hidden))
    np.testing.assert_array_equal(mtp.draft_tokens(small, jnp.arange(len(ids))), ids)
    assert mtp.with_draft_head(params) is params
    targets = np.asarray(rows.tokens)[0, [2, 5, 6]]
    inside = np.isin(targets, ids)
    assert 0 < inside.sum() < 3  # the case is a case
    ((found, weight),) = unrolled(small, CFG, rows, Unroll(1), losses.cross_entropy)
    assert weight == (np.array([3, 6, 7]) * inside).sum()
    scores = mtp.draft_logits(small, unroll(small, CFG, rows, Unroll(1))[0].hidden)[0]
    places = np.searchsorted(ids, targets)
    log_q = jax.nn.log_softmax(scores)
    by_hand = -sum(w * log_q[a, p] for a, w, p, i in zip([0, 3, 4], [3, 6, 7], places, inside, strict=True) if i)
    np.testing.assert_allclose(found, by_hand, rtol=1e-5)


@pytest.mark.parametrize(
    ("ids", "what"),
    [([3, 1], "sorted"), ([1, 1], "sorted"), ([-1, 2], "another model"), ([0, 23], "another model"), ([], "list")],
)
def test_a_map_that_does_not_fit_is_refused(ids, what):
    with pytest.raises(ValueError, match=what):
        mtp.check_draft_ids(np.array(ids, int), CFG)


@pytest.mark.parametrize("bad", [{"depth": 0}, {"depth": 9}, {"step_weights": (1.0,)}, {"feed": "teacher"}])
def test_an_unroll_that_means_nothing_is_refused(bad):
    with pytest.raises(ValueError, match=r"depth|step weights|feed"):
        Unroll(**bad)
