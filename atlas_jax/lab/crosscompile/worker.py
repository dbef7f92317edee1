"""The process that compiles: reads a request on stdin, answers each job with a line of JSON on stdout.

    python -m atlas_jax.lab.crosscompile.worker        # started by `jobs.compile_jobs`

XLA compiles ahead of time from a target description, for a GPU that is not there; a shim in place of ptxas keeps what
the assembler says of every kernel. All that is not public API of jax is in this file.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType

from atlas_jax.lab.crosscompile import reports
from atlas_jax.lab.crosscompile.chips import CHIPS, Chip


class Program(NamedTuple):
    """A function of arrays, its arguments as `jax.ShapeDtypeStruct`s, and which of them are donated."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


class Compiler:
    """XLA for one chip. `folder` is empty scratch space; `$CUDA_ROOT` was `folder / "cuda"`, and its bin first on
    `$PATH`, when jax was imported.
    """

    def __init__(self, chip: Chip, ptxas: Path, folder: Path):
        cuda, self._kept, self._dumped = (folder / name for name in ("cuda", "kept", "dumped"))
        _write_shim(cuda / "bin" / "ptxas", ptxas, self._kept)
        if (nvvm := ptxas.parents[1] / "nvvm").is_dir():  # libdevice: exp and its like
            (cuda / "nvvm").symlink_to(nvvm)
        self.chip, self._sharding = chip, _sharding(_device(chip))

    def report(self, name: str, make: Callable[[], Program]) -> reports.Report:
        """Trace, lower and compile what `make` returns. Whatever goes wrong is in the report."""
        began = time.perf_counter()
        report = reports.Report(name)
        for folder in (self._kept, self._dumped):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        try:
            lowered = self._lower(make())
            report = dataclasses.replace(report, lowered=True)
            compiled = lowered.compile({"xla_gpu_autotune_level": 0, "xla_dump_to": str(self._dumped)})
            report = dataclasses.replace(report, compiled=True, **self._read(compiled))
        except Exception as error:  # of any layer: what it says is the finding
            report = dataclasses.replace(report, error=f"{type(error).__name__}: {' '.join(str(error)[:600].split())}")
        return dataclasses.replace(report, seconds=round(time.perf_counter() - began, 2))

    def _lower(self, program: Program) -> Any:
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding)
        with _pretend(self.chip):
            traced = jax.jit(program.fn, donate_argnums=program.donate).trace(*jax.tree.map(place, program.args))
            return traced.lower(lowering_platforms=("cuda",))

    def _read(self, compiled: Any) -> dict[str, Any]:
        said = [(log.with_suffix(".ptx").read_text(), log.read_text()) for log in sorted(self._kept.glob("*.log"))]
        thunks = "".join(file.read_text() for file in self._dumped.glob("*.thunk_sequence.txt"))
        if not thunks:
            raise RuntimeError("this XLA leaves no *.thunk_sequence.txt: launches cannot be counted")
        launches, loops = reports.launches(thunks)
        memory = compiled.memory_analysis()
        return {
            "kernels": reports.kernels(said, thunks),
            "launches": launches,
            "loops": loops,
            "aliased_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
        }


def _device(chip: Chip) -> jax.Device:
    """A device to compile for and not to run on."""
    jax.devices()  # finds the plugins
    make = lambda: topologies.get_topology_desc(
        topology_name="", platform="cuda", target_config=chip.target_config(), topology="1x1x1"
    )
    try:
        return make().devices[0]
    except Exception:
        _register_plugin()
        return make().devices[0]


def _sharding(device: jax.Device) -> jax.sharding.Sharding:
    """All of an array on the one device."""
    try:
        from jax.sharding import make_single_device_sharding as make
    except ImportError:  # jax < 0.12.1
        from jax.sharding import SingleDeviceSharding as make
    return make(device)


def _register_plugin() -> None:
    """By hand: older plugins register themselves only where a GPU is."""
    from jax._src import xla_bridge
    from jax._src.lib import xla_client

    names = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
    plugin = importlib.import_module(next(name for name in names if importlib.util.find_spec(name)))
    options = xla_client.generate_pjrt_gpu_plugin_options()
    xla_bridge.register_plugin("cuda", priority=-500, library_path=str(plugin._get_library_path()), options=options)


def _pretend(chip: Chip) -> Any:
    """A context in which kernels that ask for the device are told this one (Pallas does, when it lowers)."""
    try:
        from jax.sharding import AbstractDevice
    except ImportError:  # jax < 0.11
        from jax._src.mesh import AbstractDevice
    device = AbstractDevice(device_kind=chip.kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))


def _write_shim(at: Path, ptxas: Path, kept: Path) -> None:
    """A ptxas that keeps its input, the one argument that is a file with something in it, and what `-v` says of it.

    Without an input it was asked for its version or the like: that is passed on.
    """
    at.parent.mkdir(parents=True)
    real = shlex.quote(str(ptxas))
    at.write_text(
        f"""#!/bin/sh
source=
for argument; do [ -z "$source" ] && [ -s "$argument" ] && source=$argument; done
[ -n "$source" ] || exec {real} "$@"
name=$(mktemp {shlex.quote(str(kept))}/XXXXXXXX)
cp "$source" "$name.ptx"
{real} -v "$@" 2>"$name.log"
status=$?
cat "$name.log" >&2
exit $status
"""
    )
    at.chmod(0o755)


def main(request: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Answer every job of the request."""
    try:
        compiler = Compiler(CHIPS[request["chip"]], Path(request["ptxas"]), Path(request["folder"]))
    except Exception as error:
        emit({"fatal": f"no compiler could be set up: {type(error).__name__}: {error}"})
        return
    for job in request["jobs"]:
        emit(dataclasses.asdict(compiler.report(job["name"], functools.partial(_resolve, job))))


def _resolve(job: dict[str, Any]) -> Program:
    module, function = job["program"].split(":")
    return getattr(importlib.import_module(module), function)(**job["arguments"])


def _protected_stdout() -> Any:
    """The real stdout; from here on everything else that prints, libraries included, goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*Pallas Triton.*")
    out = _protected_stdout()
    main(json.load(sys.stdin), lambda message: print(json.dumps(message), file=out, flush=True))
