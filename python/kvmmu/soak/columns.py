"""A table that is cut between its columns where it is wider than the page.

What lives here: :class:`Columns`. What never lives here: what is in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

__all__ = ["Columns"]


class Columns:
    """Several tables below each other, each with the names of the rows and as many columns as fit:
    nothing in them is folded or cut. Where not even one column fits, it is folded.

    Args:
        title: above the first.
        heads: of the columns that name a row; each table has them.
        columns: (head, figures) of the others.
        names: of each row, one text for each of ``heads``.
        sections: numbers of the rows that a section ends with.
        looks: further arguments of each :class:`rich.table.Table`.
    """

    def __init__(
        self,
        title: str,
        heads: Sequence[str],
        columns: Sequence[tuple[str, Sequence[str]]],
        names: Sequence[Sequence[str]],
        *,
        sections: Sequence[int] = (),
        **looks: Any,
    ) -> None:
        self._title, self._heads, self._columns = title, heads, list(columns)
        self._names, self._sections, self._looks = names, set(sections), looks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement

        endless = options.update(max_width=100_000)

        def fits(columns: Sequence[tuple[str, Sequence[str]]]) -> bool:
            grid = self._table(columns, whole=True)
            return Measurement.get(console, endless, grid).maximum <= options.max_width

        rest, first = self._columns, True
        while rest or first:
            count = 1
            while count < len(rest) and fits(rest[: count + 1]):
                count += 1
            grid = self._table(rest[:count], whole=fits(rest[:count]))
            if first:
                grid.title = self._title
            yield grid
            rest, first = rest[count:], False

    def _table(self, columns: Sequence[tuple[str, Sequence[str]]], *, whole: bool) -> Table:
        from rich.table import Table

        grid = Table(title_style="bold", title_justify="left", **self._looks)
        for head in self._heads:
            grid.add_column(head, no_wrap=whole, overflow="fold")
        for head, _ in columns:
            grid.add_column(head, justify="right", no_wrap=whole, overflow="fold")
        for number, names in enumerate(self._names):
            grid.add_row(*names, *(figures[number] for _, figures in columns))
            if number in self._sections:
                if grid.box is None:
                    grid.add_row()
                grid.add_section()
        return grid
