"""What can be proven of GPU kernels and decode steps without a GPU: right in interpret mode, compiled, within limits.

    python scripts/compile_gate.py                                   # tables, and one line of JSON at the end
    python scripts/compile_gate.py --chips sm_90 --models --json     # kernels on one chip, only that line on stdout

`make gate` fetches the compilers first; without them what they would have checked is listed as not checked. The exit
status is 1 if anything that was checked failed.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from atlas_jax.lab import gate
from atlas_jax.lab.crosscompile import CHIPS, CrossCompileError, Job, Report, Wheels, compile_jobs
from atlas_jax.lab.crosscompile.kernels import OPS, Case, cases
from atlas_jax.lab.crosscompile.programs import DecodeStep
from atlas_jax.lab.gate import KernelRow
from atlas_jax.lab.kernel_check import Skipped
from atlas_jax.lab.report import console

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Config:
    """What to check."""

    ops: tuple[str, ...] = tuple(OPS)
    chips: tuple[str, ...] = tuple(CHIPS)  # for kernels
    models: tuple[str, ...] = ("qwen3.5-0.8b", "qwen3.5-4b")  # whole decode steps, for `program_chip`
    steps: tuple[str, ...] = ("1x1", "4x4")  # sequences x rows; one row is plain decode
    program_chip: str = "sm_90"
    wheels: Path = ROOT / ".cache" / "gate"  # what scripts/setup_gate.sh made
    workers: int = 2  # processes that compile
    json: bool = False  # stdout gets nothing but the last line


def main(config: Config) -> dict[str, Any]:
    """Prints tables and a last line of JSON; returns what that line holds. `failed` is empty where all is well."""
    began = time.perf_counter()
    log, out = console(stderr=True), console(stderr=config.json)
    skipped: list[Skipped] = []
    wheels: Wheels | None = None
    try:
        wheels = Wheels.find(config.wheels)
        log.print(wheels.versions, highlight=False)
    except CrossCompileError as missing:
        skipped.append(Skipped("everything that is compiled", str(missing)))
    everything = cases(config.ops)
    sizes = [
        DecodeStep(model, config.program_chip, n, k, slots=2 * n)
        for model in config.models
        for n, k in (map(int, step.split("x")) for step in config.steps)
    ]

    possible = {chip: [case for case in everything if not case.obstacle(CHIPS[chip])] for chip in config.chips}

    def numbers() -> dict[Case, float | None]:
        return {case: None if case.obstacle() else case.rel_err() for case in everything}

    def on(chip: str, jobs: Sequence[Job]) -> list[Report] | None:
        """A chip that cannot be set up is a line of `not_checked`, and no reason to stop."""
        if wheels is None:
            return None
        try:
            return compile_jobs(CHIPS[chip], jobs, wheels, done=say)
        except CrossCompileError as error:
            skipped.append(Skipped(f"{len(jobs)} programs on {chip}", str(error)))
            return None

    def say(report: Report) -> None:
        log.print(f"{report.seconds:6.1f} s  {report.name}{': ' + report.error if report.error else ''}", markup=False)

    with ThreadPoolExecutor(config.workers) as pool:
        variants = {size: [gate.program_job(variant) for variant in gate.variants(size)] for size in sizes}
        steps = {size: pool.submit(on, config.program_chip, jobs) for size, jobs in variants.items()}
        errors = pool.submit(numbers)
        compiled = {
            chip: pool.submit(on, chip, [case.job(CHIPS[chip]) for case in found]) for chip, found in possible.items()
        }

    kernels: list[KernelRow] = []
    for chip, found in possible.items():
        reports = compiled[chip].result() or [None] * len(found)
        for case, report in zip(found, reports, strict=True):
            kernels.append(gate.kernel_row(case, chip, errors.result()[case], report))
    programs = [gate.program_row(size, steps[size].result()) for size in sizes]
    skipped += gate.impossible(everything, config.chips)
    result = {
        **gate.to_json(kernels, programs, skipped),
        "jax": jax.__version__,
        "compilers": wheels.versions if wheels else None,
        "total_s": round(time.perf_counter() - began, 1),
    }
    if kernels:
        out.print(gate.kernel_table(kernels))
    if programs:
        out.print(gate.program_table(programs))
    for entry in skipped:
        out.print(f"not checked: {entry.what}: {entry.why}", markup=False, style="yellow")
    for line in result["failed"]:
        out.print(f"FAILED: {line}", markup=False, style="red")
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    import sys

    import tyro

    sys.exit(1 if main(tyro.cli(Config, description=__doc__))["failed"] else 0)
