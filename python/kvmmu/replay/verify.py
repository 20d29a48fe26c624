"""Reads back what was written, the way an attention kernel would: through the exported tables.

What lives here: :class:`Verifier`. What never lives here: the MMU's own view (``translate``,
``block_table``): a table that was exported wrong must not be forgiven.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .machine import Machine
from .metrics import Totals
from .running import Running

__all__ = ["POSITIONS_A_STEP", "Verifier"]

POSITIONS_A_STEP = 64
_BATCH = 256
_MAX_SAID = 10


class Verifier:
    """Compares stored with expected contents and counts.

    Args:
        say: told of the first mismatches, a sentence each.
    """

    def __init__(
        self, machine: Machine, totals: Totals, seed: int, say: Callable[[str], None]
    ) -> None:
        self._machine = machine
        self._totals = totals
        self._random = np.random.default_rng([seed, 3])
        self._say = say
        self._drawn = np.empty((0, 2, POSITIONS_A_STEP))
        self._next = 0

    def sample(self, running: Running) -> None:
        """64 random written positions of the rows of this step."""
        n = running.n
        written = running.position[:n]
        if self._next == len(self._drawn):
            self._drawn = self._random.random((_BATCH, 2, POSITIONS_A_STEP))
            self._next = 0
        which, where = self._drawn[self._next]
        self._next += 1
        rows = (which * n).astype(np.int64)
        lengths = written[rows]
        if not lengths.all():  # a request that was admitted but has nothing written yet
            some = np.flatnonzero(written)
            if not len(some):
                return
            rows = some[(which * len(some)).astype(np.int64)]
            lengths = written[rows]
        positions = (where * lengths).astype(np.int64)
        found = self._machine.read(rows, positions)
        expected = running.contents[running.base[rows] + positions]
        self._totals.verified_tokens += POSITIONS_A_STEP
        wrong = found != expected
        if wrong.any():
            for i in np.flatnonzero(wrong).tolist():
                row = int(rows[i])
                self._mismatch(
                    row,
                    int(running.ids[row]),
                    int(running.request[row]),
                    int(positions[i]),
                    int(expected[i]),
                    int(found[i]),
                )

    def whole(
        self, row: int, sequence: int, request: int, expected: npt.NDArray[np.uint64]
    ) -> None:
        """Every position of a row, at the end of its request."""
        tokens = len(expected)
        self._totals.verified_tokens += tokens
        length = int(self._machine.seq_lens[row])
        if length != tokens:
            self._totals.mismatches += 1
            self._tell(
                f"request {request}, sequence {sequence}: "
                f"the exported length is {length}, {tokens} were written"
            )
        found = self._machine.read_row(row, tokens)
        wrong = np.flatnonzero(found != expected)
        for i in wrong[:_MAX_SAID].tolist():
            self._mismatch(row, sequence, request, i, int(expected[i]), int(found[i]))
        self._totals.mismatches += max(0, len(wrong) - _MAX_SAID)

    def _mismatch(
        self, row: int, sequence: int, request: int, position: int, expected: int, found: int
    ) -> None:
        self._totals.mismatches += 1
        self._tell(
            f"request {request}, sequence {sequence}, position {position}, "
            f"block {self._machine.block_at(row, position)}: "
            f"expected {expected:016x}, found {found:016x}"
        )

    def _tell(self, sentence: str) -> None:
        if self._totals.mismatches <= _MAX_SAID:
            self._say(f"mismatch: {sentence}")
