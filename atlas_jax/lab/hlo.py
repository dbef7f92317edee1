"""What a compiled program launches, counted in its optimised HLO text."""

from __future__ import annotations

import dataclasses
import re

# Instructions that name, hold or order things; everything else in a computation that runs is a launch of its own.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"),
    *("while", "call", "conditional", "partition-id", "replica-id", "add-dependency"),
}
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_OPCODE = re.compile(r"[\]})] ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Launches:
    """Of one run of a program.

    Attributes:
      launches: kernels, copies and library calls; a loop's body and a branch are counted once.
      loops: while loops; on a GPU the host may wait for each of their turns.
    """

    launches: int
    loops: int


def count_launches(text: str) -> Launches:
    """Count in `compiled.as_text()`. Raises `ValueError` where the text has no entry computation."""
    computations: dict[str, list[str]] = {}
    entry, lines = None, []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            lines = computations.setdefault(found["name"], [])
            entry = found["name"] if found["entry"] else entry
        elif " = " in line:
            lines.append(line)
    if entry is None:
        raise ValueError("no entry computation in this HLO text")

    def walk(name: str) -> Launches:
        launches = loops = 0
        for line in computations[name]:
            opcode = _OPCODE.search(line.split(" = ", 1)[1])
            if opcode is None:
                raise ValueError(f"not an HLO instruction: {line.strip()[:200]}")
            launches += opcode[1] not in _FREE and not opcode[1].endswith(("-done", "-update"))
            loops += opcode[1] == "while"
            if opcode[1] in ("while", "call", "conditional"):
                branches = _BRANCHES.search(line)
                names = branches[1].replace("%", "").split(", ") if branches else _CALLED.findall(line)
                for inner in map(walk, names):
                    launches, loops = launches + inner.launches, loops + inner.loops
        return Launches(launches, loops)

    return walk(entry)
