"""Which blocks move between two steps, what those blocks were, and how to break it on purpose.

What lives here: the goals of ``--goal``, :class:`Watched`, which stands before the mover and takes
notes, and the faults of ``--sabotage``. What never lives here: a request, a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import kvmmu
import numpy as np

from .schedule import Source


def by_trigger(cache: kvmmu.KVCache, budget: int) -> int:
    """What an engine calls: nothing moves unless the memory needs it."""
    return cache.compact()


def below(cache: kvmmu.KVCache, budget: int) -> int:
    """Towards available memory in one run, always."""
    plan = cache.mmu.plan_below(0.0, max_blocks=budget)
    return kvmmu.run_plan(cache.mmu, cache.mover, plan)


def free_run(cache: kvmmu.KVCache, budget: int) -> int:
    """Towards all available memory in one run. Where it lies so already, towards another one, as
    if a transfer held a block in the midst of it: blocks move before nearly every step."""
    mmu = cache.mmu
    available = mmu.states()["available"]
    if not available:
        return 0
    moved = kvmmu.run_plan(mmu, cache.mover, mmu.plan_free_run(available, max_blocks=budget))
    # Claims go to the empty blocks from one end on, mostly: the n-th is n - 1 blocks from it.
    for guests in range(2, mmu.states()["empty"]):
        if moved:
            break
        *others, last = [cache.open([0]) for _ in range(guests)]
        for other in others:
            other.close()
        with last:
            moved = _around(cache, last.block_table().astype(np.int64), budget)
    return moved


def gather(cache: kvmmu.KVCache, budget: int) -> int:
    """The sequence in most runs, in fewer."""
    mmu = cache.mmu
    open_ones = mmu.sequences().tolist()
    if not open_ones:
        return 0
    scattered = max(open_ones, key=lambda sequence: mmu.info(sequence).num_runs)
    plan = mmu.plan_gather(scattered, max_blocks=budget)
    return kvmmu.run_plan(mmu, cache.mover, plan)


def _around(cache: kvmmu.KVCache, held: Any, budget: int) -> int:
    """Towards the longest run, of those that do not lie so already, beside blocks that stay."""
    mmu = cache.mmu
    mmu.pin(held)
    try:
        for length in range(mmu.states()["available"], 1, -1):
            try:
                plan = mmu.plan_free_run(length, max_blocks=budget)
            except kvmmu.Fragmented:  # what is held is in the way of every run so long
                continue
            if len(plan):
                return kvmmu.run_plan(mmu, cache.mover, plan)
        return 0
    finally:
        mmu.unpin(held)


Goal = Callable[[kvmmu.KVCache, int], int]
"""(cache, most blocks) -> blocks moved. Called between two steps."""

GOALS: dict[str, Goal] = {
    "free-run": free_run,
    "below": below,
    "gather": gather,
    "trigger": by_trigger,
}


class Watched:
    """A mover that notes what it copies, and knows who computed what a block holds.

    Put in place of ``cache.mover``, so that every copy passes here, whoever planned it.

    Attributes:
        source: physical block -> where its content was computed, of blocks once written.
        moved, mapped, shared, steps: blocks moved; those of them that an open sequence maps; that
            several map; steps before which anything moved.
    """

    def __init__(self, cache: kvmmu.KVCache, goal: Goal, budget: int) -> None:
        self._cache, self._mover = cache, cache.mover
        self._goal, self._budget = goal, budget
        self._compacting = False
        self.source: dict[int, Source] = {}
        self.moved = self.mapped = self.shared = self.steps = 0
        cache.mover = self  # type: ignore[assignment]

    def compact(self) -> None:
        """One pass towards the goal."""
        self._compacting = True
        try:
            self.steps += self._goal(self._cache, self._budget) > 0
        finally:
            self._compacting = False

    def move(self, pairs: Any) -> None:
        """Copies block pairs[i, 0] to block pairs[i, 1]: moves, or copies on write."""
        self._carry_out(pairs)
        for source, destination in pairs.tolist():
            if source in self.source:
                self.source[destination] = self.source[source]
        if self._compacting:
            mapped = self.mappings()[pairs[:, 0]]
            self.moved += len(pairs)
            self.mapped += int((mapped > 0).sum())
            self.shared += int((mapped > 1).sum())

    def _carry_out(self, pairs: Any) -> None:
        self._mover.move(pairs)

    def mappings(self) -> Any:
        """int64 [physical blocks]: how many open sequences map each block."""
        mmu = self._cache.mmu
        tables = [mmu.block_table(sequence) for sequence in mmu.sequences().tolist()]
        every = np.concatenate(tables) if tables else np.empty(0, dtype=np.int32)
        return np.bincount(every, minlength=mmu.num_blocks + 1)

    def wrote(self, sequence: int, start: int, slots: Iterable[int], block_size: int) -> None:
        """The tokens from ``start`` on of a sequence were computed and went to these slots."""
        for position, slot in enumerate(slots, start):
            self.source[slot // block_size] = Source(sequence, position // block_size)


class SkipCopy(Watched):
    """One block of a sequence is moved in the tables, and its bytes are not."""

    done = False

    def _carry_out(self, pairs: Any) -> None:
        victims: Any = []
        if self._compacting and not self.done and self.steps >= GOOD_PASSES:
            victims = np.flatnonzero(self.mappings()[pairs[:, 0]])[:1]
            self.done = len(victims) > 0
        self._mover.move(np.delete(pairs, victims, axis=0))


class SkipCommit(Watched):
    """The bytes of one pass are moved, and the tables go on naming the old places, which are used
    again."""

    done = False

    def __init__(self, cache: kvmmu.KVCache, goal: Goal, budget: int) -> None:
        super().__init__(cache, goal, budget)
        self._mmu = cache.mmu
        cache.mmu = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mmu, name)

    def commit(self, moves: kvmmu.Moves) -> int:
        """As the MMU's, but for once."""
        mapped = self.mappings()[moves.pairs[:, 0]] > 0
        if self.done or self.steps < GOOD_PASSES or not mapped.any():
            return self._mmu.commit(moves)
        self.done = True
        self._mmu.abort(moves)
        places = moves.pairs[mapped, 0].tolist()
        for layer in self._cache.layers:
            layer.k[places] = REUSED
            layer.v[places] = REUSED
        return len(moves)


GOOD_PASSES = 5
"""Passes that go well before a fault."""
REUSED = 7.0
"""What the next owner of a block writes there."""

FAULTS: dict[str, type[Watched]] = {"skip-copy": SkipCopy, "skip-commit": SkipCommit}
