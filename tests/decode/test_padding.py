"""Padding is nothing: not in the state that a prompt leaves, not in the first token's scores, not in a gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.decode.plan import Bucket, Plan
from atlas_jax.decode.state import init_state
from atlas_jax.decode.step import prefill, step
from atlas_jax.model.ops import l2_normalise
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full
from atlas_jax.train.losses import cross_entropy

SLOTS, LENGTH, QUICK = 2, 72, {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def programs(tiny):
    """Prefill programs by width, and a step that answers the log-probability of its token."""
    cfg, params = tiny
    with jax.enable_x64(True):
        state = init_state(cfg, slots=SLOTS, length=LENGTH, max_drafts=0, dtype=jnp.float64, head=True)

        def compiled(fn, width):
            packed = jax.ShapeDtypeStruct(width, jnp.int32)
            return jax.jit(fn).lower(params, state, packed).compile(QUICK)

        widths = {w: compiled(functools.partial(prefill, cfg=cfg, width=w), (4 + w,)) for w in (1, 16, 64)}
        bucket = Bucket(1, 1, 1, True)
        yield params, state, widths, compiled(functools.partial(step, cfg=cfg, bucket=bucket), (1, Plan.width(1)))


@pytest.mark.parametrize("width", [16, 64])
def test_a_padded_prompt_leaves_what_an_unpadded_one_does(programs, width):
    """1, 2, 3, 4, 5, width - 1 and width live tokens behind which anything stands, in a slot that held NaN; against the
    same tokens one by one: states, windows, caches, and the scores of the next step (B16, B17)."""
    params, empty, prefills, run = programs
    rng = np.random.default_rng(width)
    text = rng.integers(0, 60, width + 1)
    with jax.enable_x64(True):
        dirty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float64 else x, empty)
        dirty = dirty._replace(bias=empty.bias)
        one, known = dirty, 0
        for count in (1, 2, 3, 4, 5, width - 1, width):
            for position in range(known, count):
                packed = np.array([1, position, 1, *text[position : position + 2], 0], np.int32)[:5]
                one = prefills[1](params, one, packed)
            known, found = count, []
            for garbage in rng.integers(0, 60, (2, width)):
                tokens = [*text[: count + 1], *garbage[count:]]
                found.append(prefills[width](params, dirty, np.array([1, 0, count, *tokens], np.int32)))
            for a, b, c in zip(*map(jax.tree.leaves, (*found, one)), strict=True):
                a, b, c = (np.asarray(x)[1] for x in (a, b, c))
                live = (slice(None), slice(None), slice(count)) if a.ndim == 4 and a.shape[2] == LENGTH else ...
                if a.shape == (LENGTH,):
                    live = slice(count)
                np.testing.assert_array_equal(a[live], b[live])
                np.testing.assert_allclose(a[live], c[live], atol=1e-10)
            plan = Plan.empty(1, 1, SLOTS)
            plan.slots[0], plan.lengths[0], plan.head[0], plan.num_rows[0], plan.wants[0] = 1, count, count, 1, 1
            plan.tokens[0, 0] = text[count]
            answers = [run(params, state, plan.packed)[1] for state in (found[0], one)]
            assert answers[0].ints[0, 0, 2] == answers[1].ints[0, 0, 2]
            np.testing.assert_allclose(answers[0].log_probs, answers[1].log_probs, atol=1e-10)
            assert (np.asarray(answers[0].log_probs) < 0).all()


def test_gradients_do_not_see_rows_of_zeros(tiny):
    """Padding whose embedding is all zeros, so that every key, query and value of it is zero: the gradient of a masked
    loss is finite and that of the unpadded text (B17)."""
    cfg, params = tiny
    with jax.enable_x64(True):
        params = {name: value for name, value in params.items() if name != "mtp"}
        params["embed"] = np.array(params["embed"])
        params["embed"][0] = 0
        tokens = np.random.default_rng(0).integers(1, 60, (2, 9))

        def gradient(params, tokens):
            def loss(params):
                weights = (tokens > 0).astype(jnp.float64)
                view = Full(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
                hidden, _ = trunk(params, cfg, tokens, view)
                return cross_entropy(logits(params, hidden[:, :-1]), tokens[:, 1:], weights[:, 1:])[0]

            return jax.grad(loss)(params)

        run = lambda tokens: jax.jit(gradient).lower(params, tokens).compile(QUICK)(params, tokens)
        plain, padded = run(tokens), run(np.pad(tokens, ((0, 0), (0, 5))))
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(plain))
        for mine, theirs in zip(jax.tree.leaves(padded), jax.tree.leaves(plain), strict=True):
            assert np.isfinite(mine).all()
            np.testing.assert_allclose(mine, theirs, atol=1e-10)
        at_zero = jax.grad(lambda x: (l2_normalise(x) ** 2).sum() + l2_normalise(x).sum())(jnp.zeros((3, 8)))
        assert np.isfinite(at_zero).all()
