"""The checksum of blocks in NumPy: what ``checksum_blocks`` on the device is held to.

What lives here: the definition, for memory that the host can read. What never lives here: a launch.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import InvalidBlock, InvalidConfig
from ..storage import Region, Storage, _check_ids

__all__ = ["block_checksums"]

Words: TypeAlias = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_POSITION_BITS = np.uint64(40)


def block_checksums(storage: Storage, blocks: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """A 64-bit checksum of the contents of each block, over all regions.

    The sum modulo 2^64 of ``mix(word ^ mix(position + 0x9e3779b97f4a7c15))`` over all 8-byte
    little-endian words of a block, where ``position`` is the number of the region times 2^40 plus
    that of the word in its piece, and the last word of a piece is padded with zeros. ``mix`` is the
    output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). It finds faults, not
    forgers. It depends on the order of the regions, which is that of addresses in a storage made by
    :class:`kvmmu.Layers`: compare sums of one storage.

    Args:
        storage: in host memory.
        blocks: [n] of any integer dtype; the null block is allowed.

    Returns:
        uint64 [n].

    Raises:
        InvalidConfig: not a one-dimensional integer array, or memory of a device.
        InvalidBlock: an id that the storage does not have. Numbers: ``block``, ``index``,
            ``num_blocks``.
    """
    if storage.device != "cpu":
        raise InvalidConfig(
            f"the storage is on {storage.device}; this reads host memory (ChecksumBlocks launches "
            "the kernel)",
            device=storage.device,
        )
    ids = checked_blocks(blocks, storage)
    sums = np.zeros((len(ids), len(storage.regions)), np.uint64)
    for index, block in enumerate(ids.tolist()):
        for number, region in enumerate(storage.regions):
            words = _words(region, block)
            position = np.arange(len(words), dtype=np.uint64)
            position |= np.uint64(number) << _POSITION_BITS
            terms = _mix(words ^ _mix(position + _GOLDEN))
            sums[index, number] = terms.sum()
    total: Words = sums.sum(axis=1)  # wraps, as on the device
    return total


def checked_blocks(blocks: npt.NDArray[Any], storage: Storage) -> npt.NDArray[np.uint32]:
    """The ids as contiguous uint32 [n]; errors as :func:`block_checksums`."""
    _check_ids("blocks", blocks)
    outside = (blocks < 0) | (blocks > storage.num_blocks)
    if outside.any():
        index = int(np.flatnonzero(outside)[0])
        raise InvalidBlock(
            f"blocks[{index}] is {int(blocks[index])}, but the storage has {storage.num_blocks} "
            "blocks and the null block",
            block=int(blocks[index]),
            index=index,
            num_blocks=storage.num_blocks,
        )
    return np.ascontiguousarray(blocks, np.uint32)


def _words(region: Region, block: int) -> Words:
    """The piece of a block, copied, as 8-byte words."""
    address = region.address + block * region.stride
    piece = ctypes.string_at(address, region.block_bytes)
    return np.frombuffer(piece + bytes(-len(piece) % 8), "<u8").astype(np.uint64)


def _mix(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    mixed: Words = z ^ (z >> np.uint64(31))
    return mixed
