"""Rows as a table for people, and what a reader of it has to know.

What lives here: :func:`table` and :func:`remarks`. What never lives here: measuring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .harness import Bench, Row

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

__all__ = ["remarks", "table"]


_HEADINGS = ("measure", "unit", "kvmmu", "rival", "rival's", "ratio", "adds", "goal", "met")
_TEXTS = ("measure", "unit", "rival", "goal")
WIDE = 120
"""Columns of a page on which every part of a row has a column of its own."""


class _Rows:
    """Rows as a table. On a narrow page what is text shares one column; figures are never folded or
    cut."""

    def __init__(self, rows: Sequence[Row], bench: Bench) -> None:
        self._rows, self._bench = rows, bench

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markup import escape
        from rich.table import Table

        bench, wide = self._bench, options.max_width >= WIDE
        title = f"two loops do {bench.two_loops:.2f} x one"
        if bench.atomic_ns is not None:
            title = f"one atomic add {bench.atomic_ns:.2f} ns; {title}"
        grid = Table(title=title)
        for heading in _HEADINGS:
            if heading not in _TEXTS:
                grid.add_column(heading, justify="right", no_wrap=True)
            elif _has(heading, wide):
                grid.add_column(heading, overflow="fold")
        for row in self._rows:
            cells = {
                "measure": row.measure,
                "unit": row.unit,
                "kvmmu": _figure(row.kvmmu),
                "rival": row.rival or "-",
                "rival's": _figure(row.rival_value),
                "ratio": _figure(row.ratio),
                "adds": _figure(row.adds(bench.atomic_ns)),
                "goal": "-" if row.goal is None else str(row.goal),
            }
            if not wide:
                parts = [f"{row.measure}, {row.unit}"]
                parts += [f"beside {row.rival}"] * (row.rival is not None)
                parts += [f"goal: {row.goal}"] * (row.goal is not None)
                cells["measure"] = "; ".join(parts)
            cells = {heading: escape(text) for heading, text in cells.items()}
            cells["met"] = {True: "yes", False: "[bold red]no[/]", None: "-"}[row.met]
            grid.add_row(*(cells[head] for head in _HEADINGS if _has(head, wide)))
        yield grid


def _has(heading: str, wide: bool) -> bool:
    return wide or heading == "measure" or heading not in _TEXTS


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def table(rows: Sequence[Row], bench: Bench) -> RenderableType:
    """Needs rich."""
    return _Rows(rows, bench)


def remarks(rows: Sequence[Row], bench: Bench) -> Iterator[str]:
    """Sentences below the table."""
    absent = sorted({row.rival for row in rows if row.rival and row.rival_value is None})
    if absent:
        yield "rivals that were not there: " + "; ".join(absent)
    for note in bench.notes:
        yield f"note: {note}"
