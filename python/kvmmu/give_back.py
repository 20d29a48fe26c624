"""Memory given back: granules of blocks go offline, and their pages to whoever maps them.

What lives here: the order of one shrink (take offline what is available, empty more by moves, give
the pages back) and of one growth (the pages first, then the blocks), and the book of the pages that
are gone. What never lives here: which granule goes (the core chooses), and the copy (a mover does
it).

A page goes when all blocks that have bytes in it are offline. So what goes is computed from all of
them together, not granule by granule: a page that two granules share goes with the second of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from . import _core
from .bound import Bound
from .errors import InternalError, OutOfBlocks
from .storage import Storage, _integer
from .transfer import block_runs, byte_ranges

if TYPE_CHECKING:
    from ._core import MMU, Plan

__all__ = ["GivenBack", "HostPages", "ReturnsMemory", "Shrunk", "grow", "shrink", "whole_pages"]

Int64s = npt.NDArray[np.int64]


class ReturnsMemory(Protocol):
    """Whoever owns the memory of blocks, and can do without parts of it meanwhile."""

    @property
    def page_bytes(self) -> int:
        """It takes whole pages of this size: a power of two."""

    def give_back(self, ranges: Int64s) -> None:
        """These bytes are not needed: int64 [k, 2], (address, bytes), whole pages. Nothing that
        kvmmu has queued reads or writes them any more. If it raises, it has kept all of them."""

    def take_back(self, ranges: Int64s) -> None:
        """These are needed again, with any contents: int64 [k, 2], pages that were given back
        before. If it raises, none of them is there."""


class HostPages(Bound):
    """Memory of the host, which goes back to the system page by page and comes back by itself, as
    zeros, where it is touched again. Only memory that is private to the process, writable, not
    locked and without a file behind it; and none that a device has been told of, which would go on
    reading the pages that were there."""

    @property
    def page_bytes(self) -> int:
        """That of the system, 4096 as a rule."""
        return _core.page_bytes()

    def give_back(self, ranges: Int64s) -> None:
        """``madvise(MADV_DONTNEED)``.

        Raises:
            NotReturnable: memory of another kind.
        """
        _core.release_pages(np.ascontiguousarray(ranges, dtype=np.int64).view(np.uint64))

    def take_back(self, ranges: Int64s) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What one call gave back.

    Attributes:
        blocks: blocks that went offline, whole granules.
        bytes: bytes of whole pages that went back with them.
        moved: blocks that were moved for it.
        wanted: blocks that were asked for.
        granule: blocks of a granule.
        stopped: why it were not more: None when ``blocks >= wanted``, else

            - ``"steps"``: blocks wait for steps in flight, or the budget of one pass is used up:
              call it again when they have ended;
            - ``"live"``: fewer blocks are available than a granule has;
            - ``"stuck"``: in each granule lies a block that may not move (pinned, leased, of a huge
              page), or the null block;
            - ``"granule"``: the pool has no complete granule.
    """

    blocks: int
    bytes: int
    moved: int
    wanted: int
    granule: int
    stopped: str | None

    def __bool__(self) -> bool:
        """Whether it gave back all that was asked for."""
        return self.stopped is None


class GivenBack(Bound):
    """The pages of a storage that are gone. Not for several threads at once.

    Args:
        storage: where the blocks are.
        owner: whose memory it is; None: it stays where it is, and blocks go offline all the same.
    """

    def __init__(self, storage: Storage, owner: ReturnsMemory | None) -> None:
        self._storage = storage
        self._owner = owner
        self._page = 1
        if owner is not None:
            self._page = _integer("page_bytes", owner.page_bytes, 1, 2**40)
        self._gone: Int64s = np.empty((0, 2), np.int64)

    @property
    def bytes(self) -> int:
        """Bytes that are gone now."""
        return _bytes(self._gone)

    def give(self, offline: Int64s, settle: Callable[[], None]) -> int:
        """Gives back what these blocks, all that are offline, do not need. Returns the bytes that
        went now. If the owner raises, nothing has changed here.

        Args:
            settle: waits until copies that are queued have been made: they may read these pages.
        """
        if self._owner is None:
            return 0
        pages = self._pages(offline)
        more = _minus(pages, self._gone)
        if len(more):
            settle()
            self._owner.give_back(_sized(more))
        self._gone = pages
        return _bytes(more)

    def take(self, offline: Int64s) -> None:
        """Takes back what all other blocks need. If the owner raises, nothing has changed."""
        if self._owner is None:
            return
        pages = self._pages(offline)
        needed = _minus(self._gone, pages)
        if len(needed):
            self._owner.take_back(_sized(needed))
        self._gone = pages

    def check(self, offline: Int64s) -> None:
        """InternalError unless just the pages of these blocks are gone."""
        if self._owner is not None and not np.array_equal(self._gone, self._pages(offline)):
            raise InternalError(
                f"{self.bytes} bytes are gone, {_bytes(self._pages(offline))} are those of the "
                f"{len(offline)} blocks that are offline"
            )

    def _pages(self, blocks: Int64s) -> Int64s:
        return whole_pages(self._storage, blocks, self._page)


def whole_pages(storage: Storage, blocks: Int64s, page_bytes: int) -> Int64s:
    """The whole pages that only these blocks have bytes in.

    Args:
        blocks: int64 [n], ascending.
        page_bytes: a power of two.

    Returns:
        int64 [k, 2], ascending: (first address, address behind) of pages that follow each other.
        Bytes between the pieces of blocks are somebody else's.
    """
    if len(blocks) == 0:
        return np.empty((0, 2), np.int64)
    sized = np.concatenate(byte_ranges(storage, block_runs(blocks)))
    ranges = np.stack([sized[:, 0], sized[:, 0] + sized[:, 1]], axis=1)
    ranges = _merged(ranges[np.argsort(ranges[:, 0])])
    pages = np.stack([-(-ranges[:, 0] // page_bytes), ranges[:, 1] // page_bytes], axis=1)
    found: Int64s = _merged(pages[pages[:, 1] > pages[:, 0]] * page_bytes)
    return found


def shrink(
    mmu: MMU,
    book: GivenBack,
    wanted: int,
    granule: int,
    run: Callable[[Plan], int],
    settle: Callable[[], None],
    budget: int,
) -> Shrunk:
    """Gives back ``wanted`` blocks, in whole granules, or as many as there can be.

    Args:
        run: carries a plan out and returns how many blocks moved.
        settle: waits until copies that are queued have been made.
        budget: most moves beside steps in flight.

    Raises:
        whatever ``run`` or the owner of the memory raises. Blocks that had gone offline in this
        call are in the pool again then.
    """
    gone = [mmu.shrink(wanted, granule=granule)]
    moved, stopped = 0, None
    try:
        while (left := wanted - sum(map(len, gone))) > 0:
            if granule > mmu.num_blocks:
                stopped = "granule"
                break
            in_flight = mmu.steps_in_flight() > 0
            most = budget if in_flight else None
            try:
                plan = mmu.plan_shrink(left, granule=granule, max_blocks=most)
            except OutOfBlocks:
                stopped = _why(mmu, granule)
                break
            moved += run(plan) if len(plan) else 0
            more = mmu.shrink(left, granule=granule)
            gone.append(more)
            if len(more) < left and (in_flight or len(more) == 0):
                stopped = _why(mmu, granule)
                break
        given = book.give(mmu.offline_blocks(), settle)
    except BaseException:
        mmu.grow(np.concatenate(gone))
        raise
    return Shrunk(sum(map(len, gone)), given, moved, wanted, granule, stopped)


def _why(mmu: MMU, granule: int) -> str:
    if mmu.steps_in_flight() > 0:
        return "steps"
    return "live" if mmu.states()["available"] < granule else "stuck"


def grow(mmu: MMU, book: GivenBack, wanted: int | None, granule: int) -> int:
    """Brings blocks back, those of the lowest granules first, until ``wanted`` or more are in the
    pool again (None: all). Returns how many.

    Raises:
        whatever the owner of the memory raises; nothing has changed then.
    """
    blocks = mmu.offline_blocks(wanted, granule=granule)
    # Memory first: from then on anybody may be given a block.
    book.take(np.setdiff1d(mmu.offline_blocks(), blocks, assume_unique=True))
    mmu.grow(blocks)
    return len(blocks)


# -- ranges, int64 [k, 2]: (from, to), ascending and apart -------------------------------------


def _bytes(ranges: Int64s) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _sized(ranges: Int64s) -> Int64s:
    """(address, bytes) of each."""
    sized: Int64s = np.stack([ranges[:, 0], ranges[:, 1] - ranges[:, 0]], axis=1)
    return sized


def _merged(ranges: Int64s) -> Int64s:
    """Ranges that touch put together. They come ascending and do not overlap."""
    if len(ranges) == 0:
        return ranges
    heads = np.flatnonzero(np.append(True, ranges[1:, 0] != ranges[:-1, 1]))
    tails = np.append(heads[1:] - 1, len(ranges) - 1)
    merged: Int64s = np.stack([ranges[heads, 0], ranges[tails, 1]], axis=1)
    return merged


def _minus(these: Int64s, those: Int64s) -> Int64s:
    """What lies in ``these`` and not in ``those``."""
    edges = np.concatenate([these[:, 0], these[:, 1], those[:, 0], those[:, 1]])
    enters = np.repeat([1, -1, 0, 0], [len(these), len(these), len(those), len(those)])
    covered = np.repeat([0, 0, 1, -1], [len(these), len(these), len(those), len(those)])
    order = np.argsort(edges, kind="stable")
    at = edges[order]
    inside = np.cumsum(enters[order])[:-1] > 0
    free = np.cumsum(covered[order])[:-1] == 0
    kept = inside & free & (at[1:] > at[:-1])
    return _merged(np.stack([at[:-1][kept], at[1:][kept]], axis=1))
