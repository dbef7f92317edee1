"""What a compiler says of a program, read from its own reports."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One GPU kernel.

    Attributes:
      registers: of a thread.
      spill_bytes: stores and loads of registers that did not fit, in the code of a thread.
      shared_bytes: shared memory of a block, static and dynamic; None where XLA doesn't know it (Mosaic).
      loads, stores: instructions on global memory in the PTX, a loop's body counted once.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int | None
    loads: int
    stores: int


@dataclasses.dataclass(frozen=True)
class Report:
    """One program on one chip. What could not be had is None.

    Attributes:
      error: why it was not lowered or not compiled.
      kernels: those that ptxas compiled, each once.
      launches: kernels, copies and library calls of one run, a loop's body counted once.
      loops: loops outside branches; the host may wait for each of their turns.
      aliased_bytes: outputs that reuse the memory of donated arguments.
      temp_bytes: memory of the program's own.
    """

    name: str
    lowered: bool = False
    compiled: bool = False
    error: str | None = None
    kernels: tuple[Kernel, ...] = ()
    launches: int | None = None
    loops: int | None = None
    aliased_bytes: int | None = None
    temp_bytes: int | None = None
    seconds: float = 0.0

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Report:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**fields, "kernels": tuple(Kernel(**kernel) for kernel in fields["kernels"])})


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>[^']+)' for '[^']+'(?P<spills>.*?)"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.S,
)
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_THUNK = re.compile(  # of jax 0.12.1: "kernel=name, ..., shmem_bytes=512"; before: "name ... shared_memory: 512 bytes"
    r"^(?P<indent> *)\d+: (?P<kind>k\w+)\s+\[[^\]]*\]\s*(?:kernel=)?(?P<name>[^\s,]*)"
    r"(?:.*(?:shared_memory: |shmem_bytes=)(?P<shared>\d+))?",
    re.M,
)
# Thunks that only hold others, and those that launch nothing.
_CONTAINERS = {"kWhile", "kConditional", "kSequential", "kCommandBuffer", "kWaitForStreams"}
_CONTAINERS |= {"kAsyncStart", "kAsyncDone", "kDynamicSliceFusion"}


def kernels(ptxas: Iterable[tuple[str, str]], thunks: str) -> tuple[Kernel, ...]:
    """Kernels from pairs of PTX and what `ptxas -v` said of it, and from XLA's list of thunks (for dynamic memory)."""
    dynamic = {match["name"]: int(match["shared"] or 0) for match in _THUNK.finditer(thunks)}
    found: dict[str, Kernel] = {}
    for ptx, said in ptxas:
        bodies = dict(_bodies(ptx))
        for entry in _ENTRY.finditer(said):
            name, body = entry["name"], bodies.get(entry["name"], "")
            spills = _SPILLS.search(entry["spills"])
            static = re.search(r"(\d+) bytes smem", entry["rest"])
            shared = (int(static[1]) if static else 0) + dynamic[name] if name in dynamic else None
            if spills is None:
                raise ValueError(f"ptxas says nothing about spills of {name}:\n{entry[0]}")
            found[name] = Kernel(
                name,
                registers=int(entry["registers"]),
                spill_bytes=int(spills[1]) + int(spills[2]),
                shared_bytes=shared,
                loads=_count("ld", body),
                stores=_count("st", body),
            )
    return tuple(found.values())


def _count(operation: str, body: str) -> int:
    """Instructions on global memory; one without a state space is generic, and that is global memory here."""
    elsewhere = re.compile(r"\.(?:shared|local|param|const)\b")
    found: Iterable[str] = re.findall(rf"\b{operation}(?:\.[\w:]+)+", body)
    return sum(not elsewhere.search(instruction) for instruction in found)


def launches(thunks: str) -> tuple[int, int]:
    """Launches and loops in XLA's list of thunks.

    Loops in a branch are left out: what they are for, sampling options, a step without any does not enter.
    """
    count = loops = 0
    branch: int | None = None  # the indentation of the conditional that we are in
    for match in _THUNK.finditer(thunks):
        kind, indent = match["kind"], len(match["indent"])
        branch = None if branch is not None and indent <= branch else branch
        count += kind not in _CONTAINERS
        loops += kind == "kWhile" and branch is None
        branch = indent if kind == "kConditional" and branch is None else branch
    return count, loops


def _bodies(ptx: str) -> Iterable[tuple[str, str]]:
    parts = re.split(r"\.entry\s+([\w$.]+)", ptx)
    return zip(parts[1::2], parts[2::2], strict=True)
