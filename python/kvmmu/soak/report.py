"""Tables of a soak.

What lives here: the table of policies, definitions, what the articles measured beside ours. What
never lives here: figures (see :mod:`.figures`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .columns import Columns
from .concurrency import Sustained
from .figures import MEASURES, Measure
from .policies import POLICIES
from .scenario import Scenario

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["ARTICLES", "definitions", "heading", "published", "rates", "shown", "table"]

ARTICLES = {
    "article-128k": (
        "the source article, 8 x H100, 12 h: paged without compaction / restart / compaction",
        (
            ("OOM events", "18", "0", "0"),
            ("fragmentation ratio %", "48.2", "28.0", "6.4"),
            ("128k requests timed out %", "24.5", "14.2", "0.2"),
            ("concurrency", "32", "40", "90"),
        ),
        "Its first column is nearest to strict-fifo here, its second to restart, its third to "
        "strict-compaction; plain and fallback are not in it. Why ours differ: docs/proof.md.",
    ),
    "article-2048": (
        "the second article, 8 x A100, 2,048 tokens: before / with its paged attention",
        (
            ("concurrency", "32", "58"),
            ("utilisation, 2K contiguous and the rest paged %", "-", "92"),
        ),
        "Before is nearest to contiguous-max here, after to plain.",
    ),
    "paper": (
        "the vLLM paper, KV memory that holds tokens %: max / pow2 / oracle / paged",
        (("pool holds tokens %", "20.4", "26.8", "38.2", "96.3"),),
        "The row 'pool holds tokens %' of contiguous-max, -pow2, -oracle and plain.",
    ),
}
"""What others published, beside which ours stand: title, rows, remark."""


def shown(measure: Measure, value: Any) -> str:
    """A value as a table shows it."""
    return "-" if value is None else format(value * measure.scale, measure.form)


def table(scenario: Scenario, results: Sequence[dict[str, Any]], *, hours: float) -> RenderableType:
    """One column a policy, one row a measure, in as many tables as the page is too narrow for one.
    ``hours``: simulated time that was asked for. Needs rich."""
    rows: list[tuple[str, list[str]]] = []
    stopped = any(result["interrupted"] for result in results)
    if stopped:
        reached = [f"{result['simulated_s'] / 3600:.3g}" for result in results]
        rows.append(("simulated h", reached))
    for measure in MEASURES:
        values = [result[measure.name] for result in results]
        known = [value for value in values if value is not None]
        if not known or (measure.name in _RARE and not any(known)):
            continue
        rows.append((measure.label, [shown(measure, value) for value in values]))
    return Columns(
        heading(f"{scenario.title}: {hours:g} h, seed {results[0]['seed']}", stopped),
        ("",),
        [
            (result["policy"], [figures[number] for _, figures in rows])
            for number, result in enumerate(results)
        ],
        [(label,) for label, _ in rows],
        padding=(0, 1),
    )


def heading(text: str, interrupted: bool) -> str:
    """A table's title, of a run that ended or that was stopped."""
    return f"{text} (interrupted)" if interrupted else text


_RARE = {"restarts", "continued", "dropped", "returned", "returnable_low", "hit_rate"}
"""Rows that only some scenarios have; one without a value under any policy is left out anyway."""


def definitions() -> RenderableType:
    """What each policy and each row means."""
    from rich.table import Table

    grid = Table(show_header=False, box=None, padding=(0, 1))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for policy in POLICIES.values():
        grid.add_row(policy.name, policy.about)
    grid.add_section()
    for measure in MEASURES:
        grid.add_row(measure.label.strip(), measure.meaning)
    return grid


def published(name: str) -> RenderableType | None:
    """What the articles measured, beside a scenario of that name."""
    from rich.console import Group
    from rich.table import Table

    wanted = [ARTICLES[key] for key in (name, "paper") if key in ARTICLES]
    if name not in ARTICLES:
        return None
    parts: list[RenderableType] = []
    for title, rows, remark in wanted:
        grid = Table(title=title, title_justify="left", show_header=False, padding=(0, 1))
        for row in rows:
            grid.add_row(*row)
        parts += [grid, remark]
    return Group(*parts)


def rates(
    scenario: Scenario, found: Sequence[Sustained], *, interrupted: bool = False
) -> RenderableType:
    """What each policy sustains."""
    from rich.table import Table

    grid = Table(
        title=heading(f"{scenario.title}: sustained", interrupted),
        title_style="bold",
        title_justify="left",
        padding=(0, 1),
    )
    grid.add_column("policy", no_wrap=True)
    for title in ("holds", "fails", "running there"):
        grid.add_column(title, justify="right", no_wrap=True)
    grid.add_column("probes: rate (timeouts)", justify="right")
    for one in found:
        grid.add_row(
            one.policy,
            f"{one.holds:.3f}",
            "-" if one.fails is None else f"{one.fails:.3f}",
            f"{one.concurrency:.1f}",
            " ".join(f"{rate:.3f}({share:.2%})" for rate, share in one.probes),
        )
    return grid
