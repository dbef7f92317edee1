"""The ablation script on shipped costs: its last line, its plots, and that a second run has nothing left to do."""

import json

import pytest
from load_script import script

from atlas_jax.depth.ladder import parse_ladder


@pytest.fixture(scope="module")
def ablate():
    return script("ablate_ladder")


def test_ablate_ends_with_the_best_ladder_and_leaves_plots(ablate, capsys, tmp_path):
    args = ["--costs", "gb10-27b", "--grid", "32:1", "32:2", "--concurrency", "16", "--regimes", "prose", "tools"]
    args += ["--seconds", "12", "--repetitions", "2", "--processes", "1", "--out", str(tmp_path), "--json"]
    line = ablate.main(ablate.parse(args))
    out = capsys.readouterr()
    assert len(out.out.splitlines()) == 1 and json.loads(out.out) == json.loads(json.dumps(line))
    assert parse_ladder(line["best_ladder"]) and isinstance(line["decided"], bool)
    assert [(c["ladder"], c["regime"]) for c in line["cells"]] == [
        (ladder, regime) for regime in ("prose", "tools") for ladder in ("plain", "32:1", "32:2", "A/A")
    ]
    for cell in line["cells"]:
        assert 0 < cell["tok_s_min"] <= cell["tok_s_median"] <= cell["tok_s_max"] and cell["concurrency"] == 16
    for name in ("speed.png", "why.png", "rows.csv"):
        assert (tmp_path / name).stat().st_size > (10_000 if name.endswith("png") else 100)
    again = ablate.main(ablate.parse(args))
    assert again == line and "16 of them done before" in capsys.readouterr().err


def test_parts_of_a_simulation_merge_to_what_one_machine_finds(ablate, capsys, tmp_path):
    def run(name, *more):
        args = ["--costs", "gb10-27b", "--grid", "32:1", "--concurrency", "4", "16", "--regimes", "prose", "tools"]
        args += ["--seconds", "2", "--repetitions", "2", "--processes", "1", "--out", str(tmp_path / name), "--json"]
        return ablate.main(ablate.parse([*args, *more]))

    parts = [run(name, "--part", f"{i}/2") for i, name in enumerate("ab")]
    assert [part["rows"] for part in parts] == [12, 12] and not (tmp_path / "a" / "speed.png").exists()
    capsys.readouterr()
    merged = run("both", "--merge", str(tmp_path / "b"), str(tmp_path / "a"))
    assert "24 runs, 24 of them done before" in capsys.readouterr().err
    assert merged == run("alone")
    for wrong in (("--part", "2/2"), ("--merge", str(tmp_path / "c"))):
        with pytest.raises(ValueError, match=r"i/n|no such file"):
            run("d", *wrong)
    with pytest.raises(SystemExit):
        run("d", "--decode", "--part", "0/2")
