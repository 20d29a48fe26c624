"""The requests that hold a row, as arrays.

What lives here: :class:`Running`, one column a quantity, and the arena with the tokens and the
expected contents of every running request. What never lives here: policy, the MMU.

Rows are kept dense, those of long requests first: another row moves into the place of one that
ends. A decode step is then a few whole-array operations, no Python runs once a request, and whoever
looks at whole rows does not look at the padding behind the short ones.

Of a request with a prompt of P tokens that generates G, positions 0 .. P+G-2 get written: the
last token that it generates is never computed on. ``known`` tokens are handed over when it is
opened (the prompt and, after a preemption, all that it had generated); the step that computes the
last of them generates a token, and so does each decode step after it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["LONG", "Running"]

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
LONG = 1024
"""Blocks above which a request counts as long."""
_COLUMNS = ("ids", "request", "base", "position", "known", "target", "owner")


class Running:
    """Columns of the running requests; entries 0 .. n-1 count.

    Attributes:
        n: how many.
        n_long: how many of them, at the front, are long.
        ids: sequence ids of the MMU, int64.
        request: index in the trace.
        base: where its tokens and contents begin in the arena.
        position: next position to compute; all before it are written.
        known: tokens handed over when it was opened.
        target: positions written when it ends.
        owner: number of its first logical block (see :mod:`.sharing`).
        prefill_left: known tokens of all of them that are still to compute.
        tokens: the arena, int32; position p of row i is at ``base[i] + p``.
        contents: uint64, beside it; empty where no bytes are stored.
        on_move: told of (source, destination) when a request changes its row, and of
            (source, None) when a row falls empty.
    """

    def __init__(self, rows: int, *, contents: bool = True) -> None:
        self.n = 0
        self.n_long = 0
        self.rows = rows
        self.ids: I64 = np.zeros(rows, dtype=np.int64)
        self.request: I64 = np.zeros(rows, dtype=np.int64)
        self.base: I64 = np.zeros(rows, dtype=np.int64)
        self.position: I64 = np.zeros(rows, dtype=np.int64)
        self.known: I64 = np.zeros(rows, dtype=np.int64)
        self.target: I64 = np.zeros(rows, dtype=np.int64)
        self.owner: I64 = np.zeros(rows, dtype=np.int64)
        self.prefill_left = 0
        self.tokens = np.zeros(1 << 16, dtype=np.int32)
        self._has_contents = contents
        self.contents = np.zeros(1 << 16 if contents else 0, dtype=np.uint64)
        self._top = 0
        self._owners = 0
        self._firsts = array("q")
        self._longest: int | None = 0
        self._columns: tuple[I64, ...] = tuple(getattr(self, name) for name in _COLUMNS)
        self.on_move: Callable[[int, int | None], None] = lambda source, destination: None

    def add(
        self,
        *,
        sequence: int,
        request: int,
        found: int,
        known: int,
        tokens: npt.NDArray[np.int32],
        contents: U64 | None,
        blocks: int,
    ) -> None:
        """A request gets a row. ``found`` of its tokens were cached; ``tokens`` and ``contents``
        cover every position that it will ever write, ``blocks`` blocks."""
        size = len(tokens)
        base = self._reserve(size)
        self.tokens[base : base + size] = tokens
        if contents is not None:
            self.contents[base : base + size] = contents
        row = self.n
        if blocks > LONG:
            row = self.n_long
            self._move(row, self.n)
            self.on_move(row, None)
            self.n_long += 1
        self.ids[row] = sequence
        self.request[row] = request
        self.base[row] = base
        self.position[row] = found
        self.known[row] = known
        self.target[row] = size
        self.owner[row] = self._owners
        self.prefill_left += known - found
        self._firsts.append(self._owners)
        self._owners += blocks
        if self._longest is not None:
            self._longest = max(self._longest, size)
        self.n += 1

    def remove(self, row: int) -> None:
        """A request gives its row up."""
        self.prefill_left -= max(0, int(self.known[row] - self.position[row]))
        if self.target[row] == self._longest:
            self._longest = None
        if row < self.n_long:
            self.n_long -= 1
            self._move(self.n_long, row)
            row = self.n_long
        self.n -= 1
        self._move(self.n, row)
        self.on_move(self.n, None)

    def _move(self, source: int, destination: int) -> None:
        if source != destination:
            for column in self._columns:
                column[destination] = column[source]
            self.on_move(source, destination)

    def longest(self) -> int:
        """Most positions that one of them will have written when it ends."""
        if self._longest is None:
            self._longest = int(self.target[: self.n].max(initial=0))
        return self._longest

    def donors(self, numbers: I64) -> I64:
        """int64, as numbers of logical blocks: which request each belongs to, counted in the order
        in which they got their rows (again, after a preemption)."""
        return np.searchsorted(np.frombuffer(self._firsts, dtype=np.int64), numbers, "right") - 1

    def expected(self, row: int) -> U64:
        """uint64 [target]: what each position of a row holds at its end."""
        base = int(self.base[row])
        return self.contents[base : base + int(self.target[row])]

    def _reserve(self, size: int) -> int:
        """Room at the end of the arena; live entries are packed (and the arena grows) when there
        is none."""
        if self._top + size > len(self.tokens):
            live = int(self.target[: self.n].sum())
            capacity = max(len(self.tokens), 1 << (2 * (live + size)).bit_length())
            tokens = np.empty(capacity, dtype=np.int32)
            contents = np.empty(capacity if self._has_contents else 0, dtype=np.uint64)
            top = 0
            for row in range(self.n):
                base, count = int(self.base[row]), int(self.target[row])
                tokens[top : top + count] = self.tokens[base : base + count]
                if self._has_contents:
                    contents[top : top + count] = self.contents[base : base + count]
                self.base[row] = top
                top += count
            self.tokens, self.contents, self._top = tokens, contents, top
        base = self._top
        self._top += size
        return base
