"""The device scripts, as far as a CPU proves them: the byte model, the GPU path with made-up times, failures kept."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from load_script import script
from tiny_models import TINY

from atlas_jax import presets
from atlas_jax.kernels import backends
from atlas_jax.kernels.cache_attention.specs import spec as attention_spec
from atlas_jax.kernels.cache_attention.tiles import Tile as AttentionTile
from atlas_jax.kernels.gdn_step import check, gdn_step
from atlas_jax.kernels.gdn_step.specs import spec
from atlas_jax.kernels.gdn_step.tiles import Tile
from atlas_jax.lab import kernel_bench as kb
from atlas_jax.lab import kernel_check
from atlas_jax.lab.timing import Timing

ROOT = Path(__file__).resolve().parents[2]
CELL_KEYS = {"kernel", "spec", "n", "rows", "pending", "us", "bytes", "share_of_copy", "against"}
H200 = backends.Target("gpu", "NVIDIA H200", (9, 0), (0, 11, 2))
COPY = 4e12


def ran(module, capsys, *args):
    result = module.main(module.parse(args))
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == json.loads(json.dumps(result))
    return result, captured


def test_on_a_cpu_the_byte_model_is_printed_and_nothing_else_is_claimed(capsys):
    result, captured = ran(script("bench_kernels"), capsys)
    assert (result["device"], result["copy_gb_s"], result["failed"]) == ("byte-model", None, [])
    assert "NOTHING WAS TIMED" in captured.out and {e["what"] for e in result["not_measured"]} >= {"steps", "chunk"}
    assert all(cell.keys() >= CELL_KEYS for cell in result["cells"])
    steps = [cell for cell in result["cells"] if cell["kernel"] == "gdn_step"]
    assert len(steps) == len(list(kb.step_specs()))
    assert all(cell["us"] is None and cell["share_of_copy"] is None for cell in result["cells"])


def test_bytes_of_attention_are_those_of_the_live_cache():
    """Written out: 16 sequences of a 4B model, 256 MiB of keys and values at 4,096 entries, and 512 more for copies."""
    what = attention_spec("qwen3.5-4b", 16, 4)
    rows = 16 * 4 * 16 * 256 * 2
    assert what.bytes(4096) == (256 << 20) + 2 * rows
    assert kb.copying_bytes(what, 4096) == (768 << 20) + 2 * rows
    assert what.bytes(512) == (32 << 20) + 2 * rows  # and not of the capacity


def test_bytes_of_the_designs_are_those_of_their_states():
    """Written out for one shape: 16 sequences of a 4B model, 2 MiB of states each, 4 rows, 3 of them pending."""
    what = spec("qwen3.5-4b", 16, 4)
    state, row = 16 * 32 * 128 * 128 * 4, 16 * (4 * (16 * 128 + 32 * 128) + 2 * 4 * 32)
    out = 16 * 4 * (4 * 16 * 128 + 4 * 32 * 128)
    moved = kb.design_bytes(what, 3)
    assert moved["deferred"] == what.bytes(3) == 2 * state + 7 * row + out
    assert moved["snapshot"] == 5 * state + 4 * row + out
    assert moved["recompute"] == 3 * state + 2 * (4 * row + out)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of our own making: a step takes 1.1 times its bytes at the copy rate, and Mosaic fails."""
    bench = script("bench_kernels")

    def step(what, pending, backend, tile, **_):
        if backend == "mosaic":
            raise RuntimeError("no such instruction")
        us = 1.1e6 * what.bytes(pending) / COPY * (32 / tile.columns) * (3 if backend == "xla" else 1)
        return Timing(us, 0.9 * us, 1.2 * us, 100)

    def attention(what, length, backend, tile, **_):
        us = 1.1e6 * what.bytes(length) / COPY * (3 if backend == "xla" else 1)
        return Timing(us, 0.9 * us, 1.2 * us, 100)

    monkeypatch.setattr(backends.Target, "current", classmethod(lambda cls: H200))
    monkeypatch.setattr(kb, "time_attention", attention)
    monkeypatch.setattr(bench, "copy_rate", lambda **_: COPY)
    monkeypatch.setattr(kb, "time_step", step)
    monkeypatch.setattr(kb, "time_chunk", lambda *_, **__: Timing(900.0, 890.0, 910.0, 9))
    monkeypatch.setattr(kb, "time_snapshot", lambda what, tile, **_: Timing(500.0, 490.0, 510.0, 100))
    monkeypatch.setattr(kb, "time_recompute", lambda what, tile, **_: Timing(300.0, 290.0, 310.0, 100))
    return bench


def test_on_a_gpu_every_cell_is_held_to_the_measured_copy_rate(gpu, capsys):
    parts = ("steps", "attention", "rows", "designs", "fla", "sweep")
    result, captured = ran(gpu, capsys, "--parts", *parts)
    assert (result["device"], result["copy_gb_s"], result["nominal_gb_s"]) == ("NVIDIA H200", 4000.0, 4800.0)
    for cell in result["cells"]:
        assert cell.keys() >= CELL_KEYS
        assert cell["share_of_copy"] == pytest.approx(1 / 1.1) and cell["low"] < cell["us"] < cell["high"]
        assert cell["share_of_nominal"] == pytest.approx(4.0 / 4.8 / 1.1)
    assert [cell["rows"] for cell in result["cells"] if cell["kernel"] == "gdn_step_rows"] == [1, 2, 3, 4, 5, 6, 7, 8]
    beside = next(c for c in result["cells"] if c["spec"] == "qwen3.5-4b n32 k4 p3" and c["pending"] == 3)["against"]
    slow = pytest.approx(3 * 1.1e6 * spec("qwen3.5-4b", 32, 4).bytes(3) / COPY)
    assert beside == {"xla": slow, "snapshot": 500, "recompute": 300}
    assert [entry["tile"] for entry in result["sweep"][:4]] == ["8x1", "16x1", "16x2", "32x4"]
    assert len(result["sweep"]) == 2 * len(kb.SWEEP) + 2 * len(kb.ATTENTION_SWEEP)
    attention = [cell for cell in result["cells"] if cell["kernel"] == "cache_attention"]
    assert len(attention) == len(list(kb.attention_specs()))
    copied = {cell["spec"]: cell["against"]["xla"] / cell["us"] for cell in attention if cell["against"]}
    assert copied == pytest.approx(dict.fromkeys(copied, 3.0)) and "qwen3.5-4b n32 k4 l4096 at 512" in copied
    assert len(result["ratios"]) == 5 and all(1 < r["t4_p0"] < r["t4_p3"] < 1.15 for r in result["ratios"])
    assert "met, worst 0.909" in captured.out and "1.15" in captured.out
    # What failed and what could not be had are both said, and neither stopped the rest.
    assert {entry["why"] for entry in result["failed"]} == {"RuntimeError: no such instruction"}
    assert "FAILED mosaic at qwen3.5-4b n32 k4 p3 pending 3" in captured.err
    said = {entry["what"] for entry in result["not_measured"]}
    assert {"chunk", "flash-linear-attention"} <= said
    alone, _ = ran(gpu, capsys, "--parts", "chunk")
    assert [(c["kernel"], c["us"], c["against"]) for c in alone["cells"]] == [("gdn_chunk", 900.0, {})] * 2
    assert "steps" in {entry["what"] for entry in alone["not_measured"]} and not alone["failed"]
    assert result["targets"]["time over fla's recurrent kernel, T = 1 to 8: at most 1"] == "not measured"


def test_out_of_time_nothing_new_is_begun_and_all_of_it_is_listed(gpu, capsys):
    result, _ = ran(gpu, capsys, "--budget", "-1")
    assert not result["cells"] and not result["failed"] and set(result["targets"].values()) == {"not measured"}
    late = [entry["what"] for entry in result["not_measured"] if "--budget" in entry["why"]]
    rows, chunks, tiles = 8, 2, 2 * len(kb.SWEEP) + 2 * len(kb.ATTENTION_SWEEP)
    assert len(late) == len(list(kb.step_specs())) + len(list(kb.attention_specs())) + rows + chunks + tiles
    result, _ = ran(gpu, capsys, "--check", "--budget", "-1")
    assert not result["checks"] and "out of time after 0 checks" in result["not_checked"][-1]["why"]


def test_targets_can_be_missed(gpu):
    cell = kb.step_cell(spec("qwen3.5-4b", 32, 1), 0, "triton", Tile())
    slow = cell.timed(Timing(cell.bytes / (0.5 * COPY) * 1e6, 1, 1, 1), COPY, None)
    assert slow.share_of_copy == pytest.approx(0.5) and slow.share_of_nominal is None
    ratios = [{"model": "m", "n": 32, "t4_p0": 1.14, "t4_p3": 1.31}, {"model": "m", "n": 1, "t4_p0": 9.0, "t4_p3": 9.0}]
    said = list(gpu.verdicts([slow], ratios).values())
    assert said[:3] == ["MISSED, worst 0.500", "met, worst 1.140", "MISSED, worst 1.310"]


@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
@pytest.mark.parametrize(
    "time_it",
    ["xla", "triton", "snapshot", "recompute", "chunk", "chunk triton", "attention xla", "attention triton"],
)
def test_what_is_timed_runs(time_it, monkeypatch):
    """The very programs that a GPU would time, interpreted and small."""
    monkeypatch.setattr(kb, "_MOST_SETS", 2)
    what = spec("qwen3.5-4b", 2, 2).shrunk()
    options = {"repetitions": 1, "seconds": 0.0, "turns": 1, "unroll": 2}
    chunk = {"repetitions": 1, "seconds": 0.0}
    prompt = dataclasses.replace(kb.chunk_specs()[1].shrunk(), length=40)
    cache, cut = attention_spec("qwen3.5-4b", 2, 2).shrunk(), AttentionTile(entries=16, rows=16)
    timing = {
        "attention xla": lambda: kb.time_attention(cache, 40, "xla", cut, **options),
        "attention triton": lambda: kb.time_attention(cache, 40, "triton", cut, interpret=True, **options),
        "chunk": lambda: kb.time_chunk(prompt, "xla", **chunk),
        "chunk triton": lambda: kb.time_chunk(prompt, "triton", interpret=True, **chunk),
        "xla": lambda: kb.time_step(what, 1, "xla", Tile(), **options),
        "triton": lambda: kb.time_step(what, 1, "triton", Tile(16, 1), interpret=True, **options),
        "snapshot": lambda: kb.time_snapshot(what, Tile(16, 1), interpret=True, **options),
        "recompute": lambda: kb.time_recompute(what, Tile(16, 1), interpret=True, **options),
    }[time_it]()
    assert timing.us > 0 and timing.calls == (1 if "chunk" in time_it else 2)


def test_attention_is_checked_too():
    """Every kind of scores in bfloat16, as on a device but small, and the far end of a large pool."""
    what = attention_spec("qwen3.5-4b", 6, 3)
    for scores in kernel_check.SCORES:
        assert kernel_check.check_attention(what, "xla", scores, False, True, None).ok
    large = dataclasses.replace(what.shrunk(), slots=300)
    assert kernel_check.check_attention(large, "xla", "mild", False, False, None).ok


def test_a_wrong_kernel_is_found_and_a_broken_one_does_not_stop_the_check(monkeypatch):
    """A step that forgets a pending row, one that raises; and the right one passes."""
    real, what = kernel_check.gdn_step, spec("qwen3.5-4b", 6, 3)
    once = lambda: kernel_check.check_step(what, "xla", "mild", False, True, None)
    assert once().ok

    def forgets(*x, **options):
        *rest, pending, rows = x
        return real(*rest, jnp.maximum(0, pending - 1), rows, **options)

    def raises(*_, **__):
        raise RuntimeError("ptxas died\n of something")

    monkeypatch.setattr(kernel_check, "gdn_step", forgets)
    assert not once().ok and once().rel_err > 1e-3
    monkeypatch.setattr(kernel_check, "gdn_step", raises)
    assert not once().ok and once().error == "RuntimeError: ptxas died of something"


@pytest.mark.parametrize("touched", [None, 0, 20])
def test_a_large_pool_is_checked_at_its_far_end_and_nowhere_else_changed(touched):
    what = dataclasses.replace(spec("qwen3.5-4b", 6, 2).shrunk(), slots=9)

    def step(*x):
        out, pool = gdn_step(*x)
        return out, pool if touched is None else pool.at[touched, 1, 2, 3].set(1.0)

    error = check.error(kernel_check.far_slots(step, 40), what, check.inputs(what, 0, padding=2))
    assert (error <= 2e-6) == (touched is None)


def test_step_costs_with_random_weights(monkeypatch, capsys):
    """`--random-init` from the command line to the JSON, at a size of our own under a preset's name."""
    tiny = dataclasses.replace(TINY, vocab_size=512, tie_embeddings=True)
    monkeypatch.setitem(presets.PRESETS, "qwen3.5-4b", tiny)
    args = "--random-init qwen3.5-4b --layers 1 --vocab 64 --forced-acceptance 0.9 --policies fixed1 --concurrency 1"
    more = "--repetitions 3 --max-new-tokens 60 --prompt-tokens 4 --json"
    result, captured = ran(script("bench_decode"), capsys, *args.split(), *more.split())
    assert len(captured.out.splitlines()) == 1 and "x plain" in captured.err and "random in float32" in captured.err
    assert (result["layers"], result["vocab"], result["dtype"], result["platform"]) == (1, 64, "float32", "cpu")
    plain, fixed = result["cells"]
    assert (plain["policy"], fixed["policy"], fixed["n"], fixed["k"]) == ("plain", "fixed1", 1, 2)
    assert fixed["tok_step_asked"] == 1.9 and fixed["p1"] == pytest.approx(0.9, abs=0.2)
    assert fixed["launches"] > plain["launches"] > 10
    assert min(fixed[name] for name in ("step_ms", "device_ms", "host_ms", "wait_ms", "dispatch_ms")) > 0
    with pytest.raises(SystemExit):
        script("bench_decode").parse(["--random-init", "qwen3.5-5b"])
    assert "qwen3.5-4b" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bench_kernels", "bench_decode"])
def test_device_scripts_need_the_core_dependencies_only(name):
    """They start where nothing else is installed (the GPU machine): no command line library, no plots, no torch."""
    absent = ("tyro", "matplotlib", "grain", "pytest", "torch", "triton", "fla", "transformers")
    code = f"import sys, runpy; sys.modules.update(dict.fromkeys({absent})); sys.argv = ['x', '--help']; "
    code += f"runpy.run_path('scripts/{name}.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_device_check_keeps_every_failure_and_goes_on(tmp_path):
    """With an interpreter that fails all parts but one: each is recorded with its output, and the status says so."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n*json.tool*) exec "$REAL" "$@" ;;\n*--check*) echo wrong >&2; exit 1 ;;\n'
        '*bench_kernels*) echo "no json"; exit 0 ;;\n*) echo \'{"fine": 1}\' ;;\nesac\n'
    )
    python.chmod(0o755)
    results = tmp_path / "results"
    env = {**os.environ, "PYTHON": str(python), "REAL": sys.executable}
    command = [str(ROOT / "scripts" / "device_check.sh"), "--dry-run", str(results)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    summary = json.loads((results / "summary.json").read_text())
    states = {name: state.split(",")[0] for name, state in summary["parts"].items()}
    assert states == {"device": "ok", "check": "exit status 1", "kernels": "no JSON in its last line", "decode": "ok"}
    assert done.returncode == 1 and summary["failed"] and summary["dry_run"]
    assert json.loads((results / "decode.json").read_text()) == {"fine": 1}
    assert (results / "check.err").read_text() == "wrong\n" and not (results / "kernels.json").exists()
    without = subprocess.run(command[:1], env=env, capture_output=True, text=True, timeout=60)
    assert without.returncode == 2 and "RESULTS" in without.stderr


def test_device_check_leaves_itself_under_eight_minutes():
    text = (ROOT / "scripts" / "device_check.sh").read_text()
    on_a_gpu = text.split("else\n    # A CPU would")[1].split("\nfi\n")[0]
    limits = [int(line.split()[2]) for line in on_a_gpu.splitlines() if line.strip().startswith("part ")]
    assert len(limits) == 4 and sum(limits) < 480
