"""What a step costs, as a table: by shape and context, looked up and never fitted by a line.

A table says where it comes from: `measured` on a device, `roofline` (bytes and operations over what the device can do,
`lab.roofline`), `published` (worked out from somebody else's figures) or `made` (up, to study a principle). Nothing
here imports JAX.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from atlas_jax.config import ModelConfig
from atlas_jax.files import written_whole

Kind = Literal["measured", "roofline", "published", "made"]
ContextRule = Literal["longest", "mean"]
FORMAT = "atlas_jax cost table 1"
ROOM = 1.1  # how far beyond its largest context a table is trusted


class CostError(ValueError):
    """A table that can't be read, belongs to another model or device, or has no such shape; the message says which."""


@dataclasses.dataclass(frozen=True, order=True)
class StepTime:
    """One shape at one context.

    Attributes:
      n, k, rows, head: the shape, as of a decode bucket.
      context: committed tokens of each sequence.
      seconds: median of a step within a call of the table's `rounds`, host work included; with the quartiles `low` and
        `high` where measured.
      samples: calls that were timed; 0 where none was.
      alone: median of a step that is a call of its own; None where the table knows calls of one step only.
    """

    n: int
    k: int
    rows: int
    head: bool
    context: float
    seconds: float
    low: float | None = None
    high: float | None = None
    samples: int = 0
    alone: float | None = None


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Step times of one model on one device.

    Attributes:
      kind: where the times come from.
      model: `model_id` of the model.
      device: of the device, as `device_id` names it, or a data sheet.
      steps: the times.
      prefill: seconds of a prompt token.
      context_rule: whether a step's time goes by the longest context of its sequences or by their mean.
      rounds: steps of one call to the device, as `EngineConfig.rounds`.
      about: what else there is to know: jax version, dtype, flags, commit, date, source.
    """

    kind: Kind
    model: str
    device: str
    steps: tuple[StepTime, ...]
    prefill: float = 0.0
    context_rule: ContextRule = "longest"
    about: tuple[tuple[str, str], ...] = ()
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.context_rule not in get_args(ContextRule):
            raise CostError(f"kind {self.kind!r} or context rule {self.context_rule!r} is unknown")
        if not self.steps:
            raise CostError("a cost table needs at least one step time")
        if bad := [step for step in self.steps if not (step.seconds > 0 and (step.alone is None or step.alone > 0))]:
            raise CostError(f"step times must be above 0: {bad[0]}")
        if self.rounds < 1 or (self.rounds > 1 and any(step.alone is None for step in self.steps)):
            raise CostError(f"calls of {self.rounds} steps need the time of a call of one beside them")

    def __hash__(self) -> int:
        return hash((self.model, self.device, len(self.steps), self.steps[0]))

    def seconds(self, n: int, k: int, rows: int, context: float, head: bool = True) -> float:
        """Of a step, in the smallest shape of the table with room for it, linear in context between two entries.

        Below the smallest context of the shape the smallest holds. Raises `CostError` where no shape has room, and
        beyond the largest context (by more than a tenth).
        """
        contexts, times = self._fit(n, k, rows, head)
        at = bisect.bisect_left(contexts, context)
        if at == 0:
            return times[0]
        if at == len(contexts):
            if context > ROOM * contexts[-1]:
                raise CostError(
                    f"the costs of {n} sequences of {k} rows end at a context of {contexts[-1]:,.0f}; {context:,.0f} "
                    "was asked for: measure longer ones"
                )
            return times[-1]
        share = (context - contexts[at - 1]) / (contexts[at] - contexts[at - 1])
        return times[at - 1] + share * (times[at] - times[at - 1])

    @functools.cached_property
    def one_a_call(self) -> CostTable:
        """The table for steps that are calls of their own: what a policy with a memory pays."""
        steps = (dataclasses.replace(s, seconds=s.alone or s.seconds, alone=None) for s in self.steps)
        return self if self.rounds == 1 else dataclasses.replace(self, steps=tuple(steps), rounds=1)

    def further(self, n: int, k: int, rows: int, context: float, head: bool = True) -> float:
        """Seconds of a step after the first of its call, which costs `one_a_call.seconds`."""
        first = self.one_a_call.seconds(n, k, rows, context, head)
        if self.rounds == 1:
            return first
        # By the two measured points; not negative where noise is larger than what a call costs.
        return max((self.rounds * self.seconds(n, k, rows, context, head) - first) / (self.rounds - 1), 0.0)

    def expect(self, *, model: str | None = None, device: str | None = None) -> CostTable:
        """This table, if it is of that model and device. Raises `CostError` otherwise."""
        for what, mine, wanted in (("model", self.model, model), ("device", self.device, device)):
            if wanted is not None and mine != wanted:
                raise CostError(
                    f"the cost table is of {what} {mine!r}, not {wanted!r}; costs don't carry over: measure them here "
                    "(scripts/measure_cost.py)"
                )
        return self

    @property
    def widths(self) -> tuple[int, ...]:
        """The batch sizes of its shapes, ascending."""
        return tuple(sorted({step.n for step in self.steps}))

    @property
    def deepest(self) -> int:
        """Most drafts that a step of every width can verify."""
        return min(max(step.k for step in self.steps if step.n == n) for n in self.widths) - 1

    def save(self, path: Path) -> None:
        """Write as JSON, a step time a line, so that two tables can be compared."""
        head = {
            "format": FORMAT,
            **{name: getattr(self, name) for name in ("kind", "model", "device", "context_rule", "prefill", "rounds")},
            "about": dict(self.about),
        }
        lines = ",\n".join(json.dumps(_compact(step)) for step in sorted(self.steps))
        with written_whole(path) as part:
            part.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "steps": [\n{lines}\n]}}\n')

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Read what `save` wrote. Raises `CostError` for anything else."""
        try:
            read = json.loads(path.read_text())
            if read["format"] != FORMAT:
                raise CostError(f"{path} is not an {FORMAT}: its format is {read['format']!r}")
            return cls(
                kind=read["kind"],
                model=read["model"],
                device=read["device"],
                steps=tuple(StepTime(**step) for step in read["steps"]),
                prefill=read["prefill"],
                context_rule=read["context_rule"],
                about=tuple(read["about"].items()),
                rounds=read.get("rounds", 1),
            )
        except OSError as error:
            raise CostError(f"no cost table at {path}: {error.strerror}") from None
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CostError(f"{path} is no cost table: {error!r}") from None

    @functools.cached_property
    def _grid(self) -> dict[tuple[int, bool], dict[int, dict[int, tuple[list[float], list[float]]]]]:
        """`[n, head][k][rows]` to contexts and seconds, ascending in all of them."""
        grid: dict[Any, Any] = {}
        for step in sorted(self.steps):
            by_rows = grid.setdefault((step.n, step.head), {}).setdefault(step.k, {})
            contexts, times = by_rows.setdefault(step.rows, ([], []))
            contexts.append(step.context)
            times.append(step.seconds)
        return grid

    @functools.cached_property
    def _fitted(self) -> dict[tuple[int, int, int, bool], tuple[list[float], list[float]]]:
        return {}

    def _fit(self, n: int, k: int, rows: int, head: bool) -> tuple[list[float], list[float]]:
        asked = (n, k, rows, head)
        if asked not in self._fitted:
            width = min((m for m, h in self._grid if h == head and m >= n), default=0)
            by_k = self._grid.get((width, head), {})
            depth = min((j for j in by_k if j >= k), default=0)
            by_rows = by_k.get(depth, {})
            # Rows round up within the shape; a table of full shapes only has one entry there.
            fitting = min((r for r in by_rows if r >= rows), default=0)
            if not fitting:
                what = "with the head" if head else "of plain decode"
                raise CostError(
                    f"no cost for {n} sequences of {k} rows, {rows} in all, {what}: the table has widths "
                    f"{self.widths} and up to {self.deepest} drafts"
                )
            self._fitted[asked] = by_rows[fitting]
        return self._fitted[asked]


def _compact(step: StepTime) -> dict[str, Any]:
    fields = {name: value for name, value in dataclasses.asdict(step).items() if value is not None and value != 0}
    fields["head"] = step.head
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in fields.items()}


def model_id(cfg: ModelConfig) -> str:
    """Names a model by its sizes: what its steps cost depends on nothing else."""
    sizes = {name: value for name, value in cfg.to_hf().items() if name not in ("eos_token_id", "rope_parameters")}
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:8]
    kind = f"moe{cfg.moe.num_experts}" if cfg.moe else "dense"
    return f"{len(cfg.layers)}x{cfg.hidden_size}-{kind}-{digest}"


def without_rows(table: CostTable) -> CostTable:
    """The table for an engine without ragged shapes: only full ones, `rows = n * k`."""
    return dataclasses.replace(table, steps=tuple(step for step in table.steps if step.rows == step.n * step.k))


def ratio(costs: CostTable, n: int, deep: int, shallow: int, context: float) -> float:
    """Time of a step that verifies `deep` drafts of every sequence over one that verifies `shallow`."""
    time = lambda drafts: costs.seconds(n, drafts + 1, n * (drafts + 1), context)
    return time(deep) / time(shallow)


Verdict = Literal["deeper", "tie", "shallower"]


def judge(token_ratio: float, cost_ratio: float, tie: float = 0.02) -> Verdict:
    """Whether the deeper of two rungs pays: it must win by more than `tie`, the shallower one need only not lose.

    One-sided because what the two ratios leave out (prefill between steps, host work per draft, entering a shape) is
    always to the deeper one's cost: an arithmetic win within the tie is none, an arithmetic loss only grows.
    """
    gain = token_ratio / cost_ratio - 1
    return "shallower" if gain < 0 else "tie" if gain <= tie else "deeper"


def linear_fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """`(intercept, slope)` of the least-squares line, to show what it gets wrong. Two different x at least."""
    n, xs, ys = len(points), [x for x, _ in points], [y for _, y in points]
    mean_x, mean_y = sum(xs) / max(n, 1), sum(ys) / max(n, 1)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread == 0:
        raise CostError("a line needs two different numbers of rows")
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return mean_y - slope * mean_x, slope


def merge(tables: Iterable[CostTable]) -> CostTable:
    """One table of all step times; kind, model and device must be the same."""
    first, *others = tables
    for other in others:
        if other.kind != first.kind:
            raise CostError(f"{first.kind} and {other.kind} costs are not mixed")
        if other.rounds != first.rounds:
            raise CostError(f"costs of calls of {first.rounds} and {other.rounds} steps are not mixed")
        other.expect(model=first.model, device=first.device)
    return dataclasses.replace(first, steps=tuple(sorted({s for t in (first, *others) for s in t.steps})))
