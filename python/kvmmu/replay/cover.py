"""Which regions could be huge pages for all who map them?

What lives here: :func:`separable`, regions whose blocks were all first mapped by one sequence, and
how many of them are huge pages. What never lives here: figures made of sums (see :mod:`.report`).

A huge page is 512 consecutive blocks. A region of which a part was found in the cache and the rest
is the sequence's own, or of which two parts were found that two others had computed, lies where
those lie: it becomes a huge page only by a copy, or by moving one of them to the other. A region is
*separable* if that is not so: all of its blocks are the sequence's own, whoever shares them by now,
or all were first mapped by one other sequence.

Who first mapped a block is read from the number of its logical block, which moves with it (see
:mod:`.sharing`). A block behind what is written is its sequence's own.
"""

from __future__ import annotations

import numpy as np

from .machine import Machine
from .running import Running

__all__ = ["separable"]

REGION = 512
"""Blocks of a page of order 9."""


def separable(machine: Machine, running: Running) -> tuple[int, int]:
    """Separable regions of running sequences, and those of them that are one page of order 9.

    Right after rows were exported and written.
    """
    regions = huge = 0
    for row in range(running.n):
        written = -(-int(running.position[row]) // machine.block_size)
        if max(written, -(-int(running.known[row]) // machine.block_size)) < REGION:
            continue
        first, is_huge = machine.mmu.regions(int(running.ids[row]))
        if not len(first):
            continue
        blocks = np.arange(REGION) + first[:, None]
        # The sequence's own numbers, except where it found what others had written.
        numbers = running.owner[row] + blocks
        known = blocks < written
        numbers[known] = machine.owners[machine.block_table[row, blocks[known]]]
        donors = running.donors(numbers)
        one = (donors == donors[:, :1]).all(axis=1)
        regions += int(np.count_nonzero(one))
        huge += int(np.count_nonzero(one & is_huge))
    return regions, huge
