"""The ablation: its verdicts on made-up rows, its CSV, and that it goes on where it was."""

import csv
import dataclasses

import pytest

from atlas_jax.depth.ladder import format_ladder
from atlas_jax.depth.policies import Ladder, Off, PolicyError
from atlas_jax.lab import ablate
from atlas_jax.lab.ablate import (
    AA,
    PLAIN,
    Row,
    ablate_simulated,
    append_rows,
    arm_policy,
    best_ladder,
    describe,
    merge_rows,
    parse_grid,
    read_rows,
    summarize,
    verdicts,
)

GRID = parse_grid(["32:1", "32:2", "4:2,32:1"], 3)


def rows(speeds, c=1, regime="prose"):
    """`speeds` by arm, a list of repetitions each."""
    return [Row("made", regime, c, arm, i, tok_s, 1.5) for arm, each in speeds.items() for i, tok_s in enumerate(each)]


def judged(*parts):
    return verdicts(summarize([row for part in parts for row in part]), GRID, 3)


def test_a_winner_needs_ranges_that_are_apart():
    clear = rows({PLAIN: [100, 100], "32:1": [120, 121], "32:2": [130, 132], AA: [120, 121]})
    (verdict,) = judged(clear)
    assert (verdict.depth, verdict.decided, verdict.runner_up[0]) == (2, True, 1)
    assert verdict.ratio == pytest.approx(1.31) and verdict.aa_spread == 0
    overlapping = rows({PLAIN: [100, 100], "32:1": [120, 131], "32:2": [130, 132], AA: [120, 131]})
    assert not judged(overlapping)[0].decided
    noisy = rows({PLAIN: [100, 100], "32:1": [120, 121], "32:2": [130, 132], AA: [135, 105]})
    assert not judged(noisy)[0].decided and judged(noisy)[0].aa_spread > 0.1


def test_a_machine_that_slows_down_slows_all_arms():
    """Repetition 2 at half the speed: within each repetition the same arm leads by the same."""
    (verdict,) = judged(rows({PLAIN: [100, 50], "32:1": [110, 55], "32:2": [120, 60]}))
    assert verdict.decided and verdict.depth == 2 and verdict.ratio == pytest.approx(1.2)


def test_ladders_that_ask_for_the_same_depth_are_one_arm():
    (verdict,) = judged(rows({PLAIN: [100], "32:1": [90], "32:2": [110], "4:2,32:1": [112]}, c=2))
    assert verdict.depth == 2 and verdict.decided and verdict.runner_up == (0, 1.0)
    (verdict,) = judged(rows({PLAIN: [100], "32:1": [110], "32:2": [90], "4:2,32:1": [112]}, c=8))
    assert verdict.depth == 1


def test_regimes_count_by_their_geometric_mean():
    (verdict,) = judged(
        rows({PLAIN: [100], "32:1": [120], "32:2": [80]}, regime="prose"),
        rows({PLAIN: [10], "32:1": [11], "32:2": [16]}, regime="tools"),
    )
    assert verdict.depth == 1 and verdict.ratio == pytest.approx((1.2 * 1.1) ** 0.5)


def test_the_best_ladder_says_what_it_cannot_say():
    found = judged(
        rows({PLAIN: [100], "32:1": [110], "32:2": [120]}, c=1),
        rows({PLAIN: [100], "32:1": [110], "32:2": [120]}, c=2),
        rows({PLAIN: [100], "32:1": [90], "32:2": [80]}, c=4),
        rows({PLAIN: [100], "32:1": [110], "32:2": [90]}, c=8),
        rows({PLAIN: [100], "32:1": [90], "32:2": [90]}, c=16),
    )
    best = best_ladder(found)
    assert (format_ladder(best.steps), best.max_seqs) == ("2:2,8:1", 8)
    told = "\n".join(describe(found))
    assert "best ladder: 2:2,8:1, cap 8" in told and "at C = 4 no drafts would be best" in told
    nothing = best_ladder(judged(rows({PLAIN: [100], "32:1": [90]})))
    assert nothing.max_seqs == 0 and nothing.step_drafts(1, 3) == 0


def test_a_speed_without_its_control_is_refused():
    with pytest.raises(ValueError, match="no plain run beside repetition 1"):
        summarize(rows({PLAIN: [100], "32:1": [110, 120]}))


def test_a_csv_gives_the_rows_back_and_survives_being_cut(tmp_path):
    path = tmp_path / "deep" / "rows.csv"
    wanted = rows({PLAIN: [100.0], "4:2,32:1": [112.5, 90.25]})
    append_rows(path, wanted[:1])
    append_rows(path, wanted[1:])
    assert read_rows(path) == wanted and read_rows(tmp_path / "none.csv") == []
    path.write_text(path.read_text().rstrip("\n").rsplit(",", 1)[0])
    assert read_rows(path) == wanted[:-1]
    append_rows(path, wanted[-1:])
    assert read_rows(path) == wanted
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        read_rows(tmp_path / "other.csv")


def test_grids_are_checked():
    assert parse_grid(["4:3,16:1@16"], 3)["4:3,16:1@16"].max_seqs == 16 and GRID["32:1"].max_seqs == 32
    assert arm_policy(PLAIN, GRID, 3) == Off() and arm_policy(AA, GRID, 3) == Ladder(GRID["32:1"], 3)
    for bad, wrong in (("4:3,x", "part 2"), ("4:3@x", "cap 'x'"), ("4:5", "5 drafts")):
        with pytest.raises(PolicyError, match=wrong):
            parse_grid([bad], 3)


class Serial:
    """In place of a pool of processes, which cost seconds to start."""

    def __init__(self, max_workers, mp_context):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def map(self, function, jobs, chunksize):
        return map(function, jobs)


def test_rows_that_are_there_are_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "ProcessPoolExecutor", Serial)
    ran, real = [], ablate.run_job
    monkeypatch.setattr(ablate, "run_job", lambda job: ran.append(job) or real(job))
    path = tmp_path / "rows.csv"
    run = lambda concurrencies: ablate_simulated(
        path, "gb10-27b", ["32:1", "32:2"], [("prose", c) for c in concurrencies], repetitions=2, seconds=15
    )
    first = run([8])
    assert len(ran) == len(first) == 2 * 4
    both = run([8, 16])
    assert len(ran) == 16 and both[:8] == [*first] and len(read_rows(path)) == 16
    assert [row for row in run([8, 16]) if row.tok_s <= 0] == [] and len(ran) == 16
    with path.open() as file:
        assert next(csv.reader(file))[0] == "source"
    (eight, sixteen) = verdicts(summarize(both), parse_grid(["32:1", "32:2"], 3), 3)
    assert {eight.depth, sixteen.depth} <= {1, 2} and sixteen.aa_spread > 0


def test_parts_merged_in_any_order_are_one_run_and_a_contradiction_changes_nothing(tmp_path):
    rows = [Row("s", regime, c, "plain", i, c * 1.5 + i, 1.0) for regime in ("a", "b") for c in (2, 8) for i in (0, 1)]
    one, two, out = (tmp_path / name / "rows.csv" for name in ("one", "two", "out"))
    append_rows(one, rows[::2])
    append_rows(two, rows[1::2][::-1] + rows[:1])  # one run twice, told alike
    assert merge_rows([one, two], out) == 8 and merge_rows([two, out], out) == 8
    assert read_rows(out) == rows
    append_rows(two, [dataclasses.replace(rows[2], tok_s=9.0)])
    before = out.read_text()
    for parts in ([one, two], [one, tmp_path / "three.csv"]):
        with pytest.raises(ValueError, match=r"unlike another part|no such file"):
            merge_rows(parts, out)
    assert out.read_text() == before
