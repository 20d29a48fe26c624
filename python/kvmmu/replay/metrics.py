"""The clock around the MMU, and the figures that a run adds up.

What lives here: :class:`TimedMMU`, which passes every call on and adds the time that it took;
:class:`Totals`, plain counters. What never lives here: decisions.

``mmu_s`` is all wall time inside kvmmu: every call of the MMU, those of the report (``states``,
``measure``) and whole compaction passes with their copies included. Writing contents and reading
them back is the model's part, not kvmmu's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from .._core import MMU, BlockTables, Measure, Quote
from ..compaction import compact
from ..movers import SupportsMove
from .faults import FaultyMover, InjectedFault

if TYPE_CHECKING:
    from ..metrics import Watched

__all__ = ["TimedMMU", "Totals"]

SHORT, LONG_PROMPT = 2_000, 100_000
"""Tokens: sequences of at most and of more than so many are counted apart."""

T = TypeVar("T")


class TimedMMU:
    """An MMU with a stop watch. :meth:`lap` closes a step and remembers its time."""

    def __init__(self, mmu: MMU, mover: SupportsMove) -> None:
        self._mmu = mmu
        self._mover = mover
        self.faults = mover if isinstance(mover, FaultyMover) else None
        self.total_ns = 0
        self._lap_from = 0
        self.laps = array("q")
        """Nanoseconds inside kvmmu, one entry a step."""

    @property
    def core(self) -> MMU:
        """The MMU itself, whose calls take no time here."""
        return self._mmu

    def lap(self) -> None:
        self.laps.append(self.total_ns - self._lap_from)
        self._lap_from = self.total_ns

    def _timed(self, call: Callable[[], T]) -> T:
        start = perf_counter_ns()
        try:
            return call()
        finally:
            self.total_ns += perf_counter_ns() - start

    # The calls of every step are written out: a closure would cost as much as some of them.

    def open(self, tokens: npt.NDArray[np.int32]) -> int:
        start = perf_counter_ns()
        try:
            return self._mmu.open(tokens)
        finally:
            self.total_ns += perf_counter_ns() - start

    def runs(self, sequence: int) -> int:
        return self._timed(lambda: self._mmu.info(sequence).num_runs)

    def cached_tokens(self, sequence: int) -> int:
        return self._timed(lambda: self._mmu.info(sequence).num_cached_tokens)

    def quote(self, tokens: npt.NDArray[np.int32]) -> Quote:
        return self._timed(lambda: self._mmu.quote(tokens))

    def close(self, sequence: int) -> None:
        start = perf_counter_ns()
        try:
            self._mmu.close(sequence)
        finally:
            self.total_ns += perf_counter_ns() - start

    def begin_step(self) -> int:
        start = perf_counter_ns()
        step = self._mmu.begin_step()
        self.total_ns += perf_counter_ns() - start
        return step

    def prepare(
        self,
        step: int,
        sequences: npt.NDArray[np.int64],
        tables: BlockTables,
        query_lens: npt.NDArray[np.int32] | None,
        new_tokens: npt.NDArray[np.int32],
    ) -> None:
        """Prepares, and carries the copies out that copy-on-write asks for."""
        start = perf_counter_ns()
        try:
            copies = self._mmu.prepare(
                step, sequences, tables, query_lens=query_lens, new_tokens=new_tokens
            )
            if len(copies):
                self._mover.move(copies)
        finally:
            self.total_ns += perf_counter_ns() - start

    def written(self, step: int) -> None:
        start = perf_counter_ns()
        self._mmu.written(step)
        self.total_ns += perf_counter_ns() - start

    def end_step(self, step: int) -> None:
        start = perf_counter_ns()
        self._mmu.end_step(step)
        self.total_ns += perf_counter_ns() - start

    def compact(self) -> int | None:
        """One pass; None when a fault was injected into it."""
        start = perf_counter_ns()
        if self.faults is not None:
            self.faults.passes = True
        try:
            return compact(self._mmu, self._mover)
        except InjectedFault:
            return None
        finally:
            if self.faults is not None:
                self.faults.passes = False
            self.total_ns += perf_counter_ns() - start

    def guarantee(self) -> dict[str, int]:
        return self._timed(self._mmu.guarantee)

    def states(self) -> dict[str, int]:
        start = perf_counter_ns()
        states = self._mmu.states()
        self.total_ns += perf_counter_ns() - start
        return states

    def measure(self) -> Measure:
        start = perf_counter_ns()
        measure = self._mmu.measure()
        self.total_ns += perf_counter_ns() - start
        return measure

    def stats(self) -> dict[str, int]:
        return self._timed(self._mmu.stats)


@dataclass(slots=True)
class Totals:
    """What a run has done so far. Sums, from which :mod:`.report` makes means."""

    requests: int
    """Requests of the trace."""
    finished: int = 0
    refused: int = 0
    preempted: int = 0
    """Times that a running request was thrown out to be computed again."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """(request, reason), the first few."""

    prompt_blocks_full: int = 0
    prompt_blocks_listed: int = 0
    blocks_found: int = 0
    """Hits of requests when first opened; reopening after preemption does not count again."""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that had to be computed, those of preempted requests each time."""
    generated_tokens: int = 0

    steps: int = 0
    simulated_s: float = 0.0
    peak_running: int = 0
    running_sum: int = 0
    live_peak: int = 0
    live_sum: int = 0
    ratio_sum: float = 0.0
    runs_sum: float = 0.0
    runs_steps: int = 0
    measured: int = 0
    regions_sum: int = 0
    """Complete regions of 512 blocks of open sequences, over steps; and those that are huge."""
    huge_sum: int = 0
    pages_sum: dict[int, int] = field(default_factory=dict)
    """Pages by order of open sequences, over steps."""
    runs_at_end: dict[str, list[int]] = field(default_factory=lambda: {"short": [], "long": []})
    """Runs of sequences of at most 2,000 and of more than 100,000 tokens when they finished."""

    moved_blocks: int = 0
    """Distinct (old, new) pairs of blocks by which exported rows changed; see :mod:`.seen`."""
    compactions: int = 0
    faults: int = 0
    """Passes that a fault was injected into."""
    excess_sum: int = 0
    """Windows held beyond those that the guarantee allows, over steps; and the most of a step."""
    excess_worst: int = 0
    owed: array[int] = field(default_factory=lambda: array("q"))
    """Moves owed to the guarantee, one entry a step."""
    guarantee_broken: int = 0
    """Steps in which more had been moved than freed, or moves were owed that budget and frees
    allowed."""
    wasted_blocks: int = 0
    wasted_samples: int = 0

    verified_tokens: int = 0
    mismatches: int = 0
    interrupted: bool = False
    engine: Watched | None = None
    """Who is told of waits and preemptions as they happen."""

    def preempt(self) -> None:
        """Counts a running request that was thrown out."""
        self.preempted += 1
        if self.engine is not None:
            self.engine.preempted()

    def wait(self, cause: str, seconds: float) -> None:
        """A request was admitted after so many simulated seconds in the queue."""
        if self.engine is not None:
            self.engine.waited(cause, seconds)

    def add_pages(self, measure: Measure) -> None:
        """Adds what open sequences map at the end of a step."""
        self.regions_sum += measure.regions
        for order, pages in measure.pages.items():
            self.pages_sum[order] = self.pages_sum.get(order, 0) + pages
        self.huge_sum += measure.pages.get(9, 0)

    def add_guarantee(self, held: dict[str, int], spare: int, moved: int, freed: int) -> None:
        """Counts how the guarantee stands after a pass that left ``spare`` moves of its budget."""
        excess = max(held["windows"] - held["allowed"] - held["immovable"], 0)
        self.excess_sum += excess
        self.excess_worst = max(self.excess_worst, excess)
        self.owed.append(held["owed"])
        self.guarantee_broken += moved > freed or (held["owed"] > 0 and spare > 0)

    def add_finished(self, tokens: int, runs: int) -> None:
        """Counts the runs that a sequence lies in at its end."""
        if tokens <= SHORT:
            self.runs_at_end["short"].append(runs)
        elif tokens > LONG_PROMPT:
            self.runs_at_end["long"].append(runs)

    def refuse(self, request: int, reason: str) -> None:
        self.refused += 1
        if len(self.refusals) < 20:
            self.refusals.append((request, reason))

    def admit(self, prompt: int, found_tokens: int, block_size: int) -> None:
        """Counts the prefix hits of a request that was opened for the first time."""
        self.prompt_tokens += prompt
        self.prompt_blocks_full += prompt // block_size
        self.prompt_blocks_listed += -(-prompt // block_size)
        self.blocks_found += found_tokens // block_size
