"""Touching memory before the first request needs it.

What lives here: :func:`preheat`, which claims pages, has their bytes written and gives them back,
and :class:`Preheated`, what that took. What never lives here: when.

Memory that was never written has no page behind it: whoever writes a block first waits for the
system, in the middle of a request. The pages that are claimed here are the first that requests
with pages of this size will get. Nothing is published, so the pool is what it was before; the
counters of ``stats()`` have counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core
from .errors import InvalidConfig, OutOfBlocks
from .storage import Storage

__all__ = ["Preheated", "preheat", "touch_host"]

Int32s = npt.NDArray[np.int32]
_SALT = b"kvmmu: preheat, matches nobody's prompt"


@dataclass(frozen=True, slots=True)
class Preheated:
    """What a preheat took.

    Attributes:
        pages: that were asked for; whole: of them, so many were claimed as a page of ``order``
            (the others as smaller ones, which touches as much).
        order: log2 of the blocks of such a page.
        blocks: that were claimed and given back.
        bytes: that were written; 0 on an MMU, which has none.
        seconds: all of it.
    """

    pages: int
    whole: int
    order: int
    blocks: int
    bytes: int
    seconds: float


def preheat(
    mmu: _core.MMU,
    pages: int,
    order: int | None = None,
    touch: Callable[[Int32s], int] | None = None,
) -> Preheated:
    """Claims pages, touches them, gives them back.

    Args:
        pages: how many, at least 0.
        order: 2**order blocks each, one of the MMU's; None: its largest.
        touch: writes the bytes of blocks (int32 [n]) and returns how many; None: there are none,
            and only the page table is walked.

    Raises:
        InvalidConfig: an argument, or a page that is longer than a sequence may be.
        OutOfBlocks: fewer are empty (nothing is evicted for this). OutOfTables.
        Nothing is held then.
    """
    orders = mmu.page_orders
    order = max(orders) if order is None else order
    if isinstance(pages, bool) or not isinstance(pages, int) or pages < 0:
        raise InvalidConfig(f"pages = {pages!r}: allowed is a whole number from 0")
    if isinstance(order, bool) or order not in orders:
        raise InvalidConfig(f"order = {order!r}: allowed are {', '.join(map(str, orders))}")
    blocks, empty = pages << order, mmu.states()["empty"]
    if blocks > empty:
        raise OutOfBlocks(
            f"{pages} pages of {1 << order} blocks need {blocks} empty blocks, {empty} are",
            needed=blocks,
            available=empty,
            num_blocks=mmu.num_blocks,
        )
    most = mmu.max_blocks_per_sequence >> order
    if pages and not most:
        raise InvalidConfig(
            f"order = {order}: a page of {1 << order} blocks, allowed: at most "
            f"max_blocks_per_sequence ({mmu.max_blocks_per_sequence})"
        )
    start = perf_counter()
    opened: list[int] = []
    written = whole = 0
    try:
        for first in range(0, pages, max(most, 1)):
            tokens = (min(most, pages - first) << order) * mmu.block_size
            opened.append(_open(mmu, tokens, order))
            whole += mmu.info(opened[-1]).pages.get(order, 0)
        if touch is not None and opened:
            written = touch(np.concatenate([mmu.block_table(sequence) for sequence in opened]))
    finally:
        for sequence in opened:
            mmu.close(sequence)
    return Preheated(pages, whole, order, blocks, written, perf_counter() - start)


def _open(mmu: _core.MMU, tokens: int, order: int) -> int:
    orders: dict[str, Any] = {"page_orders": sorted({0, order})}
    return mmu.open(np.zeros(tokens, dtype=np.int32), salt=_SALT, **orders)


def touch_host(storage: Storage, blocks: Int32s) -> int:
    """Writes what the null block holds over all bytes of blocks, in host memory; returns how many
    bytes."""
    pairs = np.empty((len(blocks), 2), dtype=np.uint32)
    pairs[:, 0] = storage.null_block
    pairs[:, 1] = blocks
    _core.copy_blocks(storage.region_table, pairs, storage.num_blocks + 1)  # the null block as well
    return len(blocks) * storage.block_bytes
