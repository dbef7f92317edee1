"""What the judges of the delta-rule ops share: kinds of gates, unit rows, and how far a result is from the answer."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

Gate = Literal["mild", "none", "spiky", "strong", "forget", "all forgotten"]
GATES: tuple[Gate, ...] = get_args(Gate)


def log_decays(gate: Gate, rng: np.random.Generator, shape: tuple[int, ...], often: float) -> np.ndarray:
    """Log decays of the named kind, `<= 0`; of those that jump, a share `often` does."""
    return {
        "mild": lambda: -rng.gamma(1.0, 0.2, shape),
        "none": lambda: np.zeros(shape),
        "spiky": lambda: np.where(rng.random(shape) < often, -1e4, -0.01),
        "strong": lambda: np.full(shape, -20.0),
        "forget": lambda: np.where(rng.random(shape) < often, -np.inf, -0.1),
        "all forgotten": lambda: np.full(shape, -np.inf),
    }[gate]()


def unit(x: np.ndarray) -> np.ndarray:
    """Rows of length one."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def relative(actual: np.ndarray, wanted: np.ndarray) -> float:
    """Largest error, relative to the largest value (at least 1)."""
    return np.abs(actual - wanted).max(initial=0) / np.abs(wanted).max(initial=1)
