"""Meshes of real (forced) devices in processes of their own: the tokens and the losses of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


LAUNCH = (str(ROOT / "scripts" / "launch_local.py"), "--processes", "2", "--")
CACHE = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}


def start(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=280)


def run(*command: str, **variables: str) -> dict:
    """The last line of a script."""
    done = start(*command, **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    meshes = ("--decode", "tensor=2,data=4", "expert=2", "--train", "tensor=2,data=4", "fsdp=4")
    kernels = ("--kernels", "data=2", "data=2,tensor=2", "fsdp=2,tensor=2")
    return run(str(HERE / "driver.py"), *meshes, *kernels, **CACHE)


def test_decode_on_a_mesh_gives_the_tokens_of_one_device(found):
    """Through every program: chunks, more requests than slots, kept states, bias, allowed tokens, rejected drafts."""
    for mesh, facts in found["decode"].items():
        assert facts["equal"] and facts["different_tokens"] > 15 and facts["reused"] >= 8, mesh
        assert facts["compiled"] == 0, f"{mesh}: something was compiled while serving"
        # A gather or two more: the answer is of several arrays, and experts are sorted by shard.
        assert facts["collectives"] <= facts["ideal"] + (8 if "expert" in mesh else 2), mesh
        assert facts["cut"] >= 6, f"{mesh}: nearly everything is whole on every device"


def test_training_on_a_mesh_follows_the_curve_of_one_device(found):
    assert set(found["train"]) == {"tensor=2,data=4", "fsdp=4"}
    assert all(difference < 1e-5 for difference in found["train"].values()), found["train"]


def test_pallas_kernels_run_on_each_device_s_own_heads(found):
    """All three, interpreted: answers, and gradients through the chunked prefill with packed documents."""
    assert set(found["kernels"]) == {"data=2", "data=2,tensor=2", "fsdp=2,tensor=2"}
    for mesh, facts in found["kernels"].items():
        assert facts["equal"] and 0 < facts["gradients_apart"] < 1e-5, (mesh, facts)


def test_two_processes_are_one_mesh():
    """Two processes with two devices each, started as a user would; `check_mesh` says itself what must hold."""
    asked = (str(ROOT / "scripts" / "check_mesh.py"), "--devices", "2", "--mesh", "tensor=2,data=2", "--steps", "2")
    facts = run(*LAUNCH, *asked, "--json")
    assert facts["processes"] == 2 and facts["mesh"] == "data=2,tensor=2" and facts["decode_equal"]
    assert facts["loss_max_diff"] < 1e-5 and facts["compiles_after_warmup"] == 0
    assert 0.9 < facts["collective_bytes"] / facts["ideal_bytes"] < 1.1, facts


def test_a_lost_process_ends_all_and_the_run_goes_on_on_another_mesh(tmp_path):
    """Killed in its fifth update of eight, the second process takes the first with it. What both have saved is taken up
    by one process on a mesh cut along other axes, and ends where a run on one device ends."""
    driver = str(HERE / "resume_driver.py")
    two = ("--mesh", "data=2,fsdp=2", "--cpu-devices", "2")
    lost = start(*LAUNCH, driver, str(tmp_path / "run"), *two, "--die-at", "4")
    assert lost.returncode == 1 and "process 1 of 2 was killed by SIGKILL, so all of them were ended" in lost.stderr
    resumed = run(driver, str(tmp_path / "run"), "--mesh", "fsdp=2,tensor=4", "--cpu-devices", "8")
    straight = run(driver, str(tmp_path / "straight"))
    assert resumed["resumed_at"] in (2, 4)  # the fourth may not have been written in full
    assert straight["resumed_at"] == 0
    np.testing.assert_allclose(resumed["weights"], straight["weights"], atol=1e-6)
    assert np.abs(np.array(straight["weights"]) - np.eye(4)).max() > 1e-3
