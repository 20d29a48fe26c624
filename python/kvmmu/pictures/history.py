"""What a run did to its memory, in bounded space.

What lives here: :class:`History`, which a serving loop feeds. What never lives here: the loop, and
how a history is drawn.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import InvalidConfig
from .cells import Blocks, available, cell_size, cells, codes, sequence_colours

if TYPE_CHECKING:
    from .._core import MMU

__all__ = ["Compaction", "History"]

WINDOW = 512


@dataclass(frozen=True)
class Compaction:
    """One pass: every block before and after it.

    Args:
        simulated_s: when.
        moves: int32 [m, 2]: (source, destination) of the blocks that changed their places.
        before, after: uint8 [3, blocks], each compressed by zlib: place in ``cells.CODES``, colour
            of the sequence, 1 + page order.
        effect: windows that are free and the longest available run, ``(before, after)`` each.
    """

    simulated_s: float
    moves: npt.NDArray[np.int32]
    before: bytes
    after: bytes
    effect: dict[str, tuple[int, int]]


class History:
    """Samples of a run: a map of the memory and means of series, and the passes that moved most.

    The loop calls :meth:`sample` after every step; each ``every_steps``-th call looks at the memory
    (about 3 ms for 90,000 blocks), the others add numbers up. When more than ``samples`` are kept,
    each two become one and the distance doubles. So a history has at most ``samples`` maps of
    ``3 * cells`` bytes, however long the run. It can be pickled.

    Args:
        every_steps: steps from one sample to the next, at first.
        samples: kept at most, from 2.
        cells: of a map, at most.
        compactions: passes kept at most.

    Raises:
        InvalidConfig: a number is out of range.
    """

    def __init__(
        self,
        *,
        every_steps: int = 32,
        samples: int = 600,
        cells: int = 512,
        compactions: int = 4,
    ) -> None:
        for name, value, least in (
            ("every_steps", every_steps, 1),
            ("samples", samples, 2),
            ("cells", cells, 1),
            ("compactions", compactions, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidConfig(f"{name} = {value!r}: allowed is a whole number from {least}")
        self.every_steps = every_steps
        self.cell_blocks = 0
        """Blocks a cell; 0 before the first sample."""
        self.blocks = 0
        """Blocks of a map."""
        self.times: list[float] = []
        """Simulated seconds at each sample."""
        self.compactions: list[Compaction] = []
        """Those kept, in order of time."""
        self._samples, self._cells, self._most = samples, cells, compactions
        self._steps = 0
        self._maps: list[tuple[npt.NDArray[np.uint8], ...]] = []
        self._open: dict[str, tuple[float, int]] = {}
        self._closed: list[dict[str, tuple[float, int]]] = []
        self._now = 0.0

    def sample(self, simulated_s: float, mmu: MMU, **series: float) -> None:
        """A step has ended.

        Args:
            simulated_s: when.
            mmu: looked at in every ``every_steps``-th call, in the first too.
            series: numbers of this step by name; a picture shows their means over the steps of a
                sample. NaN and infinities are left out.
        """
        self._now = simulated_s
        for name, value in series.items():
            if math.isfinite(value):
                total, count = self._open.get(name, (0.0, 0))
                self._open[name] = (total + value, count + 1)
        due = self._steps % self.every_steps == 0
        self._steps += 1
        if not due:
            return
        blocks = mmu.block_map()
        self.blocks = len(blocks)
        self.cell_blocks = self.cell_blocks or cell_size(self.blocks, self._cells)
        self.times.append(simulated_s)
        self._maps.append(cells(blocks, self.cell_blocks))
        self._closed.append(self._open)
        self._open = {}
        if len(self.times) > self._samples:
            self._thin()

    def wants(self, moves: int) -> bool:
        """Whether a pass of so many moves would be kept: ask before its maps are taken. Of passes
        that move equally many (all that use their budget up) those are kept that lie apart in time.
        """
        if moves < 1 or self._most < 1:
            return False
        if len(self.compactions) < self._most:
            return True
        least = min(len(each.moves) for each in self.compactions)
        apart = self._now - self.compactions[-1].simulated_s
        elapsed = self._now - (self.times[0] if self.times else 0.0)
        return moves > least or (moves == least and apart > elapsed / (2 * self._most))

    def compaction(self, before: Blocks, after: Blocks) -> None:
        """A pass of compaction, in the step that comes next to :meth:`sample`. Kept if it is among
        those that moved most.

        Args:
            before, after: ``mmu.block_map()`` right before it began and right after it ended.
        """
        moves = _moves(before, after)
        if not self.wants(len(moves)):
            return
        effect = {
            name: (of(before), of(after))
            for name, of in (("free windows", _free_windows), ("longest free run", _longest_run))
        }
        kept = Compaction(self._now, moves, _packed(before), _packed(after), effect)
        if len(self.compactions) == self._most:
            del self.compactions[self._superfluous(kept)]
        self.compactions.append(kept)

    def _superfluous(self, new: Compaction) -> int:
        """Of the kept passes that moved least, the one that the next one follows soonest."""
        least = min(len(each.moves) for each in self.compactions)
        following = [*self.compactions[1:], new]
        gaps = [
            (after.simulated_s - each.simulated_s, i)
            for i, (each, after) in enumerate(zip(self.compactions, following, strict=True))
            if len(each.moves) == least
        ]
        return min(gaps)[1]

    def series(self) -> dict[str, list[float | None]]:
        """Means of each series over the steps of each sample; None where there was no number."""
        names = {name: None for closed in self._closed for name in closed}
        return {name: [_mean(closed.get(name)) for closed in self._closed] for name in names}

    def planes(self) -> list[npt.NDArray[np.uint8]]:
        """Three arrays, uint8 [samples, cells]: states, sequences and page orders as
        :func:`.cells.cells` says them."""
        if not self._maps:
            return [np.zeros((0, 0), dtype=np.uint8)] * 3
        return [np.stack(plane) for plane in zip(*self._maps, strict=True)]

    def _thin(self) -> None:
        """Each two samples become one, with the map of the second: it was taken at the end."""
        merged = []
        for i in range(1, len(self._closed), 2):
            one, other = self._closed[i - 1], self._closed[i]
            names = {**one, **other}
            sums = {name: (one.get(name, (0.0, 0)), other.get(name, (0.0, 0))) for name in names}
            merged.append({name: (a[0] + b[0], a[1] + b[1]) for name, (a, b) in sums.items()})
        odd = len(self._closed) % 2
        self._closed = merged + self._closed[len(self._closed) - odd :]
        kept = [*range(1, len(self.times), 2), *range(len(self.times) - odd, len(self.times))]
        self.times = [self.times[i] for i in kept]
        self._maps = [self._maps[i] for i in kept]
        self.every_steps *= 2


def _mean(of: tuple[float, int] | None) -> float | None:
    return None if of is None or not of[1] else of[0] / of[1]


def _moves(before: Blocks, after: Blocks) -> npt.NDArray[np.int32]:
    """int32 [m, 2]: where blocks that one logical block of one sequence has both times were, and
    where they are."""
    known = np.unique(np.concatenate([before.sequences, after.sequences]))
    (old, one), (new, other) = (
        (at, np.searchsorted(known, blocks.sequences[at]) << 20 | blocks.logical[at])
        for blocks, at in ((each, np.flatnonzero(each.sequences >= 0)) for each in (before, after))
    )
    _, i, j = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    pairs = np.stack([old[i], new[j]], axis=1).astype(np.int32)
    moved: npt.NDArray[np.int32] = pairs[pairs[:, 0] != pairs[:, 1]]
    return moved


def _packed(blocks: Blocks) -> bytes:
    planes = (codes(blocks), sequence_colours(blocks.sequences), (blocks.orders + 1))
    return zlib.compress(b"".join(plane.astype(np.uint8).tobytes() for plane in planes), 9)


def _free_windows(blocks: Blocks) -> int:
    free = available(blocks)
    whole = len(free) // WINDOW
    return int(free[: whole * WINDOW].reshape(whole, WINDOW).all(axis=1).sum())


def _longest_run(blocks: Blocks) -> int:
    free = np.concatenate([[False], available(blocks), [False]])
    edges = np.flatnonzero(np.diff(free.astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
