"""The choice of backends: by device and version, on request, and refused with the reason where it can't be."""

import dataclasses
import functools

import jax
import pytest

from atlas_jax.kernels.backends import BackendError, Kernels, Target, choose, obstacle

CPU = Target("cpu", "cpu")
OLD, NEW = (0, 10, 2), (0, 11, 2)


def gpu(capability, jax_version=NEW, **other):
    return Target("gpu", "NVIDIA something", capability, jax_version, **other)


@pytest.mark.parametrize(
    ("target", "backend"),
    [
        (CPU, "xla"),
        (Target("tpu", "TPU v5"), "xla"),
        (Target("gpu", "gfx90a"), "xla"),
        (gpu((7, 5)), "xla"),
        (gpu((9, 0), has_triton=False), "xla"),
        *((gpu(capability, version), "triton") for capability in [(8, 0), (9, 0), (12, 1)] for version in (OLD, NEW)),
    ],
)
def test_auto_is_triton_where_it_runs_and_xla_elsewhere(target, backend):
    assert choose("auto", target) == Kernels(backend, backend, backend, capability=target.capability)


def test_a_name_asks_for_it_wherever_an_op_has_it():
    assert choose("mosaic", gpu((9, 0))) == Kernels("mosaic", "triton", "triton", capability=(9, 0))
    assert choose("xla", gpu((9, 0))) == Kernels(capability=(9, 0))
    assert choose("triton", CPU, interpret=True) == Kernels("triton", "triton", "triton", interpret=True)
    mixed = Kernels(gdn_step="mosaic", gdn_chunk="xla")
    assert choose(mixed, gpu((10, 0))) == dataclasses.replace(mixed, capability=(10, 0))


@pytest.mark.parametrize(
    ("wanted", "target", "why"),
    [
        ("mosaic", gpu((8, 0)), r"mosaic can't run on gpu sm_80 .*: it needs sm_90 or later. Would work: triton, xla"),
        ("mosaic", gpu((9, 0), OLD), r"need jax >= 0.11.2. Would work: triton, xla"),
        ("triton", gpu((7, 5)), r"needs sm_80 or later. Would work: xla"),
        ("triton", CPU, r"NVIDIA GPUs only .*interpret=True.* Would work: xla"),
        ("triton", gpu((9, 0), has_triton=False), r"no jax.experimental.pallas.triton"),
        (Kernels(gdn_chunk="mosaic"), gpu((9, 0)), r"gdn_chunk has no 'mosaic' kernel; it has triton, xla"),
        (Kernels(cache_attention="mosaic"), gpu((9, 0)), r"cache_attention has no 'mosaic' kernel; it has triton, xla"),
        (Kernels(gdn_step="triton"), CPU, r"gdn_step: triton can't run on cpu"),
        ("cuda", CPU, r"'cuda' is none of 'auto', 'xla', .*'triton', 'mosaic'"),
    ],
)
def test_the_impossible_is_refused_with_the_reason(wanted, target, why):
    with pytest.raises(BackendError, match=why):
        choose(wanted, target)


def test_interpreting_lifts_the_chip_but_not_the_version():
    assert obstacle("mosaic", Target("cpu", jax_version=NEW), interpret=True) is None
    assert "0.11.2" in (obstacle("mosaic", Target("cpu", jax_version=OLD), interpret=True) or "")


def test_a_choice_is_static_and_prints_as_one_line():
    @functools.partial(jax.jit, static_argnums=0)
    def traced(kernels):
        return 1 if kernels.gdn_step == "xla" else 2

    assert (traced(Kernels()), traced(Kernels("triton"))) == (1, 2)
    said = Kernels("triton", cache_attention="triton", interpret=True).describe()
    assert said == "kernels: gdn_step triton, gdn_chunk xla, cache_attention triton (interpreted)"
    assert gpu((12, 1)).describe() == "gpu sm_121 (NVIDIA something), jax 0.11.2"


def test_this_process_can_run_what_is_chosen_for_it():
    here = Target.current()
    assert here.jax_version == jax.__version_info__
    chosen = choose()
    assert not any(obstacle(b, here) for b in (chosen.gdn_step, chosen.gdn_chunk, chosen.cache_attention))
