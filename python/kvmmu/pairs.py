"""Pairs of blocks: what every mover is handed.

What lives here: their type, and the check that all movers make of them. What never lives here: a
copy (:mod:`.movers`, :mod:`.cuda`).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import InvalidBlock, InvalidConfig
from .storage import Storage, _described

__all__ = ["Pairs", "checked_pairs"]

Pairs: TypeAlias = npt.NDArray[np.uint32] | npt.NDArray[np.int32]
"""[m, 2], (source, destination): uint32 from ``Moves.pairs``, int32 from ``MMU.prepare`` and
``MMU.append`` (copy-on-write)."""


def checked_pairs(pairs: Pairs, storage: Storage) -> npt.NDArray[np.uint32]:
    """The same pairs as contiguous uint32 [m, 2].

    Raises:
        InvalidConfig: another dtype or shape.
        InvalidBlock: a negative id, or the null block. Numbers: ``block``, ``index`` (the row),
            ``num_blocks``.
    """
    num_blocks = storage.num_blocks
    if (
        not isinstance(pairs, np.ndarray)
        or pairs.dtype not in (np.uint32, np.int32)
        or pairs.ndim != 2
        or pairs.shape[1] != 2
    ):
        raise InvalidConfig(
            f"pairs must be a uint32 or int32 array of shape [m, 2], not {_described(pairs)}",
            argument="pairs",
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
    if storage.null_block < num_blocks and (pairs == storage.null_block).any():
        index = int(np.flatnonzero((pairs == storage.null_block).any(axis=1))[0])
        raise InvalidBlock(
            f"move {index} names block {storage.null_block}, the null block",
            block=storage.null_block,
            index=index,
            num_blocks=num_blocks,
        )
    return np.ascontiguousarray(pairs).view(np.uint32)
