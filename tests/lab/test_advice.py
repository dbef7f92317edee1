"""Policies that weigh costs are served only by a table of this model and this device, long and deep enough."""

import dataclasses

import pytest

from atlas_jax.depth.policies import Ladder, PolicyError, Survival, parse_policy
from atlas_jax.lab.advice import advise
from atlas_jax.lab.cost import CostError, CostTable, StepTime, model_id
from atlas_jax.lab.measure_cost import device_id
from atlas_jax.lab.trace import TraceError
from tests.tiny_models import TINY


@pytest.fixture
def table(tmp_path):
    steps = tuple(
        StepTime(n, k, n * k, head, context, 1.0 + 0.1 * n * k, alone=9.0)
        for n in (1, 4, 8)
        for head, depths in ((True, (1, 2, 3, 4)), (False, (1,)))
        for k in depths
        for context in (64, 512)
    )
    return CostTable("measured", model_id(TINY), device_id(), steps, rounds=8)


def saved(table, tmp_path):
    table.save(tmp_path / "costs.json")
    return str(tmp_path / "costs.json")


def test_each_policy_gets_the_costs_that_it_will_pay(table, tmp_path):
    advice = advise(saved(table, tmp_path), "0.9,0.8,0.7", TINY, (1, 3), context=100, longest=512)
    assert advice.widths == (1, 4)
    # A ladder's steps come several to a call; a policy with a memory is asked before each.
    survival, ladder = (parse_policy(name, advice=advice) for name in ("survival", "auto"))
    assert isinstance(survival, Survival) and survival.costs.seconds(1, 1, 1, 64) == 9.0
    assert isinstance(ladder, Ladder) and advice.costs.seconds(1, 1, 1, 64) == pytest.approx(1.1)
    assert survival.prior == (0.9, 0.8, 0.7)


def test_no_table_no_advice():
    assert advise(None, "0.9", TINY, (1,), context=64, longest=64) is None


@pytest.mark.parametrize(
    ("change", "asked", "error", "told"),
    [
        ({"device": "another"}, {}, CostError, "another"),
        ({"model": "8x64-dense-00000000"}, {}, CostError, "8x64-dense-00000000"),
        ({}, {"widths": (1, 9)}, CostError, "9 sequences"),
        ({}, {"longest": 4096}, CostError, "4,096"),
        ({}, {"num_drafts": 4}, CostError, "5 rows"),
        ({}, {"acceptance": "0.9,1.2"}, PolicyError, "0 to 1"),
        ({}, {"acceptance": "nothing-like-it"}, TraceError, "nothing-like-it"),
    ],
)
def test_what_cannot_be_used_is_said(table, tmp_path, change, asked, error, told):
    path = saved(dataclasses.replace(table, **change), tmp_path)
    given = {"acceptance": "0.9", "widths": (1,), "context": 64, "longest": 512} | asked
    with pytest.raises(error, match=told):
        advise(path, given.pop("acceptance"), TINY, given.pop("widths"), **given)
