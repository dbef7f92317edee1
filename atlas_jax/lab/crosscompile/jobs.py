"""The caller's side: what to compile, and a process per chip to do it, because a compiler may abort."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atlas_jax.lab.crosscompile.chips import Chip
from atlas_jax.lab.crosscompile.reports import Report

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")  # either compiles for every chip of chips.py


class CrossCompileError(RuntimeError):
    """Nothing can be compiled on this machine; the message says what is missing and how to get it."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A program by reference: a worker is another process, and functions don't travel.

    Attributes:
      name: unique among the jobs of a call.
      program: `"module:function"`; called with `arguments` it returns a `worker.Program`.
      arguments: keyword arguments, plain JSON.
    """

    name: str
    program: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Wheels:
    """Where jax's CUDA plugin and ptxas lie, and what they are.

    Attributes:
      paths: folders to put on `sys.path`, none where the plugin is installed.
      ptxas: the assembler.
      versions: one line for people.
    """

    paths: tuple[Path, ...]
    ptxas: Path
    versions: str

    @classmethod
    def find(cls, folder: Path | None = None) -> Wheels:
        """In `folder` (made by `pip install --target`), else among the installed packages.

        Raises `CrossCompileError` where a part is missing or where the plugin is not of jax's own version.
        """
        from importlib.metadata import distributions, version

        if folder is not None:
            folder = folder.resolve() if folder.is_dir() else None
        path = [str(folder)] if folder else sys.path
        found = {dist.name.lower().replace("_", "-"): dist for dist in distributions(path=path)}
        plugin = next((found[name] for name in PLUGINS if name in found), None)
        ptxas = next((at for root in path for at in Path(root).glob("nvidia/*/bin/ptxas")), None)
        fix = "`make gate` fetches it"
        if plugin is None:
            raise CrossCompileError(f"jax's CUDA plugin ({' or '.join(PLUGINS)}) is not installed; {fix}")
        if ptxas is None:
            raise CrossCompileError(f"ptxas (nvidia-cuda-nvcc-cu12 or nvidia-cuda-nvcc) is not installed; {fix}")
        if plugin.version != version("jaxlib"):
            raise CrossCompileError(
                f"{plugin.name} is {plugin.version} and jaxlib is {version('jaxlib')}; they must be the same; {fix}"
            )
        nvcc = next((dist for name, dist in found.items() if name.startswith("nvidia-cuda-nvcc")), None)
        versions = f"{plugin.name} {plugin.version}, ptxas {nvcc.version if nvcc else 'of unknown version'}"
        return cls((folder,) if folder else (), ptxas, versions)


def compile_jobs(
    chip: Chip,
    jobs: Sequence[Job],
    wheels: Wheels,
    *,
    seconds: float = 300.0,
    done: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """Compile all jobs for one chip, in order, and report on each; `done` is called as each is ready.

    They share a process. If it dies, or takes more than `seconds` over one job, that job has failed and the rest go on
    in a new process. Raises `CrossCompileError` where not even the target can be set up.
    """
    reports: list[Report] = []
    while len(reports) < len(jobs):
        rest = jobs[len(reports) :]
        fresh, death = _run_worker(chip, rest, wheels, seconds, done)
        reports += fresh
        if death and len(fresh) < len(rest):
            failed = Report(rest[len(fresh)].name, error=death)
            done(failed)
            reports.append(failed)
    return reports


def _run_worker(
    chip: Chip, jobs: Sequence[Job], wheels: Wheels, seconds: float, done: Callable[[Report], None]
) -> tuple[list[Report], str | None]:
    """Reports until the process ended, and what ended it if that was not the last job."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "MOSAIC_"))}
    reports: list[Report] = []
    late = threading.Event()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+") as said:
        env |= {
            # Every folder this process imports from: what a job names is importable there too.
            "PYTHONPATH": os.pathsep.join([*sys.path, *map(str, wheels.paths)]),
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program would come without its report
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # Where XLA and, by PATH, Mosaic look for ptxas: the worker puts a shim there.
            "CUDA_ROOT": f"{folder}/cuda",
            "PATH": f"{folder}/cuda/bin{os.pathsep}{os.environ.get('PATH', '')}",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "atlas_jax.lab.crosscompile.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=env,
        )
        assert process.stdin and process.stdout
        request = {"chip": chip.name, "ptxas": str(wheels.ptxas), "folder": folder}
        process.stdin.write(json.dumps({**request, "jobs": [dataclasses.asdict(job) for job in jobs]}))
        process.stdin.close()

        def stop() -> None:
            late.set()
            process.kill()

        def watch() -> threading.Timer:
            timer = threading.Timer(seconds, stop)
            timer.start()
            return timer

        timer = watch()
        try:
            for line in process.stdout:
                timer.cancel()
                message = json.loads(line)
                if "fatal" in message:
                    raise CrossCompileError(f"{chip.name}: {message['fatal']}")
                reports.append(Report.from_json(message))
                done(reports[-1])
                timer = watch()
            process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        said.seek(0)
        words = said.read()
    if process.returncode == 0:
        return reports, None
    if late.is_set():
        return reports, f"not done after {seconds:.0f} s"
    how = f"killed by signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"
    return reports, f"the compiler's process died ({how}): {_reason(words)}"


def _reason(words: str) -> str:
    """The line of a dying process that says why, as far as one can tell."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"LLVM ERROR|Check failed|Assertion|^\w*Error:", line)]
    return (telling or lines[-1:] or ["it said nothing"])[-1][:400]
