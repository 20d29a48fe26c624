"""Blocks as cells of a picture: what most blocks of a cell are.

What lives here: the bytes that pictures are made of. What never lives here: colours, pages.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._core import BlockMap

__all__ = ["CODES", "Blocks", "available", "cell_size", "cells", "codes", "sequence_colours"]

CODES = (*BlockMap.STATES, "held")
"""What a block is in a picture: its state, or kept behind a sequence to grow into."""
HELD = len(CODES) - 1
NULL = BlockMap.STATES.index("null")
COLOURS = 12
"""Sequences share so many colours; 0 is for blocks that no sequence maps."""

Bytes = npt.NDArray[np.uint8]


class Blocks(Protocol):
    """What is needed of a :class:`kvmmu.BlockMap` or a :class:`kvmmu.Snapshot`."""

    @property
    def states(self) -> npt.NDArray[np.uint8]: ...
    @property
    def sequences(self) -> npt.NDArray[np.int64]: ...
    @property
    def logical(self) -> npt.NDArray[np.int32]: ...
    @property
    def orders(self) -> npt.NDArray[np.int8]: ...
    @property
    def flags(self) -> npt.NDArray[np.uint8]: ...


def cell_size(blocks: int, most: int) -> int:
    """Blocks a cell, a power of two so that windows are whole cells; at most ``most`` cells."""
    size = 1
    while -(-blocks // size) > most:
        size *= 2
    return size


def codes(blocks: Blocks) -> Bytes:
    """uint8 [n]: places in :data:`CODES`."""
    held = (blocks.flags & BlockMap.HELD) != 0
    return np.where(held, np.uint8(HELD), blocks.states)


def sequence_colours(sequences: npt.NDArray[np.int64]) -> Bytes:
    """uint8: 1 .. 12 for a sequence, 0 for none (-1). Sequences in neighbouring slots differ."""
    slot, generation = sequences & (2**18 - 1), sequences >> 18
    colour = (slot * 7 + generation * 5) % COLOURS + 1
    return np.where(sequences < 0, 0, colour).astype(np.uint8)


def available(blocks: Blocks) -> npt.NDArray[np.bool_]:
    """bool [n]: the block is empty, or cached and evictable."""
    empty = blocks.states == BlockMap.STATES.index("empty")
    free: npt.NDArray[np.bool_] = empty | ((blocks.flags & BlockMap.EVICTABLE) != 0)
    return free


def cells(blocks: Blocks, size: int) -> tuple[Bytes, Bytes, Bytes]:
    """What most blocks of each cell are.

    Args:
        size: blocks a cell.

    Returns:
        three arrays, uint8 [cells]. The first says the commonest of :data:`CODES` in its low half,
        and its share of the cell in fifteenths in its high half; the second a colour of the
        sequence that maps most; the third 1 + the commonest page order, 0 where most blocks are
        not mapped. The null block counts nowhere.
    """
    n = len(blocks.states)
    count = -(-n // size)
    cell = np.arange(n) // size
    shares = _counts(cell, codes(blocks), count, len(CODES))
    shares[:, NULL] = 0
    commonest = shares.argmax(axis=1)
    of = np.maximum(shares.sum(axis=1), 1)
    share = np.rint(15 * shares.max(axis=1) / of).astype(np.uint8)
    orders = _counts(cell, (blocks.orders + 1).astype(np.uint8), count, 11).argmax(axis=1)
    return (
        (commonest.astype(np.uint8) | (share << 4)).astype(np.uint8),
        sequence_colours(_commonest(blocks.sequences, cell, count)),
        orders.astype(np.uint8),
    )


def _counts(
    cell: npt.NDArray[Any], kind: npt.NDArray[Any], cells: int, kinds: int
) -> npt.NDArray[Any]:
    return np.bincount(cell * kinds + kind, minlength=cells * kinds).reshape(cells, kinds)


def _commonest(
    values: npt.NDArray[np.int64], cell: npt.NDArray[Any], count: int
) -> npt.NDArray[np.int64]:
    """The sequence that most blocks of each cell have, -1 where most have none. Of open sequences
    no two have one slot, the low 18 bits of an id, so that slots are counted; -1 counts as 0."""
    slots = np.where(values < 0, 0, (values & (2**18 - 1)) + 1)
    used = int(slots.max(initial=0)) + 1
    if count * used > 2**22:  # some ten thousands of slots: those that occur get numbers
        found, slots = np.unique(slots, return_inverse=True)
        used = len(found)
    ids = np.full(used, -1, dtype=np.int64)
    ids[slots] = values
    most: npt.NDArray[np.int64] = ids[_counts(cell, slots, count, used).argmax(axis=1)]
    return most
