"""Timing of device programs from the host: many launches in one go, buffers in rotation, medians with their spread."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Carry = TypeVar("Carry")

# Memory bandwidth by device kind, bytes per second, from the makers' data sheets. The longest prefix of a kind counts.
NOMINAL_BANDWIDTH = {
    "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA A100": 2.039e12,
    "NVIDIA H100 NVL": 3.9e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA H100": 3.35e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA B200": 8.0e12,
    "NVIDIA GH200 480GB": 4.0e12,
    "NVIDIA L40S": 0.864e12,
    "NVIDIA GeForce RTX 4090": 1.008e12,
    "NVIDIA GeForce RTX 5090": 1.792e12,
    "NVIDIA RTX PRO 6000": 1.792e12,
    "NVIDIA GB10": 0.273e12,
}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median over repetitions, and the quartiles. `calls` were timed in all."""

    us: float
    low: float
    high: float
    calls: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high - self.low) / self.us


def measure(
    run: Callable[[Carry], Carry],
    carry: Carry,
    *,
    calls: int = 1,
    repetitions: int = 9,
    seconds: float = 0.02,
    wait: Callable[[Carry], Any] = jax.block_until_ready,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Timing, Carry]:
    """Time `run`, which maps its state to the next (and may donate it) and makes `calls` calls of what is measured.

    A repetition launches `run` again and again without waiting, for at least `seconds`, then waits once: the device is
    never idle between launches as long as a launch takes it longer than the host. Returns the timing and the state.
    """
    carry = run(carry)  # compiles, and warms up
    wait(carry)
    launches = 1
    while True:
        began = clock()
        for _ in range(launches):
            carry = run(carry)
        wait(carry)
        spent = clock() - began
        if spent >= seconds:
            break
        launches = max(2 * launches, int(launches * seconds / max(spent, 1e-9)))
    found = []
    for _ in range(repetitions):
        began = clock()
        for _ in range(launches):
            carry = run(carry)
        wait(carry)
        found.append((clock() - began) * 1e6 / (launches * calls))
    low, median, high = np.percentile(found, (25, 50, 75))
    return Timing(float(median), float(low), float(high), repetitions * launches * calls), carry


def chained(call: Callable[[Carry, int], Carry], unroll: int, turns: int) -> Callable[[Carry], Carry]:
    """One program of `unroll * turns` calls in a row, so that a launch from the host is paid once for all of them.

    `call(state, i)` is the i-th of the unrolled ones; let each touch memory of its own, together more than the cache
    holds. The loop has a known number of turns, so that the device need not ask the host. Donates its argument.
    """

    def program(carry: Carry) -> Carry:
        def turn(_: Any, carry: Carry) -> Carry:
            for i in range(unroll):
                # Calls on the same inputs would be merged, or what they share moved out of the loop.
                carry = call(jax.lax.optimization_barrier(carry), i)
            return carry

        return jax.lax.fori_loop(0, turns, turn, carry)

    return jax.jit(program, donate_argnums=0)


def copy_rate(bytes_moved: int = 1 << 30, **options: Any) -> float:
    """Bytes per second, read and written, of a large elementwise copy on this device: in place or not, the better.

    This, not the data sheet, is what a kernel bound by memory can be held to. `options` go to `measure`.
    """
    rates = []
    for donate in ((), (0,)):
        negate = jax.jit(lambda x: -x, donate_argnums=donate)
        timing, _ = measure(negate, jnp.ones(bytes_moved // 8, jnp.float32), **options)
        rates.append(bytes_moved / (timing.us * 1e-6))
    return max(rates)


def nominal_bandwidth(kind: str) -> float | None:
    """What the data sheet says, or None for a device that is not in the table."""
    known = [name for name in NOMINAL_BANDWIDTH if kind.startswith(name)]
    return NOMINAL_BANDWIDTH[max(known, key=len)] if known else None
