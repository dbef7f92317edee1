"""Model directories as other engines know them, in and out: `config.json`, safetensors, tokenizer files.

A directory that is exported like its source has the source's tensor names, dtypes and shards, and re-imports bit for
bit. Whatever goes wrong while one is written, nothing of it is left behind.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.weights.hf import (
    BF16,
    FP8_BLOCK,
    AllowMissing,
    CheckpointTensors,
    ImportPlan,
    ImportReport,
    Params,
    Progress,
    naming_of,
    plan_import,
    read_params,
)
from atlas_jax.weights.layout import DRAFT_IDS, Leaf, Naming, head_leaves, leaves, tied_lm_head
from atlas_jax.weights.shards import (
    INDEX,
    SINGLE,
    Shards,
    WeightError,
    index_json,
    new_directory,
    read_json,
    write_shard,
)
from atlas_jax.weights.tokenizer import end_tokens

CARRIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "*tokens*.json",
    "chat_template*",
    "*processor_config.json",
    "LICENSE*",
)


@dataclasses.dataclass(frozen=True)
class Imported:
    """A model that was read from a directory, and how it was written there."""

    cfg: ModelConfig
    params: Params
    naming: Naming
    report: ImportReport


def import_model(
    directory: Path | str,
    dtype: Any = np.float32,
    *,
    allow_missing: AllowMissing = False,
    sharding: Any = None,
    progress: Progress | None = None,
) -> Imported:
    """Read a Hugging Face directory of the family, tensor by tensor, into `dtype`.

    `A_log` and `dt_bias` are at least float32; `dtype` None keeps each tensor's own. End tokens are the union of
    `config.json`, `generation_config.json` and the tokenizer's. `sharding` puts each leaf onto devices as it is read:
    a device, a `Sharding`, or a function of path and array that gives one; without it leaves are NumPy arrays.
    `allow_missing`: see `ImportReport.missing`; "head" allows no more than a head that is missing whole. Raises
    `ConfigError` or `WeightError` naming what does not fit.
    """
    import jax

    def place(path: tuple[str | int, ...], array: np.ndarray) -> Any:
        return jax.device_put(array, sharding(path, array) if callable(sharding) else sharding)

    directory = Path(directory)
    shards, plan = _plan(directory, allow_missing=allow_missing)
    params = read_params(shards, plan, dtype, place=None if sharding is None else place, progress=progress)
    cfg = dataclasses.replace(plan.cfg, eos_ids=end_tokens(directory, plan.cfg))
    return Imported(cfg, params, plan.naming, plan.report)


def check_model(directory: Path | str, *, allow_missing: AllowMissing = False) -> ImportReport:
    """All that `import_model` checks before it reads; errors as there."""
    directory = Path(directory)
    plan = _plan(directory, allow_missing=allow_missing)[1]
    end_tokens(directory, plan.cfg)
    return plan.report


def load_model(directory: Path | str, dtype: Any = np.float32, **options: Any) -> tuple[ModelConfig, Params]:
    """Config and parameters of a model directory; options and errors as of `import_model`."""
    imported = import_model(directory, dtype, **options)
    return imported.cfg, imported.params


def load_head(directory: Path | str, dtype: Any = np.float32) -> tuple[ModelConfig, Params]:
    """Config and MTP head (the tree's `mtp`) of a directory that holds a head, with or without a trunk."""
    shards, plan = _plan(Path(directory), head_only=True)
    if not plan.cfg.mtp_layers:
        raise WeightError(f"the config in {directory} has no MTP head (mtp_num_hidden_layers is 0)")
    return plan.cfg, read_params(shards, plan, dtype)["mtp"]


def save_model(directory: Path, params: Params, cfg: ModelConfig, dtype: Any = ml_dtypes.bfloat16) -> None:
    """Write `config.json` and `model.safetensors` in `dtype`; `A_log` and `dt_bias` stay float32."""
    _save(directory, params, cfg, leaves, dtype)


def save_head(directory: Path, head: Params, cfg: ModelConfig, dtype: Any = ml_dtypes.bfloat16) -> None:
    """Write the config of the whole model and the MTP head alone, under its `mtp.*` names, in `dtype`."""
    _save(directory, {"mtp": head}, cfg, head_leaves, dtype)


def _save(directory: Path, params: Params, cfg: ModelConfig, which: Callable[..., Iterator[Leaf]], dtype: Any) -> None:
    naming = naming_of(params, cfg, Naming.of_release(cfg))
    tensors = CheckpointTensors(params, which(cfg, naming), _dtype(dtype))
    directory.mkdir(parents=True, exist_ok=True)
    write_shard(directory / SINGLE, {name: tensors.deferred(name) for name in tensors})
    (directory / "config.json").write_text(json.dumps(cfg.to_hf(), indent=1) + "\n")


def export_model(
    source: Path | str,
    target: Path | str,
    params: Params,
    cfg: ModelConfig,
    *,
    dtype: Any = None,
    head_only: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write parameters as a new directory like `source`: same names, dtypes, shards, config and tokenizer files.

    `dtype` replaces the stored dtypes (`A_log` and `dt_bias` are then float32). Tensors that an import ignores (a
    vision tower) are copied as they are. FP8 weights become bfloat16. `head_only` writes the MTP head alone, in one
    file. Host memory above the parameters: one tensor (and one leaf, where they are on devices). Raises `WeightError`
    where `target` exists or the parameters do not fit.
    """
    source = Path(source)
    shards, plan = _plan(source, allow_missing=True)
    if head_only and not cfg.mtp_layers:
        raise WeightError("the model has no MTP head to export")
    naming = naming_of(params, cfg, plan.naming)
    wanted = [*(head_leaves if head_only else leaves)(cfg, naming)]
    kept = set() if head_only else set(plan.report.ignored)
    if cfg.tie_embeddings and (lm_head := tied_lm_head(cfg, naming)).parts[0].name in kept:
        wanted.append(lm_head)
    new = CheckpointTensors(params, wanted, _stored_dtype(shards) if dtype is None else _dtype(dtype))
    _write_like(shards, Path(target), new, kept, cfg.mtp_layers, one_file=head_only, progress=progress)


def stitch(
    original: Path | str, head: Path | str, target: Path | str, *, progress: Progress | None = None
) -> tuple[str, ...]:
    """A copy of the directory `original` with the MTP head of the directory `head`; the names that were replaced.

    The head takes the names and dtypes that the original's had, whatever its own; every other tensor is copied bit for
    bit. An original without a head gets one in bfloat16. Raises `WeightError` for a head of another model.
    """
    shards, new, kept = _stitched(Path(original), head)
    _write_like(shards, Path(target), new, kept, 1, progress=progress)
    return tuple(new)


def install(model: Path | str, head: Path | str) -> tuple[str, ...]:
    """`stitch` in place: only the shards that hold tensors of the head are written anew. Names and errors as there.

    Each file is replaced whole, when all of them are written. Killed between two of the replacements, a head that is
    spread over several shards is half the old one: install it again.
    """
    model = Path(model)
    shards, new, kept = _stitched(model, head)
    with tempfile.TemporaryDirectory(prefix=".install.", dir=model) as folder:
        part = Path(folder)
        wanted = _write_shards(shards, part, new, kept, copy=False)
        _follow(model, part, 1, still_fp8=any(name.endswith("_scale_inv") for name in kept))
        for file in sorted(part.iterdir()):
            os.replace(file, model / file.name)
        for shard in set(shards.files) - wanted:  # it held nothing but tensors that are no more
            (model / shard).unlink()
    return tuple(new)


def _stitched(original: Path, head: Path | str) -> tuple[Shards, CheckpointTensors, set[str]]:
    """The original's shards, the head's tensors as they are to be stored there, and the names of those that stay."""
    shards, plan = _plan(original, allow_missing=True)
    cfg, params = load_head(head, dtype=None)
    for field in ("hidden_size", "vocab_size", "q_heads", "kv_heads", "head_dim", "rotary_dim", "rope_theta", "moe"):
        mine, theirs = getattr(plan.cfg, field), getattr(cfg, field)
        if mine != theirs:
            raise WeightError(f"the head in {head} is of another model: {field} is {theirs}, {original} has {mine}")
    tree = {"mtp": params}
    cfg = dataclasses.replace(plan.cfg, mtp_layers=1)
    wanted = head_leaves(cfg, naming_of(tree, cfg, plan.naming))
    new = CheckpointTensors(tree, wanted, _stored_dtype(shards))
    old = {name for name in shards if name.startswith(f"{plan.naming.top}mtp.")}
    if any(name.endswith("_scale_inv") for name in old):
        raise WeightError(f"the head of {original} is FP8; stitch into the bfloat16 release")
    return shards, new, set(shards) - old


def _plan(directory: Path, **options: Any) -> tuple[Shards, ImportPlan]:
    cfg = ModelConfig.load(directory)
    shards = Shards(directory)
    return shards, plan_import(shards, cfg, block=_fp8_block(directory), **options)


def _fp8_block(directory: Path) -> tuple[int, int]:
    config = read_json(directory / "config.json")
    quantised = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if quantised is None:
        return FP8_BLOCK
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    block = quantised.get("weight_block_size", list(FP8_BLOCK)) if method == "fp8" else None
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise WeightError(
            f"quantization_config asks for {method!r}; only block-scaled FP8 ('fp8' with weight_block_size) is read: "
            "take that or the bfloat16 release"
        )
    return block[0], block[1]


def _stored_dtype(shards: Shards) -> Callable[[str], Any]:
    """The dtype of a tensor in the shards; bfloat16 for FP8 and for new tensors, but ids stay whole numbers."""

    def dtype(name: str) -> Any:
        if name.endswith(DRAFT_IDS):
            return None
        stored = shards[name].dtype if name in shards else BF16
        return BF16 if stored.itemsize == 1 else stored

    return dtype


def _dtype(dtype: Any) -> Callable[[str], Any]:
    """`dtype` for all tensors, but decay parameters in float32 and ids as they are."""

    def wanted(name: str) -> Any:
        if name.endswith(DRAFT_IDS):
            return None
        return np.float32 if name.endswith(("A_log", "dt_bias")) else dtype

    return wanted


def _write_like(
    shards: Shards,
    target: Path,
    new: CheckpointTensors,
    kept: set[str],
    mtp_layers: int,
    *,
    one_file: bool = False,
    progress: Progress | None = None,
) -> None:
    """A directory of the `new` tensors and those of the shards that are `kept`, with the small files."""
    with new_directory(target) as part:
        _write_shards(shards, part, new, kept, one_file=one_file, progress=progress)
        for file in _carried(shards.directory):
            shutil.copyfile(file, part / file.name)
        still_fp8 = any(name.endswith("_scale_inv") for name in {*new, *kept})
        _follow(shards.directory, part, mtp_layers, still_fp8)


def _write_shards(
    shards: Shards,
    target: Path,
    new: CheckpointTensors,
    kept: set[str],
    *,
    one_file: bool = False,
    copy: bool = True,
    progress: Progress | None = None,
) -> set[str]:
    """Write `new` tensors and those that are `kept`, each in the shard where its name was, and the index.

    A shard that stays as it is is copied, or (without `copy`) left out. Returns the names of all that there should be.
    """
    place = {name: SINGLE if one_file else entry.shard for name, entry in shards.entries.items()}
    # A tensor of a head that there was not goes where the trunk's last norm is.
    otherwise = next((shard for name, shard in reversed(place.items()) if name.endswith("norm.weight")), SINGLE)
    contents: dict[str, list[str]] = {}
    for name in [*(name for name in shards if name in new or name in kept), *(n for n in new if n not in shards)]:
        contents.setdefault(place.get(name, otherwise), []).append(name)
    sizes: dict[str, dict[str, int]] = {}
    for done, (shard, names) in enumerate(sorted(contents.items()), start=1):
        tensors = {name: (new if name in new else shards).deferred(name) for name in names}
        sizes[shard] = {name: tensor.nbytes for name, tensor in tensors.items()}
        untouched = [name for name, entry in shards.entries.items() if entry.shard == shard]
        if names != untouched or not set(names).isdisjoint(new):
            write_shard(target / shard, tensors)
        elif copy:
            shutil.copyfile(shards.directory / shard, target / shard)
        if progress is not None:
            progress(done, len(contents))
    if shards.indexed and not one_file:
        (target / INDEX).write_text(index_json(sizes))
    return set(contents)


def _carried(source: Path) -> list[Path]:
    """The config and tokenizer files of a directory."""
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file() and any(fnmatch.fnmatch(file.name, kind) for kind in CARRIED)
    ]


def _follow(source: Path, target: Path, mtp_layers: int, still_fp8: bool) -> None:
    """Write the config of `source` into `target` where weights have changed their kind."""
    config = read_json(source / "config.json")
    text = config.get("text_config", config)
    changed = text.get("mtp_num_hidden_layers", 1) != mtp_layers
    if changed:
        text["mtp_num_hidden_layers"] = mtp_layers
    if not still_fp8:
        changed |= any([part.pop("quantization_config", None) is not None for part in (config, text)])
    if changed:
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
