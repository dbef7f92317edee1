"""What of a text is supervised, in every shape of line; chat templates; the draft vocabulary; packing; variants."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from atlas_jax.train.batches import pack
from atlas_jax.train.corpora import Document
from atlas_jax.train.texts import ChatTemplate, Text, frequent_ids, read_jsonl
from atlas_jax.train.variants import Variants

TEMPLATE = """{%- for m in messages %}
{{- '<s>' + m.role + ' ' + m.content + '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<s>assistant ' }}{%- endif %}"""
CHAT = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e f"},
]


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character."""
    made = Tokenizer(models.WordLevel({chr(i): i for i in range(128)} | {"?": 63}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return made


def lines(tmp_path, *rows):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def supervised(text):
    return "".join(chr(token) for token, weight in zip(text.tokens, text.weights, strict=True) if weight)


def test_every_shape_of_line_is_read_and_masked(tmp_path, tokenizer):
    path = lines(
        tmp_path,
        {"settings": {"model": "x"}},
        {"prompt": [65, 66], "reply": [67, 68], "regime": "tools"},
        {"prompt": "ab", "reply": "cd"},
        {"text": "xyz"},
        {"messages": CHAT},
    )
    ids, words, running, chat = read_jsonl(path, 128, tokenizer, ChatTemplate(TEMPLATE), end=(10,))
    assert (supervised(ids), ids.regime, ids.first) == ("CD", "tools", 2)
    assert (supervised(words), words.first) == ("cd", 2)
    assert (supervised(running), running.first) == ("xyz\n", 0)
    assert supervised(chat) == "c</s>e f</s>"  # what the assistant says with its end mark, and nothing else
    assert "".join(map(chr, chat.tokens)) == ChatTemplate(TEMPLATE).render(CHAT)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": [1], "reply": [128]}, "outside the vocabulary"),
        ({"prompt": "a", "answer": "b"}, "neither messages"),
        ({"messages": CHAT}, "chat template"),
        ({"prompt": [1], "reply": "text"}, "tokenizer"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, what):
    with pytest.raises(ValueError, match=rf"line 2: .*{what}"):
        read_jsonl(lines(tmp_path, {"prompt": [1], "reply": [2]}, row), 128)


def test_a_template_whose_turns_cannot_be_told_is_refused():
    """Some drop the thoughts of earlier turns: then the text of a turn depends on what follows it."""
    forgetful = TEMPLATE.replace("m.content + ", "(m.content if loop.last else '') + ")
    with pytest.raises(ValueError, match="renders turn 2 differently"):
        ChatTemplate(forgetful).pieces(CHAT)


def test_the_draft_vocabulary_is_the_most_frequent_supervised_tokens_and_the_special_ones():
    text = Text(np.array([7, 7, 7, 5, 5, 3, 9, 9, 9, 9], np.int32), np.float32([1, 1, 1, 1, 1, 1, 0, 0, 0, 0]))
    found = frequent_ids([text], 5, 12, always=(0, 11))
    np.testing.assert_array_equal(found, [0, 3, 5, 7, 11])  # 9 is never supervised
    assert found.dtype == np.int32
    np.testing.assert_array_equal(frequent_ids([text], 6, 12, always=(0, 11)), [0, 1, 3, 5, 7, 11])  # ties: smaller ids
    for size in (2, 13):
        with pytest.raises(ValueError, match="draft vocabulary"):
            frequent_ids([text], size, 12, always=(0, 11))


def test_packing_keeps_every_token_once_and_texts_whole():
    lengths = [*np.random.default_rng(0).integers(1, 40, 300).tolist(), 150]
    rows = pack(lengths, 64)
    assert all(sum(stop - start for _, start, stop in row) <= 64 for row in rows)
    pieces = sorted(piece for row in rows for piece in row)
    assert pieces[:300] == [(i, 0, length) for i, length in enumerate(lengths[:300])]
    assert pieces[300:] == [(300, 0, 64), (300, 64, 128), (300, 128, 150)]
    assert sum(lengths) > 0.9 * 64 * len(rows)


def test_variants_exchange_the_same_word_for_the_same_everywhere():
    text = (
        '<|im_start|>system\n<tools>\n{"name": "find_boat", "description": "Finds a boat.", "parameters": {"type": '
        '"object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nWhich boat leaves Dover at 1745? I am in the harbour of Dover.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    reply = "<tool_call>\nx\n</tool_call><|im_end|>"
    document = Document("p/7", text + reply + "\n", ((len(text), len(text) + len(reply)),))
    other = Document("p/8", '{"name": "paint_wall", "required": ["width"]} Ask Anna.', ())
    variants = Variants([document, other])
    same = variants.prompt(document, 0)
    assert same.text == text + "<tool_call>" and same.replies == ((len(text), len(text) + 11),)
    found = variants.prompt(document, 3, share=1.0)
    assert found == variants.prompt(document, 3, share=1.0) and found != variants.prompt(document, 4, share=1.0)
    assert found.text.count("<|im_start|>") == 3 and '"type": "object"' in found.text and "1745" not in found.text
    name = found.text.partition('"required": ["')[2].partition('"')[0]
    assert f'"{name}": {{"type"' in found.text and f"in the {name} of" in found.text
    assert variants.prompt(other, 1) is None
