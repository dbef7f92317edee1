"""The scripts of the ladder lab: what they print last is what programs read, and errors are one clear line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from load_script import script

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("policy", ["ladder", "survival", "auto"])
def test_simulate_ends_with_its_line(policy, capsys):
    simulate = script("simulate")
    args = [
        "--costs",
        "gb10-27b",
        "--policy",
        policy,
        "--regime",
        "prose",
        "--concurrency",
        "16",
        "--seconds",
        "30",
        "--json",
    ]
    line = simulate.main(simulate.parse(args))
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 and json.loads(out[0]) == line
    fields = ("policy", "regime", "concurrency", "tok_s", "tok_step", "regret_to_oracle", "switches", "seed")
    assert tuple(line) == fields and line["policy"] == policy and line["concurrency"] == 16
    assert 100 < line["tok_s"] < 300 and abs(line["regret_to_oracle"]) < 0.1


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (["--policy", "survivor"], "unknown policy 'survivor'"),
        (["--policy", "ladder/steps=4-3"], "part 1"),
        (["--costs", "nowhere"], "no cost table 'nowhere'"),
        (["--regime", "poetry"], "no trace 'poetry'"),
        (["--concurrency", "33", "--costs", "gb10-27b"], "no cost for 33 sequences"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(args, wrong):
    args = ["--costs", "gb10-27b", "--seconds", "5", *args]
    ran = subprocess.run([sys.executable, ROOT / "scripts" / "simulate.py", *args], capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stderr.splitlines()[-1 if "survivor" not in wrong else 0].startswith("error: ")
    assert wrong in ran.stderr and "Traceback" not in ran.stderr
