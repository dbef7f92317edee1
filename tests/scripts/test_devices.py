"""The scripts on a mesh and in several processes: what one device gives, and what a lost process costs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.test_heads import answers  # noqa: F401 (a fixture)
from scripts.test_scripts import model  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ALONE = "tests/scripts/alone.py"


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300)


def last(found):
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def test_generate_on_two_devices_writes_what_one_writes(model):  # noqa: F811
    asked = ("scripts/generate.py", "--model", model, "--prompt", "It rained", "--max-new-tokens", 16, "--policy")
    one, two = run(*asked, "fixed1"), run(*asked, "fixed1", "--mesh", "fsdp=2", "--cpu-devices", 2)
    told, same = last(one), last(two)
    assert told["text"] == same["text"] and (told["mesh"], same["mesh"]) == ("one device", "fsdp=2")
    for mesh, why in (("tensor=2", "does not divide kv_heads"), ("rows=2", "not axis=size"), ("data=4", "4 devices")):
        found = run(*asked, "fixed1", "--mesh", mesh, "--cpu-devices", 2)
        assert found.returncode == 1 and why in found.stderr and "Traceback" not in found.stderr, found.stderr


def test_bench_measures_a_mesh_and_its_tokens_are_plains(model):  # noqa: F811
    asked = "--concurrency 2 --prompts 2 --repetitions 2 --regimes prose --policies fixed1 --max-new-tokens 6 --json"
    bench = (ALONE, "scripts/bench_decode.py", "--model", model, *asked.split(), "--mesh", "data=2", "--cpu-devices", 2)
    found = last(run(*bench))
    assert found["mesh"] == "data=2" and all(c["equal"] and not c["compiles_after_warmup"] for c in found["cells"])
    for flags in (bench[-4:-2], bench[-2:]):  # none of them is silently left aside
        refused = run(*bench[:-4], *flags, "--random-init", "qwen3.5-0.8b")
        assert refused.returncode == 1 and "a mesh is measured on a checkpoint" in refused.stderr


@pytest.fixture
def training(model, answers, tmp_path):  # noqa: F811
    """`(RUN, flags...)` to what `train_head.py` gives, six small steps on this machine's devices."""
    settings = "--batch 4 --length 64 --chains 8 --depth 1 --steps 6 --warmup 2 --save-every 2 --log-every 1 --no-muon"
    small = "--held-out 1 --skip-held-out 0 --slots 1 --json --cpu-devices 2"

    def train(name, *before, launch=(), mesh="data=2"):
        flags = ("--model", model, "--data", answers, "--run", tmp_path / name, "--mesh", mesh)
        script = (*before, "scripts/train_head.py", *flags, *settings.split(), *small.split())
        return run(*launch, ALONE, *script), tmp_path / name

    return train


def curve(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    return [row["loss"] for row in rows]


def test_two_processes_train_the_head_of_one_and_outlive_a_kill(training):
    alone, at = training("alone")
    assert last(alone)["mesh"] == "data=2"
    launch = ("scripts/launch_local.py", "--processes", 2, "--")
    killed, folder = training("two", "--die-at", 4, launch=launch, mesh="data=4")
    assert killed.returncode != 0 and "killed by SIGKILL" in killed.stderr and not (folder / "head").exists()
    again, _ = training("two", launch=launch, mesh="data=4")
    assert last(again)["mesh"] == "data=4" and "resumed" in again.stderr
    own = [line for line in again.stdout.splitlines() if not line.startswith("[Gloo]")]  # which JAX's transport prints
    assert len(own) == 1  # the second process says nothing
    assert curve(folder) == pytest.approx(curve(at), abs=1e-4)
