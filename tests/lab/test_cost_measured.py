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
from atlas_jax.lab.ablate import parse_grid, standings, summarize
from atlas_jax.lab.ablate_decode import pieces
from atlas_jax.lab.bench import BenchError
from atlas_jax.lab.cost import CostError, CostTable, StepTime, model_id
from atlas_jax.lab.measure_cost import Plan, device_id, engine_config, measure_costs
from atlas_jax.lab.trace import from_records, load_trace
from atlas_jax.presets import random_params

PLAN = Plan(widths=(2,), deepest=1, contexts=(6,), visits=2, calls=1, alone=2, rounds=2)


@pytest.fixture(scope="module")
def params():
    return random_params(TINY, 0, jnp.float32)


@pytest.mark.slow
def test_a_table_is_measured_kept_and_gone_on_with(params, tmp_path, monkeypatch):
    kept, said = tmp_path / "costs.json", []
    about = (("jax", "x"),)
    engine = Engine(params, TINY, engine_config(PLAN, np.float32), Off())
    table = measure_costs(engine, PLAN, about=about, keep=lambda t: t.save(kept), say=said.append)
    assert (table.kind, table.model, table.device) == ("measured", model_id(TINY), device_id())
    shapes = {(s.n, s.k, s.rows, s.head) for s in table.steps}
    assert shapes == {(2, k, 2 * k, head) for k, head in ((1, False), (1, True), (2, True))}
    for step in table.steps:
        assert 0 < step.low <= step.seconds <= step.high and step.context > 6
        assert step.samples == (2 if step.head else 4) * PLAN.calls  # plain is two arms
        assert step.alone > 0
    assert table.rounds == 2 and engine.idle and engine.policy == Off()
    assert table.prefill > 0 and float(dict(table.about)["aa_spread"]) >= 0 and dict(table.about)["jax"] == "x"

    done, more = CostTable.load(kept), dataclasses.replace(PLAN, widths=(2, 4))
    assert done.widths == (2,) and len(said) == 2
    measured = []
    warmed = []
    monkeypatch.setattr(engine, "warmup", lambda policies, width: warmed.append(width))
    monkeypatch.setattr(measure_cost, "_measure", lambda engine, *what: measured.append(what[:2]) or _made(what[0]))
    whole = measure_costs(engine, more, done=done)
    assert warmed == [4] and measured == [(4, 6)] and whole.widths == (2, 4) and whole.prefill == min(done.prefill, 0.5)
    assert set(done.steps) < set(whole.steps)
    with pytest.raises(CostError, match="of device 'elsewhere'"):
        measure_costs(engine, PLAN, done=dataclasses.replace(table, device="elsewhere"))
    with pytest.raises(CostError, match="calls of 2 steps, not 3"):
        measure_costs(engine, dataclasses.replace(PLAN, rounds=3), done=table)
    for bad in ({"widths": ()}, {"contexts": (0,)}, {"visits": 0}):
        with pytest.raises(CostError):
            Plan(**bad)


def _made(n):
    return [StepTime(n, 1, n, False, 9.0, 1.0, alone=2.0)], 0.5, 0.01


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


def test_groups_fill_the_slots():
    assert [list(group) for group in pieces(range(20), 3)] == [[0, 1, 2], [3, 4, 5]]  # of the first 8
    assert [list(group) for group in pieces(range(20), 16)] == [[*range(16)]]
    with pytest.raises(BenchError, match="15 prompts cannot keep 16"):
        pieces(range(15), 16)


@pytest.mark.slow
def test_an_ablation_by_decoding_is_resumed_and_can_be_simulated(params, tmp_path, monkeypatch):
    """All arms on the same requests, tokens checked; rows that are there run nothing; every cell has its simulation."""
    plan, grid = dataclasses.replace(PLAN, deepest=2), ["32:1", "32:2"]
    own = {"prose": requests(4, 10), "tools": requests(4, 10)}
    engine = Engine(params, TINY, engine_config(plan, np.float32, ablate_decode.context_of(own)), Off())
    costs = measure_costs(engine, plan)
    ablate_decode.record(tmp_path / "t.jsonl.gz", params, TINY, own, 2)
    trace = load_trace(tmp_path / "t.jsonl.gz")
    run = lambda *more: ablate_decode.ablate_decoded(
        tmp_path / "rows.csv", "here", engine, params, own, [*grid, *more], plan, repetitions=2
    )
    first = run()
    assert len(first) == 2 * 4 * 2 and {row.ladder for row in first} == {"plain", *grid, "A/A"}
    assert engine.compiles_after_warmup == 0
    monkeypatch.setattr(ablate_decode, "_turns", lambda *_: pytest.fail("measured twice"))
    assert run() == first
    # At this width a ladder is the fixed depth that it asks for, and has that arm's rows.
    twin = {(r.regime, r.repetition): r for r in run("1:1,2:2") if r.ladder == "1:1,2:2"}
    assert twin and all(
        dataclasses.replace(twin[r.regime, r.repetition], ladder="32:2") == r for r in first if r.ladder == "32:2"
    )

    cells = summarize(first)
    checks = ablate_decode.validate(cells, grid, 2, costs, {regime: trace.only(regime) for regime in own})
    assert [(c.ladder, c.concurrency, c.regime) for c in checks] == [(c.ladder, 2, c.regime) for c in cells]
    assert all(c.simulated > 0 and c.low <= c.measured <= c.high for c in checks)
    exact = dataclasses.replace(checks[0], measured=100.0, simulated=106.0, noise=0.0)
    assert not exact.within(0.05) and exact.within(0.07) and dataclasses.replace(exact, noise=0.08).within(0.05)
    (standing,) = standings(cells, parse_grid(grid, 2), "32:2")
    assert standing.depth == 1 and standing.over_best > 0 and standing.aa_spread >= 0
    with pytest.raises(ValueError, match="no fixed depth"):
        standings(cells, parse_grid(["32:2"], 2), "32:2")


class Flat:
    def seconds(self, n, k, rows, context, head=True):
        return n + 0.2 * (rows - n) + 0.1 * (k - 1)


@pytest.mark.slow
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
