"""Memory given back while sequences run, and taken again when it is needed.

What lives here: :class:`Returning`, when blocks go offline and when they come back. What never
lives here: which ones (the core chooses) and pages of a host (nothing is stored here).

More than twice the spare available: what is above it goes, whole granules; where blocks may move,
a pass of moves first. Less than half the spare available, or the head of the queue waits for
memory: so much comes back that the spare is there again.
"""

from __future__ import annotations

from .._core import MMU
from ..errors import Fragmented, OutOfBlocks
from .metrics import TimedMMU
from .options import Options

__all__ = ["Returning"]

LOOK_EVERY = 8


class Returning:
    """See the module.

    Args:
        options: ``spare``, ``granule``, ``budget_blocks``, ``compaction``.
    """

    def __init__(self, mmu: TimedMMU, options: Options) -> None:
        assert options.spare is not None
        self._mmu = mmu
        self._spare = max(1, round(options.spare * options.blocks))
        self._granule = options.granule
        self._moves = options.budget_blocks if options.compaction else 0
        self.moved = 0
        """Blocks moved to empty granules."""
        self.offline_steps = 0
        """Blocks that were offline, added up over steps; and steps."""
        self.idle_steps = 0
        """Blocks that were offline or available beyond the spare, added up over steps."""

    def begin_anew(self) -> None:
        """Counts from here on."""
        self.moved = self.offline_steps = self.idle_steps = 0

    def step(self, number: int, states: dict[str, int], *, needed: bool) -> bool:
        """Between two steps. ``needed``: the head of the queue waits for memory.

        Returns:
            whether blocks came back.
        """
        available, offline = states["available"], states["offline"]
        self.offline_steps += offline
        self.idle_steps += max(available + offline - self._spare, 0)
        if needed or available < self._spare // 2:
            return self.bring_back(self._spare if needed else self._spare - available)
        if available > 2 * self._spare and number % LOOK_EVERY == 0:
            self._shrink(offline, available - self._spare)
        return False

    def bring_back(self, blocks: int) -> bool:
        """So many blocks come back, or all there are; whether there were any."""

        def call(mmu: MMU) -> int:
            offline = mmu.offline_blocks(blocks, granule=self._granule)
            mmu.grow(offline)
            return len(offline)

        return self._mmu.timed(call) > 0

    def _shrink(self, offline: int, more: int) -> None:
        if self._moves:
            try:
                plan = self._mmu.timed(
                    lambda mmu: mmu.plan_shrink(more, granule=self._granule, max_blocks=self._moves)
                )
                if len(plan):
                    self.moved += self._mmu.run_plan(plan)
            except (OutOfBlocks, Fragmented):
                pass  # nothing to win by moving; what is whole goes all the same
        self._mmu.timed(lambda mmu: mmu.shrink(offline + more, granule=self._granule))
