"""Tables in plain text, for scripts that run where only the core dependencies are."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns under their names: text to the left, numbers (and `-` for none) to the right."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [all(not isinstance(row[i], str) for row in rows) for i in range(len(header))]
    line = lambda row: "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
    return "\n".join(line(row).rstrip() for row in [list(header), ["-" * w for w in widths], *cells])


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
