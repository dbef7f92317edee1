"""Tool prompts that no corpus holds, made from those that it does: the same sentences about other things.

A base model knows its training prompts by heart, and a head trained on its answers to them learns that heart. With
functions, parameters, names and numbers exchanged, the only way to the answer is to copy from the prompt, as it is for
functions that were never seen.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np

from atlas_jax.train.corpora import Document

# Words of JSON schemas and of chat turns: exchanging them would change what kind of text this is.
KEPT = frozenset(
    {"name", "description", "parameters", "type", "object", "properties", "required", "items", "enum", "default"}
    | {"string", "integer", "number", "boolean", "array", "true", "false", "null", "function", "functions"}
    | {"tools", "tool", "call", "system", "user", "assistant", "arguments", "the", "and", "for", "you", "can"}
)
_TOKEN = re.compile(r"<\|?/?\w+\|?>|[A-Za-z]+|\d+")
_NAME = re.compile(r'"(?:name|required)": (?:"([\w.]+)"|\[([^\]]*)\])|"(\w+)": \{')


def identifier_words(text: str) -> set[str]:
    """Lower-case words of at least three letters that function and parameter names in `text` are made of."""
    names = " ".join(" ".join(filter(None, found)) for found in _NAME.findall(text))
    return {word.lower() for word in re.findall(r"[A-Za-z]{3,}", names)} - KEPT


def capitalised_words(text: str) -> set[str]:
    """Words with a capital first letter, of at least three letters: mostly names of people, places and things."""
    return {word for word in re.findall(r"\b[A-Z][a-z]{2,}\b", text) if word.lower() not in KEPT}


class Variants:
    """Exchanges identifier words, capitalised words and numbers of a document, each the same way throughout it."""

    def __init__(self, documents: Sequence[Document]):
        """What takes a word's place comes from `documents` (training ones)."""
        self._identifiers = sorted(set().union(*(identifier_words(d.text) for d in documents)))
        self._capitalised = sorted(set().union(*(capitalised_words(d.text) for d in documents)))

    def prompt(self, document: Document, variant: int, share: float = 0.7) -> Document | None:
        """The document up to its last reply with about `share` of its words of interest exchanged.

        A pure function of its arguments. Variant 0 is the text as it is. None for a document whose last reply is no
        tool call. The reply span that is returned is a mark, not a reply: the answer is for a model to give.
        """
        mark = "<tool_call>"
        if not document.replies or not document.text.startswith(mark, document.replies[-1][0]):
            return None
        text = document.text[: document.replies[-1][0]]
        if variant:
            rng = np.random.default_rng((variant, zlib.crc32(document.source.encode())))
            text = self._exchange(text, rng, share)
        source = f"{document.source}#{variant}" if variant else document.source
        return Document(source, text + mark, ((len(text), len(text) + len(mark)),))

    def _exchange(self, text: str, rng: np.random.Generator, share: float) -> str:
        identifiers, places = identifier_words(text), {}
        draw = lambda pool: pool[rng.integers(len(pool))]
        for word in sorted(identifiers):
            if rng.random() < share:
                places[word] = draw(self._identifiers)
        for word in sorted(capitalised_words(text)):
            if rng.random() < share and word.lower() not in identifiers:
                places[word] = draw(self._capitalised)
        for digits in sorted(set(re.findall(r"\d+", text))):
            if rng.random() < share:
                first = str(rng.integers(1, 10)) if digits[0] != "0" else "0"
                places[digits] = first + "".join(str(rng.integers(10)) for _ in digits[1:])

        def other(match: re.Match[str]) -> str:
            found = match.group()
            if found.startswith("<"):
                return found
            if found in places:
                return places[found]
            lower = places.get(found.lower()) if found.lower() in identifiers else None
            if lower is None:
                return found
            return lower.capitalize() if found[0].isupper() else lower

        return _TOKEN.sub(other, text)
