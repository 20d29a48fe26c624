"""Leases: what a transfer holds on the blocks of a sequence until it reports done.

What lives here: :class:`Lease` and the book of the open ones. What never lives here: the transfer.

A leased block stays where it is and what it is: it is not moved, evicted or reused, whatever
happens to its sequence; a sequence that writes into one copies it first. Leases end in any order,
each once. One that takes longer than its timeout is reported and kept: nobody but the transfer
knows whether it still reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ._core import MMU
from .bound import Bound
from .errors import InvalidConfig

__all__ = ["Lease", "LeaseBook"]

_log = logging.getLogger("kvmmu")


class Lease(Bound):
    """A hold on blocks. Ended by :meth:`done` or :meth:`cancel`, once.

    Attributes:
        id: number of the lease.
        sequence: id of the sequence that it was taken on (it may be closed since).
        start, stop: the tokens that it is for.
        blocks: int64 [n], the physical blocks, in the order of the sequence. They do not change.
    """

    __slots__ = ("_book", "_deadline", "blocks", "id", "sequence", "start", "stop", "timeout_s")

    def __init__(
        self,
        book: LeaseBook,
        number: int,
        sequence: int,
        start: int,
        stop: int,
        blocks: npt.NDArray[np.int64],
        timeout_s: float | None,
    ) -> None:
        self._book = book
        self.id = number
        self.sequence = sequence
        self.start = start
        self.stop = stop
        self.blocks = blocks
        self.timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def done(self) -> None:
        """The transfer has finished. A second time: ``InvalidLease``."""
        self._book.end(self)

    def cancel(self) -> None:
        """The transfer is given up, and nobody reads or writes the blocks any more. As
        :meth:`done` for the books: once."""
        self._book.end(self)

    @property
    def overdue(self) -> bool:
        """Whether the timeout has passed. The blocks are held all the same."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def __repr__(self) -> str:
        return f"Lease({self.id}, sequence {self.sequence}, tokens {self.start} to {self.stop})"


class LeaseBook(Bound):
    """The open leases of one MMU."""

    def __init__(self, mmu: MMU) -> None:
        self._mmu = mmu
        self._lock = threading.Lock()
        self._open: dict[int, Lease] = {}
        self._reported: set[int] = set()

    def take(self, sequence: int, start: int, stop: int, timeout_s: float | None) -> Lease:
        """Holds the blocks of the tokens ``start`` to ``stop`` (exclusive).

        Raises:
            InvalidConfig: tokens that the sequence does not have, or a timeout that is not above 0.
        """
        if timeout_s is not None:
            try:
                timeout_s = float(timeout_s)
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidConfig(f"timeout_s: {error}") from None
            if not timeout_s > 0:
                raise InvalidConfig(f"timeout_s = {timeout_s}: allowed is above 0, or None")
        number, blocks = self._mmu.lease(sequence, start, stop)
        lease = Lease(self, number, sequence, start, stop, blocks, timeout_s)
        with self._lock:
            self._open[number] = lease
        return lease

    def end(self, lease: Lease) -> None:
        """Gives the blocks back."""
        self._mmu.end_lease(lease.id)
        with self._lock:
            self._open.pop(lease.id, None)
            self._reported.discard(lease.id)

    def overdue(self) -> list[Lease]:
        """Leases past their timeout. Each is logged once, as a warning."""
        with self._lock:
            late = [lease for lease in self._open.values() if lease.overdue]
            fresh = [lease for lease in late if lease.id not in self._reported]
            self._reported.update(lease.id for lease in fresh)
        for lease in fresh:
            _log.warning(
                "%r is not done after %s s: its %d blocks are kept",
                lease,
                lease.timeout_s,
                len(lease.blocks),
            )
        return late

    def __iter__(self) -> Iterator[Lease]:
        with self._lock:
            return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)
