"""Cost tables and traces by name: those that ship, those made on the spot, and files."""

from __future__ import annotations

from pathlib import Path

from atlas_jax.lab.cost import CostError, CostTable
from atlas_jax.lab.trace import Trace, TraceError, load_trace, regime_trace

ROOT = Path(__file__).resolve().parents[2] / "experiments"
DEFAULT_COSTS = "roofline/qwen3.5-35b-a3b/h200"


def find_costs(name: str) -> CostTable:
    """`roofline/MODEL/DEVICE[/WEIGHTS]`, the name of a table in `experiments/costs`, or a file.

    Raises `CostError` for anything else; it lists what there is.
    """
    kind, *parts = name.split("/")
    if kind == "roofline":
        from atlas_jax.lab.roofline import roofline_table
        from atlas_jax.presets import PRESETS

        if len(parts) not in (2, 3) or parts[0] not in PRESETS:
            raise CostError(f"{name!r} is not roofline/MODEL/DEVICE[/WEIGHTS]; models are {', '.join(PRESETS)}")
        return roofline_table(parts[0], PRESETS[parts[0]], *parts[1:])
    shipped = {path.stem: path for path in sorted((ROOT / "costs").glob("*.json"))}
    if name in shipped:
        return CostTable.load(shipped[name])
    if not Path(name).is_file():
        raise CostError(
            f"no cost table {name!r}; there are {', '.join(shipped)}, roofline/MODEL/DEVICE[/WEIGHTS], and files"
        )
    return CostTable.load(Path(name))


def find_trace(name: str, *, decay: float = 0.0, seed: int = 0) -> Trace:
    """`prose`, `tools`, `switching` (made from `seed`), a recorded trace of `experiments/traces`, or a file.

    `NAME:LABEL` takes the answers of one label only. Raises `TraceError` for anything else.
    """
    if name in ("prose", "tools", "switching"):
        return regime_trace(name, decay=decay, seed=seed)
    stem, _, label = name.partition(":")
    shipped = {path.name.split(".")[0]: path for path in sorted((ROOT / "traces").glob("*.jsonl*"))}
    path = shipped.get(stem, Path(stem))
    if not path.is_file():
        raise TraceError(
            f"no trace {name!r}; there are {', '.join(('prose', 'tools', 'switching', *shipped))}, and files"
        )
    if decay:
        raise TraceError("only made traces (prose, tools, switching) can be given a decay")
    trace = load_trace(path, seed=seed)
    return trace.only(label) if label else trace
