"""Several heads of one base against plain decode, in turns: what the studies beside this file share."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Fixed, Off
from atlas_jax.lab.bench import Cell, build_engine, measure_engine

PLAIN = Off().name
Cells = dict[Any, list[list[Cell]]]  # of each entrant, by repetition: plain's and the drafting one's of each piece


def engines_of(heads: Mapping[Any, Any], cfg: Any, concurrency: int, depth: int, context: int) -> dict[Any, Engine]:
    """An engine for each of several parameter trees of the same shapes, all with the same compiled programs.

    Compiled one by one they would differ by a few per cent for no reason that the heads have a part in.
    """
    policies = [Off(), Fixed(depth)]
    made: dict[Any, Engine] = {}
    for name, params in heads.items():
        if not made:
            first, _ = build_engine(params, cfg, concurrency, policies, context)
            made[name] = first
        else:
            made[name] = Engine(params, cfg, first.config)
            made[name].programs.compiled |= first.programs.compiled
            made[name].warmup(policies)
    return made


def race(
    entrants: Callable[[int], Mapping[Any, Engine]],
    params: Any,
    regime: str,
    requests: Sequence[Request],
    depth: int,
    repetitions: int,
    say: Callable[[str], None] = lambda text: None,
) -> Cells:
    """Decode the requests with every entrant, `repetitions` times; `entrants(repetition)` are warmed-up engines.

    One sequence at a time, the entrants alternate request by request; a full batch runs whole. Beside each entrant's
    run is one of plain decode in the same engine, which the tokens are compared with.
    """
    cells: Cells = {}
    for repetition in range(repetitions):
        engines = [*entrants(repetition).items()]
        slots = engines[0][1].config.slots
        pieces = [[request] for request in requests] if slots == 1 else [list(requests)]
        for name, _ in engines:
            cells.setdefault(name, []).append([])
        for i, piece in enumerate(pieces):
            turn = (repetition + i) % len(engines)
            for name, engine in engines[turn:] + engines[:turn]:
                cells[name][-1] += measure_engine(engine, params, {regime: piece}, [Fixed(depth)], 1)
        say(f"{regime}, concurrency {slots}: repetition {repetition + 1} of {repetitions}")
    return cells


def speeds(cells: Cells) -> dict[Any, list[dict[str, Any]]]:
    """`{tok_s, x_plain, x_first, equal}` of each entrant in each repetition; no speed where tokens differ.

    Tokens over seconds of decode steps, all pieces together. The plain that is compared with is that of all entrants,
    since none of them has a part in it. `x_first` is the median over pieces of the speed over that of the first
    entrant in the same turn.
    """
    found: dict[Any, list[dict[str, Any]]] = {name: [] for name in cells}
    for by in zip(*cells.values(), strict=True):
        plain = _rate([cell for pieces in by for cell in pieces if cell.policy == PLAIN])
        drafting = [[cell for cell in pieces if cell.policy != PLAIN] for pieces in by]
        for name, mine in zip(cells, drafting, strict=True):
            figures: dict[str, Any] = {"tok_s": None, "x_plain": None, "x_first": None}
            if equal := all(cell.equal for cell in [*mine, *drafting[0]]):
                turns = [_rate([cell]) / _rate([other]) for cell, other in zip(mine, drafting[0], strict=True)]
                rate = _rate(mine)
                values = (round(rate, 1), round(rate / plain, 4), round(statistics.median(turns), 4))
                figures = dict(zip(figures, values, strict=True))
            found[name].append({**figures, "equal": equal})
    return found


def over_repetitions(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of an entrant's `speeds`, and the range of `x_plain`."""
    equal = all(figures["equal"] for figures in each)
    values = {name: [figures[name] for figures in each] for name in ("tok_s", "x_plain", "x_first")}
    found = {name: round(statistics.median(of), 4) if equal else None for name, of in values.items()}
    low, high = (min(values["x_plain"]), max(values["x_plain"])) if equal else (None, None)
    return {**found, "x_plain_min": low, "x_plain_max": high, "equal": equal}


def _rate(cells: Sequence[Cell]) -> float:
    """Tokens over seconds of decode steps."""
    return sum(cell.tokens for cell in cells) / sum(cell.tokens / (cell.tok_s or 0.0) for cell in cells)
