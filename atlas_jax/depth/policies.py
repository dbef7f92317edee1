"""How many drafts to verify next, by name. Plain Python: a policy advises the engine and knows no arrays."""

from __future__ import annotations

import dataclasses
import os
import re

from atlas_jax.depth.ladder import LadderConfig


class PolicyError(ValueError):
    """An unknown policy or one that does not fit the engine; the message lists what there is."""


@dataclasses.dataclass(frozen=True)
class Off:
    """Plain decode: one row a sequence, no head at all. The control of every speed claim."""

    name: str = "plain"
    head: bool = False

    def drafts(self, n_active: int) -> int:
        return 0

    @property
    def max_drafts(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same number of drafts at every width. With 0 the head still follows, so that a later switch isn't blind."""

    depth: int
    head: bool = True

    @property
    def name(self) -> str:
        return f"fixed{self.depth}"

    def drafts(self, n_active: int) -> int:
        return self.depth

    @property
    def max_drafts(self) -> int:
        return self.depth


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Drafts by the number of active sequences; above the cap none."""

    config: LadderConfig = LadderConfig()
    num_drafts: int = 3
    name: str = "ladder"
    head: bool = True

    def drafts(self, n_active: int) -> int:
        return self.config.step_drafts(n_active, self.num_drafts)

    @property
    def max_drafts(self) -> int:
        return self.num_drafts


Policy = Off | Fixed | Ladder


def parse_policy(name: str, num_drafts: int = 3) -> Policy:
    """`plain` (or `off`), `fixed0`, `fixed1`, ..., or `ladder` as the environment sets it.

    Raises `PolicyError` for anything else.
    """
    if name in ("plain", "off"):
        return Off()
    if match := re.fullmatch(r"fixed(\d{1,2})", name):
        return Fixed(int(match[1]))
    if name == "ladder":
        return Ladder(LadderConfig.from_env(os.environ), num_drafts)
    raise PolicyError(f"unknown policy {name!r}; there are plain, fixed0, fixed1, ... and ladder")
