"""Movers that fail on their way, for ``kvmmu replay --inject-faults``.

What lives here: :class:`FaultyMover` and what it raises. What never lives here: what becomes of a
pass that failed (the core aborts it, the serving loop goes on).
"""

from __future__ import annotations

import random

from ..movers import SupportsMove
from ..pairs import Pairs

__all__ = ["FaultyMover", "InjectedFault"]


class InjectedFault(RuntimeError):
    """The mover was told to fail here."""


class FaultyMover:
    """Copies as another mover does, but in a share of calls only the first moves, and then raises.

    Args:
        mover: does the copying.
        share: of the calls, 0 to 1.
        seed: which calls, and after how many moves.
    """

    def __init__(self, mover: SupportsMove, share: float, seed: int) -> None:
        self._mover = mover
        self._share = share
        self._random = random.Random(seed)
        self.passes = False
        """Whether faults are due: copies on write must not fail, moves may."""

    def move(self, pairs: Pairs) -> None:
        if not self.passes or self._random.random() >= self._share:
            self._mover.move(pairs)
            return
        done = self._random.randrange(len(pairs) + 1)
        self._mover.move(pairs[:done])
        raise InjectedFault(f"after {done} of {len(pairs)} moves")
