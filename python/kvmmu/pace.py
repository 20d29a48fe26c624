"""How many blocks a pass may move: budgets in microseconds and bytes, and a copy rate that learns.

What lives here: :class:`Pace`. What never lives here: what is moved, and the copy.

The rate is the time of a block in the copies that were watched, the newest counting most
(exponentially weighted, a quarter each), so that a machine that becomes busy moves less. Before the
first copy was watched there is no rate, and the limit in microseconds allows eight blocks.
"""

from __future__ import annotations

import math

from .errors import InvalidConfig

__all__ = ["Pace"]

_NEWEST = 0.25
_UNKNOWN = 8
"""Blocks of a pass before the rate is known."""


class Pace:
    """Limits of one pass beside ``budget_blocks``.

    Args:
        bytes_per_block: bytes that one move copies, over all regions.
        budget_us: most microseconds of copying; None: no limit.
        budget_bytes: most bytes; None: no limit.
        us_per_block: what a block is taken to cost before a copy was watched; None: not known.

    Raises:
        InvalidConfig: a budget that is not above 0.
    """

    def __init__(
        self,
        bytes_per_block: int,
        *,
        budget_us: float | None = None,
        budget_bytes: int | None = None,
        us_per_block: float | None = None,
    ) -> None:
        for name, value in (("budget_us", budget_us), ("budget_bytes", budget_bytes)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidConfig(f"{name} = {value!r}: allowed is a number above 0, or None")
            if not (math.isfinite(value) and value > 0):
                raise InvalidConfig(f"{name} = {value!r}: allowed is a number above 0, or None")
        self.bytes_per_block = bytes_per_block
        self.budget_us = budget_us
        self.budget_bytes = budget_bytes
        self._us_per_block = us_per_block

    @property
    def us_per_block(self) -> float | None:
        """Microseconds that a block takes; None before a copy was watched."""
        return self._us_per_block

    def watched(self, blocks: int, seconds: float) -> None:
        """So many blocks were copied in that time."""
        if blocks < 1 or seconds < 0:
            return
        now = seconds * 1e6 / blocks
        before = self._us_per_block
        self._us_per_block = now if before is None else before + _NEWEST * (now - before)

    def blocks(self) -> int | None:
        """Most blocks of the next pass, at least 1; None: no limit of its own."""
        limits = []
        if self.budget_us is not None:
            rate = self._us_per_block
            limits.append(_UNKNOWN if not rate else self.budget_us / rate)
        if self.budget_bytes is not None:
            limits.append(self.budget_bytes / max(self.bytes_per_block, 1))
        return max(1, int(min(*limits, 2**31 - 2))) if limits else None

    def us(self, blocks: int) -> float | None:
        """Microseconds that so many moves are expected to take; None while the rate is unknown."""
        return None if self._us_per_block is None else blocks * self._us_per_block
