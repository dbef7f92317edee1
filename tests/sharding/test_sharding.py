"""Meshes by name, what doesn't fit on them, where arrays lie, and counting what devices tell each other; no devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from tiny_models import TINY
from train.models import random_params

from atlas_jax import sharding
from atlas_jax.config import MoEConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.state import init_state
from atlas_jax.lab.collectives import count_collectives, ideal_collectives
from atlas_jax.model import mtp
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full
from atlas_jax.presets import PRESETS, abstract_params, preset
from atlas_jax.sharding import Mesh, MeshError
from atlas_jax.train.loop import Schedule

MOE = dataclasses.replace(TINY, ffn_size=0, moe=MoEConfig(8, 2, 16, 16))
HEADS = {"q_heads": 4, "kv_heads": 2, "gdn_key_heads": 2, "gdn_value_heads": 4}


def test_a_mesh_reads_as_it_prints():
    assert Mesh.parse("tensor=2,data=4") == Mesh(data=4, tensor=2) == Mesh.parse(str(Mesh(4, tensor=2)))
    assert Mesh.parse("") == Mesh() and str(Mesh()) == "one device" and Mesh(2, 2, 2, 2).size == 16
    for text in ("tensor", "tensor=x", "rows=2", "data=2,data=2"):
        with pytest.raises(MeshError, match="data, fsdp, expert, tensor"):
            Mesh.parse(text)
    with pytest.raises(MeshError, match="data=0"):
        Mesh.parse("data=0")


@pytest.mark.parametrize(
    ("mesh", "name", "says"),
    [
        ("tensor=8", "qwen3.5-27b", "tensor=8 does not divide kv_heads 4; what would: 1, 2, 4"),
        ("tensor=4", "qwen3.5-35b-a3b", "tensor=4 does not divide kv_heads 2; what would: 1, 2"),
        ("expert=3", "qwen3.5-35b-a3b", "expert=3 does not divide num_experts 256; what would: 1, 2, 4, 8"),
        ("fsdp=3", "qwen3.5-0.8b", "fsdp=3 does not divide hidden_size 1024; what would: 1, 2, 4"),
        ("data=3", "qwen3.5-0.8b", "data=3 does not divide slots 8; what would: 1, 2, 4, 8"),
        ("expert=2", "qwen3.5-0.8b", "has no experts"),
    ],
)
def test_what_does_not_fit_says_what_would(mesh, name, says):
    with pytest.raises(MeshError, match=says):
        Mesh.parse(mesh).check(PRESETS[name], slots=8)


def test_an_engine_refuses_a_mesh_before_it_does_anything():
    params = abstract_params(TINY)
    with pytest.raises(MeshError, match="tensor=2 does not divide kv_heads 1, gdn_key_heads 1"):
        Engine(params, TINY, EngineConfig(mesh=Mesh(tensor=2)))
    with pytest.raises(MeshError, match=r"takes 64 devices and there are 1 \(cpu\)"):
        Engine(params, TINY, EngineConfig(slots=64, mesh=Mesh(64)))


@pytest.mark.parametrize(
    ("outside", "rows", "cut", "lines"),
    [((), 8, False, 8), ((), 8, True, 2), ((), 6, True, 6), (("data",), 8, True, 4), (("data",), 6, True, 3)],
)
def test_a_kernel_gets_each_device_s_own_heads(outside, rows, cut, lines):
    """And its rows of a batch where they divide; inside a `shard_map` over sequences, what that has left."""
    mesh = AbstractMesh((2, 2, 1, 4), ("data", "fsdp", "expert", "tensor"), axis_types=(AxisType.Auto,) * 4)
    place = NamedSharding(mesh, PartitionSpec())
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
    seen = set()

    def kernel(heads, others):
        seen.add((heads.shape, others.shape))
        return others, heads

    run = lambda heads, others: sharding.by_heads(kernel, (heads, others), (2, None), (None, 2), rows=cut)
    if outside:
        whole = PartitionSpec()
        run = jax.shard_map(run, mesh=mesh, axis_names={*outside}, in_specs=whole, out_specs=whole, check_vma=False)
    others, heads = jax.jit(run).trace(array(rows, 3, 8), array(rows, 5)).out_info
    assert seen == {((lines, 3, 2), (lines, 5))}
    assert heads.shape == (rows, 3, 8) and others.shape == (rows, 5)


def test_every_array_has_a_place():
    """Parameters of every release, decode states of every kind, an optimizer's state: cut as the table says."""
    mesh = AbstractMesh((2, 2, 2, 2), ("data", "fsdp", "expert", "tensor"))
    for name in PRESETS:
        cfg = preset(name, layers=4)
        params = abstract_params(cfg)
        places = sharding.shardings(params, mesh)
        layer = places["layers"][0]
        assert layer["mixer"]["out_proj"].spec == PartitionSpec("tensor", "fsdp")
        assert layer["ffn"]["down"].spec == PartitionSpec(*["expert"] * bool(cfg.moe), "tensor", "fsdp")
        assert layer["input_norm"].spec == PartitionSpec(None)
    cfg = preset("qwen3.5-35b-a3b", layers=4)
    for rollback in ("deferred", "snapshot", "recompute"):
        options = {"proposals": True, "rollback": rollback, "head": True, "dtype": jnp.float32}
        make = functools.partial(init_state, cfg, slots=4, length=8, max_drafts=2, **options)
        places = sharding.shardings(jax.eval_shape(make), mesh)
        heads = [None] * (rollback == "snapshot") + ["tensor"]
        assert places.layers[0].state.spec == PartitionSpec("data", *heads, None, None)
        assert places.head.kv.spec == PartitionSpec("data", None, "tensor", None, None)
    for muon in (False, True):
        head = abstract_params(MOE)["mtp"]
        state = jax.eval_shape(Schedule(10, muon=muon).optimizer().init, head)
        cut = [place.spec for place in jax.tree.leaves(sharding.shardings(state, mesh))]
        assert PartitionSpec("expert", "fsdp", "tensor") in cut
    # In groups, fused weights are cut between the groups, the experts' and the dense ones told apart.
    for each in (TINY, MOE):
        each = dataclasses.replace(each, **HEADS)
        make = functools.partial(sharding.grouped, cfg=each, groups=2)
        layer = sharding.shardings(jax.eval_shape(make, abstract_params(each)), mesh)["layers"][0]
        assert layer["mixer"]["in_proj"].spec == PartitionSpec("fsdp", "tensor", None)
        assert layer["ffn"]["gate_up"].spec == PartitionSpec(*["expert"] * bool(each.moe), "fsdp", "tensor", None)
    with pytest.raises(MeshError, match="no rule says how it lies"):
        sharding.shardings({"new_proj": jax.ShapeDtypeStruct((4, 4), jnp.float32)}, mesh)
    with pytest.raises(MeshError, match="does not divide a batch of 3 rows"):
        sharding.place_batch((np.zeros((3, 2)),), mesh)


@pytest.mark.parametrize("cfg", [dataclasses.replace(TINY, **HEADS), dataclasses.replace(MOE, **HEADS)])
def test_grouped_columns_are_the_same_model(cfg):
    """Scores of whole sequences with a head's, and a draft's, in float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), random_params(cfg, scale=0.3))
        tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 9))
        score = jax.jit(lambda params: score_all(params, cfg, tokens))
        grouped = sharding.grouped(params, cfg, 2)
        assert grouped["layers"][0]["mixer"]["in_proj"].shape[1] == 2
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), score(grouped), score(params))


def score_all(params, cfg, tokens):
    view = Full(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    hidden, _ = trunk(params, cfg, tokens, view)
    entries = mtp.head_entries(params, cfg, tokens, hidden, view.positions)
    return logits(params, hidden), mtp.head(params, cfg, tokens, hidden, view)[0], entries


def test_sequences_stand_with_their_shards():
    """Whatever slots are taken, each line is one of its slot's shard, no line is given twice, and the order is kept."""
    mesh, rng = Mesh(data=4), np.random.default_rng(0)
    for count in (1, 5, 16):
        slots = rng.permutation(16)[:count].tolist()
        n = mesh.fullest(slots, [1] * count)
        places = mesh.places(slots, n)
        assert [place // n for place in places] == [slot % 4 for slot in slots]
        assert len(set(places)) == count
        for shard in range(4):
            own = [place for place in places if place // n == shard]
            assert own == sorted(own)
    assert Mesh().places([7, 2, 5], 4) == [0, 1, 2] and Mesh().fullest([7, 2], [3, 2]) == 5


HLO = """HloModule jit_step

%greedy (p: f32[4]) -> f32[4] {
  ROOT %max = f32[4]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}

%sampled (p: f32[4]) -> f32[4] {
  %all = f32[8]{0} all-gather(%p), dimensions={0}
  ROOT %more = f32[4]{0} all-reduce(%all), to_apply=%add
}

%body (carry: (s32[], f32[4])) -> (s32[], f32[4]) {
  %moved = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1}}
}

%condition (carry: (s32[], f32[4])) -> pred[] {
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %two = (bf16[2,8]{1,0}, pred[3]{0}) all-reduce(%a, %b), to_apply=%add
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), dimensions={0}
  %done = f32[8]{0} all-gather-done(%start)
  %loop = (s32[], f32[4]{0}) while(%tuple), condition=%condition, body=%body
  ROOT %branch = f32[4]{0} conditional(%which, %a, %a), branch_computations={%greedy, %sampled}
}
"""


def test_collectives_are_counted_in_hlo():
    found = count_collectives(HLO)
    assert found.kinds == {"all-gather": 1, "all-reduce": 2, "collective-permute": 1}
    assert found.bytes == (2 * 8 * 2 + 3) + 8 * 4 + 4 * 4 + 4 * 4
    with pytest.raises(ValueError, match="no entry computation"):
        count_collectives("HloModule nothing")


def test_the_ideal_is_megatrons():
    """Plain decode under `tensor`: two sums a layer, one for the look-up, two small ones for the best token."""
    ideal = ideal_collectives(TINY, Mesh(tensor=2), n=3, k=1, itemsize=2)
    assert (ideal.count, ideal.bytes) == (2 * 2 + 1 + 2, 5 * 3 * 32 * 2 + 2 * 3 * 4)
    assert ideal_collectives(MOE, Mesh(expert=2), n=3, k=1, itemsize=2).count == 2
    assert ideal_collectives(TINY, Mesh(), n=3, k=4, itemsize=2).count == 0
