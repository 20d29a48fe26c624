"""Where the bytes of blocks lie: a list of regions.

What lives here: addresses, strides and sizes, and the checks that make it safe to copy by them.
What never lives here: a copy, a decision about blocks, or an import of torch.

A region is the same piece of every block: K of one layer, V of one layer, the scales of a
quantised layer, the indexer keys, a draft model's layer. A block is all of its pieces together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .bound import Bound
from .errors import InvalidConfig

__all__ = ["Region", "Storage"]

_MAX_NUM_BLOCKS = 2**31 - 2
_MAX_ADDRESS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Region(Bound):
    """The same piece of every block.

    Block ``b`` of the region is the ``block_bytes`` bytes at ``address + b * stride``.

    Args:
        address: of block 0, in bytes.
        stride: bytes from one block to the next, at least ``block_bytes``.
        block_bytes: bytes of a block in this region, at least 1.
        num_blocks: blocks that the region has, the null block included.
        owner: whatever keeps the memory alive; held as long as the region.
        device: where the memory is: ``"cpu"``, or a CUDA device with its number, ``"cuda:0"``.
    """

    address: int
    stride: int
    block_bytes: int
    num_blocks: int
    owner: object = field(default=None, repr=False, compare=False)
    device: str = "cpu"

    @property
    def end(self) -> int:
        """Address behind the last byte of the last block."""
        return self.address + (self.num_blocks - 1) * self.stride + self.block_bytes


class Storage(Bound):
    """The regions that hold the KV of one pool of blocks.

    Args:
        regions: one or more, in any order. They may interleave (packed K and V, all layers of a
            block side by side), but no byte may belong to two of them. That is checked exactly
            among regions of one stride; regions of different strides must not interleave at all.
        num_blocks: usable blocks, as ``MMU.num_blocks``; the null block is one more, so every
            region needs at least ``num_blocks + 1`` blocks.
        null_block: which block that is, 0 .. num_blocks, as ``MMU.null_block``; default: the last.
            Nothing is ever moved from or to it.

    Raises:
        InvalidConfig: names the region (``region``; ``other`` for an overlap) and the numbers.
    """

    def __init__(
        self, regions: Iterable[Region], num_blocks: int, *, null_block: int | None = None
    ) -> None:
        self._num_blocks = _integer("num_blocks", num_blocks, 1, _MAX_NUM_BLOCKS)
        null = self._num_blocks if null_block is None else null_block
        self._null_block = _integer("null_block", null, 0, self._num_blocks)
        self._regions = tuple(regions)
        if not self._regions:
            raise InvalidConfig("a storage needs at least one region; 0 were given", given=0)
        for index, region in enumerate(self._regions):
            _check_region(index, region, self._num_blocks)
        self._device = _one_device(self._regions)
        _check_overlap(self._regions)
        self._block_bytes = sum(region.block_bytes for region in self._regions)
        table = [(region.address, region.stride, region.block_bytes) for region in self._regions]
        self._region_table = np.array(table, dtype=np.uint64).reshape(-1, 3)
        self._region_table.flags.writeable = False

    @classmethod
    def from_numpy(cls, arrays: Sequence[npt.NDArray[Any]]) -> Storage:
        """Adopts NumPy arrays, one a region, and keeps them alive.

        Args:
            arrays: each ``[num_blocks + 1, ...]`` of any dtype but object, writable. The last
                block is the null block. The first axis may have any stride of at least a block's
                bytes; the axes behind it are C-contiguous. All have equally many blocks.

        Raises:
            InvalidConfig: names the array (``region``) and what is wrong with it.
        """
        arrays = list(arrays)
        if not arrays:
            raise InvalidConfig("a storage needs at least one array; 0 were given", given=0)
        regions = [_region_of(index, array) for index, array in enumerate(arrays)]
        first = regions[0].num_blocks
        for index, region in enumerate(regions):
            if region.num_blocks != first:
                raise InvalidConfig(
                    f"array {index} has {region.num_blocks} blocks, but array 0 has {first}",
                    region=index,
                    num_blocks=region.num_blocks,
                    expected=first,
                )
        return cls(regions, first - 1)

    @property
    def regions(self) -> tuple[Region, ...]:
        """As given, in that order."""
        return self._regions

    @property
    def null_block(self) -> int:
        """The block that padding points at."""
        return self._null_block

    @property
    def span(self) -> int:
        """Usable blocks have ids below this; the null block may lie among them."""
        return self._num_blocks + (self._null_block < self._num_blocks)

    @property
    def num_blocks(self) -> int:
        """Usable blocks: ids from here on are not moved (the null block is the first of them)."""
        return self._num_blocks

    @property
    def device(self) -> str:
        """Where all of it is: ``"cpu"``, or a CUDA device with its number, ``"cuda:0"``."""
        return self._device

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all regions."""
        return self._block_bytes

    def granule(self, page_bytes: int = 2 * 2**20) -> int:
        """Blocks of the smallest aligned group whose bytes are whole pages in every region: the
        unit in which memory can go back to whoever maps it by pages of this size.

        Regions that lie within each other's strides (packed K and V, all layers of a block side by
        side) count together, as far as their pieces touch. Where a region does not begin with a
        page, each group shares its first and its last page with its neighbours: such a page goes
        only when both are gone.

        Args:
            page_bytes: a power of two; 2 MiB is the page of a device, and a huge page of a host.

        Returns:
            a power of two, perhaps more than there are blocks: then no group can go.

        Raises:
            InvalidConfig: pieces that do not touch and are no whole pages each: no group of blocks
                fills a page. Numbers: ``region``, ``stride``, ``block_bytes``, ``page_bytes``.
        """
        page = _integer("page_bytes", page_bytes, 1, 2**40)
        if page & (page - 1):
            raise InvalidConfig(
                f"page_bytes must be a power of two, not {page}", argument="page_bytes", given=page
            )
        blocks = 1
        for index, size in _joined(self._regions):
            stride = self._regions[index].stride
            if size != stride and (stride % page or size % page):
                raise InvalidConfig(
                    f"region {index} has pieces of {size} bytes every {stride}, and what lies "
                    "between is not part of a block: no group of blocks fills pages of "
                    f"{page} bytes",
                    region=index,
                    stride=stride,
                    block_bytes=size,
                    page_bytes=page,
                )
            blocks = max(blocks, page // math.gcd(page, stride))
        return blocks

    @property
    def region_table(self) -> npt.NDArray[np.uint64]:
        """uint64 [r, 3]: (address of block 0, stride, bytes a block), always the same array,
        read-only. The addresses are good while this storage lives."""
        return self._region_table

    def __repr__(self) -> str:
        return (
            f"Storage({len(self._regions)} regions, {self._num_blocks} blocks, "
            f"{self._block_bytes} bytes a block)"
        )


def _joined(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Regions of one stride whose pieces touch, together: (index of the first, bytes a block)."""
    order = sorted(range(len(regions)), key=lambda at: (regions[at].stride, regions[at].address))
    found: list[tuple[int, int]] = []
    for index in order:
        region = regions[index]
        if found:
            first, size = regions[found[-1][0]], found[-1][1]
            touches = region.stride == first.stride and region.address == first.address + size
            if touches and size + region.block_bytes <= region.stride:
                found[-1] = (found[-1][0], size + region.block_bytes)
                continue
        found.append((index, region.block_bytes))
    return found


def _one_device(regions: Sequence[Region]) -> str:
    first = regions[0].device
    for index, region in enumerate(regions):
        kind, _, number = region.device.partition(":")
        if region.device != "cpu" and not (kind == "cuda" and number.isdigit()):
            raise InvalidConfig(
                f"region {index} is on {region.device!r}; allowed are 'cpu' and a CUDA device with "
                "its number, 'cuda:0'",
                region=index,
                device=region.device,
            )
        if region.device != first:
            raise InvalidConfig(
                f"region {index} is on {region.device}, region 0 on {first}: a storage is on one "
                "device",
                region=index,
                device=region.device,
                expected=first,
            )
    return first


def _integer(name: str, value: object, low: int, high: int, **numbers: int) -> int:
    """``value`` as an int in ``low .. high``, or InvalidConfig."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidConfig(
            f"{name} must be an integer in {low} .. {high}, not {value!r}",
            argument=name,
            **numbers,
        )
    number = int(value)
    if not low <= number <= high:
        raise InvalidConfig(
            f"{name} must be in {low} .. {high}, not {number}",
            argument=name,
            given=number,
            **numbers,
        )
    return number


def _described(value: object) -> str:
    """What was given where an array was needed, for a message."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return type(value).__name__


def _check_ids(name: str, blocks: object) -> None:
    """InvalidConfig unless it is an integer array of shape [n]."""
    if not isinstance(blocks, np.ndarray) or blocks.ndim != 1 or blocks.dtype.kind not in "iu":
        raise InvalidConfig(
            f"{name} must be an integer array of shape [n], not {_described(blocks)}",
            argument=name,
        )


def _check_region(index: int, region: Region, num_blocks: int) -> None:
    for name in ("address", "stride", "block_bytes", "num_blocks"):
        value = getattr(region, name)
        _integer(f"region {index}: {name}", value, 1, _MAX_ADDRESS, region=index)
    if region.stride < region.block_bytes:
        raise InvalidConfig(
            f"region {index} has a stride of {region.stride} bytes, less than the "
            f"{region.block_bytes} bytes of a block",
            region=index,
            stride=region.stride,
            block_bytes=region.block_bytes,
        )
    if region.num_blocks < num_blocks + 1:
        raise InvalidConfig(
            f"region {index} has {region.num_blocks} blocks; {num_blocks + 1} are needed "
            f"({num_blocks} and the null block)",
            region=index,
            num_blocks=region.num_blocks,
            needed=num_blocks + 1,
        )
    if region.end > _MAX_ADDRESS:
        raise InvalidConfig(
            f"region {index} ends at {region.end:#x}, outside of the address space "
            f"(address {region.address:#x}, stride {region.stride}, {region.num_blocks} blocks)",
            region=index,
            address=region.address,
            stride=region.stride,
            num_blocks=region.num_blocks,
        )


def _check_overlap(regions: tuple[Region, ...]) -> None:
    """Refuses two regions that share a byte.

    In order of their addresses, each region is compared with all before it at once. Two spans
    that meet need a closer look. With one stride s and d bytes between the two starts, block y of
    the later region meets block x of the earlier one exactly if, with k = x - y,
    d - earlier.block_bytes < k * s < d + later.block_bytes.
    """
    order = sorted(range(len(regions)), key=lambda index: regions[index].address)
    columns = [
        (region.address, region.stride, region.block_bytes, region.num_blocks, region.end)
        for region in (regions[index] for index in order)
    ]
    # int64 holds all of them and the sums below: every address ends below 2**63.
    address, stride, size, count, end = np.array(columns, dtype=np.int64).T
    for later in range(1, len(order)):
        meet = end[:later] > address[later]
        if not meet.any():
            continue
        distance = address[later] - address[:later]
        s = stride[:later]
        lowest = np.maximum((distance - size[:later]) // s + 1, 1 - count[later])
        highest = np.minimum((distance + size[later] - 1) // s, count[:later] - 1)
        same_stride = s == stride[later]
        bad = meet & (~same_stride | (lowest <= highest))
        if bad.any():
            earlier = int(np.flatnonzero(bad)[0])
            what = (
                "share bytes"
                if same_stride[earlier]
                else "interleave with different strides, which is not supported"
            )
            one, two = sorted((order[earlier], order[later]))
            raise InvalidConfig(
                f"regions {one} and {two} {what}: "
                + "; ".join(
                    f"region {index} at {regions[index].address:#x}, stride "
                    f"{regions[index].stride}, {regions[index].block_bytes} bytes a block, "
                    f"{regions[index].num_blocks} blocks"
                    for index in (one, two)
                ),
                region=one,
                other=two,
            )


def _region_of(index: int, array: npt.NDArray[Any]) -> Region:
    if not isinstance(array, np.ndarray):
        raise InvalidConfig(
            f"array {index} is a {type(array).__name__}, not a NumPy array", region=index
        )
    shape = tuple(int(length) for length in array.shape)
    if array.dtype.hasobject:
        raise InvalidConfig(
            f"array {index} holds Python objects ({array.dtype}), which are not bytes",
            region=index,
        )
    if len(shape) == 0 or shape[0] < 2 or array.size == 0:
        raise InvalidConfig(
            f"array {index} has shape {shape}; [num_blocks + 1, ...] with at least 2 blocks of "
            "at least 1 byte is needed",
            region=index,
            shape=shape,
        )
    if not array.flags.writeable:
        raise InvalidConfig(f"array {index} is read-only; blocks are moved in it", region=index)
    if not array[:1].flags.c_contiguous:
        raise InvalidConfig(
            f"array {index} has strides {array.strides} for shape {shape}: the axes behind the "
            "first must be C-contiguous",
            region=index,
            shape=shape,
            strides=array.strides,
        )
    block_bytes = array.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    stride = int(array.strides[0])
    if stride < block_bytes:
        raise InvalidConfig(
            f"array {index} has a stride of {stride} bytes from block to block; at least the "
            f"{block_bytes} bytes of a block are needed",
            region=index,
            stride=stride,
            block_bytes=block_bytes,
        )
    return Region(
        address=int(array.ctypes.data),
        stride=stride,
        block_bytes=block_bytes,
        num_blocks=shape[0],
        owner=array,
    )
