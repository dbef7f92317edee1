"""flash-linear-attention's Triton kernels, timed on the same inputs where torch and `fla` are installed.

Neither is a dependency. Launches go through a CUDA graph, so that PyTorch's own overhead is in none of the times.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from atlas_jax.lab.timing import Timing, measure

Inputs = tuple[np.ndarray, ...]  # q, k, v, g, beta as gdn_step and gdn_chunk take them: [N, T, heads, ...]


class FlaMissing(RuntimeError):
    """Why flash-linear-attention can't be timed here."""


def load() -> str:
    """Import torch and fla; returns their versions in one line. Raises `FlaMissing` with the reason."""
    try:
        torch: Any = importlib.import_module("torch")
        fla: Any = importlib.import_module("fla")
        importlib.import_module("fla.ops.gated_delta_rule")
    except Exception as error:  # fla checks versions and devices while it is imported, with errors of any kind
        raise FlaMissing(f"flash-linear-attention cannot be imported: {type(error).__name__}: {error}") from error
    if not torch.cuda.is_available():
        raise FlaMissing("flash-linear-attention needs a GPU that torch sees")
    return f"fla {fla.__version__}, torch {torch.__version__}"


def time_recurrent(inputs: Inputs, state: np.ndarray, sets: int) -> Timing:
    """Its fused recurrent kernel: T rows read from and folded into N states, `sets` sets of states in rotation.

    It folds every row, so it has no way to take a draft back: the least that a step of its design can cost.
    """
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return _time(fused_recurrent_gated_delta_rule, _tensors(inputs, "bfloat16"), state, sets)


def time_chunk(inputs: Inputs, state: np.ndarray) -> Timing:
    """Its chunked forward over T rows with initial and final state; q and k repeated to one head per value head."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = inputs
    ratio = v.shape[2] // k.shape[2]
    repeated = (np.repeat(q, ratio, axis=2), np.repeat(k, ratio, axis=2), v, g, beta)
    return _time(chunk_gated_delta_rule, _tensors(repeated, "bfloat16"), state, sets=1)


def _tensors(inputs: Inputs, dtype: str) -> dict[str, Any]:
    """Keyword arguments of both of its functions; gates stay float32, q is already scaled."""
    import torch

    names = ("q", "k", "v", "g", "beta")
    to = {name: torch.float32 if name == "g" else getattr(torch, dtype) for name in names}
    tensors = {
        name: torch.tensor(np.asarray(x, np.float32), device="cuda", dtype=to[name])
        for name, x in zip(names, inputs, strict=True)
    }
    return {**tensors, "scale": 1.0, "output_final_state": True}


def _time(kernel: Any, tensors: dict[str, Any], state: np.ndarray, sets: int) -> Timing:
    import torch

    states = [torch.tensor(state, device="cuda", dtype=torch.float32) for _ in range(sets)]

    def calls() -> None:
        for initial in states:
            kernel(**tensors, initial_state=initial)

    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # compiles and autotunes outside the capture
            calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        timing, _ = measure(lambda _: graph.replay(), None, calls=sets, wait=lambda _: torch.cuda.synchronize())
    return timing
