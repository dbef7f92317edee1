"""What tests of the engine share: scripted drafters, and whether a state is what its tokens say."""

import itertools

import numpy as np

from atlas_jax.decode.requests import Request
from atlas_jax.model.state import GdnCache

SCRIPTS = {
    "always right": lambda r: 9,
    "always wrong": lambda r: 0,
    "right until 1": lambda r: 1,
    "right until 2": lambda r: 2,
    "mixed": lambda r: (0, 3, 1, 4, 2)[r % 5],
}
EVERY_SWITCH = [0, 0, 1, 0, 2, 0, 3, 0, 4, 1, 1, 2, 1, 3, 1, 4, 2, 2, 3, 2, 4, 3, 3, 4, 4]  # each ordered pair, cyclic


def scripted(answers, right):
    """A drafter that knows the plain answers: `right(round)` of its drafts are right, the next one is wrong."""
    rounds = itertools.count()

    def propose(tokens, count):
        whole = next(a for a in answers if tuple(a[: len(tokens)]) == tuple(tokens))
        ahead = list(whole[len(tokens) : len(tokens) + count])
        ahead += [0] * (count - len(ahead))
        good = right(next(rounds))
        return [t if j < good else (t + 1) % 60 for j, t in enumerate(ahead)]

    return propose


def whole(requests, done):
    """Prompts and their answers, for `scripted`; `done` are `(tokens, finished)`."""
    return [(*r.prompt, *tokens) for r, (tokens, _) in zip(requests, done, strict=True)]


def check_states(engine, reference):
    """Every active slot holds what prefilling its committed tokens into a fresh engine gives."""
    state = engine.materialize()
    first = lambda pool, slot: np.asarray(pool[slot] if pool.ndim == 4 else pool[slot, 0])  # of snapshots
    for a in engine._active:
        assert a.length == len(a.text) - 1
        reference.cancel_all()
        reference._state = reference._new_state()
        reference.submit(Request(tuple(a.text)))
        reference._admit()
        reference._prefill()
        for mine, theirs in zip(state.layers, reference._state.layers, strict=True):
            if isinstance(mine, GdnCache):
                taps = engine.cfg.conv_width - 1
                np.testing.assert_allclose(first(mine.state, a.slot), first(theirs.state, 0), atol=1e-9)
                np.testing.assert_allclose(mine.window[a.slot, :taps], theirs.window[0, :taps], atol=1e-9)
            else:
                np.testing.assert_allclose(mine.kv[a.slot, :, :, : a.length], theirs.kv[0, :, :, : a.length], atol=1e-9)
        mine, theirs = state.head.kv[a.slot, :, :, : a.length], reference._state.head.kv[0, :, :, : a.length]
        np.testing.assert_allclose(mine, theirs, atol=1e-9)
