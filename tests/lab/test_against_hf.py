"""Beside transformers, with something else in its place: equal tokens give ratios, others give none."""

import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_models import TINY

from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import parse_policy
from atlas_jax.lab import against_hf
from atlas_jax.lab.against_hf import Answer, Reference, measure_against_hf, table, versus
from atlas_jax.lab.bench import BenchError, Comparison
from atlas_jax.presets import random_params

REQUESTS = {
    regime: [Request((first + i, 5, 8), 40, ignore_eos=True) for i in range(2)]
    for regime, first in (("same", 3), ("other", 20))
}
# Speaks as `hf_worker` does, but knows its answers by heart.
ACTOR = """#!{python}
import json, sys, time
answers = dict(map(tuple, json.load(open({answers!r}))))
print(json.dumps({{"torch": "0", "transformers": "0"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["prompt"] == [0]:
        sys.exit(3)
    time.sleep(0.004 if asked["threads"] == 1 else 0.001)
    tokens = answers[str(asked["prompt"])][: asked["max_new_tokens"]]
    print(json.dumps({{"tokens": tokens, "first_s": 0.0, "total_s": 0.004 / asked["threads"]}}), flush=True)
"""


@pytest.fixture
def actor(tmp_path, monkeypatch):
    """`actor(answers)`: from now on this is the interpreter that has transformers."""

    def make(answers):
        (tmp_path / "answers.json").write_text(json.dumps([(str(list(p)), a) for p, a in answers.items()]))
        program = tmp_path / "python"
        program.write_text(ACTOR.format(python=sys.executable, answers=str(tmp_path / "answers.json")))
        program.chmod(0o755)
        monkeypatch.setattr(against_hf, "find_python", lambda: program)
        return program

    return make


@pytest.mark.slow
def test_a_ratio_is_given_for_equal_tokens_and_for_no_others(actor, tmp_path):
    params = jax.device_get(random_params(TINY, 1, np.float32))
    engine = Engine(params, TINY, EngineConfig(slots=1, context=64, max_drafts=0, prefill=(4,)), parse_policy("plain"))
    requests = REQUESTS["same"] + REQUESTS["other"]
    answers = {r.prompt: list(c.tokens) for r, c in zip(requests, engine.generate(requests), strict=True)}
    wrong = answers[REQUESTS["other"][1].prompt]
    wrong[17] = (wrong[17] + 1) % TINY.vocab_size
    actor(answers)
    rows = measure_against_hf(tmp_path, params, TINY, REQUESTS, [parse_policy("fixed1")], repetitions=2, context=64)
    assert [(row.regime, row.policy) for row in rows] == [(r, p) for r in REQUESTS for p in ("plain", "fixed1")]
    for row in rows[:2]:
        assert row.equal and row.compared == 160 and not row.excused
        assert row.ratio_min <= row.ratio_to_hf <= row.ratio_max and row.request_ratio_to_hf > 0
        # 39 tokens come after the first one; the actor's clock says how long they took it
        assert row.hf_tok_s == pytest.approx(39 * row.hf_threads / 0.004, rel=1e-3)
        assert row.versions == {"jax": jax.__version__, "torch": "0", "transformers": "0"}
    for row in rows[2:]:
        assert not row.equal and row.unexcused == 2 and row.tok_s is row.ratio_to_hf is row.request_ratio_to_hf is None
    assert "NO: 2 divergences that no near tie excuses" in table(rows)


def test_rates_are_of_what_came_after_the_first_step():
    """By hand."""
    ours = [[Answer((1, 2, 3, 4, 5), 2, 1.0, 2.0)], [Answer((1, 2, 3, 4, 5), 1, 1.0, 3.0)]]
    theirs = [[Answer((1, 2, 3, 4, 5), 1, 2.0, 6.0)], [Answer((1, 2, 3, 4, 5), 1, 1.0, 2.0)]]
    reference = SimpleNamespace(threads=1, versions={})
    row = versus("prose", "fixed1", ours, theirs, Comparison(compared=10), reference)
    assert (row.tok_s, row.hf_tok_s) == (2.5, 2.5)  # medians of 3 and 2, of 1 and 4
    assert (row.ratio_to_hf, row.ratio_min, row.ratio_max) == (1.75, 0.5, 3.0)
    assert row.request_ratio_to_hf == round((3 + 2 / 3) / 2, 4)
    assert row.equal and row.repetitions == 2
    assert "0.50-3.00" in table([row]) and "yes" in table([row])
    with pytest.raises(BenchError, match="beyond its first step"):
        versus("prose", "plain", [[Answer((1,), 1, 1.0, 1.0)]], theirs[:1], Comparison(compared=1), reference)


def test_the_fastest_number_of_threads_is_taken(actor, tmp_path, monkeypatch):
    monkeypatch.setattr(against_hf.os, "sched_getaffinity", lambda _: {0, 1})
    with Reference(tmp_path, TINY, actor({(5,): [1, 2, 3]})) as reference:
        assert reference.choose_threads(Request((5,), 3)) == reference.threads == 2


def test_a_process_that_ends_is_an_error(actor, tmp_path):
    with Reference(tmp_path, TINY, actor({})) as reference, pytest.raises(BenchError, match=r"ended \(status 3\)"):
        reference.generate(Request((0,), 3))


def test_an_environment_without_transformers_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(against_hf.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(against_hf, "ROOT", tmp_path)
    with pytest.raises(BenchError, match=r"scripts/setup_hf\.sh"):
        against_hf.find_python()
