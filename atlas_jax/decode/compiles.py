"""Counts XLA compilations of this process, so that "nothing recompiles while serving" is a measurement."""

from __future__ import annotations

import jax

_count = 0


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _count
    if event == "/jax/core/compile/backend_compile_duration":
        _count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiles() -> int:
    """Programs compiled by this process so far, by anyone."""
    return _count
