"""Where the advantage ends: one thing varied at a time.

What lives here: :func:`variants`, which runs to make, and :func:`sensitivity`, their table. What
never lives here: runs.

Three policies (plain paging, huge pages without moves, the default) under other loads, shares of
long requests, step times, rates of prefill, budgets and triggers than the scenario's; everything
else stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .columns import Columns
from .figures import MEASURES
from .scenario import Scenario
from .task import Task

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Variant", "sensitivity", "variants"]

HOURS = 2.0
POLICIES = ("plain", "fallback", "compaction")
LOADS = (0.67, 0.83, 1.0, 1.11, 1.22)
LONG_SHARES = (0.05, 0.15, 0.3, 0.6)
STEPS_MS = (10, 30, 100)
PREFILL = (20_000, 200_000)
BUDGETS = (4, 8, 16, 32, 64)
TRIGGERS = (0.0, 0.65, 0.8, 0.9)
COLUMNS = {
    "running_mean": "at\nonce",
    "pool_used": "in\nuse %",
    "timeouts_long": "long\nleft %",
    "huge_cover": "huge\ncover",
    "free_windows": "free\nwin-\ndows",
    "runs_long": "runs\n128k",
    "runs_all": "runs\nall",
    "moves_per_step": "moves\na step",
}
"""Measures, and their heads: as narrow as their figures, so that 80 columns hold all."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One run, and what is varied in it."""

    what: str
    value: str
    task: Task


def variants(task: Task) -> list[Variant]:
    """All runs for a table. ``task.policy`` does not matter."""
    if task.hours is None:
        task = replace(task, hours=min(HOURS, task.scenario.hours))
    return list(_variants(task))


def _variants(task: Task) -> Iterator[Variant]:
    for load in LOADS:
        for policy in POLICIES:
            yield Variant("load", f"{load:g}", replace(task, policy=policy, rate=task.rate * load))
    for share in LONG_SHARES:
        changed = _long_share(task.scenario, share)
        if changed is None:
            break
        scenario, rate = changed
        for policy in POLICIES:
            varied = replace(task, policy=policy, scenario=scenario, rate=task.rate * rate)
            yield Variant("long requests", f"{share:.0%}", varied)
    for step_ms in STEPS_MS:
        server = task.scenario.server.model_copy(update={"step": step_ms / 1000})
        scenario = task.scenario.model_copy(update={"server": server})
        for policy in POLICIES:
            yield Variant("step", f"{step_ms} ms", replace(task, policy=policy, scenario=scenario))
    for tokens_per_s in PREFILL:
        server = task.scenario.server.model_copy(update={"prefill_tokens_per_s": tokens_per_s})
        scenario = task.scenario.model_copy(update={"server": server})
        for policy in POLICIES:
            varied = replace(task, policy=policy, scenario=scenario)
            yield Variant("prefill", f"{tokens_per_s:,}/s", varied)
    for budget in BUDGETS:
        yield Variant(
            "budget", f"{budget}", replace(task, policy="compaction", budget_blocks=budget)
        )
    for trigger in TRIGGERS:
        yield Variant(
            "trigger", f"{trigger:g}", replace(task, policy="compaction", windows_below=trigger)
        )


def _long_share(scenario: Scenario, share: float) -> tuple[Scenario, float] | None:
    """The scenario with another share of its first kind of two, and the rate that asks for about as
    much memory as before."""
    if len(scenario.kinds) != 2:
        return None
    long, short = scenario.kinds
    means = [kind.prompt.lognormal.mean if kind.prompt.lognormal else 1.0 for kind in (long, short)]
    before = long.share * means[0] + short.share * means[1]
    after = share * means[0] + (1 - share) * means[1]
    kinds = (
        long.model_copy(update={"share": share}),
        short.model_copy(update={"share": 1 - share}),
    )
    return scenario.model_copy(update={"kinds": kinds}), before / after


def sensitivity(planned: Sequence[Variant], results: Sequence[dict[str, Any]]) -> RenderableType:
    """The table: one row a run."""
    from .report import heading, shown

    task = planned[0].task
    stopped = any(result["interrupted"] for result in results)
    measures = {measure.name: measure for measure in MEASURES}
    return Columns(
        heading(
            f"{task.scenario.title}: one thing varied at a time, {task.simulated_s / 3600:g} h",
            stopped,
        ),
        ("varied", "policy"),
        [
            (head, [shown(measures[name], result[name]) for result in results])
            for name, head in COLUMNS.items()
        ],
        [(f"{one.what} {one.value}", one.task.policy) for one in planned],
        sections=[
            number
            for number, (one, following) in enumerate(pairwise(planned))
            if one.what != following.what
        ],
        box=None,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
