"""The simulator against arithmetic, and the policies against each other on shipped costs."""

import dataclasses

import pytest

from atlas_jax.depth.ladder import LadderConfig
from atlas_jax.depth.policies import Advice, DCut, Fixed, Ladder, Off, Oracle, PolicyError, parse_policy
from atlas_jax.lab.cost import CostTable, StepTime
from atlas_jax.lab.simulate import Load, regret, simulate, summary
from atlas_jax.lab.tables import find_costs
from atlas_jax.lab.trace import Answer, Trace, regime_trace


def table(plain=1.0, head=1.1, draft=0.3, row=0.05, widths=(1, 2, 4, 8, 16), prefill=0.0):
    shapes = [(n, k, rows) for n in widths for k in range(1, 6) for rows in range(n, n * k + 1)]
    steps = [StepTime(n, k, rows, True, 1.0, head + draft * (k - 1) + row * (rows - n)) for n, k, rows in shapes]
    steps += [StepTime(n, 1, n, False, 1.0, plain) for n in widths]
    steps += [dataclasses.replace(step, context=1e6) for step in steps]
    return CostTable("made", "m", "d", tuple(steps), prefill)


def trace(*runs, prompt=10):
    """Answers of the given runs; what the head says and the truth are the outcome, nearly."""
    rows = lambda run: tuple(tuple(-0.01 if j < r else -4.0 for j in range(4)) for r in run)
    chances = lambda run: tuple(tuple(0.99 if j < r else 0.02 for j in range(4)) for r in run)
    return Trace("t", 4, tuple(Answer("x", prompt, run, rows(run), chances(run), chances(run)) for run in runs))


def test_one_sequence_by_hand():
    """Runs 0 2 . . 1 . 0: one row, then at most three; the last step is cut by the answer's end."""
    found = simulate(Fixed(2), table(prefill=0.01), trace((0, 2, 1, 0, 3, 2, 1)), Load(1, requests=1), timeline=True)
    # Steps: no drafts yet -> 1 token; run 2 -> 3; run 3 of which 2 are offered, and 2 leave no room -> 3.
    assert (found.steps, found.tokens) == (3, 7)
    assert [round(m[3]) + 1 for m in found.timeline] == [1, 3, 3]
    spent = 1.7 + (1.7 + 0.1) + (1.7 + 0.1)
    assert found.seconds == pytest.approx(10 * 0.01 + spent) and found.decode_tok_s == pytest.approx(7 / spent)
    assert found.tok_step == pytest.approx(7 / 3) and found.p[:2] == (1.0, 1.0) and found.p[2] is None
    assert found.latency == (pytest.approx(found.seconds),) * 2


def test_pending_drafts_keep_the_shape():
    """Behind three accepted drafts a step of none still folds them, in the deeper shape."""
    ladder = Ladder(LadderConfig(((1, 3),), cap=1))
    long, short = (0, *(3,) * 40), (0,) * 3
    both = simulate(ladder, table(), trace(short, long), Load(2, requests=2), timeline=True)
    assert [moment[1] for moment in both.timeline[:4]] == [2, 2, 2, 1]
    alone = [b[0] - a[0] for a, b in zip(both.timeline, both.timeline[1:], strict=False)]
    assert alone[1] == pytest.approx(1.1) and alone[3] == pytest.approx(1.1 + 0.9 + 0.15)


def test_plain_takes_a_token_a_step_and_the_costs_say_how_long():
    found = simulate(Off(), table(), regime_trace("prose", answers=20), Load(4, seconds=500))
    assert found.tok_step == 1 and found.tok_s == pytest.approx(4, rel=0.02)
    assert found.p == (None,) * 4 and found.switches == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_fixed_depth_has_the_rates_of_the_trace(depth):
    made = regime_trace("tools", answers=120)
    found = simulate(Fixed(depth), table(), made, Load(4, requests=120))
    assert found.p[:depth] == pytest.approx(made.acceptance()[:depth], abs=0.04)
    assert found.tokens == sum(len(answer.run) for answer in made.answers)


def test_runs_repeat_by_seed():
    made, costs = regime_trace("prose", answers=30), table()
    run = lambda seed, **options: simulate(Fixed(1), costs, made, Load(4, seconds=60, seed=seed, **options))
    assert run(1) == run(1) != run(2)
    assert run(1, rate=0.2) == run(1, rate=0.2) != run(3, rate=0.2)


def test_an_open_loop_serves_what_arrives():
    """Few requests: throughput is theirs, whatever the policy; latency is the policy's."""
    made, costs = regime_trace("tools", answers=50), table()
    load = Load(16, requests=150, rate=0.01)
    plain, fixed = (simulate(policy, costs, made, load) for policy in (Off(), Fixed(3)))
    assert plain.tok_s == pytest.approx(fixed.tok_s, rel=0.05)
    assert plain.tokens == fixed.tokens and plain.latency[0] > 1.3 * fixed.latency[0]
    assert plain.seconds == pytest.approx(150 / 0.01, rel=0.25)


def test_going_deeper_can_be_charged():
    ladder = Ladder(LadderConfig(((1, 1), (2, 3))))
    free, dear = (
        simulate(ladder, table(), regime_trace("prose", answers=8), Load(1, requests=8), switch_s=x) for x in (0.0, 9.0)
    )
    assert free == dear  # one width, one depth: never
    rung = parse_policy("adaptive_rung/probe_ticks=4")
    run = lambda x: simulate(rung, table(), regime_trace("prose", answers=48), Load(16, requests=200), switch_s=x)
    free, dear = run(0.0), run(9.0)
    assert free.switches == dear.switches > 4
    assert (dear.seconds - free.seconds) / 9 == pytest.approx(free.switches / 2, abs=free.switches / 4)


@pytest.mark.parametrize("regime", ["prose", "tools", "switching"])
def test_knowing_more_is_never_worse(regime):
    """clairvoyant >= oracle >= every fixed depth, on costs where pruning rows pays."""
    costs, made = table(row=0.08, widths=(4,)), regime_trace(regime, answers=96, switch_every=24)
    load = Load(4, requests=96)
    oracle = simulate(Oracle(costs), costs, made, load)
    clairvoyant = simulate(Oracle(costs), costs, made, load, truth="outcome")
    best = max(simulate(Fixed(depth), costs, made, load).tok_s for depth in range(4))
    assert clairvoyant.tok_s > oracle.tok_s > best
    assert regret(oracle, oracle) == 0 < regret(simulate(Off(), costs, made, load), oracle)


@pytest.mark.parametrize("regime", ["prose", "tools", "switching"])
def test_survival_stays_close_to_the_oracle(regime):
    costs = find_costs("gb10-27b")
    made, load = regime_trace(regime), Load(16, seconds=200)
    oracle = simulate(Oracle(costs), costs, made, load)
    survival = simulate(parse_policy("survival", advice=Advice(costs)), costs, made, load)
    assert regret(survival, oracle) < 0.05


def test_a_rung_that_probes_often_follows_a_switch():
    """Where probes cost no capture they may come often: then it is within 2 % of the better static rung."""
    costs, made, load = find_costs("gb10-27b"), regime_trace("switching"), Load(16, seconds=700)
    speed = {
        name: simulate(parse_policy(name), costs, made, load).tok_s
        for name in ("adaptive_rung/probe_ticks=32", "ladder/steps=32:1", "ladder/steps=32:2")
    }
    adaptive, *static = speed.values()
    assert adaptive > 0.98 * max(static)


def test_pruning_pays_where_rows_are_dear_and_not_where_they_are_free():
    made, load = regime_trace("prose", answers=64), Load(8, requests=64)
    ladder = LadderConfig(((8, 3),))
    gain = {}
    for row in (0.0, 0.15):
        cut, whole = (
            simulate(DCut(ladder, ratio=ratio, canonical=None), table(row=row), made, load).tok_s
            for ratio in (0.5, 1.0)
        )
        gain[row] = cut / whole - 1
    assert gain[0.0] < 0 < gain[0.15]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(PolicyError, match="trace t has 4"):
        simulate(Fixed(5), table(), trace((1, 0)), Load(1, requests=1))
    for bad, wrong in (
        ({"concurrency": 0, "seconds": 1}, "concurrency"),
        ({"concurrency": 1}, "seconds or requests"),
        ({"concurrency": 1, "seconds": 1, "rate": 0}, "rate"),
    ):
        with pytest.raises(ValueError, match=wrong):
            Load(**bad)
    with pytest.raises(ValueError, match="no step"):
        simulate(Off(), table(), trace((0,)), Load(1, seconds=0))


def test_the_summary_is_what_programs_expect():
    load = Load(1, requests=1, seed=3)
    found = simulate(Fixed(1), table(), trace((0, 1, 0)), load)
    line = summary(found, "prose", load, found)
    fields = ("policy", "regime", "concurrency", "tok_s", "tok_step", "regret_to_oracle", "switches", "seed")
    assert tuple(line) == fields and line["regret_to_oracle"] == 0 and line["seed"] == 3
