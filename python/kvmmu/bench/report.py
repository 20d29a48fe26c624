"""Rows as a table for people, and what a reader of it has to know.

What lives here: :func:`table` and :func:`remarks`. What never lives here: measuring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .harness import Bench, Row

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["remarks", "table"]


def table(rows: Sequence[Row], bench: Bench) -> Table:
    """Needs rich."""
    from rich.markup import escape
    from rich.table import Table

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    title = f"two loops do {bench.two_loops:.2f} x one"
    if bench.atomic_ns is not None:
        title = f"one atomic add {bench.atomic_ns:.2f} ns; {title}"
    found = Table(title=title)
    for heading in ("measure", "unit", "kvmmu", "rival", "rival's", "ratio", "adds", "goal", "met"):
        found.add_column(
            heading, justify="left" if heading in ("measure", "unit", "rival", "goal") else "right"
        )
    for row in rows:
        found.add_row(
            escape(row.measure),
            row.unit,
            figure(row.kvmmu),
            escape(row.rival or "-"),
            figure(row.rival_value),
            figure(row.ratio),
            figure(row.adds(bench.atomic_ns)),
            "-" if row.goal is None else str(row.goal),
            {True: "yes", False: "[bold red]no[/]", None: "-"}[row.met],
        )
    return found


def remarks(rows: Sequence[Row], bench: Bench) -> Iterator[str]:
    """Sentences below the table."""
    absent = sorted({row.rival for row in rows if row.rival and row.rival_value is None})
    if absent:
        yield "rivals that were not there: " + "; ".join(absent)
    for note in bench.notes:
        yield f"note: {note}"
