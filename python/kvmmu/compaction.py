"""The way of one pass of compaction: plan, begin, copy, commit.

What lives here: the order of those four, and what happens when the copy fails. What never lives
here: the choice of moves (the core plans) and the copy (a mover does it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core import MMU, Plan
    from .movers import SupportsMove

__all__ = ["compact", "run_plan"]


def compact(mmu: MMU, mover: SupportsMove) -> int:
    """One pass of compaction, if the memory needs it: at most ``budget_blocks`` moves.

    To be called between two steps, with a mover over the storage that this MMU decides about.

    Returns:
        blocks moved; 0 when nothing called for it.

    Raises:
        whatever the mover raises; every sequence then has the blocks it had before.
    """
    plan = mmu.plan_compaction()
    return 0 if plan is None else run_plan(mmu, mover, plan)


def run_plan(mmu: MMU, mover: SupportsMove, plan: Plan) -> int:
    """Carries out a plan: ``begin``, ``mover.move``, ``commit``.

    Returns:
        blocks moved. Fewer than ``len(plan)`` when a source or destination is no longer what the
        plan saw.

    Raises:
        InvalidPlan: from ``begin``.
        whatever the mover raises; the moves are aborted first, and every sequence has the blocks
        it had before.
    """
    moves = mmu.begin(plan)
    try:
        mover.move(moves.pairs)
    except BaseException:
        mmu.abort(moves)
        raise
    return mmu.commit(moves)
