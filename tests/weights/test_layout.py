"""The table of leaves and tensors: it covers every model of the family, and its two directions undo each other."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from tiny_models import TINY

from atlas_jax.config import MoEConfig
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full
from atlas_jax.presets import PRESETS, abstract_params, preset
from atlas_jax.weights import hf
from atlas_jax.weights.hf import CheckpointTensors, params_from_hf, plan_import, read_params
from atlas_jax.weights.layout import TRUNKS, Naming, leaves
from atlas_jax.weights.shards import WeightError

MOE = dataclasses.replace(TINY, ffn_size=0, moe=MoEConfig(4, 2, 12, 20))
NEXT = dataclasses.replace(MOE, family="qwen3_next", gdn_key_heads=2, gdn_value_heads=4)


def random_tensors(cfg, naming, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    parts = [part for leaf in leaves(cfg, naming) for part in leaf.parts]
    return {part.name: rng.standard_normal(part.shape).astype(dtype) for part in parts}


@pytest.mark.parametrize("name", PRESETS)
def test_leaves_are_those_of_the_model(name):
    """Paths and shapes as `Model` makes them; each element of a leaf stands in exactly one tensor."""
    cfg = preset(name)
    for naming in (Naming(), Naming.of_release(cfg)):
        mine = {leaf.path: leaf for leaf in leaves(cfg, naming)}
        if naming == Naming():
            theirs = jax.tree_util.tree_leaves_with_path(abstract_params(cfg))
            assert {tuple(key.key for key in path): leaf.shape for path, leaf in theirs} == {
                path: leaf.shape for path, leaf in mine.items()
            }
        for leaf in mine.values():
            assert math.prod(leaf.shape) == sum(math.prod(part.shape) for part in leaf.parts)
        names = [part.name for leaf in mine.values() for part in leaf.parts]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "naming",
    [
        *(Naming(trunk, "language_model." if trunk == "language_model.model." else "") for trunk in TRUNKS),
        Naming(grouped=True),
        Naming(fused_experts=False),
        Naming(fused_head_experts=False),
        Naming(grouped=True, fused_experts=False, fused_head_experts=False),
        Naming(draft_vocab=7),
    ],
    ids=str,
)
def test_every_spelling_is_found_read_and_written_back(naming):
    """Bit for bit, in every spelling, and to one and the same parameters whatever the spelling."""
    tensors = random_tensors(NEXT, naming)
    ids = np.array([0, 3, 4, 9, 80, 81, 255], np.int32)
    tensors |= {"mtp.draft_ids": ids} if naming.draft_vocab else {}
    found = plan_import(tensors, NEXT)
    assert found.naming == naming and set(found.report.used) == set(tensors) and not found.report.ignored
    params = read_params(tensors, found, np.float32)
    written = CheckpointTensors(params, leaves(NEXT, naming))
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype
        np.testing.assert_array_equal(written[name], tensor)
    other = Naming(draft_vocab=naming.draft_vocab)
    same = params_from_hf(dict(CheckpointTensors(params, leaves(NEXT, other))), NEXT)
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_fusing_does_not_depend_on_the_spelling_of_experts():
    """One expert's gate and up lie where the fused tensor has them: rows 0 to I - 1, and I to 2 I - 1."""
    tensors = random_tensors(MOE, Naming())
    at, size = "model.layers.0.mlp.experts.", MOE.moe.expert_size
    fused = tensors.pop(f"{at}gate_up_proj"), tensors.pop(f"{at}down_proj")
    tensors = {name: tensor for name, tensor in tensors.items() if ".layers.1.mlp.experts." not in name}
    apart = dict(tensors)
    for layer in range(2):
        for e in range(MOE.moe.num_experts):
            here = f"model.layers.{layer}.mlp.experts.{e}."
            apart[f"{here}gate_proj.weight"] = fused[0][e, :size]
            apart[f"{here}up_proj.weight"] = fused[0][e, size:]
            apart[f"{here}down_proj.weight"] = fused[1][e]
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = fused[0]
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = fused[1]
    jax.tree.map(np.testing.assert_array_equal, params_from_hf(apart, MOE), params_from_hf(tensors, MOE))


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_trunk_is_the_same_with_and_without_a_head(tied, head):
    """No norm is shifted because of which keys there are; tied or not, the head adds keys and nothing else."""
    cfg = dataclasses.replace(TINY, tie_embeddings=tied)
    tensors = random_tensors(cfg, Naming())
    params = params_from_hf(tensors, cfg)
    assert ("lm_head" in params) == (not tied)
    if not head:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
        plain = params_from_hf(tensors, dataclasses.replace(cfg, mtp_layers=0))
        assert "mtp" not in plain
        jax.tree.map(np.testing.assert_array_equal, plain, {k: v for k, v in params.items() if k != "mtp"})
    for path in (("layers", 0, "input_norm"), ("layers", 0, "mixer", "norm"), ("final_norm",)):
        leaf = params
        for key in path:
            leaf = leaf[key]
        name = {"input_norm": "layers.0.input_layernorm", "norm": "layers.0.linear_attn.norm"}.get(path[-1], "norm")
        np.testing.assert_array_equal(leaf, tensors[f"model.{name}.weight"])  # as stored: `1 + w` is the layer's


def test_large_tensors_in_tiles_are_the_same(monkeypatch):
    """A tensor of many tiles, in every dtype, transposed and cast on threads, against NumPy."""
    monkeypatch.setattr(hf, "TILE_BYTES", 2**14)
    rng = np.random.default_rng(0)
    for source_dtype in (hf.BF16, np.float32, np.float16, np.float64):
        source = rng.standard_normal((515, 130)).astype(source_dtype)
        for target_dtype in (hf.BF16, np.float32, np.float64):
            target = np.zeros((130, 700), target_dtype)
            hf.copy(target[:, 100:615], source.T)
            np.testing.assert_array_equal(target[:, 100:615], source.T.astype(target_dtype))
            assert not target[:, :100].any() and not target[:, 615:].any()
        whole = np.empty((3, 130, 40), np.float32)
        stacked = rng.standard_normal((3, 40, 130)).astype(source_dtype)
        hf.copy(whole, stacked.swapaxes(1, 2))
        np.testing.assert_array_equal(whole, stacked.swapaxes(1, 2).astype(np.float32))


def test_bfloat16_widens_exactly():
    every = np.arange(2**16, dtype=np.uint16).view(hf.BF16)
    every = every[~np.isnan(every.astype(np.float32))]
    wide = np.empty(every.shape, np.float32)
    hf.copy(wide, every)
    np.testing.assert_array_equal(wide, every.astype(np.float32))


@pytest.mark.parametrize("block", [(128, 128), (16, 8)])
def test_fp8_is_dequantised_by_blocks(block):
    """Against an element by element product; a scale of another shape, or none, is an error."""
    import ml_dtypes

    cfg, naming = MOE, Naming(fused_experts=False, fused_head_experts=False)
    tensors = random_tensors(cfg, naming)
    rng = np.random.default_rng(1)
    expected = {}
    for name in list(tensors):
        if "experts." in name or name.endswith(("q_proj.weight", "out_proj.weight")):
            small = tensors[name].astype(ml_dtypes.float8_e4m3fn)
            rows, columns = small.shape
            scale = rng.uniform(0.5, 2, (-(-rows // block[0]), -(-columns // block[1]))).astype(np.float32)
            wide = scale[np.arange(rows)[:, None] // block[0], np.arange(columns) // block[1]]
            tensors[name], tensors[f"{name}_scale_inv"] = small, scale
            expected[name] = small.astype(np.float32) * wide
    plan = plan_import(tensors, cfg, block=block)
    params = read_params(tensors, plan, np.float32)
    written = CheckpointTensors(params, leaves(cfg, naming))
    for name, product in expected.items():
        np.testing.assert_array_equal(written[name], product)
    name = next(iter(expected))
    scale = tensors.pop(f"{name}_scale_inv")
    with pytest.raises(WeightError, match=f"{name}.* is FP8 and has no .*_scale_inv"):
        plan_import(tensors, cfg, block=block)
    with pytest.raises(WeightError, match=r"_scale_inv.*blocks of"):
        plan_import({**tensors, f"{name}_scale_inv": np.ones((9, 9), np.float32)}, cfg, block=block)
    del scale, tensors[name]
    with pytest.raises(WeightError, match="lacks the tensor"):
        plan_import(tensors, cfg, block=block)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda t: t.pop("mtp.norm.weight"), r"lacks the tensor 'mtp\.norm\.weight'.*--allow-missing"),
        (lambda t: t.update({"model.layers.9.x": np.zeros(1)}), r"no place for the tensors model\.layers\.9\.x"),
        (lambda t: t.update({"model.norm.weight": np.zeros(32, np.int32)}), "model.norm.weight.*dtype int32"),
        (lambda t: t.update({"mtp.norm.weight": np.zeros(3)}), r"mtp\.norm\.weight.*shape \(3,\).*asks for \(32,\)"),
        (lambda t: t.update({"model.language_model.embed_tokens.weight": np.zeros(1)}), "two|trunks under"),
        (lambda t: t.update({"mtp.draft_ids": np.array([3, 2], np.int32)}), "ascending token ids"),
        (lambda t: t.update({"mtp.draft_ids": np.array([3, 256], np.int32)}), "ascending token ids"),
        (lambda t: t.update({"mtp.draft_ids": np.array([3.0])}), "token ids are int32"),
        (lambda t: t.update({"mtp.embed_tokens.weight": np.zeros(1)}), "embedding of its own is not supported"),
        (lambda t: t.update({"model.layers.1.self_attn.q_proj.qweight": np.zeros(1)}), "quantisation that is not"),
        (
            lambda t: t.update({"model.layers.0.linear_attn.conv1d.weight": np.zeros((32, 4, 1))}),
            "MLX re-export, whose norms",
        ),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.")], r"none of its 15 tensors.*--allow-missing"),
    ],
)
def test_every_misfit_is_named_with_the_way_out(spoil, word):
    tensors = random_tensors(TINY, Naming())
    spoil(tensors)
    with pytest.raises(WeightError, match=word):
        params_from_hf(tensors, TINY)


def test_a_head_beside_a_config_without_one_is_an_error():
    with pytest.raises(WeightError, match="mtp_num_hidden_layers is 0; set it to 1"):
        params_from_hf(random_tensors(TINY, Naming()), dataclasses.replace(TINY, mtp_layers=0))


def test_allow_missing_takes_zeros_and_leaves_a_missing_head_out():
    tensors = random_tensors(TINY, Naming())
    gone = "model.layers.1.self_attn.k_proj.weight"
    whole = params_from_hf(tensors, TINY)["layers"][1]["mixer"]["qkv_proj"]
    del tensors[gone]
    plan = plan_import(tensors, TINY, allow_missing=True)
    assert plan.report.missing == (gone,) and plan.cfg == TINY
    holed = read_params(tensors, plan)["layers"][1]["mixer"]["qkv_proj"]
    k = slice(2 * TINY.q_heads * TINY.head_dim, (2 * TINY.q_heads + TINY.kv_heads) * TINY.head_dim)
    assert not holed[:, k].any() and whole[:, k].all()
    np.testing.assert_array_equal(np.delete(holed, k, 1), np.delete(whole, k, 1))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    plan = plan_import(tensors, TINY, allow_missing=True)
    assert plan.cfg.mtp_layers == 0 and len(plan.report.missing) == 16 and "mtp" not in read_params(tensors, plan)


def test_a_head_alone_may_be_allowed_to_be_missing():
    """All of it or nothing, and no other tensor: what decoding without a head is loaded with."""
    tensors = random_tensors(TINY, Naming())
    headless = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    plan = plan_import(headless, TINY, allow_missing="head")
    assert plan.cfg.mtp_layers == 0 and set(plan.report.used) == set(headless)
    assert plan_import(tensors, TINY, allow_missing="head").cfg == TINY
    for rest in (tensors, headless):
        lacking = {name: tensor for name, tensor in rest.items() if name != "model.norm.weight"}
        with pytest.raises(WeightError, match=r"lacks the tensor 'model\.norm\.weight'"):
            plan_import(lacking, TINY, allow_missing="head")
    del tensors["mtp.norm.weight"]
    with pytest.raises(WeightError, match=r"lacks the tensor 'mtp\.norm\.weight'"):
        plan_import(tensors, TINY, allow_missing="head")


def test_linear_weights_lie_as_they_are_stored():
    """Which makes reading them a copy of whole rows, not a transposition."""
    params = params_from_hf(random_tensors(MOE, Naming()), MOE)
    ffn, mixer = params["layers"][0]["ffn"], params["layers"][1]["mixer"]
    for leaf in (ffn["gate_up"], ffn["down"], ffn["router"], mixer["qkv_proj"], params["mtp"]["fc"]):
        assert leaf.swapaxes(-1, -2).flags.c_contiguous
    assert params["embed"].flags.c_contiguous


def test_what_is_ignored_has_a_reason():
    cfg = dataclasses.replace(TINY, tie_embeddings=True)
    tensors = random_tensors(cfg, Naming("model.language_model."))
    tensors |= {
        "model.visual.blocks.0.weight": np.zeros(1),
        "lm_head.weight": tensors["model.language_model.embed_tokens.weight"].copy(),
        "model.language_model.layers.1.self_attn.rotary_emb.inv_freq": np.zeros(2),
    }
    report = plan_import(tensors, cfg).report
    assert sorted(report.ignored.values()) == [
        "computed from the config",
        "tied: the same as the embedding",
        "vision tower",
    ]
    assert set(report.used) | set(report.ignored) == set(tensors) and not report.missing
    tensors["lm_head.weight"][0] += 1
    with pytest.raises(WeightError, match=r"ties the embeddings and 'lm_head\.weight' differs"):
        plan_import(tensors, cfg)


def test_a_tied_lm_head_is_the_embedding():
    """One buffer: its gradient is the sum of what the embedding and an equal LM head of its own would get."""
    cfg = dataclasses.replace(TINY, tie_embeddings=True, mtp_layers=0)
    params = params_from_hf(random_tensors(cfg, Naming()), cfg)
    tokens = np.arange(6)[None]
    view = Full(np.arange(6)[None])

    def loss(params):
        return (logits(params, trunk(params, cfg, tokens, view)[0]) ** 2).sum()

    together, apart = jax.jit(lambda a, b: (jax.grad(loss)(a), jax.grad(loss)(b)))(
        params, params | {"lm_head": params["embed"].copy()}
    )
    expected = apart["embed"] + apart["lm_head"]
    assert np.abs(apart["lm_head"]).max() > 0 and np.abs(apart["embed"]).max() > 0
    np.testing.assert_allclose(together["embed"], expected, atol=1e-4 * np.abs(expected).max())
