"""Policies by name, and the depth each asks for."""

import pytest

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.step import Bucket
from atlas_jax.depth.ladder import LadderConfig
from atlas_jax.depth.policies import (
    AdaptiveRung,
    Advice,
    DCut,
    Decision,
    Fixed,
    Ladder,
    Off,
    Oracle,
    Outcome,
    PolicyError,
    Queued,
    Survival,
    parse_policy,
)


def test_names():
    assert parse_policy("plain") == parse_policy("off") == Off()
    assert parse_policy("fixed3") == Fixed(3) and Fixed(3).name == "fixed3"
    for name in ("", "fixed", "fixed-1", "fixed1x", "Ladder", "fixed999"):
        with pytest.raises(PolicyError, match="unknown policy"):
            parse_policy(name)


def test_the_ladder_reads_the_environment(monkeypatch):
    monkeypatch.setenv("ATLAS_MTP_K_LADDER", "1:2,4:1")
    monkeypatch.setenv("ATLAS_MTP_MAX_SEQS", "6")
    policy = parse_policy("ladder")
    assert [policy.drafts(n) for n in (1, 2, 4, 5, 6, 7, 32)] == [2, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("policy", [Off(), Fixed(0), Fixed(2), Ladder(), Ladder(LadderConfig(steps=((2, 3), (4, 1))))])
def test_warmup_reaches_every_step_of_a_drain(policy):
    """Whatever number is active and whatever the last step left pending, the bucket is among those compiled."""
    buckets = BucketConfig()
    reachable = buckets.reachable(policy, 8)
    assert len(reachable) <= 24
    for n in range(1, 9):
        for before in range(1, 9):
            k = max(policy.drafts(before), policy.drafts(n)) + 1
            assert buckets.fit(n, k, n, policy.head) in reachable


def test_rows_round_up_within_the_grid():
    buckets = BucketConfig(n=(1, 4), k=(1, 3), ragged=True)
    assert buckets.fit(3, 2, 5, True) == Bucket(4, 3, 6, True)
    assert buckets.fit(1, 3, 2, True) == Bucket(1, 3, 2, True)
    assert buckets.fit(4, 3, 12, True) == Bucket(4, 3, 12, True)
    with pytest.raises(ValueError, match="without a head"):
        Bucket(1, 2, 2, False)
    with pytest.raises(ValueError, match="no such bucket"):
        Bucket(2, 2, 5, True)


class Flat:
    """Costs by rows alone."""

    def seconds(self, n, k, rows, context, head=True):
        return n + 0.3 * (rows - n) + 0.1 * (k - 1)


ADVICE = Advice(Flat(), (0.9, 0.8, 0.3), (1, 4))
ALL = (
    *("plain", "fixed0", "fixed2", "ladder", "ladder/steps=1:3,4:1/cap=8", "ladder/enabled=no/num_drafts=2"),
    *("adaptive_rung", "adaptive_rung/steps=32:1/enter=1.2/leave=1.1/probe_ticks=32/flush=64", "survival/probe=64"),
    *("dcut", "dcut/ratio=0.4/max_seqs=32/row_budget=40/canonical=none/steps=32:3", "survival", "auto"),
    *("oracle/accept=0.9,0.5", "survival/num_drafts=2/row_budget=8/half_life=100.5/prior=0.4", "auto/margin=0.05"),
)


@pytest.mark.parametrize("name", ALL)
def test_every_policy_keeps_its_word(name):
    """It verifies what is there, within room and budget, in depths that it announced; equal states decide equally."""
    policy = parse_policy(name, advice=ADVICE)
    state = policy.start()
    hash(state), hash(policy)
    for n in (1, 2, 4, 9, 16, 40):
        for turn in range(6):
            chances = (-0.1 * (turn + 1),) * 3 if policy.needs_log_probs else ()
            queued = [Queued(*((0, ()) if i == turn else (3, chances)), 100 + i, 0 if i == 1 else 5) for i in range(n)]
            decision = policy.decide(state, queued)
            assert decision == policy.decide(state, list(queued)) and isinstance(decision, Decision)
            assert len(decision.verify) == n and decision.propose in policy.depths(n)
            assert all(0 <= v <= min(q.drafts, q.most) for v, q in zip(decision.verify, queued, strict=True))
            assert max(decision.verify) <= max(policy.depths(n)) <= policy.max_drafts
            if not policy.ragged:
                full = [
                    v for v, q in zip(decision.verify, queued, strict=True) if min(q.drafts, q.most) >= decision.propose
                ]
                assert set(full) <= {decision.propose}
            told = (chances,) * n
            state = policy.observe(state, Outcome(n, decision.verify, tuple(v // 2 for v in decision.verify), told))
            hash(state)


def test_options_are_typed(monkeypatch):
    for name in ("ATLAS_MTP_K_LADDER", "ATLAS_MTP_MAX_SEQS", "ATLAS_MTP_STATIC_RUNG"):
        monkeypatch.delenv(name, raising=False)
    assert parse_policy("ladder/steps=1:3, 4:1/cap=6") == Ladder(LadderConfig(((1, 3), (4, 1)), cap=6))
    cut = parse_policy("dcut/ratio=0.5/max_seqs=4/canonical=none")
    assert cut == DCut(ratio=0.5, max_seqs=4, canonical=None, name=cut.name)
    rung = parse_policy("adaptive_rung/alpha=0.25/num_drafts=2")
    assert isinstance(rung, AdaptiveRung) and (rung.rung.alpha, rung.num_drafts) == (0.25, 2)
    survival = parse_policy("survival/probe=9", advice=ADVICE)
    assert isinstance(survival, Survival) and survival.prior == ADVICE.acceptance and survival.probe == 9
    assert parse_policy("oracle/accept=0.5", advice=ADVICE) == Oracle(
        ADVICE.costs, accept=(0.5,), name="oracle/accept=0.5"
    )
    monkeypatch.setenv("ATLAS_MTP_STATIC_RUNG", "1")
    assert parse_policy("adaptive_rung").depths(16) == {1}
    assert parse_policy("adaptive_rung/cap=32").depths(16) == {1, 2}  # options say it all, or the environment does


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ladder/steps=4:3,broken", "part 2 \\('broken'\\)"),
        ("ladder/stepz=4:3", "no option 'stepz=4:3'; its options are steps, cap"),
        ("ladder/cap", "no option 'cap'"),
        ("ladder/cap=-1", "no whole number"),
        ("ladder/cap=1/cap=2", "twice"),
        ("ladder/enabled=false", "neither yes nor no"),
        ("dcut/ratio=much", "no finite number"),
        ("dcut/ratio=nan", "no finite number"),
        ("adaptive_rung/alpha=2", "at most 1"),
        ("adaptive_rung/enter=1.1", "leave 1.3 above enter 1.1"),
        ("survival/prior=1.5", "probabilities"),
        ("plain/cap=3", "unknown policy"),
        ("fixed1/cap=3", "unknown policy"),
        ("survivor", "unknown policy 'survivor'.*adaptive_rung"),
    ],
)
def test_what_is_wrong_is_named(name, wrong):
    with pytest.raises(PolicyError, match="(?s)" + wrong):
        parse_policy(name, advice=ADVICE)


@pytest.mark.parametrize("name", ["survival", "oracle", "auto"])
def test_advice_is_asked_for(name):
    with pytest.raises(PolicyError, match="cost"):
        parse_policy(name)


def test_auto_is_a_ladder_in_the_grammar():
    policy = parse_policy("auto", advice=ADVICE)
    assert isinstance(policy, Ladder) and parse_policy(policy.name) == policy
    assert "/steps=" in policy.name and "/cap=" in policy.name
    with pytest.raises(PolicyError, match="acceptance"):
        parse_policy("auto", advice=Advice(Flat()))
