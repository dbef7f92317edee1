"""`convert` and `stitch` end to end: what they print last is JSON and true, and a failure is one line."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from load_script import script
from weights.release import CFG, MOE, write_release

from atlas_jax.config import ConfigError
from atlas_jax.lab.import_bench import write_random_release
from atlas_jax.presets import preset
from atlas_jax.weights.checkpoint import load_model
from atlas_jax.weights.layout import Naming
from atlas_jax.weights.shards import Shards, WeightError

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "tensors_used",
    "tensors_ignored",
    "tensors_missing",
    "bytes",
    "seconds",
    "raw_read_seconds",
    "peak_rss_mb",
}


def test_convert_reports_every_tensor_and_writes_a_copy(tmp_path, capsys):
    write_release(tmp_path / "model", MOE, Naming("model.language_model."), extra=("model.visual.x",), wrapper=True)
    convert = script("convert")
    config = convert.parse([str(tmp_path / "model"), str(tmp_path / "copy"), "--json"])
    result = convert.main(config)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and json.loads(lines[0]) == result and result.keys() >= FIELDS
    source = Shards(tmp_path / "model")
    assert (result["tensors_used"], result["tensors_ignored"], result["tensors_missing"]) == (len(source) - 1, 1, 0)
    assert result["bytes"] == source.nbytes - source.entries["model.visual.x"].nbytes
    assert result["ignored"] == {"vision tower": 1}
    assert 0 < result["raw_read_seconds"] < result["seconds"] and result["peak_rss_mb"] >= result["rss_before_mb"] > 10
    assert set(Shards(tmp_path / "copy")) == set(source)
    with pytest.raises(WeightError, match="exists; name a new directory"):
        convert.main(config)

    convert.main(convert.parse([str(tmp_path / "model"), "--list"]))
    out = capsys.readouterr().out
    assert all(name in out for name in source) and "ignored: vision tower" in out


def test_convert_takes_a_checkpoint_without_a_head_only_when_told(tmp_path, capsys):
    write_release(tmp_path / "model", dataclasses.replace(CFG, mtp_layers=0), Naming())
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    convert = script("convert")
    with pytest.raises(WeightError, match="--allow-missing"):
        convert.main(convert.parse([str(tmp_path / "model")]))
    result = convert.main(convert.parse([str(tmp_path / "model"), str(tmp_path / "copy"), "--allow-missing"]))
    assert result["tensors_missing"] == 15 and result["missing"][-1] == "mtp.norm.weight"
    assert "MISSING" in capsys.readouterr().out
    assert load_model(tmp_path / "copy")[0].mtp_layers == 0  # the copy says of itself that it has none


def convert_apart(*args):
    """The script in a process of its own, whose peak is nobody else's."""
    command = [sys.executable, str(ROOT / "scripts" / "convert.py"), *map(str, args), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_reading_takes_the_memory_of_the_model_and_little_more(tmp_path):
    """At most one tensor (here 64 MB of 250) above the target, whichever dtype that has."""
    cfg = preset("qwen3.5-0.8b", layers=8, vocab=32768)
    nbytes = write_random_release(tmp_path / "model", cfg, shard_bytes=2**27)
    assert len(Shards(tmp_path / "model").files) >= 3
    largest = max(entry.nbytes for entry in Shards(tmp_path / "model").entries.values()) / 2**20
    for dtype, factor in (("stored", 1), ("float32", 2)):
        found = convert_apart(tmp_path / "model", "--dtype", dtype)
        assert found["bytes"] == nbytes and found["model_mb"] == pytest.approx(factor * nbytes / 2**20, rel=1e-3)
        assert 200 < found["model_mb"] <= found["peak_rss_mb"] - found["rss_before_mb"] < found["model_mb"] + largest


def test_the_benchmark_leaves_nothing_and_agrees_with_itself(tmp_path, capsys, monkeypatch):
    convert = script("convert")
    monkeypatch.setattr(convert, "preset", lambda name: dataclasses.replace(MOE, family="qwen3_next"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = convert.parse(["--benchmark", "qwen3-next-80b-a3b", "--repetitions", "2"])
    result = convert.main(config)
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == result and result.keys() >= FIELDS
    assert result["repetitions"] == 2 and result["share_min"] <= result["share_of_raw"] <= result["share_max"]
    assert result["tensors_used"] > 40 and not result["tensors_missing"] and list(tmp_path.iterdir()) == []
    for args in ([], ["x", "--benchmark", "qwen3.5-0.8b"]):
        with pytest.raises(ConfigError, match="--benchmark"):
            convert.main(convert.parse(args))


def test_a_head_goes_out_and_comes_back(tmp_path, capsys):
    write_release(tmp_path / "model", CFG, Naming())
    convert, stitch = script("convert"), script("stitch")
    convert.main(convert.parse([str(tmp_path / "model"), str(tmp_path / "head"), "--head-only", "--json"]))
    result = stitch.main(stitch.parse([str(tmp_path / name) for name in ("model", "head", "new")]))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result and result["tensors_replaced"] == 15
    old, new = Shards(tmp_path / "model"), Shards(tmp_path / "new")
    assert {n: old[n].tobytes() for n in old} == {n: new[n].tobytes() for n in new}


@pytest.mark.parametrize("name", ["convert", "stitch", "plan"])
def test_a_failure_is_one_line_and_leaves_nothing(name, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    broken, target = str(tmp_path / "broken"), str(tmp_path / "target")
    args = {"convert": [broken, target], "stitch": [broken, broken, target], "plan": [broken]}[name]
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("error: ") and "config.json is not readable JSON" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["broken"]
