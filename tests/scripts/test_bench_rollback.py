"""The rollback bench: bytes are those of the shapes, ratios and equality those of the runs, its last line is whole."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from load_script import script
from tiny_models import TINY

from atlas_jax.decode.plan import Bucket
from atlas_jax.decode.state import init_state
from atlas_jax.lab import rollback
from atlas_jax.lab.bench import BenchError
from atlas_jax.lab.forced import ForcedAcceptance, ForcedDrafter, ForcedError
from atlas_jax.presets import preset, random_params
from atlas_jax.weights.checkpoint import save_model

FORCED = ForcedAcceptance((1.0,))


@pytest.fixture
def bench():
    return script("bench_rollback")


@pytest.mark.slow
def test_the_script_ends_with_its_line(bench, tmp_path, capsys):
    """All three on a tiny model: the same tokens, every draft accepted as asked, states and pools as the shapes say."""
    rng = np.random.default_rng(0)
    noisy = lambda x: np.asarray(x, np.float32) + 0.1 * rng.standard_normal(x.shape).astype(np.float32)
    save_model(tmp_path, jax.tree.map(noisy, random_params(TINY, 0, jnp.float32)), TINY)
    args = ["--model", str(tmp_path), "--n", "2", "--drafts", "1", "--repetitions", "2", "--max-new-tokens", "12"]
    result = bench.main(bench.parse([*args, "--forced-acceptance", "1.0", "--json"]))
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and json.loads(captured.out) == result
    assert "measured" in captured.err and "states MiB" in captured.err
    assert result["complete"] and [cell["rollback"] for cell in result["cells"]] == list(rollback.ROLLBACKS)
    one = 2 * 8 * 8 * 4  # a state of TINY's one GDN layer, in bytes
    for cell, moved, kept in zip(result["cells"], (2, 3, 3), (1, 2, 1), strict=True):
        assert cell["equal"] and cell["excused"] == cell["unexcused"] == 0 and cell["compared"] == 2 * 2 * 12
        assert (cell["n"], cell["drafts"], cell["tok_step"]) == (2, 1, 2.0)
        assert (cell["state_bytes"], cell["pool_bytes"]) == (2 * moved * one, 2 * kept * one)
        assert 0 < cell["ms_low"] <= cell["ms"] <= cell["ms_high"] and cell["steps"] == 2 * 5


def test_bytes_are_those_of_the_shapes():
    """Written out for a 4B model, whose states are 2 MiB a layer: 3 of every 4 layers have one."""
    cfg = preset("qwen3.5-4b")
    sizes = {"slots": 16, "length": 8, "max_drafts": 3, "dtype": jnp.bfloat16, "head": True}
    layer = 2 << 20
    for how, moved in {"deferred": 2, "snapshot": 5, "recompute": 3}.items():
        state = jax.eval_shape(lambda how=how: init_state(cfg, **sizes, rollback=how))
        assert rollback.state_bytes(how, state, 16, 4) == 16 * 24 * layer * moved


def test_ratios_and_equality_are_those_of_the_runs(monkeypatch):
    """Made-up passes: the second rollback takes twice as long, the third emits a wrong token once."""
    plain = [(1, 2, 3)]
    passes = {"deferred": [1.0, 2.0, 3.0], "snapshot": [2.0, 4.0, 6.0], "recompute": [1.0, 1.0, 1.0]}
    state = init_state(TINY, slots=1, length=4, max_drafts=1, dtype=jnp.float32, head=False)
    program = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(temp_size_in_bytes=7))
    programs = SimpleNamespace(compiled={Bucket(1, 2, 2, True): program, Bucket(1, 1, 1, False): None, 8: None})
    engines = {how: SimpleNamespace(name=how, programs=programs, _state=state) for how in passes}
    turns = []

    def serve(engine, requests, drafts):
        turns.append(engine.name)
        wrong = engine.name == "recompute" and len(turns) > 9
        return rollback._Pass(passes[engine.name], 4, [(1, 2, 4)] if wrong else plain)

    monkeypatch.setattr(rollback, "_serve", serve)
    drafter = ForcedDrafter(FORCED, TINY.vocab_size)
    found = list(rollback._cells(engines, drafter, [None], 1, plain, lambda *divergence: 1.0, 3))
    assert [(c.rollback, c.ms, c.ratio, c.equal, c.unexcused) for c in found] == [
        ("deferred", 2.0, 1.0, True, 0),
        ("snapshot", 4.0, 2.0, True, 0),
        ("recompute", 1.0, 0.5, False, 1),
    ]
    assert turns[3:] == [
        *("deferred", "snapshot", "recompute"),
        *("snapshot", "recompute", "deferred"),
        *("recompute", "deferred", "snapshot"),
    ]
    assert [(c.temp_bytes, c.tok_step, c.steps) for c in found] == [(7, 4 / 3, 9)] * 3


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"repetitions": 0}, BenchError, "at least once"),
        ({"rollbacks": ()}, BenchError, "at least one rollback"),
        ({"drafts": (0, -1)}, BenchError, "at least 0"),
        ({"drafts": (2,)}, ForcedError, "2 drafts need 2 probabilities"),
        ({"max_new_tokens": 5}, BenchError, "6 new ones"),
    ],
)
def test_what_would_measure_nothing_is_refused(options, error, word):
    options = {"widths": (1,), "drafts": (1,), **options}
    with pytest.raises(error, match=word):
        next(rollback.measure({}, TINY, forced=FORCED, dtype=jnp.float32, **options))
