"""Five hundred damaged directories: each gives one clear error that names something, and leaves nothing behind."""

import json
import random
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from weights.release import CFG, write_release

from atlas_jax.config import ConfigError
from atlas_jax.weights.checkpoint import export_model, import_model
from atlas_jax.weights.layout import Naming
from atlas_jax.weights.shards import INDEX, WeightError

COUNT = 500


def _shard(rng, directory):
    return rng.choice(sorted(directory.glob("*.safetensors")))


def truncate(rng, directory):
    file = _shard(rng, directory)
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def garble_header(rng, directory):
    file = _shard(rng, directory)
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(8 + length)] = rng.randrange(256)
    file.write_bytes(content)


def noise(rng, directory):
    file = _shard(rng, directory)
    file.write_bytes(rng.randbytes(rng.choice([0, 5, 8, 64, 4096])))


def drop_file(rng, directory):
    rng.choice([_shard(rng, directory), directory / "config.json"]).unlink()


def make_directory(rng, directory):
    file = rng.choice([_shard(rng, directory), directory / "config.json"])
    file.unlink()
    file.mkdir()


def change_tensor(rng, directory):
    file = _shard(rng, directory)
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kind = rng.randrange(6)
    if kind == 0:
        tensors[name] = np.ones(tensor.shape, rng.choice([np.int8, np.int32, np.uint8, np.bool_]))
    elif kind == 1:
        tensors[name + rng.choice(["_", ".x", "s"])] = tensor
    elif kind == 2:
        tensors[name] = tensor.reshape(-1)[: rng.randrange(tensor.size)]
    elif kind == 3:
        tensors[name] = tensor[None]
    elif kind == 4:
        tensors |= {name: tensor, name.replace("layers.", "layers.7") + ".extra": tensor}
    save_file(tensors, file)
    index = json.loads((directory / INDEX).read_text())
    if rng.random() < 0.5:  # a consistent index: the misfit is then with the config
        listed = {n: shard for n, shard in index["weight_map"].items() if shard != file.name}
        index["weight_map"] = listed | dict.fromkeys(tensors, file.name)
        (directory / INDEX).write_text(json.dumps(index))


def break_json(rng, directory):
    file = directory / rng.choice(["config.json", INDEX, "generation_config.json"])
    text = file.read_text()
    kind = rng.randrange(4)
    if kind == 0:
        text = text[: rng.randrange(len(text) - 1)]
    elif kind == 1:
        text = rng.choice(["", "[]", "null", "3", '"x"', "{", "[" * 100_000, "\ufeff{}", "NaN"])
    elif kind == 2:
        at = rng.choice([0, len(text.rstrip()) - 1])  # not inside a name, which would be sound JSON of another meaning
        text = text[:at] + rng.choice("{}[],:") + text[at:]
    else:
        file.write_bytes(b"\xff\xfe" + text.encode())
        return
    file.write_text(text)


def change_config(rng, directory):
    config = json.loads((directory / "config.json").read_text())
    wrong = [None, "x", [], {}, -1, 0.5, True, 10**30, float("nan")]
    fields = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    fields += ["linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"]
    fields += ["head_dim", "linear_conv_kernel_dim", "intermediate_size", "model_type"]
    field = rng.choice(fields)
    if rng.random() < 0.3 and type(config[field]) is int:
        config[field] += rng.choice([1, 8, 10**6])
    else:
        config[field] = rng.choice(wrong)
    (directory / "config.json").write_text(json.dumps(config))


def change_small_files(rng, directory):
    file = directory / rng.choice(["generation_config.json", "config.json"])
    content = json.loads(file.read_text())
    content["eos_token_id"] = rng.choice([-1, "x", 10**9, [1, "2"], {}, 1.5, [None], True])
    file.write_text(json.dumps(content))


def change_index(rng, directory):
    index = json.loads((directory / INDEX).read_text())
    names = sorted(index["weight_map"])
    kind = rng.randrange(4)
    if kind == 0:
        del index["weight_map"][rng.choice(names)]
    elif kind == 1:
        index["weight_map"][rng.choice(names)] = rng.choice(
            ["../x.safetensors", "/x.safetensors", "x.bin", "x.safetensors", 3, None, "a/b.safetensors", ".safetensors"]
        )
    elif kind == 2:
        index["weight_map"]["model.more.weight"] = index["weight_map"][names[0]]
    else:
        index["weight_map"] = rng.choice([{}, [], None, "x", 3])
    (directory / INDEX).write_text(json.dumps(index))


DAMAGES = [truncate, garble_header, noise, drop_file, make_directory, change_tensor, break_json, change_config]
DAMAGES += [change_small_files, change_index]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sound") / "model"
    write_release(directory, CFG, Naming())
    return directory, import_model(directory, None)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_an_error_or_of_no_consequence(damage, sound, tmp_path):
    """An error of ours, on one line and not empty; or the very same model, where only unused bytes were hit."""
    directory, whole = sound
    harmless = 0
    for seed in range(COUNT // len(DAMAGES)):
        rng = random.Random(seed)
        copy, target = tmp_path / f"copy{seed}", tmp_path / "out" / "target"
        shutil.copytree(directory, copy)
        damage(rng, copy)
        try:
            imported = import_model(copy, None)
            export_model(copy, target, imported.params, imported.cfg)
        except (ConfigError, WeightError) as error:
            assert len(str(error)) > 20 and "\n" not in str(error).strip(), seed
            assert not target.parent.exists() or not any(target.parent.iterdir()), seed
        else:
            harmless += 1
            jax.tree.map(np.testing.assert_array_equal, imported.params, whole.params)
            assert imported.cfg == whole.cfg, seed
            shutil.rmtree(target)
        shutil.rmtree(copy)
    assert harmless <= 5
