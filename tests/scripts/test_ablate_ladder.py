"""The ablation script on shipped costs: its last line, its plots, and that a second run has nothing left to do."""

import importlib.util
import json
from pathlib import Path

from atlas_jax.depth.ladder import parse_ladder

ROOT = Path(__file__).resolve().parents[2]


def test_ablate_ends_with_the_best_ladder_and_leaves_plots(capsys, tmp_path):
    spec = importlib.util.spec_from_file_location("ablate_ladder", ROOT / "scripts" / "ablate_ladder.py")
    ablate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ablate)
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
