"""The gate as a command: one line of JSON, an exit status, and nothing that was not checked among what passed."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import pytest

from atlas_jax.lab import crosscompile
from atlas_jax.lab.crosscompile import CHIPS, Kernel, Report, Wheels, kernels
from atlas_jax.lab.crosscompile.kernels import Case

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compile_gate.py"
FINE = Report("", True, True, launches=9, loops=0, aliased_bytes=1 << 40, temp_bytes=0)
OTHERS = (Kernel("cache_attention", 130, 0, 74752, 8, 10), Kernel("loop_fusion", 200, 0, 0, 1, 1))
FINE = dataclasses.replace(FINE, kernels=(Kernel("gdn_step", 72, 0, 512, 9, 2), *OTHERS))


@pytest.fixture
def gate(monkeypatch, capsys):
    """Runs the script on two kernels and a decode step, with what the compilers would say; returns status and JSON."""
    both = [Case("gdn_step", kernels.OPS["gdn_step"].specs[0].name, name) for name in ("triton", "mosaic")]

    def run(*arguments, rel_err=1e-7, report=FINE):
        monkeypatch.setattr(Case, "rel_err", lambda case: rel_err)
        monkeypatch.setattr(kernels, "cases", lambda ops: both)
        monkeypatch.setattr(crosscompile, "compile_jobs", lambda chip, jobs, wheels, done: [report for _ in jobs])
        monkeypatch.setattr(sys, "argv", ["compile_gate.py", "--models", "qwen3.5-0.8b", "--steps", "1x1", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        captured = capsys.readouterr()
        return ended.value.code, json.loads(captured.out.splitlines()[-1]), captured

    return run


@pytest.fixture
def compilers(monkeypatch):
    monkeypatch.setattr(Wheels, "find", classmethod(lambda cls, folder: cls((), Path("ptxas"), "pretended")))


def test_without_compilers_numbers_are_checked_and_the_rest_is_not_checked(gate, tmp_path):
    status, result, captured = gate("--wheels", str(tmp_path), "--json")
    assert status == 0 and result["failed"] == [] and len(captured.out.splitlines()) == 1
    assert "make gate" in result["not_checked"][0]["why"]
    assert {row["chip"] for row in result["kernels"]} == set(CHIPS)
    for row in result["kernels"]:
        assert (row["lowered"], row["compiled"], row["registers"], row["spill_bytes"]) == (None,) * 4
    (program,) = result["programs"]
    assert program["aliased_bytes"] is None and program["kernels_per_layer"] is None
    status, result, _ = gate("--wheels", str(tmp_path), rel_err=1e-3)
    assert status == 1 and "rel_err" in result["failed"][0]


def test_what_compiles_within_limits_passes_and_what_cannot_exist_is_named(gate, compilers):
    status, result, captured = gate()
    assert status == 0 and result["failed"] == []
    names = ["kernel", "spec", "chip", "backend", "rel_err", "lowered", "compiled", "registers"]
    for row in result["kernels"]:
        assert set(row) >= {*names, "spill_bytes", "shared_bytes"}
        assert row["compiled"] and (row["registers"], row["shared_bytes"]) == (72, 512)  # not the fusion's
    assert set(result["programs"][0]) >= {"model", "chip", "aliased_bytes", "temp_bytes", "kernels_per_layer"}
    assert "gdn_step mosaic on sm_80" in [entry["what"] for entry in result["not_checked"]]
    assert not [row for row in result["kernels"] if (row["backend"], row["chip"]) == ("mosaic", "sm_80")]
    assert "gdn_step" in captured.out and "decode steps" in captured.out


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kernels": (Kernel("gdn_step", 255, 8, 0, 9, 2),)}, "spills 8 bytes"),
        ({"compiled": False, "error": "no such instruction"}, "no such instruction"),
        ({"aliased_bytes": 0}, "not aliased"),
        ({"temp_bytes": 1 << 30}, "reach a layer's weights"),
    ],
)
def test_what_breaks_a_limit_fails(gate, compilers, change, complaint):
    status, result, captured = gate("--chips", "sm_90", report=dataclasses.replace(FINE, **change))
    assert status == 1 and any(complaint in line for line in result["failed"])
    assert "FAILED" in captured.out
