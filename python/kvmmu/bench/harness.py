"""How benchmarks are measured: contenders in turn, medians, one yardstick.

What lives here: timing, rows and their verdicts. What never lives here: a workload; each of those
has a file of its own beside this one, with a function ``rows(bench)`` that yields rows; and what
only a checkout can measure (``benches/``).
"""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Bench",
    "Goal",
    "Row",
    "medians",
    "of_the_core",
    "seconds",
    "warm_cores",
    "with_path",
]

NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


@dataclass(frozen=True)
class Goal:
    """What a figure, or its ratio to the rival's, is to be: at most ``limit``, or at least."""

    limit: float
    of: Literal["value", "ratio"] = "value"
    least: bool = False

    def __str__(self) -> str:
        return f"{self.of} {'>=' if self.least else '<='} {self.limit:g}"

    def is_met_by(self, figure: float) -> bool:
        return figure >= self.limit if self.least else figure <= self.limit


@dataclass(frozen=True)
class Row:
    """One figure beside its rival's. Units are times, and smaller is better, unless the unit or the
    goal says something else.

    Args:
        measure: what was done, in words.
        unit: ``ns``, ``us`` or ``ms``, perhaps with what it is for: ``ns/block``; or what is
            counted.
        kvmmu: our figure.
        rival: who else was measured, or would have been.
        rival_value: None when the rival was not there.
        goal: what ``met`` judges.
    """

    measure: str
    unit: str
    kvmmu: float
    rival: str | None = None
    rival_value: float | None = None
    goal: Goal | None = None

    @property
    def ratio(self) -> float | None:
        """kvmmu / rival: below 1 kvmmu is faster."""
        return self.kvmmu / self.rival_value if self.rival_value else None

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        judged = self.kvmmu if self.goal.of == "value" else self.ratio
        return None if judged is None else self.goal.is_met_by(judged)

    def adds(self, atomic_ns: float | None) -> float | None:
        """The figure in uncontended atomic adds of this run; None where they were not measured."""
        scale = NANOSECONDS.get(self.unit.split("/")[0])
        return None if scale is None or atomic_ns is None else self.kvmmu * scale / atomic_ns

    def as_json(self, atomic_ns: float | None) -> dict[str, Any]:
        """The row with all that follows from it."""
        return {
            "measure": self.measure,
            "unit": self.unit,
            "kvmmu": self.kvmmu,
            "rival": self.rival,
            "rival_value": self.rival_value,
            "ratio": self.ratio,
            "goal": None if self.goal is None else str(self.goal),
            "met": self.met,
            "atomic_adds": self.adds(atomic_ns),
        }


@dataclass
class Bench:
    """What a workload may need: where rivals are, and what this machine can do now.

    Attributes:
        vllm, llfree: folders of rivals' sources.
        trace: file of requests, as ``kvmmu replay`` reads them.
        rust: what an example of the core crate measures, by its name; None: there is no checkout.
        atomic_ns: an uncontended atomic add; None: it was not measured.
        two_loops: how much more two private loops do than one.
        notes: what a reader of the table has to know.
    """

    vllm: Path | None = None
    llfree: Path | None = None
    trace: Path | None = None
    rust: Callable[[str], Mapping[str, float]] | None = None
    atomic_ns: float | None = None
    two_loops: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def two_cores(self) -> bool:
        """Whether two private loops really run in parallel: two-thread figures need it."""
        return self.two_loops >= 1.6

    def note(self, text: str) -> None:
        """Something that a reader of the table has to know."""
        self.notes.append(text)


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def medians(contenders: Mapping[str, Callable[[], float]], rounds: int = 15) -> dict[str, float]:
    """Runs every contender once a round, in turn; each call returns its own figure.

    The first round is not counted.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        for name, measure in contenders.items():
            figure = measure()
            if round_number:
                figures[name].append(figure)
    return {name: statistics.median(values) for name, values in figures.items()}


def _spin(until: float) -> int:
    count = 0
    while time.perf_counter() < until:
        count += 1
    return count


def _loop(start_at: float) -> int:
    while time.perf_counter() < start_at:
        pass
    return _spin(start_at + 0.3)


def warm_cores(warm_up: float = 3.0) -> float:
    """Keeps two cores busy, then says how much more two private loops do than one (at best 2)."""
    unheard = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's business
    with multiprocessing.get_context("fork").Pool(2, signal.signal, unheard) as pool:
        pool.map(_spin, [time.perf_counter() + warm_up] * 2, chunksize=1)
        alone = max(pool.map(_loop, [time.perf_counter()], chunksize=1) for _ in range(3))[0]
        both = max(
            sum(pool.map(_loop, [time.perf_counter() + 0.05] * 2, chunksize=1)) for _ in range(3)
        )
    return both / alone


def of_the_core(bench: Bench, example: str) -> Mapping[str, float] | None:
    """What an example of the core crate measures; None, with a note, without a checkout."""
    if bench.rust is None:
        bench.note(f"{example}: the core alone is measured from a checkout (benches/run)")
        return None
    return bench.rust(example)


def with_path(folder: Path, load: Callable[[], Any], bench: Bench) -> Any:
    """What ``load`` imports from a rival's source folder; None, with a note, if it cannot."""
    sys.path.insert(0, str(folder))
    try:
        return load()
    except ImportError as error:
        bench.note(f"{folder}: {error}")
        return None
    finally:
        sys.path.remove(str(folder))
