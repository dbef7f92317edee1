"""Policies by name, and the depth each asks for."""

import pytest

from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.step import Bucket
from atlas_jax.depth.ladder import LadderConfig
from atlas_jax.depth.policies import Fixed, Ladder, Off, PolicyError, parse_policy


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
