"""A cost table measured on a tiny model here; a trace recorded from it; and every policy in the engine that serves."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.engine import Engine, EngineConfig
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Advice, Fixed, Off, parse_policy
from atlas_jax.lab.ablate_decode import arms, record
from atlas_jax.lab.cost import CostError, CostTable, model_id
from atlas_jax.lab.measure_cost import Plan, device_id, measure_costs
from atlas_jax.lab.trace import load_trace
from atlas_jax.presets import random_params

PLAN = Plan(widths=(1, 2), deepest=1, contexts=(6,), visits=2, steps=2)


@pytest.fixture(scope="module")
def params():
    return random_params(TINY, 0, jnp.float32)


def test_a_table_is_measured_kept_and_gone_on_with(params, tmp_path):
    kept, said = tmp_path / "costs.json", []
    half = measure_costs(
        params, TINY, dataclasses.replace(PLAN, widths=(1,)), dtype=np.float32, keep=lambda t: t.save(kept)
    )
    assert half.widths == (1,) and CostTable.load(kept).widths == (1,)
    table = measure_costs(
        params, TINY, PLAN, dtype=np.float32, done=CostTable.load(kept), about=(("jax", "x"),), say=said.append
    )
    assert not any("1 sequences" in text for text in said) and any("2 sequences" in text for text in said)
    assert (table.kind, table.model, table.device) == ("measured", model_id(TINY), device_id())
    shapes = {(s.n, s.k, s.rows, s.head) for s in table.steps}
    assert shapes == {(n, k, n * k, head) for n in (1, 2) for k, head in ((1, False), (1, True), (2, True))}
    for step in table.steps:
        assert 0 < step.low <= step.seconds <= step.high and step.context > 6
        assert step.samples == (2 if step.head else 4) * PLAN.steps  # plain is two arms
    assert table.prefill > 0 and float(dict(table.about)["aa_spread"]) >= 0 and dict(table.about)["jax"] == "x"
    with pytest.raises(CostError, match="of device 'elsewhere'"):
        measure_costs(params, TINY, PLAN, dtype=np.float32, done=dataclasses.replace(table, device="elsewhere"))
    for bad in ({"widths": ()}, {"contexts": (0,)}, {"visits": 0}):
        with pytest.raises(CostError):
            Plan(**bad)


def requests(count, tokens=12):
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, TINY.vocab_size, (count, 5)).tolist()
    return [Request(tuple(prompt), tokens, ignore_eos=True) for prompt in prompts]


def test_the_engine_records_what_a_trace_needs(params, tmp_path):
    record(tmp_path / "t.jsonl.gz", params, TINY, {"prose": requests(3), "tools": requests(2)}, 2, concurrency=2)
    trace = load_trace(tmp_path / "t.jsonl.gz").expect(model_id(TINY))
    assert trace.depth == 2 and [len(answer.run) for answer in trace.answers] == [12] * 5
    assert [answer.label for answer in trace.answers] == ["prose"] * 3 + ["tools"] * 2
    assert all(chance <= 0 for answer in trace.answers for row in answer.log_probs for chance in row)


def test_arms_of_an_ablation_have_names_of_their_own():
    found = arms(["4:3,8:1", "32:1"], 3)
    assert len({policy.name for policy in found.values()}) == 4
    assert all(found["A/A"].drafts(n) == found["4:3,8:1"].drafts(n) for n in range(1, 33))


class Flat:
    def seconds(self, n, k, rows, context, head=True):
        return n + 0.2 * (rows - n) + 0.1 * (k - 1)


def test_policies_change_between_steps_without_loss_and_without_compiling(params):
    """Every policy takes its turn on running sequences; the tokens are plain's, and nothing is compiled on the way."""
    policies = [
        parse_policy(name, 2, Advice(Flat(), (0.6, 0.5)))
        for name in (
            *("plain", "fixed1", "ladder/steps=1:2,2:1/num_drafts=2", "adaptive_rung", "dcut/steps=32:2/num_drafts=2"),
            *("survival/probe=4", "oracle/accept=0.9", "auto"),
        )
    ]
    config = EngineConfig(
        slots=3, context=64, max_drafts=2, buckets=BucketConfig(n=(4,), k=(1, 2, 3)), dtype=jnp.float64
    )
    plain = Engine(params, TINY, config, Off())
    wanted = [completion.tokens for completion in plain.generate(requests(5, 24))]

    engine = Engine(params, TINY, config, Fixed(2))
    engine.warmup(policies)
    ids = [engine.submit(request) for request in requests(5, 24)]
    turn, used = 0, set()
    while not engine.idle:
        if turn % 2 == 0:
            engine.policy = policies[(turn // 2) % len(policies)]
        used.add(engine.policy.name)
        engine.step()
        turn += 1
    assert used == {policy.name for policy in policies}
    assert [engine.completion(i).tokens for i in ids] == wanted
    assert engine.compiles_after_warmup == 0
