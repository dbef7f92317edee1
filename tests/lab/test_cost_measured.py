"""A cost table measured on a tiny model here; a trace recorded from it; and every policy in the engine that serves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Advice, Off, parse_policy
from atlas_jax.lab import ablate_decode, measure_cost
from atlas_jax.lab.cost import CostError, CostTable, StepTime, model_id
from atlas_jax.lab.measure_cost import Plan, device_id, measure_costs
from atlas_jax.lab.trace import from_records, load_trace
from atlas_jax.presets import random_params

PLAN = Plan(widths=(2,), deepest=1, contexts=(6,), visits=2, steps=2)


@pytest.fixture(scope="module")
def params():
    return random_params(TINY, 0, jnp.float32)


def test_a_table_is_measured_kept_and_gone_on_with(params, tmp_path, monkeypatch):
    kept, said = tmp_path / "costs.json", []
    about = (("jax", "x"),)
    table = measure_costs(
        params, TINY, PLAN, dtype=np.float32, about=about, keep=lambda t: t.save(kept), say=said.append
    )
    assert (table.kind, table.model, table.device) == ("measured", model_id(TINY), device_id())
    shapes = {(s.n, s.k, s.rows, s.head) for s in table.steps}
    assert shapes == {(2, k, 2 * k, head) for k, head in ((1, False), (1, True), (2, True))}
    for step in table.steps:
        assert 0 < step.low <= step.seconds <= step.high and step.context > 6
        assert step.samples == (2 if step.head else 4) * PLAN.steps  # plain is two arms
    assert table.prefill > 0 and float(dict(table.about)["aa_spread"]) >= 0 and dict(table.about)["jax"] == "x"

    done, more = CostTable.load(kept), dataclasses.replace(PLAN, widths=(2, 4))
    assert done.widths == (2,) and len(said) == 2
    measured = []
    monkeypatch.setattr(measure_cost, "Engine", lambda params, cfg, config, policy: _Nothing())
    monkeypatch.setattr(measure_cost, "_measure", lambda engine, *what: measured.append(what[:2]) or _made(what[0]))
    whole = measure_costs(params, TINY, more, dtype=np.float32, done=done)
    assert measured == [(4, 6)] and whole.widths == (2, 4) and whole.prefill == min(done.prefill, 0.5)
    assert set(done.steps) < set(whole.steps)
    with pytest.raises(CostError, match="of device 'elsewhere'"):
        measure_costs(params, TINY, PLAN, dtype=np.float32, done=dataclasses.replace(table, device="elsewhere"))
    for bad in ({"widths": ()}, {"contexts": (0,)}, {"visits": 0}):
        with pytest.raises(CostError):
            Plan(**bad)


class _Nothing:
    def warmup(self, policies):
        return 0.0


def _made(n):
    return [StepTime(n, 1, n, False, 9.0, 1.0)], 0.5, 0.01


def requests(count, tokens=12):
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, TINY.vocab_size, (count, 5)).tolist()
    return [Request(tuple(prompt), tokens, ignore_eos=True) for prompt in prompts]


def test_recording_runs_all_requests_at_the_depth_and_keeps_the_regimes(monkeypatch, tmp_path):
    seen = {}

    class Recorded:
        def __init__(self, params, cfg, config, policy, trace):
            seen.update(config=config)
            self.policy, self.trace = policy, trace

        def generate(self, given):
            for i, request in enumerate(given):
                told = {"request": i, "label": request.label, "position": 4, "offered": 2, "accepted": 1}
                self.trace({**told, "log_probs": [-0.1, -0.2]})

    monkeypatch.setattr(ablate_decode, "Engine", Recorded)
    ablate_decode.record(tmp_path / "t.jsonl.gz", {}, TINY, {"prose": requests(3), "tools": requests(2)}, 2)
    assert seen["config"].draft_log_probs and seen["config"].context >= 17
    trace = load_trace(tmp_path / "t.jsonl.gz").expect(model_id(TINY))
    assert trace.depth == 2 and len(trace.answers) == 5
    assert [answer.label for answer in trace.answers] == ["prose"] * 3 + ["tools"] * 2


def test_arms_of_an_ablation_have_names_of_their_own():
    found = ablate_decode.arms(["4:3,8:1", "32:1"], 3)
    assert len({policy.name for policy in found.values()}) == 4
    assert all(found["A/A"].drafts(n) == found["4:3,8:1"].drafts(n) for n in range(1, 33))


class Flat:
    def seconds(self, n, k, rows, context, head=True):
        return n + 0.2 * (rows - n) + 0.1 * (k - 1)


def test_policies_change_between_steps_without_loss_and_without_compiling(params):
    """Every policy takes its turn on running sequences; the tokens are plain's, and nothing is compiled on the way.

    What the engine records meanwhile is a trace of those answers.
    """
    policies = [
        parse_policy(name, 2, Advice(Flat(), (0.6, 0.5)))
        for name in (
            *("plain", "fixed1", "ladder/steps=1:2,2:1/num_drafts=2", "adaptive_rung", "dcut/steps=32:2/num_drafts=2"),
            *("survival/probe=4", "oracle/accept=0.9", "auto"),
        )
    ]
    rng, records = np.random.default_rng(0), []
    noisy = lambda x: np.asarray(x, np.float64) + rng.standard_normal(x.shape) * (0.3 if x.ndim > 1 else 0.1)
    config = EngineConfig(
        slots=3,
        context=64,
        max_drafts=2,
        buckets=BucketConfig(n=(4,), k=(1, 3)),
        prefill=(8,),
        dtype=jnp.float64,
        draft_log_probs=True,
    )
    with jax.enable_x64(True):
        engine = Engine(jax.tree.map(noisy, params), TINY, config, Off(), trace=records.append)
        engine.warmup(policies)
        wanted = [completion.tokens for completion in engine.generate(requests(5, 24))]
        assert len(set(map(len, wanted))) == 1 and len({token for tokens in wanted for token in tokens}) > 10

        records.clear()
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

    trace = from_records("t", model_id(TINY), records)
    assert trace.depth == 2 and [len(answer.run) for answer in trace.answers] == [24] * 5
    assert all(chance <= 0 for answer in trace.answers for row in answer.log_probs for chance in row)
