"""The scripts end to end on a tiny random model, offline: what they print last is JSON, and it is true."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_models
from flax import nnx
from load_script import script

from atlas_jax.lab import bench as lab
from atlas_jax.model.modules import Model
from atlas_jax.train import corpora, tools_text
from atlas_jax.train.corpora import CorpusError
from atlas_jax.weights.checkpoint import save_model

ROOT = Path(__file__).resolve().parents[2]
TINY = dataclasses.replace(tiny_models.TINY, vocab_size=2048, tie_embeddings=True, eos_ids=(0, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model directory: random weights, large enough that picks vary, and the real tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(0)
    params = Model(TINY, rngs=nnx.Rngs(0)).params()

    def noisy(x):
        return np.asarray(x) + rng.standard_normal(x.shape).astype(np.float32) * (0.3 if x.ndim > 1 else 0.1)

    save_model(directory, jax.tree.map(noisy, params), TINY)
    shutil.copy(ROOT / "checkpoints" / "tokenizer.json", directory / "tokenizer.json")
    return directory


@pytest.fixture
def offline(monkeypatch):
    def fetch(*_):
        raise CorpusError("no network, says the test")

    monkeypatch.setattr(corpora, "fetch", fetch)
    monkeypatch.setattr(tools_text, "fetch", fetch)


def last_line(capsys):
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]), captured


@pytest.mark.slow
def test_bench_decode_prints_one_line_of_json(model, offline, capsys, monkeypatch):
    bench = script("bench_decode")
    seen = {}

    def summarize(regime, concurrency, runs, gap, warmup_s):
        seen.update(runs=runs, gap=gap)
        return real(regime, concurrency, runs, gap, warmup_s)

    real = lab.summarize
    monkeypatch.setattr(lab, "summarize", summarize)
    config = bench.Config(model, ("prose",), (2,), ("fixed1",), prompts=3, repetitions=2, max_new_tokens=10, json=True)
    result = bench.main(config)
    printed, captured = last_line(capsys)
    assert printed == result and len(captured.out.splitlines()) == 1
    assert "no network, says the test" in " ".join(captured.err.split())
    assert [cell["policy"] for cell in result["cells"]] == ["plain", "fixed1"]
    for cell in result["cells"]:
        assert cell["equal"] and cell["tok_s"] > 0 and cell["ratio_to_plain"] > 0
        assert (cell["compiles_after_warmup"], cell["concurrency"], cell["excused"]) == (0, 2, 0)
    assert result["cells"][0]["p1"] is None and result["cells"][1]["p1"] is not None

    # What would settle a divergence agrees with what the engine picked, and with nothing else.
    answer = next(run for run in seen["runs"] if run.repetition == 0).answers[1]
    gaps = [seen["gap"](1, at, answer[at]) for at in range(len(answer))]
    assert max(gaps) < lab.TIE_BOUND
    assert seen["gap"](1, 4, (answer[4] + 1) % TINY.vocab_size) > lab.TIE_BOUND


def test_demo_works_offline_and_says_so(model, offline, capsys, tmp_path):
    demo = script("demo")
    config = demo.Config(
        model, tmp_path / "out", ("tools",), (1,), ("plain", "fixed1"), prompts=2, repetitions=1, max_new_tokens=8
    )
    result = demo.main(config)
    printed, captured = last_line(capsys)
    assert printed == result == json.loads((tmp_path / "out" / "demo.json").read_text())
    assert "OFFLINE" in captured.out and "The same tokens." in captured.out and "x plain" in captured.out
    assert result["prompts"] == "own" and all(cell["equal"] for cell in result["cells"])
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000


def test_generate_streams_what_it_reports_and_survives_an_interruption(model, capsys, monkeypatch, tmp_path):
    generate = script("generate")
    config = generate.Config(
        "It rained upon the", model=model, policy="fixed1", max_new_tokens=9, temperature=0.7, seed=3
    )
    plain_text, captured = last_line(capsys) if generate.main(config) else None
    assert plain_text["tokens"] == 9 and plain_text["finished"] == "length"
    assert plain_text["steps"] <= 9 and captured.out.startswith("It rained upon the")

    steps, real = [], generate.Engine.step

    def step(engine):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real(engine)

    monkeypatch.setattr(generate.Engine, "step", step)
    (tmp_path / "prompt.txt").write_text("It rained upon the")
    config = dataclasses.replace(config, prompt=None, file=tmp_path / "prompt.txt", show_drafts=True)
    result = generate.main(config)
    printed, captured = last_line(capsys)
    assert printed == result and result["finished"] == "interrupted" and 3 <= result["tokens"] <= 6
    assert plain_text["text"].startswith(result["text"].rstrip("\ufffd"))
    assert "accepted draft" in captured.out and "\x1b[" in captured.out

    with pytest.raises(SystemExit, match="exactly one"):
        generate.main(generate.Config(model=model))
