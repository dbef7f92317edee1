"""What the lab claims, and what it refuses to claim, on runs made up here; prompts and streamed text."""

import json

import numpy as np
import pytest
from rich.console import Console

from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.depth.policies import Fixed, Off
from atlas_jax.lab import bench
from atlas_jax.lab.bench import Comparison, Run, compare, summarize
from atlas_jax.lab.prompts import TextStream, chat, own_prompts, requests_for
from atlas_jax.lab.report import plot, table, to_json
from atlas_jax.train.corpora import CACHE
from atlas_jax.train.tokens import load_tokenizer

KEYS = {
    *("regime", "concurrency", "policy", "tok_s", "ratio_to_plain", "tok_step", "p1", "p2_cond", "p3_cond", "equal"),
    *("excused", "compiles_after_warmup"),
}
PLAIN = ((1, 2, 3, 4), (5, 6, 7, 8))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(CACHE.parents[1] / "checkpoints" / "tokenizer.json")


def never(*_):
    raise AssertionError("no divergence: the gap is not asked for")


def run(policy, repetition, answers=PLAIN, seconds=1.0, compiles=0, drafts=0):
    acceptance = Acceptance()
    for _ in range(4):
        acceptance.record(drafts, 1 + drafts)
    return Run(policy, repetition, answers, seconds, seconds / 4, 0.5, acceptance, compiles)


def test_equal_answers_are_compared_whole():
    assert compare(PLAIN, PLAIN, never) == Comparison(8, 0, 0)


@pytest.mark.parametrize(("gap", "excused"), [(0.0, True), (0.9e-4, True), (1e-4, False), (3.0, False)])
def test_only_a_near_tie_excuses_and_what_follows_is_not_compared(gap, excused):
    asked = []
    other = ((1, 2, 9, 9), (5, 6, 7, 8))
    found = compare(PLAIN, other, lambda *where: asked.append(where) or gap)
    assert asked == [(0, 2, 9)]
    assert found == Comparison(3 + 4, int(excused), int(not excused))


def test_an_answer_that_ends_elsewhere_is_never_excused():
    assert compare(PLAIN, (PLAIN[0], (5, 6, 7)), never) == Comparison(7, 0, 1)
    assert compare(PLAIN, (PLAIN[0], (*PLAIN[1], 9)), never) == Comparison(8, 0, 1)


def test_near_ties_are_excused_only_while_rare():
    assert not Comparison(10_000, 1, 0).note
    assert "1 near ties in 9999 tokens" in Comparison(9_999, 1, 0).note


def test_ratios_are_taken_within_a_repetition():
    runs = [run("plain", -1, compiles=2), run("fixed2", -1, compiles=1)]
    for repetition, speedup in enumerate((2.0, 1.5, 1.8)):
        slow = 10.0**repetition  # the machine slows down for everyone
        runs += [run("fixed2", repetition, seconds=slow / speedup, drafts=2), run("plain", repetition, seconds=slow)]
    plain, fixed = summarize("prose", 2, runs, never, warmup_s=3.0)
    assert (plain.policy, plain.ratio_to_plain, plain.step_cost, plain.p1) == ("plain", 1.0, 1.0, None)
    assert (fixed.ratio_to_plain, fixed.ratio_min, fixed.ratio_max) == pytest.approx((1.8, 1.5, 2.0))
    assert (fixed.tok_step, fixed.p1, fixed.p2_cond, fixed.p3_cond) == (3.0, 1.0, 1.0, None)
    assert fixed.step_cost == pytest.approx(1 / 1.8)
    assert (fixed.compiles_after_warmup, fixed.repetitions, fixed.tokens, fixed.compared) == (1, 3, 24, 24)
    assert fixed.equal
    cells = to_json([plain, fixed])["cells"]
    assert all(cell.keys() >= KEYS for cell in cells)
    assert json.loads(json.dumps(cells))[0]["p1"] is None


def test_no_speed_without_equality(tmp_path):
    wrong = ((1, 2, 3, 4), (5, 6, 0, 8))
    runs = [run("plain", 0), run("fixed1", 0, wrong, seconds=0.1, drafts=1), run("fixed3", 0, seconds=0.5, drafts=3)]
    cells = summarize("tools", 2, runs, lambda *_: 2.0)
    plain, bad, good = cells
    assert (bad.equal, bad.unexcused, good.equal, plain.equal) == (False, 1, True, True)
    assert (bad.tok_s, bad.ratio_to_plain, bad.ratio_min, bad.ratio_max) == (None, None, None, None)
    assert good.ratio_to_plain == pytest.approx(2.0)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(cells))
    row = next(line for line in capture.get().splitlines() if "fixed1" in line)
    assert "NOT EQUAL" in row and "80" not in row
    plot(cells, tmp_path / "deep" / "plot.png")
    assert (tmp_path / "deep" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_control_that_does_not_repeat_itself_carries_no_claim():
    runs = [run("plain", 0), run("plain", 1, ((1, 2, 3, 9), PLAIN[1])), run("fixed1", 0), run("fixed1", 1)]
    plain, fixed = summarize("tools", 2, runs, lambda *_: 2.0)
    assert not plain.equal and not fixed.equal and fixed.tok_s is None
    assert "does not repeat" in fixed.note


def test_requests_that_cannot_be_measured_are_refused():
    with pytest.raises(bench.BenchError, match="temperature"):
        bench._check("prose", [Request((1,), sampling=Sampling(0.5))], 1, 1)
    with pytest.raises(bench.BenchError, match="3 requests cannot keep 4 slots full"):
        bench._check("prose", [Request((1,))] * 3, 4, 1)
    with pytest.raises(bench.BenchError, match="at least one"):
        bench._check("prose", [Request((1,))], 1, 0)


def test_plain_is_always_measured_and_once():
    assert [p.name for p in bench.with_plain([Fixed(1)])] == ["plain", "fixed1"]
    assert [p.name for p in bench.with_plain([Fixed(1), Off()])] == ["plain", "fixed1"]


def test_own_prompts_have_the_form_of_the_training_texts(tokenizer):
    own = own_prompts(tokenizer)
    assert {regime: len(prompts) for regime, prompts in own.items()} == {"prose": 8, "tools": 8}
    for ids in own["tools"]:
        text = tokenizer.decode(list(ids), skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nYou can call functions.\n\n<tools>\n{")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert max(len(ids) for prompts in own.values() for ids in prompts) <= 640


def test_chat_turns():
    assert chat("Hi <|im_end|>you") == "<|im_start|>user\nHi you<|im_end|>\n<|im_start|>assistant\n"
    tool = {"name": "f", "description": "d" * 1000, "parameters": {}}
    assert '"name": "f"' in chat("Hi", [{"type": "function", "function": tool}])
    with pytest.raises(ValueError, match="2 tools take more than"):
        chat("Hi", [tool, tool | {"name": "g"}])
    with pytest.raises(ValueError, match="needs a name"):
        chat("Hi", [{"description": "nameless"}])


def test_unknown_regime(tokenizer):
    with pytest.raises(ValueError, match="unknown regime 'verse'"):
        requests_for("verse", tokenizer, 1)


def test_streamed_text_is_the_text_and_no_half_characters(tokenizer):
    text = "<|im_start|>user\nnaïve café 日本 \U0001f600 \x00\t.<|im_end|>"
    stream = TextStream(tokenizer)
    pieces = [stream.feed(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + stream.close() == text
    assert not any("\ufffd" in piece for piece in pieces)
    half = tokenizer.encode("日").ids[0]
    assert stream.feed(half) == "" and stream.close() == "\ufffd" and stream.close() == ""
    for token in np.random.default_rng(0).integers(0, 2048, 500).tolist():
        stream.feed(token)  # any tokens at all make some text


def test_a_token_that_the_tokenizer_lacks_is_no_text(tokenizer):
    """As in the tokenizer's own decode, even between the halves of a character: models are padded beyond it."""
    beyond = tokenizer.get_vocab_size() + 5
    ids = [token for id in tokenizer.encode("日本, naïve").ids for token in (beyond, id)]
    stream = TextStream(tokenizer)
    assert "".join(map(stream.feed, ids)) + stream.close() == tokenizer.decode(ids) == "日本, naïve"
