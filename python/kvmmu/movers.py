"""What carries moves out.

What lives here: movers, which copy whole blocks of a storage. What never lives here: a decision
about which block goes where, and any knowledge of sequences. A mover is handed pairs and copies.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _core
from .errors import InvalidBlock, InvalidConfig
from .storage import Storage

__all__ = ["CPUMover", "Mover", "Pairs"]

Pairs: TypeAlias = npt.NDArray[np.uint32] | npt.NDArray[np.int32]
"""[m, 2], (source, destination): uint32 from ``Moves.pairs``, int32 from ``MMU.prepare`` and
``MMU.append`` (copy-on-write)."""


class Mover(Protocol):
    """Copies blocks. :func:`kvmmu.compact` and :func:`kvmmu.run_plan` take any object with this
    method."""

    def move(self, pairs: Pairs) -> None:
        """Copies block ``pairs[i, 0]`` to block ``pairs[i, 1]`` for every i, over all regions.

        When it returns, whatever reads the destinations in the order of this mover (the host for
        a CPU mover, the stream for a device) sees the copies. If it raises, the destinations hold
        nothing of worth and every source is as it was.
        """
        ...


class CPUMover:
    """Copies in host memory, with the interpreter lock released.

    The default, and the reference that other movers are tested against. Nothing else may write
    the sources or touch the destinations during ``move``.

    Args:
        storage: the memory; kept alive.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._copied_bytes = 0

    @property
    def storage(self) -> Storage:
        """The memory that it moves blocks in."""
        return self._storage

    @property
    def copied_bytes(self) -> int:
        """Bytes copied so far (each counted once). Exact while one thread moves at a time."""
        return self._copied_bytes

    def move(self, pairs: Pairs) -> None:
        """Copies block ``pairs[i, 0]`` to block ``pairs[i, 1]`` in every region.

        Args:
            pairs: uint32 or int32 [m, 2]; destinations differ from each other and from every
                source. A source may occur several times.

        Raises:
            InvalidBlock: an id that is not below ``storage.num_blocks`` (the null block, for
                instance). Numbers: ``block``, ``num_blocks``, and ``index``, the row.
            InvalidPlan: a destination that occurs twice, or that is a source as well. Numbers:
                ``block``.
            InvalidConfig: another dtype or shape.
            Nothing has been copied then.
        """
        checked = _checked(pairs, self._storage.num_blocks)
        if len(checked) == 0:
            return
        _core.copy_blocks(self._storage.region_table, checked, self._storage.num_blocks)
        self._copied_bytes += len(checked) * self._storage.block_bytes


def _checked(pairs: Pairs, num_blocks: int) -> npt.NDArray[np.uint32]:
    """The same pairs as contiguous uint32 [m, 2]."""
    if (
        not isinstance(pairs, np.ndarray)
        or pairs.dtype not in (np.uint32, np.int32)
        or pairs.ndim != 2
        or pairs.shape[1] != 2
    ):
        given = (
            f"{pairs.dtype} of shape {pairs.shape}"
            if isinstance(pairs, np.ndarray)
            else type(pairs).__name__
        )
        raise InvalidConfig(
            f"pairs must be a uint32 or int32 array of shape [m, 2], not {given}", argument="pairs"
        )
    if pairs.dtype == np.int32 and pairs.size and int(pairs.min()) < 0:
        index = int(np.flatnonzero(pairs.min(axis=1) < 0)[0])
        block = int(pairs[index].min())
        raise InvalidBlock(
            f"move {index} names block {block}, but ids start at 0",
            block=block,
            index=index,
            num_blocks=num_blocks,
        )
    return np.ascontiguousarray(pairs).view(np.uint32)
