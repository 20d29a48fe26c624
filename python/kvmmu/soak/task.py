"""What is to be run.

What lives here: :class:`Task`. What never lives here: how (see :mod:`.run`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..replay.traces import Trace
from .scenario import Scenario

__all__ = ["Task"]


@dataclass(frozen=True, slots=True)
class Task:
    """One run, as it is handed to a process.

    Attributes:
        scenario: the load.
        policy: by name.
        seed: of the requests.
        hours: simulated time; None: as the scenario says.
        rate: times as many requests a second.
        trace: the real one, where the scenario takes one.
        verify: store bytes and read them back.
        budget_blocks: most blocks that a pass moves; None: the default.
        windows_below: share of free windows that starts a pass; None: the default.
        settings: options of a policy that is none of those with a name; ``policy`` only names it.
        history: keep what pictures of the memory are made of.
    """

    scenario: Scenario
    policy: str
    seed: int = 0
    hours: float | None = None
    rate: float = 1.0
    trace: Trace | None = None
    verify: bool = False
    budget_blocks: int | None = None
    windows_below: float | None = None
    settings: Mapping[str, Any] | None = None
    history: bool = False

    @property
    def simulated_s(self) -> float:
        hours = self.scenario.hours if self.hours is None else self.hours
        return hours * 3600
