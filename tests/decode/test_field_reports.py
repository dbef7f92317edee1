"""Bugs that other engines had, each as the check that would have found it here (the numbers are those of our notes)."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import atlas_jax
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Fixed
from atlas_jax.model.state import GdnCache

LENGTHS = (1, 2, 3, 5, 17, 64, 65, 120, 9)


@pytest.fixture(scope="module")
def wide(tiny):
    """Nine slots in one bucket of sixteen, so that no batch fills it."""
    cfg, params = tiny
    config = EngineConfig(
        slots=9, context=160, max_drafts=3, buckets=BucketConfig(n=(16,), k=(1, 4)), prefill=(16, 64),
        dtype=jnp.float64,
    )  # fmt: skip
    with jax.enable_x64(True):
        engine = Engine(params, cfg, config, Fixed(3))
        rng = np.random.default_rng(8)
        requests = [Request(tuple(rng.integers(0, 60, n).tolist()), 10, ignore_eos=True) for n in LENGTHS]
        alone = [engine.generate([r])[0].tokens for r in requests]
        yield engine, requests, alone


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 10))
def test_every_batch_size_gives_every_row_its_own_answer(wide, size):
    """1 to 9 rows, powers of two or not, ragged prompts; the last live row and the first are as good as any (B09, B12,
    B13, B15)."""
    engine, requests, alone = wide
    for start in (0, 9 - size):
        part = slice(start, start + size)
        assert [c.tokens for c in engine.generate(requests[part])] == alone[part]


def test_one_step_may_hold_rows_of_every_kind(wide):
    """In prefill, without drafts, with one, with three, finishing: at once (B14)."""
    engine, requests, alone = wide
    kinds = [dataclasses.replace(r, max_drafts=(0, 1, None)[i % 3]) for i, r in enumerate(requests)]
    engine.cancel_all()
    ids, seen = [], set()
    while kinds or not engine.idle:
        if kinds:
            ids.append(engine.submit(kinds.pop(0)))
        seen |= {len(e.drafts) for e in engine.step()}
    assert seen >= {0, 1, 3}
    assert [engine.completion(i).tokens for i in ids] == alone


def test_a_finished_rows_state_stays_as_it_was(wide):
    """While others go on, not a bit of a slot without rows changes (B03)."""
    engine, requests, _ = wide
    engine.cancel_all()
    short = engine.submit(dataclasses.replace(requests[3], max_new_tokens=2))
    engine.submit(requests[4])
    slot = None
    while not any(e.request == short and e.finished for e in engine.step()):
        slot = engine._active[0].slot
    before = jax.device_get(jax.tree.map(lambda x: x[slot], engine._state))
    while not engine.idle:
        engine.step()
    after = jax.device_get(jax.tree.map(lambda x: x[slot], engine._state))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(7,), (63,), (65,), (16, 64)])
def test_any_split_of_a_prompt_leaves_the_same_state(tiny, widths):
    """Chunks that do and don't divide the prompt, against one (B17, B18)."""
    cfg, params = tiny
    text = np.random.default_rng(2).integers(0, 60, 131).tolist()
    with jax.enable_x64(True):
        states = []
        for prefill in ((160,), widths):
            config = EngineConfig(slots=2, context=160, prefill=prefill, dtype=jnp.float64)
            engine = Engine(params, cfg, config)
            engine.submit(Request(tuple(text)))
            engine._admit()
            engine._prefill()
            states.append(jax.device_get(engine._state))
        one, split = states
        for mine, theirs in zip((*split.layers, split.head), (*one.layers, one.head), strict=True):
            if isinstance(mine, GdnCache):
                np.testing.assert_allclose(mine.state[0], theirs.state[0], atol=1e-10)
                taps = cfg.conv_width - 1
                np.testing.assert_allclose(mine.window[0, :taps], theirs.window[0, :taps], atol=1e-10)
            else:
                np.testing.assert_allclose(mine.kv[0, :, :, :130], theirs.kv[0, :, :, :130], atol=1e-10)


def test_a_state_of_another_dtype_is_refused(wide):
    """It must not be reinterpreted (B07)."""
    engine, requests, _ = wide
    good = engine._state
    engine._state = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.float64 else x, good)
    with pytest.raises(TypeError, match="float"):
        engine.generate(requests[:1])
    engine.cancel_all()
    engine._lost = True


def test_no_negative_index_marks_padding():
    """Negative indices wrap in JAX: none is written as a sentinel next to an indexed update (B10)."""
    root = pathlib.Path(atlas_jax.__file__).parent
    for path in [*root.glob("decode/*.py"), *root.glob("model/*.py"), *root.glob("kernels/**/*.py")]:
        for line in path.read_text().splitlines():
            assert not re.search(r"\.at\[[^\]]*(?<![\w\]):])-1", line), f"{path}: {line.strip()}"
