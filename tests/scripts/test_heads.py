"""The head scripts on a tiny random model, offline: they resume, keep the base, refuse what is wrong, and add up."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from load_script import script
from scripts.test_scripts import last_line, model, offline  # noqa: F401 (fixtures)

from atlas_jax import devices
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.train import heads
from atlas_jax.weights.checkpoint import load_model


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Prompts and replies as self_distill.py writes them."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rng = np.random.default_rng(0)
    draw = lambda length: rng.integers(20, 2048, length).tolist()
    rows = [{"prompt": draw(9), "reply": draw(20), "regime": "tools"} for _ in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"settings": {}}, *rows]))
    return path


@pytest.mark.slow
def test_a_head_is_trained_kept_and_taken_up_again(model, offline, answers, tmp_path, capsys, monkeypatch):  # noqa: F811
    """Judged by counts that are handed to it: that a replay and the loop count alike is another test's business."""
    train_head = script("train_head")
    counts = iter(range(1, 9))

    def judged(*_, **__):
        steps = next(counts)
        return {regime: Acceptance(Counter({(3, 1): steps}), 2 * steps) for regime in ("prose", "tools")}

    monkeypatch.setattr(heads, "acceptance", judged)
    before = (model / "model.safetensors").read_bytes()
    options = dict(model=model, run=tmp_path, length=64, batch=2, chains=8, depth=1, warmup=2, save_every=3, muon=False)
    options |= dict(log_every=1, held_out=1, skip_held_out=0, slots=1, draft_vocab=300, json=True)
    config = lambda **more: train_head.Config(data=(answers,), **(options | more))
    train_head.main(config(steps=3))
    result, captured = last_line(capsys)
    assert captured.out.count("\n") == 1 and result["steps"] == 3
    assert set(result) >= {"pooled", "prose", "tools"} and result["pooled"]["tok_step"] >= 1
    cfg, params = load_model(model)
    first = heads.load_head(tmp_path / "head", params, cfg)["mtp"]
    assert len(first["draft_ids"]) == 300 and set(range(12)) <= set(first["draft_ids"].tolist())  # the special ones

    train_head.main(config(steps=6))
    assert "resumed" in last_line(capsys)[1].err
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and all("live_tools" in row for row in rows)
    second = heads.load_head(tmp_path / "head", params, cfg)["mtp"]
    np.testing.assert_array_equal(first["draft_ids"], second["draft_ids"])
    assert (first["fc"] != second["fc"]).any()
    assert (model / "model.safetensors").read_bytes() == before

    with pytest.raises(SystemExit, match="drafts 300 tokens, not 200"):  # the map stays when a head is taken up
        train_head.main(config(run=tmp_path / "other", draft_vocab=200, init=str(tmp_path / "head")))


def test_eval_head_adds_up(model, offline, tmp_path, capsys, monkeypatch):  # noqa: F811
    """Lift and share from counts that are handed to it, one head in place of the other."""
    eval_head = script("eval_head")
    cfg, params = load_model(model)
    heads.save_head(tmp_path / "single", params, cfg, {"steps": 1})
    logs = iter([{0: 1, 3: 1}, {0: 3, 1: 1}, {3: 1}])  # accepted of 3 offered: default, single step, bound

    def counted(*_, **__):
        histogram = next(logs)
        tokens = sum((a + 1) * n for a, n in histogram.items())
        log = Acceptance(Counter({(3, a): n for a, n in histogram.items()}), tokens)
        return {"prose 0": log, "tools 0": log}

    monkeypatch.setattr(heads, "acceptance", counted)
    monkeypatch.setattr(eval_head, "bound", counted)
    eval_head.main(eval_head.Config(model=model, single_step=tmp_path / "single", json=True, prompts=1))
    result, captured = last_line(capsys)
    assert captured.out.count("\n") == 1 and result["prompts"] == "own"
    fields = {"u1", "u2", "u3", "p1", "p2_cond", "p3_cond", "mean_accepted", "tok_step"}
    for regime in ("prose", "tools", "pooled"):
        assert all(fields <= set(result["heads"][name][regime]) for name in ("default", "single_step"))
        assert result["heads"]["default"][regime]["mean_accepted"] == 1.5
        assert result["lift_over_single_step"][regime] == pytest.approx(1.5 / 0.25 - 1)
        assert result["share_of_bound"][regime] == pytest.approx((1.5 - 0.25) / (3 - 0.25), abs=1e-4)


def test_answers_are_read_again_and_a_torn_line_is_dropped(tmp_path):
    self_distill = script("self_distill")
    path, settings = tmp_path / "answers.jsonl", {"model": "x", "temperature": 0.0, "seed": 0}
    assert self_distill.read(path, settings) == set()
    with path.open("a") as file:
        file.write(json.dumps({"id": "a"}) + "\n" + json.dumps({"id": "b"}) + "\n" + '{"id": "c", "rep')
    assert self_distill.read(path, settings) == {"a", "b"}
    assert path.read_text().endswith('"b"}\n')
    with pytest.raises(SystemExit, match="holds answers for"):
        self_distill.read(path, settings | {"temperature": 0.5})


def test_self_distilled_answers_are_the_models_own(model, tmp_path, capsys, monkeypatch):  # noqa: F811
    """Through the engine, two at a time; run again, nothing is left to do."""
    self_distill = script("self_distill")
    asked = {f"p/{i}": ("tools", f"p/{i}", [5, 6 + i, 7]) for i in range(3)}
    monkeypatch.setattr(self_distill, "training_prompts", lambda *_: asked.items())
    monkeypatch.setitem(self_distill.MAX_NEW_TOKENS, "tools", 5)
    options = dict(slots=2, context=64, policy="plain", cpu_threads=None)
    config = self_distill.Config(model=model, out=tmp_path / "a.jsonl", **options)
    self_distill.main(config)
    assert last_line(capsys)[0]["new"] == 3
    _, *rows = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert {row["id"] for row in rows} == set(asked) and all(1 <= len(row["reply"]) <= 5 for row in rows)
    self_distill.main(config)
    assert last_line(capsys)[0]["new"] == 0

    # In two parts and merged: the same answers, in the order of the prompts.
    parts = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    for i, path in enumerate(parts):
        self_distill.main(dataclasses.replace(config, out=path, part=f"{i}/2"))
    merged = dataclasses.replace(config, out=tmp_path / "b.jsonl", merge=tuple(reversed(parts)))
    self_distill.main(merged)
    assert last_line(capsys)[0]["answers"] == 3
    _, *same = map(json.loads, merged.out.read_text().splitlines())
    assert [row["id"] for row in same] == list(asked) and same == sorted(rows, key=lambda row: row["id"])
    for files, why in ((parts[:1], "1 prompts have no answer, p/1"), ([*parts, tmp_path / "2.jsonl"], "no such file")):
        with pytest.raises(SystemExit, match=why):
            self_distill.main(dataclasses.replace(merged, out=tmp_path / "c.jsonl", merge=tuple(files)))
    other = json.loads(parts[0].read_text().splitlines()[1])
    parts[1].write_text(parts[1].read_text() + json.dumps(other | {"reply": [1]}) + "\n")
    with pytest.raises(SystemExit, match="differently from another part"):
        self_distill.main(dataclasses.replace(merged, out=tmp_path / "c.jsonl"))
    assert not (tmp_path / "c.jsonl").exists()


@pytest.mark.parametrize("text", ("2/2", "1", "a/b", "-1/2"))
def test_a_part_of_a_job_says_what_it_wants(text):
    assert [*devices.share("abcde", "1/2"), *devices.share("abcde", "0/2")] == list("bdace")
    with pytest.raises(devices.ProcessError, match="is not i/n with i from 0"):
        devices.share("abcde", text)


def test_a_best_head_gives_way_to_a_better_one_only(model, tmp_path):  # noqa: F811
    keep_best = script("train_head").keep_best
    cfg, params = load_model(model)
    folder = Path(tmp_path / "tools")
    log = lambda accepted: Acceptance(Counter({(3, accepted): 2}), 2 * (accepted + 1))
    for accepted, kept in ((1, 1), (0, 1), (2, 2), (2, 2)):
        keep_best(folder, params, cfg, log(accepted))
        assert json.loads((folder / "head.json").read_text())["mean_accepted"] == kept


def test_a_run_of_another_base_is_not_taken_up(tmp_path):
    check_base = script("train_head").check_base
    check_base(tmp_path / "new", "a")
    (tmp_path / "settings.json").write_text(json.dumps({"base": "a", "seed": 0}))
    check_base(tmp_path, "a")
    with pytest.raises(heads.HeadError, match="trains a head of the base a, and this one is b: name another --run"):
        check_base(tmp_path, "b")
