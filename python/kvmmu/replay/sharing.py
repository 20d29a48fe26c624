"""Are blocks held twice?

What lives here: :func:`wasted`, distinct blocks in exported rows minus distinct logical blocks.
What never lives here: repair.

A *logical block* is one that some request computed: each time that a request is opened, its blocks
get new numbers, and whoever writes a position writes the number of its logical block into the
block (a second region of the storage, which moves with the first). A request that found its prefix
cached writes nothing there and so reads the number of the block that it shares. Two requests that
computed the same prefix at the same time, before either had published it, hold two logical blocks.

So the difference is 0 exactly when nothing is held twice: a move that repointed one of two
sharers, for instance, leaves one logical block in two places and counts 1. Taken at sampled
steps, right after they were exported, over written blocks; the worst sample counts.
"""

from __future__ import annotations

import numpy as np

from .machine import Machine
from .running import Running

__all__ = ["wasted"]


def wasted(machine: Machine, running: Running) -> int:
    """Blocks in exported rows that hold a logical block which another one holds too."""
    n = running.n
    if not n:
        return 0
    written = -(-running.position[:n] // machine.block_size)
    width = int(written.max())
    rows = machine.block_table[:n, :width]
    seen = np.zeros(machine.num_blocks + 1, dtype=bool)
    seen[rows[np.arange(width) < written[:, None]]] = True
    owners = np.sort(machine.owners[seen])
    return int(np.count_nonzero(owners[1:] == owners[:-1]))
