"""Model directories in and out: bit for bit, like their source, and without leftovers where something goes wrong."""

import dataclasses
import json
import os
import shutil
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_models import TINY
from weights.release import CFG, MOE, NEXT, write_release

from atlas_jax.config import ConfigError, ModelConfig
from atlas_jax.model.modules import Model
from atlas_jax.weights import checkpoint, shards
from atlas_jax.weights.checkpoint import (
    export_model,
    import_model,
    install,
    load_head,
    load_model,
    save_head,
    save_model,
    stitch,
)
from atlas_jax.weights.hf import CheckpointTensors
from atlas_jax.weights.layout import Naming, leaves
from atlas_jax.weights.shards import INDEX, Shards, WeightError, write_shard


@pytest.fixture
def directory(tmp_path):
    params = jax.device_get(Model(CFG, rngs=nnx.Rngs(1)).params())
    save_model(tmp_path / "model", params, CFG)
    return tmp_path / "model", params


def stored(directory):
    """`{name: (shard, dtype, bytes)}`."""
    shards = Shards(directory)
    return {name: (entry.shard, entry.dtype, shards[name].tobytes()) for name, entry in shards.entries.items()}


def test_round_trip_rounds_once_to_bfloat16(directory, tmp_path):
    path, params = directory
    cfg, loaded = load_model(path)
    assert cfg == CFG

    def rounded(keys, leaf):
        exact = getattr(keys[-1], "key", None) in ("a_log", "dt_bias")
        return leaf if exact else np.asarray(leaf).astype(ml_dtypes.bfloat16).astype(np.float32)

    expected = jax.tree_util.tree_map_with_path(rounded, params)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    save_model(tmp_path / "again", loaded, cfg)
    again, first = (load_file(p / "model.safetensors") for p in (tmp_path / "again", path))
    assert again.keys() == first.keys() and "mtp.fc.weight" in first and "lm_head.weight" not in first
    for name in first:
        np.testing.assert_array_equal(again[name], first[name])


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda t: t.pop("mtp.norm.weight"), "lacks the tensor 'mtp.norm.weight'"),
        (lambda t: t.update({"mtp.extra": np.zeros(1, np.float32)}), "no place for the tensors mtp.extra"),
        (lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}), "model.norm.weight.* has the shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(directory, spoil, word):
    path, _ = directory
    tensors = load_file(path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(WeightError, match=word):
        load_model(path)


def test_a_directory_without_its_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CFG.to_hf()))
    with pytest.raises(WeightError, match=r"no model\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightError, match=r"\.bin files are never read: they can run code"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("cfg", "naming", "wrapper"),
    [
        (CFG, Naming("model.language_model."), True),
        (MOE, Naming("model.language_model.", fused_head_experts=False), True),
        (MOE, Naming(fused_experts=False, fused_head_experts=False), False),
        (NEXT, Naming(grouped=True, fused_experts=False, fused_head_experts=False), False),
    ],
    ids=["dense", "moe", "unfused", "next"],
)
def test_an_export_has_the_names_dtypes_shards_and_files_of_its_source(cfg, naming, wrapper, tmp_path):
    """The vision tower and a duplicate of the tied head included; a re-import is the same bits."""
    extra = ("model.visual.patch.weight",) if wrapper else ()
    write_release(tmp_path / "source", cfg, naming, extra=extra, wrapper=wrapper)
    imported = import_model(tmp_path / "source", None)
    assert imported.cfg == dataclasses.replace(cfg, eos_ids=(3, 5, 7)) and imported.naming == naming
    assert imported.report.ignored == dict.fromkeys(extra, "vision tower")
    export_model(tmp_path / "source", tmp_path / "target", imported.params, imported.cfg)
    assert stored(tmp_path / "target") == stored(tmp_path / "source")
    for name in ("config.json", "generation_config.json", "merges.txt"):
        assert (tmp_path / "target" / name).read_text() == (tmp_path / "source" / name).read_text()
    again = import_model(tmp_path / "target", None)
    jax.tree.map(np.testing.assert_array_equal, again.params, imported.params)
    wide = load_model(tmp_path / "source")[1]
    export_model(tmp_path / "source", tmp_path / "wide", wide, imported.cfg)  # through float32 and back
    assert stored(tmp_path / "wide") == stored(tmp_path / "source")
    export_model(tmp_path / "source", tmp_path / "cast", wide, imported.cfg, dtype=np.float32)
    assert {entry.dtype for n, entry in Shards(tmp_path / "cast").entries.items() if n not in extra} == {"F32"}


def test_a_copy_of_a_tied_lm_head_follows_the_embedding(tmp_path):
    tensors = write_release(tmp_path / "source", CFG, Naming(), shards=1)
    shard = tmp_path / "source" / "model-00001-of-00001.safetensors"
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, shard)
    (tmp_path / "source" / INDEX).unlink()
    shard.rename(tmp_path / "source" / "model.safetensors")
    imported = import_model(tmp_path / "source")
    imported.params["embed"] = imported.params["embed"] + 1
    export_model(tmp_path / "source", tmp_path / "target", imported.params, imported.cfg)
    new = load_file(tmp_path / "target" / "model.safetensors")
    np.testing.assert_array_equal(new["lm_head.weight"], new["model.embed_tokens.weight"])
    assert not (tmp_path / "target" / INDEX).exists()
    assert (new["lm_head.weight"] != tensors["model.embed_tokens.weight"]).any()


@pytest.mark.parametrize("draft_vocab", [None, 9])
@pytest.mark.parametrize("fused", [True, False])
def test_a_head_is_stitched_into_a_copy(fused, draft_vocab, tmp_path):
    """In the original's spelling whatever the head's own; every other tensor is the same, bit for bit."""
    naming = Naming("model.language_model.", fused_head_experts=fused)
    write_release(tmp_path / "base", MOE, naming, extra=("model.visual.x",), wrapper=True)
    cfg, head = load_head(tmp_path / "base")
    head = jax.tree.map(lambda leaf: leaf + 1, head)
    if draft_vocab:
        head["draft_ids"] = np.arange(3, 3 + draft_vocab, dtype=np.int32)
    save_head(tmp_path / "head", head, cfg)
    assert set(Shards(tmp_path / "head")) == {n for n in Shards(tmp_path / "head") if n.startswith("mtp.")}
    replaced = stitch(tmp_path / "base", tmp_path / "head", tmp_path / "new")
    old, new = stored(tmp_path / "base"), stored(tmp_path / "new")
    assert set(new) - set(old) == ({"mtp.draft_ids"} if draft_vocab else set())
    assert set(replaced) == {name for name in new if name.startswith("mtp.")}
    for name in old:
        assert new[name][:2] == old[name][:2] and (new[name] == old[name]) == (name not in replaced), name
    mine = load_model(tmp_path / "new")[1]["mtp"]
    jax.tree.map(np.testing.assert_array_equal, mine, load_head(tmp_path / "head")[1])
    if draft_vocab:
        assert mine["draft_ids"].dtype == np.int32 and new["mtp.draft_ids"][1] == "I32"
        exported = tmp_path / "exported"
        export_model(tmp_path / "new", exported, load_model(tmp_path / "new")[1], cfg)
        assert stored(exported) == new


def test_a_base_without_a_head_gets_one_and_says_so(tmp_path):
    headless = dataclasses.replace(CFG, mtp_layers=0)
    write_release(tmp_path / "base", headless, Naming())
    head = jax.device_get(Model(CFG, rngs=nnx.Rngs(1)).params())["mtp"]
    save_head(tmp_path / "head", head, CFG)
    stitch(tmp_path / "base", tmp_path / "head", tmp_path / "new")
    assert ModelConfig.load(tmp_path / "new").mtp_layers == 1
    assert load_model(tmp_path / "new")[1]["mtp"].keys() == head.keys()
    save_head(tmp_path / "other", jax.device_get(Model(TINY, rngs=nnx.Rngs(1)).params())["mtp"], TINY)
    with pytest.raises(WeightError, match="is of another model: hidden_size is 32"):
        stitch(tmp_path / "base", tmp_path / "other", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def files(directory):
    """`{name: (inode, content)}`: a file that was not written anew has its inode."""
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in directory.iterdir()}


@pytest.mark.parametrize("draft_vocab", [None, 9])
@pytest.mark.parametrize("shards", [1, 3, 20])
@pytest.mark.parametrize("mtp_layers", [0, 1])
def test_a_head_is_installed_in_place(mtp_layers, shards, draft_vocab, tmp_path):
    """As `stitch` has it, but shards without a tensor of the head are not even touched; nor are strange files."""
    base, naming = tmp_path / "base", Naming("model.language_model.")
    write_release(base, dataclasses.replace(CFG, mtp_layers=mtp_layers), naming, shards=shards, wrapper=True)
    if shards == 1:
        (base / INDEX).unlink()
        (base / "model-00001-of-00001.safetensors").rename(base / "model.safetensors")
    (base / "card.json").write_text("{}")
    head = jax.device_get(Model(CFG, rngs=nnx.Rngs(1)).params())["mtp"]
    if draft_vocab:
        head["draft_ids"] = np.arange(3, 3 + draft_vocab, dtype=np.int32)
    save_head(tmp_path / "head", head, CFG)
    stitch(base, tmp_path / "head", tmp_path / "expected")
    before, held = files(base), {entry.shard for n, entry in Shards(base).entries.items() if n.startswith("mtp.")}
    replaced = install(base, tmp_path / "head")
    after = files(base)
    assert stored(base) == stored(tmp_path / "expected") and "mtp.norm.weight" in replaced
    assert json.loads(after["config.json"][1]) == json.loads((tmp_path / "expected" / "config.json").read_text())
    assert set(after) == set(before) and after["card.json"] == before["card.json"]
    touched = {name for name in before if after[name] != before[name] and name.endswith(".safetensors")}
    if mtp_layers and not draft_vocab:
        assert touched == held
    assert touched and (shards == 1 or len(touched) < len(before)) and held <= touched
    jax.tree.map(np.testing.assert_array_equal, load_model(base)[1]["mtp"], load_head(tmp_path / "head")[1])


def test_a_shard_that_only_a_former_draft_vocabulary_needed_goes(tmp_path):
    write_release(tmp_path / "base", CFG, Naming())
    head = load_head(tmp_path / "base")[1]
    ids, extra = {"mtp.draft_ids": np.arange(9, dtype=np.int32)}, tmp_path / "base" / "model-ids.safetensors"
    save_file(ids, extra)
    index = json.loads((tmp_path / "base" / INDEX).read_text())
    index["weight_map"]["mtp.draft_ids"] = extra.name
    (tmp_path / "base" / INDEX).write_text(json.dumps(index))
    assert len(load_model(tmp_path / "base")[1]["mtp"]["draft_ids"]) == 9
    save_head(tmp_path / "head", head, CFG)
    install(tmp_path / "base", tmp_path / "head")
    assert not extra.exists() and "draft_ids" not in load_model(tmp_path / "base")[1]["mtp"]


def test_what_is_written_is_what_the_library_reads(tmp_path):
    """Every dtype, shapes without elements or axes, strided arrays; each tensor aligned to its own width."""
    rng = np.random.default_rng(0)
    shapes = {"plain": (3, 5), "scalar": (), "empty": (0, 4), "odd": (7,)}
    tensors = {
        f"{name}.{kind}": rng.integers(0, 2, shape).astype(dtype)
        for kind, dtype in shards._DTYPES.items()
        for name, shape in shapes.items()
    }
    tensors["strided"] = rng.standard_normal((6, 4)).astype(ml_dtypes.bfloat16).T[::2]
    write_shard(tmp_path / "model.safetensors", tensors)
    mine = Shards(tmp_path)
    assert set(mine) == set(tensors)
    for name, expected in tensors.items():
        assert mine[name].shape == expected.shape and mine[name].dtype == expected.dtype
        np.testing.assert_array_equal(mine[name], expected)
        assert not expected.nbytes or mine.entries[name].offset % expected.itemsize == 0
        assert mine.deferred(name).data().tobytes() == expected.tobytes()
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as theirs:
        assert set(theirs.keys()) == set(tensors) and theirs.metadata() == {"format": "pt"}
        for name in (name for name in tensors if ".F8" not in name):  # which it can't make arrays of
            np.testing.assert_array_equal(theirs.get_tensor(name), tensors[name])
    with pytest.raises(WeightError, match="complex64 can't be written"):
        write_shard(tmp_path / "x.safetensors", {"x": np.zeros(1, np.complex64)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    """32 tensors of 1 MiB in one file, cast, copied and stitched: never as much as three of them above the model."""
    cfg = dataclasses.replace(CFG, vocab_size=2**20 // (2 * CFG.hidden_size), ffn_size=2**20 // (2 * CFG.hidden_size))
    cfg = dataclasses.replace(cfg, layers=cfg.layers * 4)
    write_release(tmp_path / "base", cfg, Naming(), shards=1)
    imported = import_model(tmp_path / "base", None)
    save_head(tmp_path / "head", imported.params["mtp"], cfg)
    mebibytes = sum(entry.nbytes == 2**20 for entry in Shards(tmp_path / "base").entries.values())
    assert mebibytes >= 24

    def peak(write):
        tracemalloc.start()
        try:
            write()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    export = lambda **options: export_model(
        tmp_path / "base", tmp_path / f"out{len(options)}", imported.params, imported.cfg, **options
    )
    assert peak(lambda: export()) < 3 * 2**20
    assert peak(lambda: export(dtype=np.float32)) < 2 * 3 * 2**20
    of_head = sum(leaf.nbytes for leaf in jax.tree.leaves(imported.params["mtp"]))
    assert peak(lambda: install(tmp_path / "base", tmp_path / "head")) < of_head + 3 * 2**20


def test_a_trunk_alone_or_a_head_alone_is_told_apart(tmp_path):
    write_release(tmp_path / "base", CFG, Naming())
    imported = import_model(tmp_path / "base")
    export_model(tmp_path / "base", tmp_path / "head", imported.params, imported.cfg, head_only=True)
    assert sorted(p.name for p in (tmp_path / "head").iterdir()) == [
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
    ]
    jax.tree.map(np.testing.assert_array_equal, load_head(tmp_path / "head")[1], imported.params["mtp"])
    with pytest.raises(WeightError, match=r"scripts/stitch\.py"):
        load_model(tmp_path / "head")


def test_fp8_comes_out_in_bfloat16_and_the_config_says_so(tmp_path):
    tensors = write_release(tmp_path / "source", CFG, Naming(), shards=1)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = np.full((1, 1), 0.5, np.float32)
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    for file in (tmp_path / "source").glob("model*of*"):
        file.unlink()
    (tmp_path / "source" / INDEX).unlink()
    config = CFG.to_hf() | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    imported = import_model(tmp_path / "source")
    export_model(tmp_path / "source", tmp_path / "target", imported.params, imported.cfg)
    new = Shards(tmp_path / "target")
    assert new.entries[name].dtype == "BF16" and f"{name}_scale_inv" not in new
    assert "quantization_config" not in json.loads((tmp_path / "target" / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "target")[1], imported.params)
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match="'awq'; only block-scaled FP8"):
        load_model(tmp_path / "source")


def test_leaves_go_where_they_are_sent_as_they_are_read(directory):
    path, _ = directory
    seen = []
    everywhere = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec())

    def sharding(leaf_path, array):
        seen.append(leaf_path)
        return everywhere

    progress = []
    imported = import_model(path, ml_dtypes.bfloat16, sharding=sharding, progress=lambda *at: progress.append(at))
    leaves_ = jax.tree.leaves(imported.params)
    assert len(seen) == len(leaves_) and all(isinstance(leaf, jax.Array) for leaf in leaves_)
    assert imported.params["embed"].dtype == ml_dtypes.bfloat16
    assert imported.params["layers"][0]["mixer"]["a_log"].dtype == np.float32
    assert progress == sorted(progress) and progress[-1] == (imported.report.nbytes,) * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_nothing_is_left_of_an_export_that_fails(directory, tmp_path, monkeypatch, error):
    path, _ = directory
    imported = import_model(path)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(checkpoint, "_follow", fail)
    (tmp_path / "out").mkdir()
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        export_model(path, tmp_path / "out" / "target", imported.params, imported.cfg)
    assert os.listdir(tmp_path / "out") == []
    with pytest.raises(WeightError, match="exists; name a new directory"):
        export_model(path, path, imported.params, imported.cfg)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_files_and_folders_have_the_usual_mode(umask, tmp_path):
    """What the umask leaves, as for any new file: colleagues can read a group's checkpoints."""
    write_release(tmp_path / "base", CFG, Naming())
    imported = import_model(tmp_path / "base")
    export_model(tmp_path / "base", tmp_path / "new", imported.params, imported.cfg, dtype=np.float32)
    save_head(tmp_path / "head", imported.params["mtp"], imported.cfg)
    stitch(tmp_path / "base", tmp_path / "head", tmp_path / "stitched")
    for folder in ("new", "head", "stitched"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o750
        for file in (tmp_path / folder).iterdir():
            assert file.stat().st_mode & 0o777 == 0o640, file


def wrong(index):
    """A shard that the norm is not in."""
    return next(shard for shard in SHARDS if shard != index["weight_map"][NORM])


SHARDS = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda d, index: index["weight_map"].update(x="../a.safetensors"), "leads out of the directory"),
        (lambda d, index: index["weight_map"].update(x="/etc/a.safetensors"), "leads out of the directory"),
        (lambda d, index: index["weight_map"].update(x="a.bin"), r"only \.safetensors files are read"),
        (lambda d, index: index["weight_map"].update(x=SHARDS[0]), "x should be in .* is in none"),
        (lambda d, index: index["weight_map"].pop(NORM), r"does not list model\.norm\.weight"),
        (lambda d, index: index["weight_map"].update({NORM: wrong(index)}), r"'model\.norm\.weight' is in .*, not in "),
        (lambda d, index: index.clear(), "no weight_map"),
        (lambda d, index: (d / SHARDS[1]).unlink(), "the shard model-00002.* is not in"),
        (lambda d, index: shutil.copy(d / SHARDS[1], d / "model-9.safetensors"), r"also holds model-9\.safetensors"),
        (lambda d, index: shutil.copy(d / SHARDS[1], d / SHARDS[2]), "is in both model-00002.* and model-00003"),
    ],
)
def test_an_index_that_disagrees_is_an_error(tmp_path, spoil, word):
    write_release(tmp_path / "source", CFG, Naming())
    index = json.loads((tmp_path / "source" / INDEX).read_text())
    spoil(tmp_path / "source", index)
    (tmp_path / "source" / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=word):
        load_model(tmp_path / "source")


def test_parameters_that_lack_a_leaf_are_named(directory, tmp_path):
    _, params = directory
    params["layers"][1]["mixer"].pop("k_norm")
    with pytest.raises(WeightError, match="no layers/1/mixer/k_norm"):
        save_model(tmp_path / "x", params, CFG)
    params["layers"][1]["mixer"]["k_norm"] = np.zeros(3)
    with pytest.raises(WeightError, match=r"layers/1/mixer/k_norm has the shape \(3,\)"):
        CheckpointTensors(params, leaves(CFG, Naming()))
