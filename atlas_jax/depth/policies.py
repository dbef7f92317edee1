"""Depth policies by name. Plain Python: a policy advises the engine and knows no arrays."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from atlas_jax.depth.adaptive import AdaptiveRung, RungConfig
from atlas_jax.depth.dcut import DCut
from atlas_jax.depth.fit import fit_ladder
from atlas_jax.depth.interface import Costs, Decision, Outcome, Policy, PolicyError, Queued, State, uniform
from atlas_jax.depth.ladder import LadderConfig, Steps, describe_bad_part, format_ladder, parse_ladder
from atlas_jax.depth.survival import Oracle, Survival

__all__ = [
    "GRAMMAR",
    "AdaptiveRung",
    "Advice",
    "Costs",
    "DCut",
    "Decision",
    "Fixed",
    "Ladder",
    "Off",
    "Oracle",
    "Outcome",
    "Policy",
    "PolicyError",
    "Queued",
    "State",
    "Survival",
    "parse_policy",
]


@dataclasses.dataclass(frozen=True)
class Off:
    """Plain decode: one row a sequence, no head at all. The control of every speed claim."""

    name: str = "plain"
    head: bool = False
    needs_log_probs: bool = False
    ragged: bool = False

    @property
    def max_drafts(self) -> int:
        return 0

    def start(self) -> None:
        return None

    def drafts(self, n_active: int) -> int:
        return 0

    def decide(self, state: None, queued: Sequence[Queued]) -> Decision:
        return uniform(queued, 0)

    def observe(self, state: None, outcome: Outcome) -> None:
        return None

    def depths(self, n: int) -> frozenset[int]:
        return frozenset((0,))


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same number of drafts at every width. With 0 the head still follows, so that a later switch isn't blind."""

    depth: int
    head: bool = True
    needs_log_probs: bool = False
    ragged: bool = False

    @property
    def name(self) -> str:
        return f"fixed{self.depth}"

    @property
    def max_drafts(self) -> int:
        return self.depth

    def start(self) -> None:
        return None

    def drafts(self, n_active: int) -> int:
        return self.depth

    def decide(self, state: None, queued: Sequence[Queued]) -> Decision:
        return uniform(queued, self.depth)

    def observe(self, state: None, outcome: Outcome) -> None:
        return None

    def depths(self, n: int) -> frozenset[int]:
        return frozenset((self.depth,))


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Drafts by the number of active sequences; above the cap none."""

    config: LadderConfig = LadderConfig()
    num_drafts: int = 3
    head: bool = True
    needs_log_probs: bool = False
    ragged: bool = False

    @property
    def name(self) -> str:
        return "ladder" + ladder_options(self.config, self.num_drafts)

    @property
    def max_drafts(self) -> int:
        return self.num_drafts

    def start(self) -> None:
        return None

    def drafts(self, n_active: int) -> int:
        return self.config.step_drafts(n_active, self.num_drafts)

    def decide(self, state: None, queued: Sequence[Queued]) -> Decision:
        return uniform(queued, self.drafts(len(queued)))

    def observe(self, state: None, outcome: Outcome) -> None:
        return None

    def depths(self, n: int) -> frozenset[int]:
        return frozenset((self.drafts(n),))


def ladder_options(config: LadderConfig, num_drafts: int = 3) -> str:
    """The options that say how a ladder differs from the default one, as `/steps=1:2,4:1/cap=8`, or nothing."""
    default, told = LadderConfig(), ""
    if config.steps != default.steps:
        told += f"/steps={format_ladder(config.steps)}"
    if not config.enabled:
        told += "/enabled=no"
    if config.cap is not None:
        told += f"/cap={config.cap}"
    return told + (f"/num_drafts={num_drafts}" if num_drafts != 3 else "")


@dataclasses.dataclass(frozen=True)
class Advice:
    """What policies that weigh costs need to know of the machine and the text.

    Attributes:
      costs: of steps, for the model and device that serve.
      acceptance: of draft 1, 2, ... given those before it; empty where unknown.
      widths: numbers of active sequences to fit a ladder at; the largest is the concurrency.
      context: committed tokens of a typical sequence.
      asked: costs of steps that are calls of their own, as those of a policy with a memory are; None for the same.
    """

    costs: Costs
    acceptance: tuple[float, ...] = ()
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    context: float = 512
    asked: Costs | None = None


_Readers = dict[str, Callable[[str], Any]]

GRAMMAR = """policies, each followed by any of its options as /option=value:
  plain (or off)   no head at all
  fixed0, fixed1, ...
  ladder           steps, cap, enabled, num_drafts; without them as the environment sets it
  adaptive_rung    a ladder's options, and enter, leave, alpha, alpha_slow, probe_ticks, p1_trigger, flush, stale
  dcut             a ladder's options, and ratio, row_budget, max_seqs, canonical
  survival         num_drafts, row_budget, half_life, probe, prior; needs a cost table
  oracle           num_drafts, row_budget, accept; needs a cost table, and a simulator or accept
  auto             num_drafts, margin; a ladder fitted to a cost table and an acceptance
as in ladder/steps=1:3,8:2,16:1/cap=16 or dcut/ratio=0.5"""


def parse_policy(name: str, num_drafts: int = 3, advice: Advice | None = None) -> Policy:
    """The policy that a name and its options spell; `GRAMMAR` lists them. `num_drafts` is the default of the option.

    `advice` is what `survival`, `oracle` and `auto` go by. Raises `PolicyError` for an unknown name or option, for a
    value that an option cannot have, and where the advice is missing.
    """
    kind, *parts = name.split("/")
    if match := re.fullmatch(r"fixed([0-9]{1,2})", name):
        return Fixed(int(match[1]))
    if name in ("plain", "off"):
        return Off()
    readers: dict[str, _Readers] = {
        "ladder": _LADDER,
        "adaptive_rung": _LADDER | _RUNG,
        "dcut": _LADDER | _DCUT,
        "survival": _SURVIVAL,
        "oracle": _ORACLE,
        "auto": _AUTO,
    }
    if kind not in readers:
        raise PolicyError(f"unknown policy {name!r}; {GRAMMAR}")
    options = {"num_drafts": num_drafts} | _read(kind, parts, readers[kind])
    try:
        return _build(kind, name, options, advice)
    except PolicyError as error:
        raise PolicyError(f"policy {name!r}: {error}") from None


def _build(kind: str, name: str, options: dict[str, Any], advice: Advice | None) -> Policy:
    if kind in ("ladder", "adaptive_rung", "dcut"):
        asked = {option: options.pop(option) for option in ("steps", "cap", "enabled") if option in options}
        # Options say what a ladder is; what the environment says, pins included, holds only where there are none.
        try:
            config = LadderConfig(**asked) if asked else LadderConfig.from_env(os.environ)
        except ValueError as error:
            raise PolicyError(str(error)) from None
        if kind == "ladder":
            return Ladder(config, **options)
        if kind == "dcut":
            return DCut(config, name=name, **options)
        return AdaptiveRung(config, options.pop("num_drafts"), RungConfig(**options), name=name)
    if advice is None:
        raise PolicyError("it weighs costs: give a table of this model and device (scripts/measure_cost.py makes one)")
    if kind == "survival":
        if advice.acceptance:
            options.setdefault("prior", advice.acceptance)
        return Survival(advice.asked or advice.costs, name=name, **options)
    if kind == "oracle":
        return Oracle(advice.asked or advice.costs, name=name, **options)
    if not advice.acceptance:
        raise PolicyError("a ladder is fitted to an acceptance: give p1,p2_cond,... or a trace")
    curve = (*advice.acceptance, *[advice.acceptance[-1]] * options["num_drafts"])[: options["num_drafts"]]
    fit = fit_ladder(advice.costs, curve, advice.widths, advice.context, margin=options.get("margin", 0.0))
    return Ladder(fit.config, options["num_drafts"])


def _read(kind: str, parts: Sequence[str], readers: _Readers) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals or option not in readers:
            raise PolicyError(f"policy {kind} has no option {part!r}; its options are {', '.join(readers)}")
        if option in options:
            raise PolicyError(f"policy {kind}: option {option} is given twice")
        try:
            options[option] = readers[option](value)
        except ValueError as error:
            raise PolicyError(f"policy {kind}: {option}={value!r} {error}") from None
    return options


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError("is no whole number of 0 or more")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("is no finite number")
    return value


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part) for part in text.split(","))


def _steps(text: str) -> Steps:
    steps = parse_ladder(text)
    if steps is None:
        raise ValueError(f"is no ladder: {describe_bad_part(text)} is not N_MAX:DRAFTS")
    return steps


def _flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("is neither yes nor no")
    return text == "yes"


def _count_or_none(text: str) -> int | None:
    return None if text == "none" else _count(text)


_LADDER: _Readers = {"steps": _steps, "cap": _count, "enabled": _flag, "num_drafts": _count}
_RUNG: _Readers = {
    **dict.fromkeys(("enter", "leave", "alpha", "alpha_slow", "p1_trigger"), _number),
    **dict.fromkeys(("probe_ticks", "flush", "stale"), _count),
}
_DCUT: _Readers = {"ratio": _number, "row_budget": _count, "max_seqs": _count, "canonical": _count_or_none}
_SURVIVAL: _Readers = {
    "num_drafts": _count,
    "row_budget": _count_or_none,
    "half_life": _number,
    "probe": _count,
    "prior": _numbers,
}
_ORACLE: _Readers = {"num_drafts": _count, "row_budget": _count_or_none, "accept": _numbers}
_AUTO: _Readers = {"num_drafts": _count, "margin": _number}
