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
from dataclasses import dataclass, field, fields
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from .._core import MMU, BlockMap, BlockTables, Measure, Plan, Quote, SequenceInfo
from ..compaction import compact, run_plan
from ..movers import SupportsMove
from .faults import FaultyMover, InjectedFault

if TYPE_CHECKING:
    from ..metrics import Watched

__all__ = ["LONG_PROMPT", "SHORT", "Onlooker", "Shape", "TimedMMU", "Totals"]

SHORT, LONG_PROMPT = 2_000, 100_000
"""Tokens: sequences of at most and of more than so many are counted apart."""

T = TypeVar("T")


class Shape(TypedDict, total=False):
    """What a request requires of where it lies, as :meth:`kvmmu.MMU.open` takes it."""

    require: str
    contiguous: int


class Onlooker(Protocol):
    """Sees a run go by: a :class:`kvmmu.pictures.History`, for one."""

    def sample(self, simulated_s: float, mmu: MMU, **series: float) -> None:
        """A step has ended; numbers of this step by name."""

    def wants(self, moves: int) -> bool:
        """Whether to look before and after a pass of so many moves."""
        ...

    def compaction(self, before: BlockMap, after: BlockMap) -> None:
        """Such a pass was made."""


class TimedMMU:
    """An MMU with a stop watch. :meth:`lap` closes a step and remembers its time."""

    def __init__(self, mmu: MMU, mover: SupportsMove) -> None:
        self._mmu = mmu
        self._mover = mover
        self.faults = mover if isinstance(mover, FaultyMover) else None
        self.onlooker: Onlooker | None = None
        """Told of every step (:meth:`sample`) and of passes that it wants; its time is not ours."""
        self.total_ns = 0
        self._lap_from = 0
        self.laps = array("q")
        """Nanoseconds inside kvmmu, one entry a step."""

    def begin_anew(self) -> None:
        """Forgets what was timed so far."""
        self.total_ns = self._lap_from = 0
        self.laps = array("q")

    @property
    def core(self) -> MMU:
        """The MMU itself, whose calls take no time here."""
        return self._mmu

    def lap(self) -> None:
        self.laps.append(self.total_ns - self._lap_from)
        self._lap_from = self.total_ns

    def timed(self, call: Callable[[MMU], T]) -> T:
        """Any call that is made less than once a step."""
        start = perf_counter_ns()
        try:
            return call(self._mmu)
        finally:
            self.total_ns += perf_counter_ns() - start

    # The calls of every step are written out: a closure would cost as much as some of them.

    def open(self, tokens: npt.NDArray[np.int32], shape: Shape) -> int:
        start = perf_counter_ns()
        try:
            return self._mmu.open(tokens, **shape)
        finally:
            self.total_ns += perf_counter_ns() - start

    def fork(self, sequence: int, tokens: npt.NDArray[np.int32]) -> int:
        """A continuation: a fork that is extended by tokens, or nothing."""

        def call(mmu: MMU) -> int:
            child = mmu.fork(sequence)
            try:
                copies = mmu.append(child, tokens)
            except BaseException:
                mmu.close(child)
                raise
            if len(copies):
                self._mover.move(copies)
            return child

        return self.timed(call)

    def info(self, sequence: int) -> SequenceInfo:
        return self.timed(lambda mmu: mmu.info(sequence))

    def regions(self, sequence: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        return self.timed(lambda mmu: mmu.regions(sequence))

    def cached_tokens(self, sequence: int) -> int:
        return self.timed(lambda mmu: mmu.info(sequence).num_cached_tokens)

    def blocks(self, sequence: int) -> npt.NDArray[np.int32]:
        """Physical blocks of a sequence; the clock stands still."""
        return self._mmu.block_table(sequence)

    def quote(self, tokens: npt.NDArray[np.int32], shape: Shape) -> Quote:
        return self.timed(lambda mmu: mmu.quote(tokens, **shape))

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
            if self.onlooker is None:
                return compact(self._mmu, self._mover)
            return self._compact_seen(self.onlooker)
        except InjectedFault:
            return None
        finally:
            if self.faults is not None:
                self.faults.passes = False
            self.total_ns += perf_counter_ns() - start

    def run_plan(self, plan: Plan) -> int:
        """Carries out a plan that somebody asked for."""
        return self.timed(lambda mmu: run_plan(mmu, self._mover, plan))

    def _compact_seen(self, onlooker: Onlooker) -> int:
        """:func:`compact`, with a look before and after the passes that the onlooker wants."""
        plan = self._mmu.plan_compaction()
        if plan is None:
            return 0
        if not onlooker.wants(len(plan)):
            return run_plan(self._mmu, self._mover, plan)
        looking = perf_counter_ns()
        before = self._mmu.block_map()
        self.total_ns -= perf_counter_ns() - looking
        moved = run_plan(self._mmu, self._mover, plan)
        looking = perf_counter_ns()
        onlooker.compaction(before, self._mmu.block_map())
        self.total_ns -= perf_counter_ns() - looking
        return moved

    def sample(self, simulated_s: float, **series: float) -> None:
        """Tells the onlooker of a step, if there is one."""
        if self.onlooker is not None:
            self.onlooker.sample(simulated_s, self._mmu, **series)

    def guarantee(self) -> dict[str, int]:
        return self.timed(lambda mmu: mmu.guarantee())

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
        return self.timed(lambda mmu: mmu.stats())


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
    separable_sum: int = 0
    """Those that are separable (see :mod:`.cover`), over sampled steps; and of them, huge ones."""
    separable_huge_sum: int = 0
    pages_sum: dict[int, int] = field(default_factory=dict)
    """Pages by order of open sequences, over steps."""
    tokens_sum: int = 0
    """Tokens whose KV is in memory, and slots of the blocks in use, over the steps looked at."""
    slots_sum: int = 0
    full_tokens_sum: int = 0
    """The same tokens over those steps in which the head of the queue waited for memory or a shape,
    and how many these were."""
    full_steps: int = 0
    ratio_empty_sum: float = 0.0
    windows_sum: float = 0.0
    """Free windows / those that the available blocks could make, over steps with one or more; and
    those steps."""
    windows_steps: int = 0
    unused_sum: int = 0

    waits: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    """(request, steps waited by cause) of every request that was admitted first or left."""
    timed_out: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    """The same, of those whose clients left."""
    failures: dict[str, int] = field(default_factory=lambda: {"memory": 0, "shape": 0, "tables": 0})
    """Requests that were refused at the head of the queue, by the reason."""
    continued: int = 0
    """Continuations opened as forks; parked sequences that were dropped for others."""
    dropped: int = 0
    restarts: int = 0
    stats_before: dict[str, int] = field(default_factory=dict)
    """The core's counters when counting began."""
    moved_by_step: array[int] = field(default_factory=lambda: array("l"))
    offline_sum: int = 0
    idle_sum: int = 0
    """Blocks given back, and blocks that could have been, over steps (see :mod:`.returning`)."""
    low_windows: list[tuple[float, float]] = field(default_factory=list)
    """(share of the pool in use, free windows of the possible) at each look, where memory is given
    back."""
    pairs_at_end: list[tuple[int, int, int]] = field(default_factory=list)
    """(blocks, runs, pair runs) of sequences of more than 100,000 tokens when they finished. The
    receiving end of a pair is the one that finished before it, in as many blocks."""
    last_long: npt.NDArray[np.int32] | None = None

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
    huge_at_end: int = 0
    """Huge pages of sequences when they finished."""
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
        """A request waited so many simulated seconds in the queue for this cause."""
        if self.engine is not None:
            self.engine.waited(cause, seconds)

    def begin_anew(self, stats: dict[str, int]) -> None:
        """Forgets all but the number of requests; the core's counters count from ``stats`` on."""
        fresh = Totals(requests=self.requests, stats_before=stats, engine=self.engine)
        for entry in fields(self):
            setattr(self, entry.name, getattr(fresh, entry.name))

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

    def guarantee(self) -> dict[str, float]:
        """How it stood: windows held in excess, moves owed."""
        owed = np.array(self.owed or [0])
        return {
            "excess_mean": self.excess_sum / max(len(self.owed), 1),
            "excess_worst": self.excess_worst,
            "owed_mean": float(owed.mean()),
            "owed_p99": float(np.percentile(owed, 99)),
            "owed_worst": int(owed.max()),
        }

    def add_finished(self, tokens: int, info: SequenceInfo) -> None:
        """Counts the runs that a sequence lies in at its end, and its huge pages."""
        runs = info.num_runs
        self.huge_at_end += info.pages.get(9, 0)
        if tokens <= SHORT:
            self.runs_at_end["short"].append(runs)
        elif tokens > LONG_PROMPT:
            self.runs_at_end["long"].append(runs)

    def add_transfer(self, blocks: npt.NDArray[np.int32]) -> None:
        """Counts what a transfer of a long sequence would be made of."""
        before, self.last_long = self.last_long, blocks
        if before is None or not len(blocks):
            return
        n = min(len(before), len(blocks))
        source, target = blocks[:n], before[:n]
        breaks = np.diff(source) != 1
        pairs = breaks | (np.diff(target) != 1)
        self.pairs_at_end.append((n, 1 + int(breaks.sum()), 1 + int(pairs.sum())))

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
