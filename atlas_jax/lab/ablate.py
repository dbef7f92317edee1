"""Which ladder is best: a grid of them over concurrency and regime, by simulation or by decoding, and a verdict.

Rows are kept in a CSV and never measured twice. Every speed is compared within its repetition; a rung is a winner only
where its range over the repetitions lies apart from that of every other depth, and at least as far apart as the same
ladder from itself (the A/A arm).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from atlas_jax.depth.ladder import LadderConfig, describe_bad_part, format_ladder, parse_ladder
from atlas_jax.depth.policies import Ladder, Off, Policy, PolicyError
from atlas_jax.files import written_whole
from atlas_jax.lab.simulate import Load, simulate
from atlas_jax.lab.tables import find_costs, find_trace

PLAIN, AA = "plain", "A/A"


@dataclasses.dataclass(frozen=True)
class Row:
    """One run. `source` names the costs or the device; `ladder` is a written ladder, `plain` or `A/A`."""

    source: str
    regime: str
    concurrency: int
    ladder: str
    repetition: int
    tok_s: float
    tok_step: float

    @property
    def key(self) -> tuple[str, str, int, str, int]:
        return self.source, self.regime, self.concurrency, self.ladder, self.repetition


@dataclasses.dataclass(frozen=True)
class Cell:
    """One ladder at one concurrency in one regime: tok/s over the repetitions, and over plain's within each."""

    ladder: str
    concurrency: int
    regime: str
    tok_s_median: float
    tok_s_min: float
    tok_s_max: float
    tok_step: float
    ratios: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The best depth at one concurrency, 0 for plain, over all regimes (geometric mean of the speed-ups).

    Attributes:
      ratio: its median speed-up over plain.
      decided: whether its range lies apart from that of every other depth by more than the A/A arm's spread.
      runner_up: the next best depth, and its median speed-up.
    """

    concurrency: int
    depth: int
    ratio: float
    decided: bool
    runner_up: tuple[int, float] | None
    aa_spread: float


@dataclasses.dataclass(frozen=True)
class Standing:
    """How a ladder does at one concurrency, over all regimes (geometric mean), medians over the repetitions.

    Attributes:
      over_plain: its speed over plain's.
      over_best: over that of the fixed depth that is best there, `depth`.
      aa_spread: how far the same ladder came apart from itself; differences within it are none.
    """

    concurrency: int
    over_plain: float
    over_best: float
    depth: int
    aa_spread: float

    def good(self, bound: float = 0.03) -> bool:
        """Not slower than plain beyond the spread, and within the bound (or the spread) of the best fixed depth."""
        return self.over_plain >= 1 - self.aa_spread and self.over_best >= 1 - max(bound, self.aa_spread)


def parse_grid(texts: Iterable[str], max_drafts: int) -> dict[str, LadderConfig]:
    """Ladders by their written form, each up to a `cap` where it is given as `LADDER@CAP`.

    Raises `PolicyError` for one that is malformed or asks for more than `max_drafts`.
    """
    found = {}
    for text in texts:
        written, _, cap = text.partition("@")
        steps = parse_ladder(written)
        if steps is None:
            raise PolicyError(f"ladder {text!r}: {describe_bad_part(written)} is not N_MAX:DRAFTS")
        if cap and not cap.isdecimal():
            raise PolicyError(f"ladder {text!r}: the cap {cap!r} is no number")
        if deep := [drafts for _, drafts in steps if drafts > max_drafts]:
            raise PolicyError(f"ladder {text!r} asks for {deep[0]} drafts; at most {max_drafts} are measured")
        found[text] = LadderConfig(steps, cap=int(cap) if cap else max(32, steps[-1][0]))
    return found


def arm_policy(ladder: str, grid: dict[str, LadderConfig], num_drafts: int) -> Policy:
    """The policy of an arm; `A/A` is the first ladder of the grid once more."""
    if ladder == PLAIN:
        return Off()
    config = next(iter(grid.values())) if ladder == AA else grid[ladder]
    return Ladder(config, num_drafts)


_COLUMNS = [field.name for field in dataclasses.fields(Row)]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV, none where there is no file. A last line that was cut off is dropped.

    Raises `ValueError` for a file with other columns.
    """
    header, *lines = csv.reader(_whole_lines(path) or [",".join(_COLUMNS)])
    if header != _COLUMNS:
        raise ValueError(f"{path} has columns {header}, not those of an ablation; move it away")
    return [
        Row(source, regime, int(c), ladder, int(repetition), float(tok_s), float(tok_step))
        for source, regime, c, ladder, repetition, tok_s, tok_step in lines
    ]


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a CSV, which is made if need be; a last line that was cut off is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = _whole_lines(path)
    if path.is_file() and sum(map(len, kept)) < path.stat().st_size:
        path.write_text("".join(kept))
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not kept:
            writer.writerow(_COLUMNS)
        writer.writerows(dataclasses.astuple(row) for row in rows)


def _whole_lines(path: Path) -> list[str]:
    """Of a file of one-byte characters, the lines that end."""
    return (
        [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.is_file() else []
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """One simulated run."""

    costs: str
    regime: str
    concurrency: int
    ladder: str
    repetition: int
    grid: tuple[str, ...]
    num_drafts: int
    seconds: float


_trace, _costs = functools.lru_cache(8)(find_trace), functools.cache(find_costs)  # a worker runs many jobs


def run_job(job: Job) -> Row:
    """Simulate; the A/A arm meets another text of the same regime."""
    grid = parse_grid(job.grid, job.num_drafts)
    seed = job.repetition + (1000 if job.ladder == AA else 0)
    trace, load = _trace(job.regime, seed=seed), Load(job.concurrency, job.seconds, seed=seed)
    found = simulate(arm_policy(job.ladder, grid, job.num_drafts), _costs(job.costs), trace, load)
    return Row(job.costs, job.regime, job.concurrency, job.ladder, job.repetition, found.tok_s, found.tok_step)


def ablate_simulated(
    path: Path,
    costs: str,
    grid: Sequence[str],
    places: Sequence[tuple[str, int]],
    *,
    repetitions: int = 5,
    num_drafts: int = 3,
    seconds: float = 60.0,
    processes: int = 2,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """All rows of a grid at each of `places`, regime and concurrency; those that the CSV has are not run again.

    Interrupted, it goes on where it was.
    """
    parse_grid(grid, num_drafts)
    have = {row.key: row for row in read_rows(path)}
    wanted = [
        Job(costs, regime, c, ladder, repetition, tuple(grid), num_drafts, seconds)
        for regime, c in places
        for ladder in (PLAIN, *grid, AA)
        for repetition in range(repetitions)
    ]
    key = lambda job: (job.costs, job.regime, job.concurrency, job.ladder, job.repetition)
    missing = [job for job in wanted if key(job) not in have]
    say(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them done before")
    if missing:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:  # JAX may run here
            for i, row in enumerate(pool.map(run_job, missing, chunksize=4), start=1):
                append_rows(path, [row])
                have[row.key] = row
                if i % 50 == 0 or i == len(missing):
                    say(f"{i} of {len(missing)}")
    return [have[key(job)] for job in wanted]


def merge_rows(parts: Iterable[Path], out: Path) -> int:
    """Add the rows of other CSVs to those of `out`, sorted; return their number. A simulated run is the same anywhere.

    Raises `ValueError`, and changes nothing, for a file that is absent and for a run that two files tell differently.
    """
    merged = {row.key: row for row in read_rows(out)}
    for path in parts:
        if not path.is_file():
            raise ValueError(f"{path}: no such file; name the folders of all parts")
        for row in read_rows(path):
            if merged.setdefault(row.key, row) != row:
                raise ValueError(f"{path} tells {row.regime}, C = {row.concurrency}, {row.ladder} unlike another part")
    with written_whole(out) as part:
        append_rows(part, (merged[key] for key in sorted(merged)))
    return len(merged)


def summarize(rows: Sequence[Row]) -> list[Cell]:
    """The cells, in the order of the rows. Raises `ValueError` where a repetition has no plain run beside it."""
    plain = {(r.regime, r.concurrency, r.repetition): r.tok_s for r in rows if r.ladder == PLAIN}
    grouped: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.ladder, row.concurrency, row.regime), []).append(row)
    cells = []
    for (ladder, c, regime), runs in grouped.items():
        if bad := [r for r in runs if (regime, c, r.repetition) not in plain]:
            raise ValueError(
                f"{regime}, concurrency {c}: no plain run beside repetition {bad[0].repetition} of {ladder}"
            )
        speeds = [r.tok_s for r in runs]
        cells.append(
            Cell(
                ladder=ladder,
                concurrency=c,
                regime=regime,
                tok_s_median=statistics.median(speeds),
                tok_s_min=min(speeds),
                tok_s_max=max(speeds),
                tok_step=statistics.median(r.tok_step for r in runs),
                ratios=tuple(
                    r.tok_s / plain[regime, c, r.repetition] for r in sorted(runs, key=lambda r: r.repetition)
                ),
            )
        )
    return cells


def _joint(cells: Sequence[Cell], c: int) -> dict[str, list[float]]:
    """Speed over plain per ladder and repetition at one concurrency, the geometric mean of the regimes."""
    joint: dict[str, list[float]] = {}
    for ladder in dict.fromkeys(cell.ladder for cell in cells if cell.concurrency == c):
        per_regime = [cell.ratios for cell in cells if cell.ladder == ladder and cell.concurrency == c]
        joint[ladder] = [math.exp(statistics.mean(map(math.log, each))) for each in zip(*per_regime, strict=False)]
    return joint


def _spread(joint: dict[str, list[float]], first: str) -> float:
    """How far the A/A arm came apart from its twin, at most."""
    return max((abs(a / b - 1) for a, b in zip(joint.get(AA, ()), joint.get(first, ()), strict=False)), default=0.0)


def verdicts(cells: Sequence[Cell], grid: dict[str, LadderConfig], num_drafts: int) -> list[Verdict]:
    """The best depth at each concurrency."""
    found = []
    for c in sorted({cell.concurrency for cell in cells}):
        joint = _joint(cells, c)
        # Ladders that ask for the same depth here are the same arm.
        pooled: dict[int, list[float]] = {}
        for ladder, ratios in joint.items():
            if ladder != AA:
                depth = 0 if ladder == PLAIN else grid[ladder].step_drafts(c, num_drafts)
                pooled.setdefault(depth, []).extend(ratios)
        spread = _spread(joint, next(iter(grid)))
        best, *others = sorted(pooled, key=lambda depth: (-statistics.median(pooled[depth]), depth))
        decided = all(min(pooled[best]) > max(pooled[d]) for d in others)
        rival = (others[0], statistics.median(pooled[others[0]])) if others else None
        median = statistics.median(pooled[best])
        if rival is not None:
            decided = decided and median / rival[1] - 1 > spread
        found.append(Verdict(c, best, median, decided, rival, spread))
    return found


def standings(cells: Sequence[Cell], grid: dict[str, LadderConfig], ladder: str) -> list[Standing]:
    """A ladder against plain and against the best of the grid's fixed depths (`N:D` and no cap in reach)."""
    found = []
    for c in sorted({cell.concurrency for cell in cells}):
        joint = _joint(cells, c)
        fixed = {config.steps[0][1]: text for text, config in grid.items() if _fixed(config, c) and text != ladder}
        if not fixed:
            raise ValueError(f"no fixed depth in the grid to hold {ladder} against at concurrency {c}; add 32:1 or so")
        depth = max(fixed, key=lambda d: statistics.median(joint[fixed[d]]))
        over_best = statistics.median(a / b for a, b in zip(joint[ladder], joint[fixed[depth]], strict=True))
        spread = _spread(joint, next(iter(grid)))
        found.append(Standing(c, statistics.median(joint[ladder]), over_best, depth, spread))
    return found


def _fixed(config: LadderConfig, c: int) -> bool:
    return len(config.steps) == 1 and config.max_seqs >= c


def best_ladder(found: Sequence[Verdict]) -> LadderConfig:
    """The verdicts as a ladder with a cap; where plain is best below the cap the ladder can only say 1."""
    cap = max((v.concurrency for v in found if v.depth), default=0)
    steps: list[tuple[int, int]] = []
    for verdict in sorted(found, key=lambda v: v.concurrency):
        if verdict.concurrency <= cap:
            depth = max(verdict.depth, 1)
            if steps and steps[-1][1] == depth:
                steps.pop()
            steps.append((verdict.concurrency, depth))
    return LadderConfig(tuple(steps) or ((1, 1),), cap=cap)


def describe(found: Sequence[Verdict]) -> list[str]:
    """The verdicts in words, and what the grammar could not say."""
    ladder = best_ladder(found)
    lines = [f"best ladder: {format_ladder(ladder.steps)}, cap {ladder.max_seqs}"]
    for v in found:
        rival = "" if v.runner_up is None else f", then {v.runner_up[0]} drafts at {v.runner_up[1]:.3f}"
        sure = "decided" if v.decided else f"not decided (A/A {100 * v.aa_spread:.1f} %)"
        lines.append(f"C = {v.concurrency}: {v.depth} drafts, {v.ratio:.3f} times plain{rival}; {sure}")
    if unsaid := [v.concurrency for v in found if not v.depth and v.concurrency <= ladder.max_seqs]:
        lines.append(
            f"at C = {', '.join(map(str, unsaid))} no drafts would be best, which no ladder can say below its cap"
        )
    return lines
