"""The frozen trunk's hiddens of a corpus, computed once and streamed from disk while heads train.

A cache is a folder of NumPy files, one row of packed documents after the other: tokens, weights, segments, hiddens and
the places where chains of drafts may begin. Logits are not kept (at V = 248k they would be a hundred times the
hiddens); losses make them again, block by block. `cache.json` is written last: a folder without it is unfinished and is
taken up again where it stopped, never trained on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.files import written_whole
from atlas_jax.kernels.backends import Kernels
from atlas_jax.model.mixers import Params
from atlas_jax.model.trunk import trunk
from atlas_jax.model.views import Full
from atlas_jax.train.batches import pack
from atlas_jax.train.texts import Text


class CacheError(ValueError):
    """A cache of hiddens that can't be used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class HiddenCache:
    """A finished cache; arrays are memory maps of `[R, T]` (`hidden`: `[R, T, D]`).

    Attributes:
      anchors: `[R, A]` rows where chains begin, those of a row first, then `T` for none.
      regimes: of each token, int8, as an index into `names`.
    """

    tokens: np.ndarray
    weights: np.ndarray
    segments: np.ndarray
    hidden: np.ndarray
    anchors: np.ndarray
    regimes: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def base_mark(params: Params) -> str:
    """A digest of the frozen parameters: hiddens, heads and checkpoints of another base are told by it."""
    digest = hashlib.sha256()
    leaves = jax.tree_util.tree_leaves_with_path({name: leaf for name, leaf in params.items() if name != "mtp"})
    for path, leaf in leaves:
        # float32, so that a model reads the same whether it was loaded in its own dtype or widened
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf, np.float32).tobytes())
    return digest.hexdigest()[:16]


def cache_hiddens(
    params: Params,
    cfg: ModelConfig,
    texts: Sequence[Text],
    directory: Path,
    *,
    length: int = 1024,
    batch: int = 4,
    dtype: str = "float32",
    kernels: Kernels = Kernels(),
    progress: Callable[[int, int], None] = lambda done, rows: None,
) -> HiddenCache:
    """The cache in `directory`, made or finished if need be; `progress(rows done, rows)` is called as it goes.

    Texts are packed into rows of `length`; one that is longer is cut into windows, each a document of its own. Raises
    `CacheError` if `directory` holds the cache of another base or other texts, or if nothing is supervised.
    """
    where = pack([len(text.tokens) for text in texts], length)
    names = sorted({text.regime for text in texts})
    regimes = np.zeros((len(where), length), np.int8)
    tokens, segments = np.zeros((2, len(where), length), np.int32)
    weights = np.zeros((len(where), length), np.float32)
    begins: list[np.ndarray] = []
    for r, row in enumerate(where):
        at, firsts = 0, []
        for segment, (index, start, stop) in enumerate(row):
            text, end = texts[index], at + stop - start
            tokens[r, at:end] = text.tokens[start:stop]
            weights[r, at:end] = text.weights[start:stop]
            segments[r, at:] = segment
            regimes[r, at:end] = names.index(text.regime)
            # A chain judges token t + 2 first, and serving begins none before the row whose next token it emitted.
            begins_at = np.arange(max(0, text.first - 1 - start), stop - start - 2)
            firsts.append(at + begins_at[text.weights[start:stop][begins_at + 2] > 0])
            at = end
        segments[r, at:] = len(row)
        begins.append(np.concatenate(firsts))
    supervised = sum(map(len, begins))
    total = sum(len(text.tokens) for text in texts)
    if supervised == 0:
        raise CacheError(f"none of the {total} tokens is supervised: no reply was found; check the chat template")
    anchors = np.full((len(where), max(map(len, begins))), length, np.int32)
    for r, found in enumerate(begins):
        anchors[r, : len(found)] = found

    directory.mkdir(parents=True, exist_ok=True)
    content = hashlib.sha256(b"".join(x.tobytes() for x in (tokens, weights, anchors, regimes))).hexdigest()[:16]
    identity = {"base": base_mark(params), "content": content, "shape": list(tokens.shape), "dtype": dtype}
    state, finished = directory / "progress.json", directory / "cache.json"
    for path in (finished, state):
        before = json.loads(path.read_text())["identity"] if path.exists() else identity
        if differs := [name for name in identity if before.get(name) != identity[name]]:
            raise CacheError(f"{directory} holds hiddens of another {', '.join(differs)}; remove it or name another")
    small: dict[str, np.ndarray] = {"tokens": tokens, "weights": weights, "segments": segments}
    small |= {"anchors": anchors, "regimes": regimes}
    if not finished.exists():
        done = json.loads(state.read_text())["rows"] if state.exists() else 0
        hidden = np.lib.format.open_memmap(
            directory / "hidden.npy", "r+" if done else "w+", np.dtype(dtype), (*tokens.shape, cfg.hidden_size)
        )
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        forward = jax.jit(lambda p, x, s: trunk(p, cfg, x, Full(positions, s, kernels))[0])
        frozen = jax.device_put({name: leaf for name, leaf in params.items() if name != "mtp"})
        for first in range(done, len(tokens), batch):
            last = min(first + batch, len(tokens))
            taken = np.minimum(np.arange(first, first + batch), last - 1)  # the last batch repeats its last row
            hidden[first:last] = np.asarray(forward(frozen, tokens[taken], segments[taken]))[: last - first]
            if last == len(tokens) or (first // batch) % 16 == 15:
                hidden.flush()
                _write(state, {"identity": identity, "rows": last})
                progress(last, len(tokens))
        del hidden
        for name, array in small.items():
            np.save(directory / f"{name}.npy", array)
        _write(finished, {"identity": identity, "tokens": total, "supervised": supervised, "names": names})
    return load_hiddens(directory)


def load_hiddens(directory: Path, params: Params | None = None) -> HiddenCache:
    """A finished cache. Raises `CacheError` if it isn't, or (given `params`) if another base made it."""
    path = directory / "cache.json"
    if not path.exists():
        raise CacheError(f"{directory} holds no finished cache of hiddens")
    facts = json.loads(path.read_text())
    if params is not None and facts["identity"]["base"] != base_mark(params):
        raise CacheError(f"{directory} holds hiddens of another base")
    load: Any = functools.partial(np.load, mmap_mode="r")
    names = ("tokens", "weights", "segments", "hidden", "anchors", "regimes")
    return HiddenCache(**{name: load(directory / f"{name}.npy") for name in names}, names=tuple(facts["names"]))


def _write(path: Path, value: dict[str, Any]) -> None:
    with written_whole(path) as part:
        part.write_text(json.dumps(value) + "\n")


def batches(
    caches: Sequence[HiddenCache], batch: int, chains: int, seed: int
) -> Callable[[int], tuple[np.ndarray, ...]]:
    """`i -> Rows` of `batch` rows as a pure function of i: each epoch takes every row once, in an order of its own.

    A row begins `chains` chains: all of its anchors or, where it has more, a stretch of them, another one each time.
    """
    import grain

    where = [(cache, row) for cache in caches for row in range(len(cache))]
    order = grain.MapDataset.source(where).seed(seed).shuffle().repeat()

    def row(place: int) -> tuple[np.ndarray, ...]:
        cache, at = order[place]
        length = cache.tokens.shape[1]
        anchors = cache.anchors[at][cache.anchors[at] < length]
        if len(anchors) > chains:
            first = np.random.default_rng((seed, place)).integers(len(anchors) - chains + 1)
            anchors = anchors[first : first + chains]
        anchors = np.pad(anchors, (0, chains - len(anchors)), constant_values=length)
        return cache.tokens[at], cache.weights[at], cache.segments[at], cache.hidden[at], anchors

    rows = lambda i: [row(place) for place in range(i * batch, (i + 1) * batch)]
    return lambda i: tuple(map(np.stack, zip(*rows(i), strict=True)))
