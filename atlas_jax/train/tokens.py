"""Texts to token arrays: the vocabulary, tokenized corpora and the prompts that decoding is measured on."""

import hashlib
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atlas_jax.files import written_whole
from atlas_jax.train.corpora import CACHE, Document, Split

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 2048
END = "<|endoftext|>"
# The names that Qwen models use, ids 0 to 6, then spare ones so that a new special needs no new vocabulary.
SPECIAL = (
    *(END, "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tools>", "</tools>"),
    *(f"<|reserved_{i}|>" for i in range(5)),
)


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Tokenized documents, end to end. Compared and hashed by identity, so that derived tables can be cached.

    `tokens` int32 [T]; `starts` int64 [documents], the index of each document's first token; `reply` bool
    [T], true on the assistant's replies including the closing `<|im_end|>`; `packed`: whether several
    documents may share a row (transcripts) or a row is a window of one document (prose); `bytes`: size of the
    text in UTF-8.
    """

    regime: str
    tokens: np.ndarray
    starts: np.ndarray
    reply: np.ndarray
    packed: bool
    bytes: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.starts, append=len(self.tokens))


@dataclass(frozen=True)
class Prompt:
    """What a decode starts from: `ids` of the prompt (never of the answer) and the `source` of its text."""

    regime: str
    ids: tuple[int, ...]
    source: str


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> "Tokenizer":
    """A byte-level BPE of exactly `vocab_size` entries, `SPECIAL` first; a pure function of `texts`.

    Any text can be encoded and comes back unchanged. `ValueError` if the texts are too small to fill the
    vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The trainer does not know that specials will be cut out of a text first, and would spend merges on their
    # letters.
    special = re.compile("|".join(map(re.escape, SPECIAL)))
    tokenizer.train_from_iterator((part for text in texts for part in special.split(text)), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the texts fill {tokenizer.get_vocab_size()} of {vocab_size} vocabulary entries: too small"
        )
    return tokenizer


def balanced_texts(splits: Iterable[Split]) -> list[str]:
    """Training texts with the same number of characters from each regime: for `train_tokenizer`.

    A larger regime gives every k-th of its pieces of about 2,000 characters, so that all its works are heard.
    """
    pieces = []
    for split in splits:
        texts = (document.text for document in split.train)
        pieces.append([text[i : i + 2000] for text in texts for i in range(0, len(text), 2000)])
    budget = min(sum(map(len, regime)) for regime in pieces)
    chosen = []
    for regime in pieces:
        count = max(1, round(len(regime) * budget / sum(map(len, regime))))
        chosen += [regime[i * len(regime) // count] for i in range(count)]
    return chosen


def load_tokenizer(path: Path | str) -> "Tokenizer":
    """The tokenizer saved at `path`; `FileNotFoundError` with the command that makes it."""
    from tokenizers import Tokenizer

    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: run scripts/fetch_corpora.py --train-tokenizer to make it")
    return Tokenizer.from_file(str(path))


def tokenize(
    split: Split, tokenizer: "Tokenizer", part: str = "train", *, cache: Path | None = CACHE
) -> TokenSet:
    """The documents of `split.train` or `split.held_out` (`part`) as one `TokenSet`.

    A prose work ends with `<|endoftext|>`, a transcript with the newline after its last `<|im_end|>`. The
    pieces between replies are encoded one by one, so a prompt cut before a reply has the very tokens it would
    have on its own. Cached in `cache` (None: not) under a hash of the tokenizer and of every text, so a
    change of either is never missed.
    """
    documents: tuple[Document, ...] = getattr(split, part)
    key = hashlib.sha256(tokenizer.to_str().encode())
    for document in documents:
        key.update(f"{len(document.text)} {document.replies} ".encode() + document.text.encode())
    packed = split.regime == "tools"
    size = sum(len(document.text.encode()) for document in documents)
    path = None if cache is None else Path(cache) / f"tokens-{key.hexdigest()[:24]}.npz"
    arrays = _load(path)
    if arrays is None:
        arrays = _encode(documents, tokenizer, END if split.regime == "prose" else "")
        _save(path, arrays)
    return TokenSet(split.regime, packed=packed, bytes=size, **arrays)


def _encode(documents: Sequence[Document], tokenizer: "Tokenizer", end: str) -> dict[str, np.ndarray]:
    pieces: list[str] = []
    is_reply: list[bool] = []
    firsts: list[int] = []
    for document in documents:
        firsts.append(len(pieces))
        position = 0
        for start, stop in document.replies:
            pieces += [document.text[position:start], document.text[start:stop]]
            is_reply += [False, True]
            position = stop
        pieces.append(document.text[position:] + end)
        is_reply.append(False)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(pieces)]
    offsets = np.cumsum([0, *map(len, ids)])
    return {
        "tokens": np.fromiter(chain.from_iterable(ids), np.int32, offsets[-1]),
        "starts": offsets[np.asarray(firsts, np.int64)],
        "reply": np.repeat(np.asarray(is_reply, bool), np.diff(offsets)),
    }


def _load(path: Path | None) -> dict[str, np.ndarray] | None:
    if path is None or not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file) as archive:
            return {name: archive[name] for name in ("tokens", "starts", "reply")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # damaged, so made again


def _save(path: Path | None, arrays: dict[str, np.ndarray]) -> None:
    if path is None:
        return
    with written_whole(path) as part, part.open("wb") as file:
        np.savez(file, tokens=arrays["tokens"], starts=arrays["starts"], reply=arrays["reply"])


def prompts(
    split: Split, tokenizer: "Tokenizer", count: int | None, *, max_tokens: int = 640, seed: int = 0
) -> list[Prompt]:
    """`count` prompts from the held-out documents of `split`; a pure function of its arguments.

    Prose: 64 to 256 tokens from the start of a line, packages and their works taking turns. Tools: a
    transcript up to and including `<|im_start|>assistant\\n`, where a call follows and the prompt has at most
    `max_tokens` tokens; shuffled, so fewer prompts are a prefix of more. `count` None: all there are (tools
    only). `ValueError` if there are not enough.
    """
    if split.regime == "prose":
        if count is None:
            raise ValueError("prose prompts are drawn from running text: say how many")
        found = _prose_prompts(split, tokenizer, count, min(max_tokens, 256), np.random.default_rng(seed))
    else:
        found = _tools_prompts(split, tokenizer, max_tokens, np.random.default_rng(seed))
    if count is not None and len(found) < count:
        raise ValueError(
            f"{split.regime}: {len(found)} held-out prompts of at most {max_tokens} tokens, not {count}"
        )
    return found[:count]


def _prose_prompts(
    split: Split, tokenizer: "Tokenizer", count: int, longest: int, rng: np.random.Generator
) -> list[Prompt]:
    packages: dict[str, list[Document]] = {}
    for document in split.held_out:
        packages.setdefault(document.source.split("/")[0], []).append(document)
    queues = []
    for works in packages.values():
        stretches = -(-count // (len(packages) * len(works)))  # of each work, with one prompt in each
        queues.append([(work, i, stretches) for i in range(stretches) for work in works])
    found = []
    for work, i, stretches in filter(None, chain.from_iterable(zip_longest(*queues))):
        low, high = (len(work.text) * j // stretches for j in (i, i + 1))
        begins = [m.start() for m in re.finditer(r"^\S", work.text, re.MULTILINE)]
        begins = [begin for begin in begins if low <= begin <= (low + high) // 2]
        if not begins:
            continue
        text = work.text[begins[rng.integers(len(begins))] : high]  # so the prompts of a work never overlap
        ids = tokenizer.encode(text).ids[: rng.integers(64, longest + 1)]
        if len(ids) >= 64:
            found.append(Prompt(split.regime, tuple(ids), work.source))
    return found


def _tools_prompts(
    split: Split, tokenizer: "Tokenizer", max_tokens: int, rng: np.random.Generator
) -> list[Prompt]:
    found = []
    for index in rng.permutation(len(split.held_out)):
        document = split.held_out[index]
        if not document.replies:
            continue
        start = document.replies[-1][0]
        if not document.text.startswith("<tool_call>", start):
            continue
        ids = tokenizer.encode(document.text[:start]).ids
        if len(ids) <= max_tokens:
            found.append(Prompt(split.regime, tuple(ids), document.source))
    return found
