"""The comparison with transformers: rates by hand, and no speed where the tokens differ. Live in tests/hf."""

import builtins

import pytest

from atlas_jax.config import ModelConfig
from atlas_jax.lab.against_hf import Answer, Reference, table, versus
from atlas_jax.lab.bench import BenchError, Comparison

OURS = [[Answer((1, 2, 3, 4, 5), 2, 1.0, 2.0)], [Answer((1, 2, 3, 4, 5), 1, 1.0, 3.0)]]
THEIRS = [[Answer((1, 2, 3, 4, 5), 1, 2.0, 6.0)], [Answer((1, 2, 3, 4, 5), 1, 1.0, 2.0)]]


def test_rates_are_of_what_came_after_the_first_step():
    row = versus("prose", "fixed1", OURS, THEIRS, Comparison(compared=10), 1)
    assert (row.tok_s, row.hf_tok_s) == (2.5, 2.5)  # medians of 3 and 2, of 1 and 4
    assert (row.ratio_to_hf, row.ratio_min, row.ratio_max) == (1.75, 0.5, 3.0)
    assert row.request_ratio_to_hf == round((3 + 2 / 3) / 2, 4)
    assert row.equal and row.repetitions == 2
    assert "0.50-3.00" in table([row]) and "yes" in table([row])


def test_other_tokens_have_no_speed():
    row = versus("prose", "fixed1", OURS, THEIRS, Comparison(compared=10, unexcused=1), 1)
    assert "NO: 1 divergences" in table([row])
    assert not row.equal and "no near tie excuses" in row.note
    assert {row.tok_s, row.hf_tok_s, row.ratio_to_hf, row.ratio_min, row.ratio_max, row.request_ratio_to_hf} == {None}


def test_requests_that_end_with_their_first_step_measure_nothing():
    with pytest.raises(BenchError, match="beyond its first step"):
        versus("prose", "plain", [[Answer((1,), 1, 1.0, 1.0)]], THEIRS[:1], Comparison(compared=1), 1)


def test_without_transformers_the_way_out_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name in ("torch", "transformers"):
            raise ImportError(name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(BenchError, match=r"torch is not installed here; run in .*scripts/setup_hf\.sh"):
        Reference(tmp_path, ModelConfig)
