"""The gate's own checks: what they read from compilers is right, and whatever is wrong with a kernel fails one of them.

Tests that compile for a GPU need the compilers that `make gate` fetches, and are skipped without them.
"""

import dataclasses
import json
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import pytest

from atlas_jax.kernels.cache_attention.specs import SPECS as ATTENTION_SPECS
from atlas_jax.kernels.gdn_step.specs import SPECS
from atlas_jax.lab import gate
from atlas_jax.lab.crosscompile import CHIPS, CrossCompileError, Job, Kernel, Report, Wheels, compile_jobs, reports
from atlas_jax.lab.crosscompile.kernels import Case
from atlas_jax.lab.crosscompile.programs import DecodeStep

ROOT = Path(__file__).resolve().parents[2]
SPEC = next(spec for spec in SPECS if (spec.rows, spec.folded, spec.value_heads) == (2, 1, 32))
GOOD = Case("gdn_step", SPEC.name, "triton")
ATTENTION_SPEC = next(spec for spec in ATTENTION_SPECS if (spec.model, spec.rows) == ("qwen3.5-4b", 4))
ATTENTION = Case("cache_attention", ATTENTION_SPEC.name, "triton")
SIZE = DecodeStep("qwen3.5-0.8b", "sm_90", n=1, k=1, slots=2)

# Programs and kernels that no gate may let pass, importable by a worker.
TWINS = '''
import dataclasses, functools, os
import jax, jax.numpy as jnp
from atlas_jax.kernels.cache_attention import pallas_triton as attention_triton
from atlas_jax.kernels.cache_attention.program import Parts as AttentionParts
from atlas_jax.kernels.gdn_step import pallas_triton
from atlas_jax.kernels.gdn_step.program import PARTS
from atlas_jax.kernels.gdn_step.tiles import Tile
from atlas_jax.lab.crosscompile.programs import decode_step
from atlas_jax.lab.crosscompile.worker import Program

def twin(*args, backend, interpret=False, capability=None, tile=Tile(), **parts):
    parts = dataclasses.replace(PARTS, **parts)
    return pallas_triton.gdn_step(*args, interpret=interpret, tile=tile, parts=parts)

def _update_then_decay(state, k, v, g, beta):
    delta = beta * (v - (state * k).sum(0))
    return jnp.exp(g) * (state + k * jax.lax.broadcast_in_dim(delta, state.shape, (1,)))

def _first_lane_dropped(state, *row):
    lane = jax.lax.broadcasted_iota(jnp.int32, state.shape, 0)
    return jnp.where(lane == 0, 0, PARTS.fold_row(state, *row))

decay_order = functools.partial(twin, fold_row=_update_then_decay)
lane_dropped = functools.partial(twin, fold_row=_first_lane_dropped)
head_map = functools.partial(twin, key_head=lambda head, ratio: head % 2)
off_by_one = functools.partial(twin, committed=lambda f, p, r: (f - jnp.maximum(p - 1, 0), f + jnp.minimum(r, 1)))
spilling = functools.partial(twin, tile=Tile(columns=128, warps=1))

def attention_twin(*args, backend, interpret=False, capability=None, **parts):
    return attention_triton.cache_attention(*args, interpret=interpret, parts=AttentionParts(**parts))

causal_order = functools.partial(attention_twin, seen=lambda at, position: at >= 0)
dead_values = functools.partial(attention_twin, live=lambda at, length: at >= 0)
head_dropped = functools.partial(attention_twin, kv_head=lambda program, blocks: 0)
not_rescaled = functools.partial(attention_twin, rescale=lambda old, new: jnp.where(old > -jnp.inf, 1.0, 0.0))

def undonated(**fields):
    return decode_step(**fields)._replace(donate=())

def no_kernel():
    return Program(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), jnp.float32),))

def die():
    os.abort()
'''


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """The module above under a name; workers import from the same folders as this process."""
    folder = tmp_path_factory.mktemp("twins")
    (folder / "gate_twins.py").write_text(TWINS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "gate_twins"
        sys.modules.pop("gate_twins", None)


@pytest.fixture(scope="module")
def wheels():
    try:
        return Wheels.find(ROOT / ".cache" / "gate")
    except CrossCompileError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def compiled(twins, wheels):
    """Reports for sm_90 by name, all from one call; the program that kills its compiler is followed by another."""
    chip = CHIPS["sm_90"]
    spilling = dataclasses.replace(GOOD, function=f"{twins}:spilling")
    small = dataclasses.asdict(dataclasses.replace(SIZE, layers=1))
    jobs = {
        "good": GOOD.job(chip),
        "attention": ATTENTION.job(chip),
        "spilling": spilling.job(chip),
        "dead": Job("dead", f"{twins}:die"),
        "no kernel": Job("no kernel", f"{twins}:no_kernel"),
        "undonated": Job("undonated", f"{twins}:undonated", small),
        "missing": Job("missing", f"{twins}:nothing_of_this_name"),
    }
    return dict(zip(jobs, compile_jobs(chip, list(jobs.values()), wheels), strict=True))


@pytest.mark.slow
def test_a_kernel_that_is_right_compiles_in_place_and_passes(compiled):
    report = compiled["good"]
    row = gate.kernel_row(GOOD, "sm_90", 1e-7, report)
    assert row.failures == () and row.lowered and row.compiled and row.spill_bytes == 0
    assert 16 < row.registers <= 255 and row.shared_bytes > 0 and row.loads >= 7 and row.stores >= 2
    assert report.launches == 1 and report.temp_bytes == 0
    assert report.aliased_bytes == SPEC.slots * 32 * 128 * 128 * 4  # the pool


def test_attention_over_the_cache_is_one_sweep_and_one_join(compiled):
    row = gate.kernel_row(ATTENTION, "sm_90", 1e-3, compiled["attention"])
    assert row.failures == () and row.compiled and row.spill_bytes == 0
    names = [kernel.name for kernel in compiled["attention"].kernels]
    assert sorted(name for name in names if "cache" in name) == ["cache_attention", "cache_attention_join"]
    assert compiled["attention"].loops == 0 and compiled["attention"].temp_bytes < 8 << 20  # no copy of a cache


def test_a_kernel_that_spills_fails(compiled):
    row = gate.kernel_row(GOOD, "sm_90", 1e-7, compiled["spilling"])
    assert row.compiled and row.spill_bytes > 0
    assert any("spills" in why for why in row.failures)


def test_a_compiler_that_aborts_fails_its_own_program_only(compiled):
    assert "died" in compiled["dead"].error and not compiled["dead"].lowered
    assert compiled["no kernel"].compiled and compiled["undonated"].compiled
    assert "nothing_of_this_name" in compiled["missing"].error


def test_xla_in_the_place_of_a_kernel_fails(compiled):
    row = gate.kernel_row(GOOD, "sm_90", 1e-7, compiled["no kernel"])
    assert row.compiled and any("no kernel named gdn_step" in why for why in row.failures)


def test_a_step_whose_state_is_not_donated_fails(compiled):
    size = dataclasses.replace(SIZE, layers=1)
    report = compiled["undonated"]
    assert report.compiled and report.launches > 5 and report.aliased_bytes < size.state_bytes()
    failures = gate.program_row(dataclasses.replace(SIZE, layers=8), [report] * 3).failures
    # The one layer that was compiled has no attention.
    assert ["not aliased" in why for why in failures if "cache_attention" not in why] == [True]


ATTENTION_ERRORS = ["causal_order", "dead_values", "head_dropped", "not_rescaled"]


@pytest.mark.parametrize("error", ["", "decay_order", "head_map", "off_by_one", "lane_dropped", *ATTENTION_ERRORS])
def test_a_kernel_with_an_error_fails_the_numeric_check(twins, error):
    good = ATTENTION if error in ATTENTION_ERRORS else GOOD
    case = dataclasses.replace(good, function=f"{twins}:{error}" if error else "")
    row = gate.kernel_row(case, "sm_90", case.rel_err(), None)
    assert bool(row.failures) == bool(error)
    assert row.compiled is None and row.registers is None  # not checked here, so not passed


def test_what_cannot_exist_is_not_checked_and_says_why():
    cases = [GOOD, dataclasses.replace(GOOD, backend="mosaic")]
    entries = {entry.what: entry.why for entry in gate.impossible(cases, ["sm_80", "sm_90"])}
    missing = "sm_90" if jax.__version_info__ >= (0, 11, 2) else "jax >= 0.11.2"
    assert missing in entries.pop("gdn_step mosaic on sm_80")
    assert set(entries) <= {"gdn_step mosaic, interpreted", "gdn_step mosaic on sm_90"}  # an older jax has no Mosaic


def test_a_broken_error_is_still_json():
    for broken in (float("nan"), float("inf")):
        row = gate.kernel_row(GOOD, "sm_90", broken, None)
        assert row.failures and json.loads(json.dumps(row.rel_err, allow_nan=False)) > 1


PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gdn_step' for 'sm_90a'
ptxas info    : Function properties for gdn_step
    4200 bytes stack frame, 4148 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes smem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers
"""
PTX = """
.visible .entry gdn_step(.param .u64 a)
{ ld.param.b64 %rd1, [a]; ld.global.v4.b32 {%r1}, [%rd1]; ld.volatile.global.b32 %r2, [%rd1]; ld.b32 %r3, [%rd1];
  ld.shared.b32 %r4, [%r5]; st.global.b32 [%rd1], %r1; st.shared.b32 [%r5], %r1; ld.local.b32 %r6, [%r7]; }
.visible .entry other(.param .u64 a)
{ st.global.L1::evict_last.b32 [%rd1], %r1; }
"""
THUNKS = """001: kCustomKernel [source         | next=009 (8) ] gdn_step grid: [1, 1, 1] threads: [28, 1, 1]  shared_memory: 512 bytes
002: kWhile        [prev=105 (1)   | next=118 (1) ]
condition:
    003: kCustomKernel [source | sink] other grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    004: kCopy         [source       | next=113 (1)] kCopy
005: kConditional  [prev=002 (1)   | next=009 (1) ]
  branch 1:
    006: kWhile        [prev=085 (1) | sink        ]
      body:
        007: kConditional  [prev=105 (5) | next=154 (1) ]
        008: kWhile        [prev=105 (5) | next=154 (1) ]
009: kWhile        [prev=005 (1)   | next=118 (1) ]
"""  # noqa: E501

NEWER_THUNKS = re.sub(
    r"(gdn_step|other) (.*)  shared_memory: (\d+) bytes", r"kernel=\1, \2, shmem_bytes=\3, x=true", THUNKS
)


@pytest.mark.parametrize("thunks", [THUNKS, NEWER_THUNKS], ids=["jax before 0.12.1", "jax 0.12.1"])
def test_reports_of_compilers_are_read(thunks):
    step, other = reports.kernels([(PTX, PTXAS)], thunks)
    assert step == Kernel("gdn_step", registers=255, spill_bytes=4160, shared_bytes=528, loads=3, stores=1)
    assert other == Kernel("other", registers=24, spill_bytes=0, shared_bytes=0, loads=0, stores=1)
    assert reports.launches(thunks) == (3, 2)


KERNELS = (Kernel("gdn_step", 72, 0, 512, 9, 2), Kernel("cache_attention", 130, 0, 74752, 8, 10))
FINE = Report("", True, True, None, KERNELS, 240, 0, aliased_bytes=SIZE.state_bytes(), temp_bytes=1 << 20)
SHORT = dataclasses.replace(FINE, launches=40)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, ""),
        ({"aliased_bytes": SIZE.state_bytes() - 1}, "not aliased"),
        ({"kernels": KERNELS[1:]}, "no kernel named gdn_step"),
        ({"kernels": KERNELS[:1]}, "no kernel named cache_attention"),
        ({"loops": 3}, "3 loops wait for the host"),
        ({"temp_bytes": SIZE.layer_bytes()}, "reach a layer's weights"),
        ({"compiled": False, "error": "no"}, "no"),
    ],
)
def test_limits_of_a_step(change, complaint):
    row = gate.program_row(SIZE, [dataclasses.replace(FINE, **change), FINE, SHORT])
    assert [complaint in why for why in row.failures] == [True] * bool(complaint)


def test_temporaries_that_grow_with_the_pool_fail():
    row = gate.program_row(SIZE, [FINE, dataclasses.replace(FINE, temp_bytes=2 << 20), SHORT])
    assert row.temp_growth == 1 << 20 and ["grow by" in why for why in row.failures] == [True]
    assert row.kernels_per_layer == 10.0  # 24 layers against 4


@pytest.mark.parametrize("plugin, folder", [("jax-cuda12-plugin", "cuda_nvcc"), ("jax-cuda13-plugin", "cu13")])
def test_compilers_that_are_missing_or_of_another_version_are_an_error(tmp_path, plugin, folder):
    def pretend(name, version):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return info

    with pytest.raises(CrossCompileError, match=rf"{plugin}.*make gate"):
        Wheels.find(tmp_path)
    old = pretend(plugin, "0.1.2")
    with pytest.raises(CrossCompileError, match="ptxas"):
        Wheels.find(tmp_path)
    (tmp_path / "nvidia" / folder / "bin").mkdir(parents=True)
    (tmp_path / "nvidia" / folder / "bin" / "ptxas").touch()
    with pytest.raises(CrossCompileError, match=r"0\.1\.2.*must be the same"):
        Wheels.find(tmp_path)
    shutil.rmtree(old)
    pretend(plugin, version("jaxlib"))
    assert Wheels.find(tmp_path).ptxas == tmp_path / "nvidia" / folder / "bin" / "ptxas"
