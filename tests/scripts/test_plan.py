"""The plan of a model from its config alone: published sizes, floors that can be worked out by hand, and what fits."""

import json

import jax.numpy as jnp
import pytest
from load_script import script
from tiny_models import TINY

from atlas_jax.config import ConfigError
from atlas_jax.lab import plan as lab
from atlas_jax.lab.plan import GPUS, Gpu, draft_floor_ms, fit, floor_ms, footprint, slot_bytes
from atlas_jax.presets import PRESETS, param_count, preset, random_params

plan = script("plan")
FIELDS = {
    "weight_bytes",
    "gdn_state_bytes_per_sequence",
    "conv_state_bytes_per_sequence",
    "kv_bytes_per_token",
    "head_kv_bytes_per_token",
    "head_bytes",
    "pending_bytes_per_row",
    "max_slots",
    "max_context",
    "floor_ms",
}
# GDN state MiB, conv KiB, trunk KV and head KV bytes a token.
PUBLISHED = {
    "qwen3.5-0.8b": (18, 648, 12288, 2048),
    "qwen3.5-2b": (18, 648, 12288, 2048),
    "qwen3.5-4b": (48, 1152, 32768, 4096),
    "qwen3.5-9b": (48, 1152, 32768, 4096),
    "qwen3.5-27b": (144, 2880, 65536, 4096),
    "qwen3.5-35b-a3b": (60, 1440, 20480, 2048),
    "qwen3-next-80b-a3b": (72, 1728, 24576, 2048),
    "qwen3.5-122b-a10b": (144, 2592, 24576, 2048),
    "qwen3.5-397b-a17b": (180, 3240, 30720, 2048),
}


@pytest.mark.parametrize("name", PRESETS)
def test_bytes_are_the_published_ones(name):
    cfg, (state, conv, kv, head_kv) = preset(name), PUBLISHED[name]
    sizes = footprint(cfg)
    assert sizes.gdn_state_bytes_per_sequence == state * 2**20
    assert sizes.conv_state_bytes_per_sequence == conv * 2**10
    assert (sizes.kv_bytes_per_token, sizes.head_kv_bytes_per_token) == (kv, head_kv)
    trunk, both = param_count(cfg), param_count(cfg, head=True)
    assert sizes.weight_bytes == pytest.approx(2 * trunk, rel=1e-4)
    assert sizes.head_bytes == 2 * (both - trunk)


def test_weight_bytes_are_those_of_real_arrays():
    params = random_params(TINY, 0, jnp.bfloat16)
    head = sum(leaf.nbytes for leaf in lab.jax.tree.leaves(params.pop("mtp")))
    trunk = sum(leaf.nbytes for leaf in lab.jax.tree.leaves(params))
    assert (footprint(TINY).weight_bytes, footprint(TINY).head_bytes) == (trunk, head)


@pytest.mark.parametrize(
    ("name", "gpu", "n", "rows", "ms"),
    [  # worked out independently, from parameter counts and the same data sheets
        ("qwen3.5-4b", "h200", 1, 1, 1.80),
        ("qwen3.5-4b", "h200", 8, 4, 2.15),
        ("qwen3.5-4b", "h200", 32, 4, 3.33),
        ("qwen3.5-4b", "gb10", 32, 1, 58.6),
        ("qwen3.5-35b-a3b", "h200", 1, 1, 1.27),
        ("qwen3.5-35b-a3b", "h200", 1, 4, 2.45),
        ("qwen3.5-35b-a3b", "h200", 8, 4, 9.73),
        ("qwen3.5-35b-a3b", "gb10", 32, 4, 271),
    ],
)
def test_floors_at_4096_tokens(name, gpu, n, rows, ms):
    assert floor_ms(preset(name), GPUS[gpu], n, rows, 4096) == pytest.approx(ms, rel=0.01)


def test_a_step_that_computes_more_than_it_reads_is_bound_by_the_peak():
    cfg, slow = preset("qwen3.5-4b"), Gpu(1e12, 1e15, 1e12)
    products = 2 * param_count(cfg) * 128  # every parameter once a row; the tied embedding is the LM head
    assert floor_ms(cfg, slow, 32, 4, 1) == pytest.approx(1e3 * products / 1e12, rel=0.03)
    assert floor_ms(cfg, slow, 32, 4, 1) == pytest.approx(4 * floor_ms(cfg, slow, 32, 1, 1), rel=1e-6)


def test_a_draft_pass_reads_the_head_and_the_lm_head():
    cfg = preset("qwen3.5-4b")
    assert draft_floor_ms(cfg, GPUS["h200"], 1, 0) == pytest.approx(1e3 * 1.51e9 / 4.8e12, rel=0.01)
    moe = preset("qwen3.5-35b-a3b")
    assert draft_floor_ms(moe, GPUS["h200"], 1, 0) == pytest.approx(1e3 * 1.15e9 / 4.8e12, rel=0.01)


def test_what_fits_is_the_largest_that_fits():
    cfg, gpu = preset("qwen3.5-9b"), GPUS["h100"]
    found = fit(cfg, gpu, 8192, 16)
    weights = footprint(cfg).weight_bytes + footprint(cfg).head_bytes
    room = int(gpu.memory * lab.USABLE) - weights
    assert found.free_bytes == room and found.slot_bytes == slot_bytes(cfg, 8192, 3)
    assert found.max_slots * slot_bytes(cfg, 8192, 3) <= room < (found.max_slots + 1) * slot_bytes(cfg, 8192, 3)
    longest = found.max_context
    assert 16 * slot_bytes(cfg, longest, 3) <= room < 16 * slot_bytes(cfg, longest + 1, 3)
    assert fit(cfg, gpu, 8192, 1).max_context == cfg.max_positions  # never longer than the model's own
    nothing = fit(preset("qwen3.5-397b-a17b"), gpu, 4096, 1)
    assert (nothing.max_slots, nothing.max_context) == (0, 0) and nothing.free_bytes < 0


def test_the_script_takes_a_preset_or_a_directory(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(preset("qwen3.5-4b").to_hf()))
    results = []
    for model in ("qwen3.5-4b", str(tmp_path)):
        results.append(plan.main(plan.parse([model, "--json"])))
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 and json.loads(lines[0]) == results[-1]
    assert results[0].keys() >= FIELDS and results[0]["floor_ms"].keys() >= {"1x1", "32x4"}
    assert results[0] | {"model": ""} == results[1] | {"model": ""}
    plan.main(plan.parse(["qwen3.5-397b-a17b", "--gpu", "h100", "--slots", "4"]))
    out = capsys.readouterr().out
    assert "does NOT fit" in out and "draft pass" in out
    assert footprint(preset("qwen3.5-4b")).weight_bytes == json.loads(json.dumps(results[0]))["weight_bytes"]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["qwen4"], "no directory and no preset; there are qwen3.5-0.8b"),
        (["qwen3.5-4b", "--context", "0"], "must be at least 1"),
        (["qwen3.5-4b", "--context", "999999"], "exceeds the model's 262144"),
    ],
)
def test_plans_that_make_no_sense_are_refused(args, word):
    with pytest.raises(ConfigError, match=word):
        plan.main(plan.parse(args))
