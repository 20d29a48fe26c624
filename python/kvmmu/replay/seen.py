"""Moves, the way a reader of the exported tables sees them.

What lives here: :class:`SeenRows`, which remembers each running request's row as last exported
and counts what changed in it. What never lives here: the MMU's own count of moves.

Between two exports an entry changes when the request grew (it was the null block before) or when
its block was moved: same sequence, same logical block, another physical one. The replay forks
nothing, so copy-on-write changes no entry.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["SeenRows"]


class SeenRows:
    """A second copy of the table.

    Args:
        table: int32 [rows, width], the exported table; width is even.
        null_block: what an entry without a block holds.
    """

    def __init__(self, table: npt.NDArray[np.int32], null_block: int) -> None:
        self._table = table
        self._seen = np.full_like(table, null_block)
        self._null = null_block
        # Two entries are compared at a time: this runs in every step, over all rows.
        self._table_pairs = table.view(np.uint64)
        self._seen_pairs = self._seen.view(np.uint64)

    def remove(self, row: int, last: int) -> None:
        """The request of a row has ended and the last row takes its place."""
        self._seen[row] = self._seen[last]
        self._seen[last] = self._null

    def moved(self, rows: int, blocks: int) -> int:
        """Looks at the first rows, up to so many blocks, right after an export.

        Returns:
            how many distinct (old, new) pairs of blocks have come in place of each other since
            the last look.
        """
        width = (blocks + 1) // 2
        differ = self._table_pairs[:rows, :width] != self._seen_pairs[:rows, :width]
        where = np.flatnonzero(differ)
        if not len(where):
            return 0
        row, pair = np.divmod(where, width)
        before, after = self._seen_pairs[row, pair], self._table_pairs[row, pair]
        self._seen_pairs[row, pair] = after
        old, new = before.view(np.int32), after.view(np.int32)
        changed = np.flatnonzero((old != self._null) & (old != new))
        return len(set(zip(old[changed].tolist(), new[changed].tolist(), strict=True)))
