"""Supervised texts for heads: answers of the base itself, JSONL in the usual shapes, chat templates, plain text.

Every line of a JSONL file is one of
  `{"prompt": ids, "reply": ids}`      tokens, as `scripts/self_distill.py` writes them
  `{"prompt": "...", "reply": "..."}`  text
  `{"messages": [{"role", "content"}, ...], "tools": [...]}`  a chat, for `ChatTemplate`
  `{"text": "..."}`                    running text, all of it supervised
with an optional `"regime"`. A line `{"settings": ...}` is skipped.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas_jax.train.corpora import load_prose
from atlas_jax.train.tokens import TokenSet, tokenize
from atlas_jax.train.tools_text import load_tools
from atlas_jax.weights.tokenizer import render_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Tokens int32 `[T]`, the weight of each as a target float32 `[T]`, and `first`: the token where an answer begins.

    No chain of drafts starts before `first - 1`: serving drafts only behind a token that it emitted.
    """

    tokens: np.ndarray
    weights: np.ndarray
    regime: str = "text"
    first: int = 0

    @classmethod
    def answer(cls, prompt: Sequence[int], reply: Sequence[int], regime: str) -> Text:
        """A reply behind its prompt; the reply is supervised."""
        tokens = np.array([*prompt, *reply], np.int32)
        return cls(tokens, (np.arange(len(tokens)) >= len(prompt)).astype(np.float32), regime, len(prompt))


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template, and the mask that goes with it: what the assistant says, its end mark included.

    The mask is found by rendering: a conversation up to an assistant's turn, with the prompt for one, must begin the
    rendering that includes the turn. Nothing about the template's own marks is assumed.
    """

    source: str

    @classmethod
    def load(cls, path: Path) -> ChatTemplate:
        """From a `.jinja` file, or the `chat_template` of a `tokenizer_config.json`."""
        text = path.read_text()
        if path.suffix != ".json":
            return cls(text)
        template = json.loads(text).get("chat_template")
        if not isinstance(template, str):
            raise ValueError(f"{path} holds no chat_template")
        return cls(template)

    def render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False, **extra: Any) -> str:
        """The conversation as text; with `prompt`, up to where the assistant speaks next."""
        return render_template(self.source, {"messages": list(messages), "add_generation_prompt": prompt, **extra})

    def pieces(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> list[tuple[str, bool]]:
        """`(text, whether the assistant says it)`, in order. `ValueError` for a template whose turns can't be told."""
        whole, position, found = self.render(messages, **extra), 0, list[tuple[str, bool]]()
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.render(messages[:i], True, **extra), self.render(messages[: i + 1], **extra)
            if not (whole.startswith(after.rstrip()) and after.startswith(before)):
                raise ValueError(
                    f"the chat template renders turn {i + 1} differently when more turns follow, so what the assistant "
                    "says can't be told from the rest; give texts with {'prompt', 'reply'} instead"
                )
            after = after if whole.startswith(after) else after.rstrip()
            found += [(whole[position : len(before)], False), (whole[len(before) : len(after)], True)]
            position = len(after)
        return [*found, (whole[position:], False)]


def read_jsonl(
    path: Path,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
    end: Sequence[int] = (),
) -> list[Text]:
    """The texts of a file. Raises `ValueError` that names the line for one of another shape, or of other tokens.

    `end` closes running text. Weights are 1 on what is supervised and 0 elsewhere.
    """
    texts = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                if "settings" not in row:
                    texts.append(_text(row, vocab_size, tokenizer, template, end))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return texts


def _text(
    row: dict[str, Any],
    vocab_size: int,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    end: Sequence[int],
) -> Text:
    def ids(piece: str | Sequence[int]) -> list[int]:
        if not isinstance(piece, str):
            return list(piece)
        if tokenizer is None:
            raise ValueError("text needs a tokenizer")
        return tokenizer.encode(piece, add_special_tokens=False).ids

    if "messages" in row:
        if template is None:
            raise ValueError("a conversation needs a chat template")
        extra = {"tools": row["tools"]} if "tools" in row else {}
        pieces = [(ids(text), said) for text, said in template.pieces(row["messages"], **extra)]
    elif "reply" in row:
        pieces = [(ids(row["prompt"]), False), (ids(row["reply"]), True)]
    elif "text" in row:
        pieces = [([*ids(row["text"]), *end], True)]
    else:
        raise ValueError(f"neither messages, reply nor text among {sorted(row)}")
    tokens = np.array([token for piece, _ in pieces for token in piece], np.int32)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"a token id outside the vocabulary of {vocab_size}: another tokenizer wrote it")
    weights = np.repeat(np.array([said for _, said in pieces], np.float32), [len(piece) for piece, _ in pieces])
    first = int(np.argmax(weights > 0)) if weights.any() else len(tokens)
    return Text(tokens, weights, row.get("regime", "text"), first)


def from_token_set(tokens: TokenSet, weight: float = 1.0, reply_weight: float = 1.0) -> list[Text]:
    """The documents of a corpus; replies may weigh more (or, with `weight` 0, all)."""
    weights = np.where(tokens.reply, np.float32(reply_weight), np.float32(weight))
    bounds = zip(tokens.starts, tokens.starts + tokens.lengths, strict=True)
    return [Text(tokens.tokens[a:b], weights[a:b], tokens.regime) for a, b in bounds]


def corpus_texts(tokenizer: Tokenizer, prose_tokens: int = 600_000) -> list[Text]:
    """The shipped model's training texts, as its base saw them: replies weigh 3, and of each work its beginning."""
    tools = from_token_set(tokenize(load_tools(), tokenizer), 1.0, 3.0)
    prose = from_token_set(tokenize(load_prose(), tokenizer))
    share = min(1.0, prose_tokens / sum(len(text.tokens) for text in prose))
    cut = lambda array: array[: int(len(array) * share)]
    return [*tools, *(Text(cut(text.tokens), cut(text.weights), text.regime) for text in prose)]


def frequent_ids(texts: Iterable[Text], size: int, vocab_size: int, always: Sequence[int] = ()) -> np.ndarray:
    """The draft vocabulary: `always` (control and special tokens), then the most frequent supervised ids; sorted int32.

    Ties go to the smaller id, so the map is a function of the texts. Raises `ValueError` if `size` can't hold `always`
    or exceeds the vocabulary.
    """
    if not len(set(always)) < size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size}: it must exceed the {len(set(always))} tokens that are always in, and not "
            f"the vocabulary of {vocab_size}"
        )
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.tokens[text.weights > 0].tolist())
    rest = sorted(set(range(vocab_size)) - set(always), key=lambda id: (-counts[id], id))
    return np.array(sorted([*set(always), *rest[: size - len(set(always))]]), np.int32)
