"""What policies that weigh costs go by when they serve: a table measured here, and an acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from atlas_jax.config import ModelConfig
from atlas_jax.depth.policies import Advice, PolicyError
from atlas_jax.lab.cost import model_id
from atlas_jax.lab.measure_cost import device_id
from atlas_jax.lab.tables import find_costs, find_trace


def advise(
    costs: str | None,
    acceptance: str | None,
    cfg: ModelConfig,
    widths: Sequence[int],
    *,
    context: float,
    longest: int,
    num_drafts: int = 3,
) -> Advice | None:
    """The advice for `parse_policy`, or None without a table: then a policy that needs one says so.

    Args:
      costs: a name or file as `find_costs` takes it; the table must be of this model and this device.
      acceptance: `p1,p2_cond,...`, or a trace as `find_trace` takes it; None leaves it unknown.
      widths: numbers of active sequences that will be served; a ladder is fitted to those that the table has.
      context: committed tokens of a typical sequence, and `longest` the most that any will have.
      num_drafts: most drafts.

    Raises `CostError`, `TraceError` or `PolicyError` for what cannot be used, and for a table that ends too early.
    """
    if costs is None:
        return None
    table, most = find_costs(costs).expect(model=model_id(cfg), device=device_id()), max(widths)
    # What a policy may come to ask for while it serves; a table that ends before would fail in the middle of a request.
    table.seconds(most, num_drafts + 1, most * (num_drafts + 1), longest)
    table.seconds(most, 1, most, longest, head=False)
    last = min(width for width in table.widths if width >= most)
    fitted = (*(width for width in table.widths if width < last), last)
    return Advice(table, _acceptance(acceptance, cfg), fitted, context, asked=table.one_a_call)


def _acceptance(told: str | None, cfg: ModelConfig) -> tuple[float, ...]:
    if told is None:
        return ()
    try:
        curve = tuple(map(float, told.split(",")))
    except ValueError:
        trace = find_trace(told)
        # Made traces are of no model; what was recorded is of the one that it was recorded with.
        return (trace.expect(model_id(cfg)) if trace.model else trace).acceptance()
    if not all(0 <= share <= 1 for share in curve):
        raise PolicyError(f"acceptance {told!r}: shares are from 0 to 1, of draft 1, of draft 2 given draft 1, ...")
    return curve
