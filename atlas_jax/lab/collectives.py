"""What the devices of a mesh tell each other in one run of a compiled program, and the least that a step must."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from atlas_jax.config import ModelConfig
from atlas_jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Of one run of a program, on one device.

    Attributes:
      kinds: how many of each kind. A loop's body is counted once, and of a conditional the branch with the fewest: the
        one that a step without sampling options takes.
      bytes: of their results.
    """

    kinds: dict[str, int]
    bytes: int

    @property
    def count(self) -> int:
        return sum(self.kinds.values())

    def __add__(self, other: Collectives) -> Collectives:
        names = sorted(self.kinds.keys() | other.kinds.keys())
        kinds = {name: self.kinds.get(name, 0) + other.kinds.get(name, 0) for name in names}
        return Collectives(kinds, self.bytes + other.bytes)


_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
# An asynchronous one is counted where it is done: what its start names holds the operands too.
_COLLECTIVE = re.compile(
    r"[\]})] (?P<kind>all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute"
    r"|collective-broadcast)(?:-done)?\("
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_CALLS = re.compile(r"[\]})] (?:while|call|async-start)\(.*")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


def count_collectives(text: str) -> Collectives:
    """Count in `compiled.as_text()`. Raises `ValueError` where the text has no entry computation."""
    computations: dict[str, list[str]] = {}
    entry, lines = None, list[str]()
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            lines = computations.setdefault(found["name"], [])
            entry = found["name"] if found["entry"] else entry
        elif " = " in line:
            lines.append(line.split(" = ", 1)[1])
    if entry is None:
        raise ValueError("no entry computation in this HLO text")

    def walk(name: str) -> Collectives:
        total = Collectives({}, 0)
        for line in computations[name]:
            if one := _COLLECTIVE.search(line):
                total += Collectives({one["kind"]: 1}, sum(map(_bytes, _SHAPE.finditer(line[: one.end()]))))
            elif branches := _BRANCHES.search(line):
                names = (branches[1] or f"{branches[2]}, {branches[3]}").replace("%", "").split(", ")
                total += min(map(walk, names), key=lambda found: (found.count, found.bytes))
            elif calls := _CALLS.search(line):
                total = sum(map(walk, _CALLED.findall(calls[0])), total)
        return total

    return walk(entry)


def _bytes(shape: re.Match[str]) -> int:
    bits = int(shape[2] or 8)  # a pred takes a byte
    return math.prod(int(extent) for extent in shape[3].split(",") if extent) * bits // 8


def ideal_collectives(cfg: ModelConfig, mesh: Mesh, n: int, k: int, itemsize: int) -> Collectives:
    """What a greedy decode step of n sequences with k rows on each shard of the data cannot do without.

    tensor: as in Megatron-LM (arXiv 1909.08053) a sum over `[rows, D]` behind each mixer, each FFN and each look-up of
    the embedding; of the cut vocabulary, the best score and its index. expert: the sum behind the FFN. fsdp: where
    weights stay where they are, a sum over the columns of each product with the hidden and, since the hidden stays cut,
    one number a row for each norm. data: the answer, gathered. `itemsize` is that of an activation.
    """
    hidden = cfg.hidden_size // mesh.fsdp
    head = k > 1
    # Rows and kinds of layers of each pass: the trunk, then one layer of the head for each draft.
    passes: list[tuple[int, Sequence[str]]] = [(n * k, cfg.layers), *[(n, ("attention",))] * (k - 1)]
    refills = [n * k] * head
    sizes: list[int] = []
    if mesh.tensor > 1:
        look_ups = [rows for rows, _ in passes] + refills
        sizes += [rows * hidden * itemsize for rows in look_ups]
        for rows, layers in passes:
            sizes += [rows * hidden * itemsize] * 2 * len(layers) + [4 * rows] * 2
    elif mesh.expert > 1:
        sizes += [rows * hidden * itemsize for rows, layers in passes for _ in layers]
    if mesh.fsdp > 1:
        columns = {
            "gdn": cfg.conv_channels + 2 * cfg.gdn_value_heads + cfg.value_size,
            "attention": 2 * (cfg.q_heads + cfg.kv_heads) * cfg.head_dim,
        }
        ffn = [2 * cfg.ffn_size] if cfg.moe is None else [cfg.moe.num_experts, 1, 2 * cfg.moe.shared_size]
        if cfg.moe is not None:
            ffn.append(2 * cfg.moe.expert_size * cfg.moe.experts_per_token)
        for rows, layers in passes:
            for kind in layers:
                sizes += [rows * width // mesh.tensor * itemsize for width in (columns[kind], *ffn)]
                sizes += [4 * rows] * 2
            sizes += [rows * cfg.vocab_size // mesh.tensor * itemsize, 4 * rows]
        for rows in [n] * (k - 1) + refills:  # into the head: two norms, `fc`
            sizes += [4 * rows] * 2 + [rows * cfg.hidden_size * itemsize]
    if mesh.data > 1:
        sizes.append(4 * n * mesh.data * (2 + k + (k - 1) + k))
    return Collectives({"ideal": len(sizes)}, sum(sizes))
