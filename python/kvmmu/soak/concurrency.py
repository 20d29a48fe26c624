"""How many requests can be sustained: the largest rate that few long requests leave.

What lives here: :func:`sustained`, a bisection over the rate. What never lives here: runs (see
:mod:`.together`).

*Sustained* is the largest rate, times that of the scenario, at which fewer than 0.5 % of the long
requests (more than 100,000 tokens; of all requests, where a scenario has none) time out within the
probe; *concurrency* is the mean number of running requests there. The share is taken to fall with
the rate. What is returned is an interval: the largest rate that held, the smallest that did not (or
nothing, where each held).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .task import Task
from .together import soak

__all__ = ["ALLOWED", "PROBE_HOURS", "Sustained", "sustained"]

ALLOWED = 0.005
PROBE_HOURS = 3.0
PROBES = 5
LOWEST, HIGHEST = 1 / 64, 4.0


@dataclass(frozen=True, slots=True)
class Sustained:
    """What a policy sustains.

    Attributes:
        policy: its name.
        holds: largest rate that was sustained, times the scenario's; 0: none that was tried.
        fails: smallest that was not; None: each that was tried held.
        figures: of the run at ``holds``; None where there is none.
        probes: (rate, share of time-outs) of every run, in their order.
    """

    policy: str
    holds: float
    fails: float | None
    figures: dict[str, Any] | None
    probes: tuple[tuple[float, float], ...]

    @property
    def concurrency(self) -> float:
        """Requests running at once at that rate."""
        return 0.0 if self.figures is None else float(self.figures["running_mean"])


class _Search:
    """The bisection of one policy, a probe at a time."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._holds = 0.0
        self._fails: float | None = None
        self._figures: dict[str, Any] | None = None
        self._probes: list[tuple[float, float]] = []
        self._rate = 1.0

    def probe(self) -> Task:
        return replace(self.task, rate=self._rate)

    def learn(self, figures: dict[str, Any]) -> None:
        share = figures["timeouts_long"]
        share = figures["timeouts"] if share is None else share
        self._probes.append((self._rate, share or 0.0))
        if (share or 0.0) < ALLOWED:
            self._holds, self._figures = self._rate, figures
        else:
            self._fails = self._rate
        if self._fails is None:
            self._rate = min(self._holds * 1.25, HIGHEST)
        elif self._holds == 0.0:
            self._rate = max(self._fails / 2, LOWEST)
        else:
            self._rate = (self._holds + self._fails) / 2

    def result(self) -> Sustained:
        return Sustained(
            self.task.policy, self._holds, self._fails, self._figures, tuple(self._probes)
        )


def sustained(
    tasks: Sequence[Task],
    *,
    probes: int = PROBES,
    processes: int | None = None,
    watch: Callable[[Sequence[float]], bool] = lambda simulated_s: False,
) -> list[Sustained]:
    """Looks for the rate that each policy sustains, all of them at once.

    Args:
        tasks: one a policy; their ``hours`` are those of one probe.
        probes: runs a policy.
        processes, watch: as for :func:`.together.soak`.
    """
    searches = [_Search(task) for task in tasks]
    for _ in range(probes):
        found = soak([search.probe() for search in searches], processes=processes, watch=watch)
        for search, soaked in zip(searches, found, strict=True):
            if soaked.figures["interrupted"]:
                return [search.result() for search in searches]
            search.learn(soaked.figures)
    return [search.result() for search in searches]
