"""The ladder: how many drafts each sequence proposes, as a function of how many sequences are active.

A ladder is a tuple of steps `(n_max, drafts)`, ascending in `n_max`; its written form is `4:3,8:3,16:1,32:1`.
Names, defaults and grammar are those of the Atlas engine, so that one setting means the same in both. Its
integers and its white space are Rust's, which are narrower than Python's: `int` also takes `1_6`, `-0` and
full-width digits, `str.strip` also strips four separators that Unicode doesn't call white space.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

Steps = tuple[tuple[int, int], ...]

DEFAULT_STEPS: Steps = ((4, 3), (8, 3), (16, 1), (32, 1))
DEFAULT_MAX_SEQS = 32
DEFAULT_MAX_SEQS_WITHOUT_LADDER = 4

LADDER_VAR = "ATLAS_MTP_K_LADDER"
NO_LADDER_VAR = "ATLAS_NO_MTP_K_LADDER"
MAX_SEQS_VAR = "ATLAS_MTP_MAX_SEQS"
STATIC_RUNG_VAR = "ATLAS_MTP_STATIC_RUNG"

_LOOKS_OFF = ("", "0", "false", "no", "off")
_UINT = re.compile(r"\+?[0-9]+")
_UINT_MAX = 2**64 - 1
# Unicode's White_Space property.
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006"
    "\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)


def _parse_uint(text: str) -> int | None:
    """The 64-bit unsigned integer that `text` spells, or None. White space around it is not taken."""
    if not _UINT.fullmatch(text):
        return None
    # Any number of leading zeros is fine, but Python refuses to convert thousands of digits.
    digits = text.removeprefix("+").lstrip("0") or "0"
    value = int(digits) if len(digits) <= 20 else _UINT_MAX + 1
    return value if value <= _UINT_MAX else None


def _parse_step(part: str) -> tuple[int, int] | None:
    left, _, right = part.partition(":")  # without a colon `right` is empty, and so no integer
    n_max, drafts = _parse_uint(left.strip(_WHITE_SPACE)), _parse_uint(right.strip(_WHITE_SPACE))
    return None if n_max is None or drafts is None else (n_max, drafts)


def parse_ladder(value: str) -> Steps | None:
    """The steps that `value` spells, ascending in `n_max`, or None if any part of it is malformed.

    The sort is stable: of two steps with one `n_max` the first as written wins the lookup. Nothing else is
    checked; `0:0` is a step.
    """
    steps = []
    for part in value.split(","):
        step = _parse_step(part)
        if step is None:
            return None
        steps.append(step)
    return tuple(sorted(steps, key=lambda step: step[0]))


def describe_bad_part(value: str) -> str | None:
    """Which part makes `parse_ladder` reject `value`, as in `part 2 ('broken')`, or None if none does."""
    for number, part in enumerate(value.split(","), start=1):
        if _parse_step(part) is None:
            return f"part {number} ({part!r})"
    return None


def format_ladder(steps: Steps) -> str:
    """The written form of `steps`, which `parse_ladder` reads back."""
    return ",".join(f"{n_max}:{drafts}" for n_max, drafts in steps)


@dataclass(frozen=True)
class LadderConfig:
    """A ladder with its switches.

    Attributes:
        steps: the ladder, ascending in `n_max`, at least one step.
        enabled: False proposes `num_drafts` whatever the number of active sequences.
        cap: most active sequences that still speculate; None takes the default, which depends on `enabled`.
        static_rung: keep every rung as written, even where a policy would adapt it.

    Raises:
        ValueError: `steps` is empty, negative or not ascending, or `cap` is negative.
    """

    steps: Steps = DEFAULT_STEPS
    enabled: bool = True
    cap: int | None = None
    static_rung: bool = False

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a ladder needs at least one step")
        if any(n_max < 0 or drafts < 0 for n_max, drafts in self.steps):
            raise ValueError(f"a ladder has no negative numbers: {format_ladder(self.steps)}")
        if list(self.steps) != sorted(self.steps, key=lambda step: step[0]):
            raise ValueError(f"a ladder's steps ascend in n_max: {format_ladder(self.steps)}")
        if self.cap is not None and self.cap < 0:
            raise ValueError(f"cap must be 0 or more, got {self.cap}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> LadderConfig:
        """The configuration that the environment variables `environ` ask for; nothing else reads them.

        - `ATLAS_MTP_K_LADDER`: the ladder. One malformed part rejects the whole value for the default. Its
          presence, even malformed, pins adaptation off.
        - `ATLAS_NO_MTP_K_LADDER`: present, with any value: no ladder, `num_drafts` at every n.
        - `ATLAS_MTP_MAX_SEQS`: most active sequences that still speculate; 0 never speculates.
        - `ATLAS_MTP_STATIC_RUNG`: present, with any value: pins adaptation off.

        Warns (`UserWarning`) about each value that doesn't do what it seems to say, and says what is done.
        """
        enabled = NO_LADDER_VAR not in environ
        for name in (NO_LADDER_VAR, STATIC_RUNG_VAR):
            if name in environ and environ[name].casefold() in _LOOKS_OFF:
                _warn(f"{name}={environ[name]!r} counts as set, whatever the value; unset it instead")

        steps = DEFAULT_STEPS
        if LADDER_VAR in environ:
            value = environ[LADDER_VAR]
            parsed = parse_ladder(value)
            if parsed is not None:
                steps = parsed
            else:
                default = f"the default {format_ladder(steps)}"
                instead = default if enabled else f"no ladder, as {NO_LADDER_VAR} is set"
                _warn(
                    f"{LADDER_VAR}={value!r}: {describe_bad_part(value)} is not N_MAX:DRAFTS; "
                    f"the whole value is replaced by {instead}; adaptation is pinned off all the same"
                )

        cap = _parse_uint(environ.get(MAX_SEQS_VAR, ""))
        static_rung = LADDER_VAR in environ or STATIC_RUNG_VAR in environ
        config = cls(steps, enabled, cap, static_rung)
        if MAX_SEQS_VAR in environ and cap is None:
            _warn(
                f"{MAX_SEQS_VAR}={environ[MAX_SEQS_VAR]!r} is not an unsigned integer (spaces count); "
                f"the default {config.max_seqs} is used"
            )
        return config

    @property
    def max_seqs(self) -> int:
        """Most active sequences that still speculate. 0: never."""
        if self.cap is not None:
            return self.cap
        return DEFAULT_MAX_SEQS if self.enabled else DEFAULT_MAX_SEQS_WITHOUT_LADDER

    @property
    def adaptive_pinned(self) -> bool:
        """Whether no policy may depart from the rungs: asked for, or there is no ladder to depart from."""
        return self.static_rung or not self.enabled

    def drafts(self, n_active: int, num_drafts: int) -> int:
        """Drafts per sequence at `n_active` active sequences, whatever the cap.

        The rung is the first step with `n_active <= n_max`, beyond all of them the last one, clamped to
        1..num_drafts. A `num_drafts` of 0 is speculation off and gives 0.

        Raises:
            ValueError: `n_active` or `num_drafts` is negative.
        """
        if n_active < 0 or num_drafts < 0:
            raise ValueError(f"n_active and num_drafts must be 0 or more, got {n_active} and {num_drafts}")
        if num_drafts == 0 or not self.enabled:
            return num_drafts
        wanted = next((drafts for n_max, drafts in self.steps if n_active <= n_max), self.steps[-1][1])
        return min(max(wanted, 1), num_drafts)

    def step_drafts(self, n_active: int, num_drafts: int) -> int:
        """`drafts` up to `max_seqs` active sequences, 0 (plain decode) beyond."""
        drafts = self.drafts(n_active, num_drafts)
        return drafts if n_active <= self.max_seqs else 0


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)  # 3: the caller of from_env
