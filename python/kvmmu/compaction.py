"""The way of one pass of compaction: plan, begin, copy, commit.

What lives here: the order of those four, and what happens when the copy fails. What never lives
here: the choice of moves (the core plans) and the copy (a mover does it).
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core import MMU, Plan
    from .movers import SupportsMove
    from .pace import Pace

__all__ = ["compact", "run_plan"]


def compact(mmu: MMU, mover: SupportsMove, pace: Pace | None = None) -> int:
    """One pass of compaction, if the memory needs it: at most ``budget_blocks`` moves.

    To be called between two steps, with a mover over the storage that this MMU decides about.

    Args:
        pace: further limits of the pass; it learns from the copy.

    Returns:
        blocks moved; 0 when nothing called for it.

    Raises:
        whatever the mover raises; every sequence then has the blocks it had before.
    """
    plan = mmu.plan_compaction() if pace is None else mmu.plan_compaction(max_blocks=pace.blocks())
    return 0 if plan is None else run_plan(mmu, mover, plan, pace)


def run_plan(mmu: MMU, mover: SupportsMove, plan: Plan, pace: Pace | None = None) -> int:
    """Carries out a plan: ``begin``, ``mover.move``, ``commit``.

    Args:
        pace: watches how long the copy takes (of a mover that copies at once).

    Returns:
        blocks moved. Fewer than ``len(plan)`` when a source or destination is no longer what the
        plan saw.

    Raises:
        InvalidPlan: from ``begin``.
        whatever the mover raises; the moves are aborted first, and every sequence has the blocks
        it had before.
    """
    moves = mmu.begin(plan)
    start = perf_counter()
    try:
        mover.move(moves.pairs)
    except BaseException:
        mmu.abort(moves)
        raise
    if pace is not None:
        pace.watched(len(moves), perf_counter() - start)
    return mmu.commit(moves)
