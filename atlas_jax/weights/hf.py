"""Tensors under Hugging Face names to our parameter tree and back, streamed: one checkpoint tensor in flight at a time.

Everything that can be known without the data (names, shapes, dtypes) is checked before any of it is read. What a
zero-centred norm is follows from the layer's definition, never from the values or from which other keys are there.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.weights.layout import DRAFT_IDS, Leaf, LeafPath, Naming, Part, head_leaves, leaves
from atlas_jax.weights.shards import Deferred, Shards, WeightError, shorten

Tensors = Mapping[str, np.ndarray]
Params = dict[str, Any]
Place = Callable[[LeafPath, np.ndarray], Any]
Progress = Callable[[int, int], None]
AllowMissing = bool | Literal["head"]  # every tensor, none, or only a head that is missing whole

BF16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = {np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}
_FP8 = {np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}
TILE_BYTES = 2**20
FP8_BLOCK = (128, 128)  # of the releases; a config may state another

_IGNORED_PREFIXES = {
    "model.visual.": "vision tower",
    "visual.": "vision tower",
    "vision_tower.": "vision tower",
    "model.vision_tower.": "vision tower",
}


@dataclasses.dataclass(frozen=True)
class ImportReport:
    """What became of every tensor.

    Attributes:
      used: names of the tensors that are in the parameters.
      ignored: names and reasons of those that are not.
      missing: names that the config asks for and the checkpoint lacks, with `allow_missing`: a head that is missing
        whole is left out of the model, any other tensor is zeros.
      nbytes: of the used tensors, as stored.
    """

    used: tuple[str, ...]
    ignored: Mapping[str, str]
    missing: tuple[str, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ImportPlan:
    """What an import will do: everything is checked, nothing is read."""

    cfg: ModelConfig
    naming: Naming
    leaves: tuple[Leaf, ...]
    report: ImportReport
    block: tuple[int, int]


def params_from_hf(tensors: Tensors, cfg: ModelConfig, prefix: str | None = None) -> Params:
    """The parameter tree from tensors under their checkpoint names, each in the dtype that it has.

    `prefix` leads the trunk's names; None finds out. Raises `WeightError` naming each tensor that is missing,
    mis-shaped or left over.
    """
    naming = Naming.find(tensors, cfg)
    if prefix is not None:
        naming = dataclasses.replace(naming, trunk=prefix)
    return read_params(tensors, plan_import(tensors, cfg, naming=naming))


def params_to_hf(params: Mapping[str, Any], cfg: ModelConfig, prefix: str = "model.") -> dict[str, np.ndarray]:
    """The tensors of `params` under the names of a release of the config's family; inverse of `params_from_hf`."""
    naming = naming_of(params, cfg, Naming.of_release(cfg, prefix))
    return dict(CheckpointTensors(params, leaves(cfg, naming)))


def naming_of(params: Mapping[str, Any], cfg: ModelConfig, naming: Naming) -> Naming:
    """`naming`, with the draft vocabulary that the parameters' head has."""
    ids = params["mtp"].get("draft_ids") if cfg.mtp_layers else None
    return dataclasses.replace(naming, draft_vocab=None if ids is None else len(ids))


def plan_import(
    tensors: Tensors,
    cfg: ModelConfig,
    *,
    naming: Naming | None = None,
    allow_missing: AllowMissing = False,
    head_only: bool = False,
    block: tuple[int, int] = FP8_BLOCK,
) -> ImportPlan:
    """Match a checkpoint with a config. Raises one `WeightError` that names every kind of misfit, and the way out.

    `head_only`: the MTP head alone is wanted, and whatever else there is is ignored. `block`: rows and columns that
    share one scale where weights are FP8. `allow_missing`: see `ImportReport.missing`; "head" allows no more than a
    head that is missing whole.
    """
    naming = naming or Naming.find(tensors, cfg)
    ids = f"{naming.top}{DRAFT_IDS}"
    if ids in tensors:
        naming = dataclasses.replace(naming, draft_vocab=tensors[ids].size)
    wanted = tuple(head_leaves(cfg, naming) if head_only else leaves(cfg, naming))
    head = {part.name for leaf in wanted if leaf.path[0] == "mtp" for part in leaf.parts}
    missing = [part.name for leaf in wanted for part in leaf.parts if part.name not in tensors]
    if head and head <= set(missing) and not head_only:
        if not allow_missing:
            raise WeightError(
                f"the config promises an MTP head and the checkpoint has none of its {len(head)} tensors "
                f"(such as {missing[-1]}); --allow-missing (allow_missing=True) imports the model without a head"
            )
        cfg = dataclasses.replace(cfg, mtp_layers=0)
        wanted = tuple(leaf for leaf in wanted if leaf.path[0] != "mtp")
    needed = [name for name in missing if name not in head or cfg.mtp_layers]
    problems = [] if allow_missing is True else _missing(needed)
    used: list[str] = []
    for leaf in wanted:
        for part in leaf.parts:
            if part.name in tensors:
                used += _check_part(part, tensors, problems, block, whole=leaf.path[-1] == "draft_ids")
    ignored: dict[str, str] = {}
    unexpected = []
    for name in sorted(set(tensors) - set(used)):
        reason = "not of the head" if head_only else _reason_to_ignore(name, tensors, cfg, naming)
        if reason:
            ignored[name] = reason
        else:
            unexpected.append(name)
    if unexpected:
        problems.append(f"the config has no place for the tensors {shorten(unexpected)}{_hint(unexpected, cfg)}")
    if problems:
        raise WeightError("; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else ""))
    report = ImportReport(tuple(used), ignored, tuple(missing), sum(tensors[name].nbytes for name in used))
    return ImportPlan(cfg, naming, wanted, report, block)


def _missing(missing: list[str]) -> list[str]:
    if not missing:
        return []
    if any(name.endswith("embed_tokens.weight") for name in missing) and len(missing) > 10:
        hint = "; if it holds a head only, put it into a copy of its base with scripts/stitch.py"
    else:
        hint = "; --allow-missing (allow_missing=True) takes zeros"
    more = f", {shorten(missing[1:], 3)}" if len(missing) > 1 else ""
    return [f"the checkpoint lacks the tensor {missing[0]!r}{more}{hint}"]


def _check_part(part: Part, tensors: Tensors, problems: list[str], block: tuple[int, int], whole: bool) -> list[str]:
    """The names that the part uses: its own and, where it is FP8, that of its scales."""
    tensor = tensors[part.name]
    if tensor.shape != part.shape:
        reexport = part.name.endswith("conv1d.weight") and tensor.shape == (part.shape[0], part.shape[2], 1)
        hint = " (an MLX re-export, whose norms are changed too: import the original)" if reexport else ""
        problems.append(f"{part.name!r} has the shape {tensor.shape}, the config asks for {part.shape}{hint}")
    elif whole:
        if tensor.dtype not in (np.int32, np.int64):
            problems.append(f"{part.name!r} has the dtype {tensor.dtype}, token ids are int32")
    elif tensor.dtype in _FP8:
        scales = f"{part.name}_scale_inv"
        if scales not in tensors:
            problems.append(f"{part.name!r} is FP8 and has no {scales}: without its scales it means nothing")
            return [part.name]
        lead, (rows, columns) = part.shape[:-2], part.shape[-2:]
        expected = (*lead, -(-rows // block[0]), -(-columns // block[1]))
        if tensors[scales].shape != expected or tensors[scales].dtype not in _FLOATS:
            at = f"{tensors[scales].dtype} {tensors[scales].shape}"
            problems.append(f"{scales!r} is {at}; blocks of {block[0]} x {block[1]} make it a float {expected}")
        return [part.name, scales]
    elif tensor.dtype not in _FLOATS:
        problems.append(f"{part.name!r} has the dtype {tensor.dtype}; weights are bfloat16, float16, float32 or FP8")
    return [part.name]


def _reason_to_ignore(name: str, tensors: Tensors, cfg: ModelConfig, naming: Naming) -> str | None:
    for prefix, reason in _IGNORED_PREFIXES.items():
        if name.startswith(prefix):
            return reason
    if name.endswith("rotary_emb.inv_freq"):
        return "computed from the config"
    embedding = f"{naming.trunk}embed_tokens.weight"
    if name == f"{naming.top}lm_head.weight" and cfg.tie_embeddings and embedding in tensors:
        same = tensors[name].shape == tensors[embedding].shape and tensors[name].dtype == tensors[embedding].dtype
        if same and np.array_equal(tensors[name].view(np.uint8), tensors[embedding].view(np.uint8)):
            return "tied: the same as the embedding"
        raise WeightError(f"the config ties the embeddings and {name!r} differs from {embedding!r}: one is wrong")
    return None


def _hint(unexpected: list[str], cfg: ModelConfig) -> str:
    if not cfg.mtp_layers and any("mtp." in name for name in unexpected):
        return " (its mtp_num_hidden_layers is 0; set it to 1 to use the head)"
    if any(name.endswith(("_scale", "qweight", "scales", "weight_packed", "_scale_2")) for name in unexpected):
        return " (a quantisation that is not read; take the bfloat16 or the block-scaled FP8 release)"
    if any(name.startswith("mtp.embed_tokens") for name in unexpected):
        return " (a head with an embedding of its own is not supported)"
    return ""


def read_params(
    tensors: Tensors,
    plan: ImportPlan,
    dtype: Any = None,
    *,
    place: Place | None = None,
    progress: Progress | None = None,
) -> Params:
    """Read what was planned, as NumPy arrays in `dtype` (None: as stored), decay parameters at least float32.

    Linear weights `[in, out]` lie in memory as checkpoints have them, row by output: a device swaps the axes as it
    takes an array over, and copies it then anyway.

    `place(path, array)` may put each leaf onto devices as soon as it is complete. `progress(done, total)` hears of
    bytes. Host memory above the result: one checkpoint tensor (its mapped pages), and with `place` one leaf.
    """
    params: Params = {}
    done = 0
    for leaf in plan.leaves:
        array = _read_leaf(leaf, tensors, plan, dtype)
        if leaf.path[-1] == "draft_ids":
            _check_draft_ids(array, leaf.parts[0].name, plan.cfg.vocab_size)
        _put(params, leaf.path, array if place is None else place(leaf.path, array))
        done += sum(tensors[part.name].nbytes for part in leaf.parts if part.name in tensors)
        if progress is not None:
            progress(done, plan.report.nbytes)
    return params


def _read_leaf(leaf: Leaf, tensors: Tensors, plan: ImportPlan, dtype: Any) -> np.ndarray:
    there = [part for part in leaf.parts if part.name in tensors]
    wanted = _leaf_dtype(leaf, [tensors[part.name].dtype for part in there], dtype)
    target = leaf.allocate(np.empty if len(there) == len(leaf.parts) else np.zeros, wanted)
    for part in there:
        tensor = tensors[part.name]
        if tensor.dtype in _FP8:
            tensor = _dequantise(tensor, tensors[f"{part.name}_scale_inv"], plan.block)
        for mine, theirs in part.pairs(target, tensor):
            copy(mine, theirs)
        if isinstance(tensors, Shards):
            tensors.release(part.name)
    return target


def _leaf_dtype(leaf: Leaf, stored: list[np.dtype], dtype: Any) -> np.dtype:
    if leaf.path[-1] == "draft_ids":
        return np.dtype(np.int32)
    if dtype is None:
        widest = [BF16 if given in _FP8 else given for given in stored] or [np.dtype(np.float32)]
        return functools.reduce(np.promote_types, widest)
    decay = leaf.path[-1] in ("a_log", "dt_bias")
    return np.promote_types(dtype, np.float32) if decay else np.dtype(dtype)


def _check_draft_ids(ids: np.ndarray, name: str, vocab: int) -> None:
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab or (np.diff(ids) <= 0).any():
        raise WeightError(f"{name!r} must be ascending token ids of the {vocab} there are, at least one")


def _dequantise(tensor: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """FP8 times the scale of its block, in float32."""
    rows, columns = tensor.shape[-2:]
    wide = scales.astype(np.float32).repeat(block[0], axis=-2)[..., :rows, :]
    return tensor.astype(np.float32) * wide.repeat(block[1], axis=-1)[..., :columns]


class CheckpointTensors(Mapping[str, np.ndarray]):
    """The checkpoint tensors of some leaves of `params`, each made when it is asked for.

    `dtype(name)` says in what (None: the leaf's own). Raises `WeightError` for parameters that lack a leaf or have it
    in another shape.
    """

    def __init__(
        self, params: Mapping[Any, Any], wanted: Iterable[Leaf], dtype: Callable[[str], Any] = lambda name: None
    ):
        self._dtype = dtype
        self._parts: dict[str, tuple[Part, np.ndarray | jax.Array]] = {}
        for leaf in wanted:
            array = _get(params, leaf.path)
            if tuple(array.shape) != leaf.shape:
                where = "/".join(map(str, leaf.path))
                raise WeightError(f"the parameter {where} has the shape {array.shape}, the config says {leaf.shape}")
            self._parts |= {part.name: (part, array) for part in leaf.parts}

    def __getitem__(self, name: str) -> np.ndarray:
        part, array = self._parts[name]
        tensor = np.empty(part.shape, self._dtype(name) or array.dtype)
        for mine, theirs in part.pairs(np.asarray(array), tensor):
            copy(theirs, mine)
        return tensor

    def deferred(self, name: str) -> Deferred:
        """The tensor as it will be."""
        part, array = self._parts[name]
        return Deferred.of(part.shape, np.dtype(self._dtype(name) or array.dtype), lambda: self[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _get(params: Mapping[Any, Any], path: LeafPath) -> Any:
    try:
        return functools.reduce(lambda tree, key: tree[key], path, params)
    except KeyError:
        raise WeightError(f"the parameters have no {'/'.join(map(str, path))}, the config asks for it") from None


def _put(params: Params, path: LeafPath, value: Any) -> None:
    for key in path[:-1]:
        params = params.setdefault(key, {})  # type: ignore[arg-type]
    params[path[-1]] = value  # type: ignore[index]


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy between two views of one shape, however strided, tile by tile on a few threads: no second copy is made."""
    order = sorted(range(target.ndim), key=lambda axis: -target.strides[axis])
    dtype, target, source = target.dtype, _bits(target.transpose(order)), source.transpose(order)
    axis = max(range(source.ndim), key=lambda axis: source.strides[axis], default=0)
    if source.nbytes <= TILE_BYTES:
        _copy_tile(target, source, dtype)
        return
    step = max(1, TILE_BYTES * source.shape[axis] // source.nbytes)
    tiles = [(slice(None),) * axis + (slice(i, i + step),) for i in range(0, source.shape[axis], step)]
    for _ in _threads().map(lambda tile: _copy_tile(target[tile], source[tile], dtype), tiles):
        pass


def _copy_tile(target: np.ndarray, source: np.ndarray, dtype: np.dtype) -> None:
    if source.size > 2**12 and source.itemsize <= 4 and source.strides[-1] != source.itemsize:
        # XLA transposes in small blocks as it takes an array over: six times NumPy's speed.
        source = np.asarray(jax.device_put(_bits(source), _cpu())).view(source.dtype)
    if source.dtype == dtype:
        target[...] = _bits(source)
    elif source.dtype == BF16 and dtype == np.float32:  # several times as fast as the general cast, and exact
        np.left_shift(_bits(source), 16, out=target, dtype=np.uint32)
    else:
        target[...] = _bits(source.astype(dtype))


def _bits(array: np.ndarray) -> np.ndarray:
    """The same memory as whole numbers: NumPy copies dtypes that it doesn't know element by element."""
    return array.view(f"u{array.itemsize}")


@functools.cache
def _cpu() -> Any:
    return jax.local_devices(backend="cpu")[0]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), "weights")
