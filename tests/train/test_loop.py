"""A run that stops, however it stops, continues to the very parameters of one that did not."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.train.loop import Run, Schedule, train

START = {"layer": {"in_proj": np.eye(4, dtype=np.float32), "norm": np.zeros(4, np.float32)}}
FROZEN = {"target": np.float32([1, -1, 2, 0])}


def loss(trained, frozen, x):
    out = x @ trained["layer"]["in_proj"] + trained["layer"]["norm"]
    return ((out - frozen["target"]) ** 2).sum(), jnp.float32(x.shape[0])


def batches(step):
    return (np.random.default_rng(step).standard_normal((8, 4)).astype(np.float32),)


def run(directory, steps=30, batches=batches, schedule=None, said=None):
    report = (lambda row: None) if said is None else said.append
    schedule = schedule or Schedule(30, warmup=3)
    return train(loss, START, FROZEN, batches, schedule, Run(directory, save_every=10, log_every=4), report=report)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight"))


def test_a_killed_run_resumes_bit_for_bit(straight, tmp_path):
    """Killed between checkpoints, it goes on from the last one; interrupted by hand, from the very step."""

    def stops(at, error):
        def batch(step):
            if step == at:
                raise error
            return batches(step)

        return batch

    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path, batches=stops(14, RuntimeError("power cut")))
    said = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, batches=stops(17, KeyboardInterrupt()), said=said)
    assert said[0] == {"resumed_at": 10}
    said = []
    resumed = run(tmp_path, said=said)
    assert said[0] == {"resumed_at": 17}
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 30


def test_a_resume_with_other_settings_says_so(tmp_path):
    """A longer schedule on the same run is no secret."""
    run(tmp_path, schedule=Schedule(10, warmup=3))
    said = []
    run(tmp_path, schedule=Schedule(12, peak=1e-3, warmup=3), said=said)
    assert said[0] == {"resumed_at": 10, "changed": {"steps": [10, 12], "peak": [3e-3, 1e-3]}}


def test_it_learns_and_leaves_its_inputs_alone(straight):
    np.testing.assert_array_equal(START["layer"]["in_proj"], np.eye(4))
    before, after = (float(loss(t, FROZEN, batches(99)[0])[0]) for t in (START, straight))
    assert after < before
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), straight, START)
    assert all(jax.tree.leaves(moved))


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    """It names the step, and what is on disk is the last good checkpoint."""
    bad = lambda step: batches(step) if step < 22 else (np.full((8, 4), np.nan, np.float32),)
    with pytest.raises(FloatingPointError, match="at step 23"):
        run(tmp_path, batches=bad)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["10", "20"]


def test_a_loss_of_exactly_zero_stops_the_run(tmp_path):
    """It compares a thing with itself, or its mask is empty and its weight is not."""
    zero = lambda trained, frozen, x: (0 * loss(trained, frozen, x)[0], jnp.where(x[0, 0] < 9, 1.0, 0.0))
    with pytest.raises(ValueError, match="exactly 0 at step 1;"):
        train(zero, START, FROZEN, batches, Schedule(30), Run(tmp_path, save_every=10, log_every=4))


def test_nothing_supervised_stops_the_run(tmp_path):
    nothing = lambda trained, frozen, x: (0 * loss(trained, frozen, x)[0], jnp.float32(0))
    with pytest.raises(ValueError, match="steps 1 to 4"):
        train(nothing, START, FROZEN, batches, Schedule(30), Run(tmp_path, save_every=10, log_every=4))


def test_accumulated_batches_are_one_large_batch(tmp_path):
    """Ragged weights, one micro-batch without any: the mean is over all weights, not the mean of means."""

    def ragged(trained, frozen, x, weights):
        out = x @ trained["layer"]["in_proj"] + trained["layer"]["norm"]
        return (((out - frozen["target"]) ** 2).sum(-1) * weights).sum(), weights.sum()

    def micro(i):
        rng = np.random.default_rng(i)
        weights = rng.integers(0, 3, 4) * (i % 4 != 2)
        return rng.standard_normal((4, 4)).astype(np.float32), weights.astype(np.float32)

    large = lambda step: tuple(map(np.concatenate, zip(*map(micro, range(4 * step, 4 * step + 4)), strict=True)))
    schedule, silent = Schedule(6, warmup=3, muon=False), lambda row: None
    split = train(ragged, START, FROZEN, micro, schedule, Run(tmp_path / "a", accumulate=4), report=silent)
    whole = train(ragged, START, FROZEN, large, schedule, Run(tmp_path / "b"), report=silent)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), split, whole)


@pytest.mark.parametrize("muon", [True, False])
def test_both_optimizers_move_every_leaf(tmp_path, muon):
    trained = run(tmp_path, schedule=Schedule(30, warmup=3, muon=muon))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trained))
