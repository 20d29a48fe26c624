"""Launches of the kernels: arguments, grids, and the checks that come before.

What lives here: one class a kernel, written against :class:`Launcher`, which a ``cupy.RawKernel``
is. What never lives here: a stream, an event, an allocation on a device, or an import of CuPy.
Whoever calls makes the right device and stream current and owns the buffers.

Addresses are plain ints. Nothing is allocated on a device, and what a launch refuses it refuses
before it has launched anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core
from ..bound import Bound
from ..errors import InvalidConfig, LimitExceeded
from ..pairs import Pairs, checked_pairs
from ..storage import Storage, _described, _integer
from .checksum import checked_blocks

__all__ = [
    "MAX_MOVES",
    "CheckedPairs",
    "ChecksumBlocks",
    "Launcher",
    "MoveBlocks",
    "MoveBlocksIndirect",
    "Place",
    "RegionTable",
    "UpdateTables",
    "WriteKV",
]

Arguments: TypeAlias = tuple[Any, ...]

CheckedPairs = NewType("CheckedPairs", npt.NDArray[np.uint32])
"""Moves that passed every check, uint32 [m, 2], contiguous, nobody else's memory. ``check`` of a
launch makes them, so what is launched has been looked at once, and is what was looked at."""

MAX_MOVES = 508
"""Moves of one launch of ``move_blocks``: as many as its arguments hold."""

_LANES = 32
_CHUNK_WORDS = 128
_MAX_CHUNKS = 2**31 - 1
_MAX_GRID = 2**27
"""Thread blocks of a launch: their warps are numbered in 32 bits."""

_MOVES = np.dtype([("pairs", np.uint32, (MAX_MOVES, 2))])
_HALVES = np.dtype(
    [
        (
            "half",
            [
                ("source_token", np.uint64),
                ("source_head", np.uint64),
                ("pool_block", np.uint64),
                ("pool_offset", np.uint64),
                ("pool_head", np.uint64),
                ("heads", np.uint32),
                ("words_per_head", np.uint32),
                ("width", np.uint32),
                ("unused", np.uint32),
            ],
            (2,),
        )
    ]
)
_NO_REGIONS = np.empty((0, 3), np.uint64)


class Launcher(Protocol):
    """A compiled kernel. ``cupy.RawKernel`` is one; it launches in the current stream."""

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Arguments, /) -> object:
        """Launches.

        Args:
            grid, block: thread blocks, and threads of each; missing axes are 1.
            args: NumPy scalars, and NumPy structures of size 1 for arguments passed by value. They
                have been read when the call returns.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RegionTable:
    """What kernels know about a storage (``kernels/blocks.cuh``).

    Attributes:
        storage: whose table it is.
        base: lowest address of all regions.
        rows: uint64 [r, 5]: (bytes from ``base`` to block 0, stride, bytes a block, width of an
            access, chunks of a block in the regions before), read-only. A kernel needs a copy of it
            in device memory.
        chunks_per_block: chunks of a block in all regions.
    """

    storage: Storage
    base: int
    rows: npt.NDArray[np.uint64]
    chunks_per_block: int

    @classmethod
    def of(cls, storage: Storage) -> RegionTable:
        """The table of a storage.

        A region's width is the largest of 16, 8, 4, 2 and 1 bytes that divides its address, its
        stride and its bytes a block.

        Raises:
            InvalidConfig: a block of more chunks than a kernel can number. Numbers: ``chunks``,
                ``block_bytes``.
        """
        base = min(region.address for region in storage.regions)
        rows = np.zeros((len(storage.regions), 5), np.uint64)
        chunks = 0
        for row, region in zip(rows, storage.regions, strict=True):
            width = _width(region.address, region.stride, region.block_bytes)
            row[:] = (region.address - base, region.stride, region.block_bytes, width, chunks)
            chunks += -(-region.block_bytes // (width * _CHUNK_WORDS))
        if chunks > _MAX_CHUNKS:
            raise InvalidConfig(
                f"a block of {storage.block_bytes} bytes has {chunks} chunks; a kernel numbers at "
                f"most {_MAX_CHUNKS}",
                chunks=chunks,
                block_bytes=storage.block_bytes,
            )
        rows.flags.writeable = False
        return cls(storage, base, rows, chunks)


class _OnWarps(Bound):
    """A kernel whose warps take work in turn."""

    def __init__(self, launch: Launcher, threads: int, max_thread_blocks: int | None) -> None:
        self._launch = launch
        self._threads = _integer("threads", threads, _LANES, 256)
        if self._threads % _LANES:
            raise InvalidConfig(
                f"threads must be a multiple of {_LANES}, not {threads}", argument="threads"
            )
        most = _MAX_GRID if max_thread_blocks is None else max_thread_blocks
        self._max_thread_blocks = _integer("max_thread_blocks", most, 1, _MAX_GRID)

    def _grid(self, warps: int) -> int:
        """Thread blocks that have so many warps, as far as they are allowed."""
        return min(-(-warps * _LANES // self._threads), self._max_thread_blocks)


class _OnRegions(_OnWarps):
    """A kernel that takes the region table."""

    def __init__(
        self,
        launch: Launcher,
        table: RegionTable,
        rows: int,
        *,
        threads: int = 256,
        max_thread_blocks: int | None = None,
    ) -> None:
        super().__init__(launch, threads, max_thread_blocks)
        self._table = table
        self._head = (
            np.uint64(table.base),
            np.uint64(rows),
            np.uint32(len(table.rows)),
            np.uint32(table.chunks_per_block),
        )


class MoveBlocks(_OnRegions):
    """``move_blocks``: copies blocks in all regions, with the moves in the launch's arguments.

    Args:
        launch: the kernel.
        table: of the storage.
        rows: address of a copy of ``table.rows`` on the device.
        threads: of a thread block, a multiple of 32 up to 256.
        max_thread_blocks: at most so many at once, to leave room for other kernels; None: as many
            as there is work for.

    One thread at a time.
    """

    def __init__(
        self,
        launch: Launcher,
        table: RegionTable,
        rows: int,
        *,
        threads: int = 256,
        max_thread_blocks: int | None = None,
    ) -> None:
        super().__init__(launch, table, rows, threads=threads, max_thread_blocks=max_thread_blocks)
        self._moves = np.zeros(1, _MOVES)
        # The kernel numbers the chunks of all moves in 31 bits.
        self._most = min(MAX_MOVES, _MAX_CHUNKS // table.chunks_per_block)

    def __call__(self, pairs: Pairs) -> int:
        """Copies block ``pairs[i, 0]`` to block ``pairs[i, 1]`` for every i.

        Returns:
            launches: one for each ``MAX_MOVES`` moves begun, none without moves.

        Raises:
            InvalidBlock, InvalidPlan, InvalidConfig: as :meth:`kvmmu.CPUMover.move`. Nothing has
                been launched then.
        """
        return self.launch(self.check(pairs))

    def check(self, pairs: Pairs) -> CheckedPairs:
        """The same pairs, for :meth:`launch`; errors as :meth:`kvmmu.CPUMover.move`."""
        return _checked_pairs(pairs, self._table.storage)

    def launch(self, checked: CheckedPairs) -> int:
        """Calling the object, for pairs that :meth:`check` has returned."""
        for first in range(0, len(checked), self._most):
            part = checked[first : first + self._most]
            self._moves["pairs"][0, : len(part)] = part
            grid = self._grid(len(part) * self._table.chunks_per_block)
            args = (*self._head, np.uint32(len(part)), self._moves)
            self._launch((grid,), (self._threads,), args)
        return -(-len(checked) // self._most)

    def warm_up(self) -> None:
        """Launches once without moves."""
        self._launch((1,), (self._threads,), (*self._head, np.uint32(0), self._moves))


class MoveBlocksIndirect(_OnRegions):
    """``move_blocks_indirect``: copies the blocks that a buffer on the device names; for graphs.

    Args:
        launch, table, rows, threads: as :class:`MoveBlocks`.
        buffer: address of uint32 [2 + 2 * capacity] on the device, zero at first.
        refused: address of uint32 [1] on the device, zero at first: a count that was above the
            capacity, which copies nothing.
        capacity: moves that the buffer holds.
        thread_blocks: the grid, always the same.

    Raises:
        InvalidConfig: a capacity or a grid that is not allowed. Numbers: ``argument``, ``given``.
    """

    def __init__(
        self,
        launch: Launcher,
        table: RegionTable,
        rows: int,
        *,
        buffer: int,
        refused: int,
        capacity: int,
        thread_blocks: int,
        threads: int = 256,
    ) -> None:
        super().__init__(launch, table, rows, threads=threads, max_thread_blocks=thread_blocks)
        self._capacity = _integer("capacity", capacity, 1, _MAX_CHUNKS // table.chunks_per_block)
        if buffer % 8:
            raise InvalidConfig(
                f"the buffer at {buffer:#x} is not aligned to 8 bytes", argument="buffer"
            )
        self._args = (*self._head, np.uint64(buffer), np.uint32(capacity), np.uint64(refused))

    @property
    def capacity(self) -> int:
        """Moves that the buffer holds."""
        return self._capacity

    def check(self, pairs: Pairs) -> CheckedPairs:
        """The same pairs, for :meth:`fill_checked`; errors as :meth:`fill`."""
        checked = _checked_pairs(pairs, self._table.storage)
        if len(checked) > self._capacity:
            raise LimitExceeded(
                f"{len(checked)} moves for a buffer of {self._capacity}",
                needed=len(checked),
                limit=self._capacity,
            )
        return checked

    def fill(self, staging: npt.NDArray[np.uint32], pairs: Pairs) -> int:
        """Writes moves to host memory, in the form of the device's buffer.

        Args:
            staging: uint32 [2 + 2 * capacity], C-contiguous.
            pairs: as :meth:`MoveBlocks.__call__`.

        Returns:
            bytes from the start that have to reach the device's buffer.

        Raises:
            LimitExceeded: more moves than the capacity. Numbers: ``needed``, ``limit``.
            InvalidBlock, InvalidPlan, InvalidConfig: as :meth:`MoveBlocks.__call__`.
            Nothing has been written then.
        """
        return self.fill_checked(staging, self.check(pairs))

    def fill_checked(self, staging: npt.NDArray[np.uint32], checked: CheckedPairs) -> int:
        """As :meth:`fill`, for pairs that :meth:`check` has returned."""
        size = 2 + 2 * self._capacity
        if staging.dtype != np.uint32 or staging.shape != (size,) or not staging.flags.c_contiguous:
            raise InvalidConfig(
                f"staging must be a C-contiguous uint32 array of shape [{size}], not "
                f"{staging.dtype} of shape {staging.shape}",
                argument="staging",
            )
        end = 2 + 2 * len(checked)
        staging[2:end] = checked.reshape(-1)
        staging[0], staging[1] = len(checked), 0
        return 4 * end

    def __call__(self) -> None:
        """Launches; once in a captured graph, and then with every replay."""
        self._launch((self._max_thread_blocks,), (self._threads,), self._args)


class UpdateTables(Bound):
    """``update_tables``: writes single entries of the int32 tables that kernels read.

    Args:
        launch: the kernel.
        tables: address of the tables on the device, one allocation.
        num_entries: int32 entries of all tables together, at most 2^32.
    """

    def __init__(
        self, launch: Launcher, tables: int, num_entries: int, *, threads: int = 256
    ) -> None:
        self._launch = launch
        self._tables = np.uint64(tables)
        self._num_entries = _integer("num_entries", num_entries, 1, 2**32)
        self._threads = _integer("threads", threads, 1, 256)

    def __call__(self, entries: npt.NDArray[np.uint32], address: int | None = None) -> None:
        """Writes ``entries[i, 1]``, the bits of an int32, to entry ``entries[i, 0]``; one launch.

        Args:
            entries: uint32 [n, 2], C-contiguous, host memory. No index occurs twice.
            address: where the device reads the same bytes; None: in ``entries`` itself, which is
                then page-locked memory that the device can read.

        Raises:
            InvalidConfig: another dtype or shape, an index behind the tables, or one that occurs
                twice (numbers: ``index``). Nothing has been launched then.
        """
        if (
            not isinstance(entries, np.ndarray)
            or entries.dtype != np.uint32
            or entries.ndim != 2
            or entries.shape[1] != 2
            or not entries.flags.c_contiguous
        ):
            raise InvalidConfig(
                "entries must be a C-contiguous uint32 array of shape [n, 2], not "
                f"{_described(entries)}",
                argument="entries",
            )
        count = _integer("the number of entries", len(entries), 0, 2**31 - 1)
        if count == 0:
            return
        where = np.sort(entries[:, 0])
        if int(where[-1]) >= self._num_entries:
            raise InvalidConfig(
                f"entry {int(where[-1])} is behind the {self._num_entries} of the tables",
                index=int(where[-1]),
                num_entries=self._num_entries,
            )
        twice = where[1:] == where[:-1]
        if twice.any():
            index = int(where[1:][twice][0])
            raise InvalidConfig(f"entry {index} is to be written twice", index=index)
        at = entries.ctypes.data if address is None else address
        if at % 8:
            raise InvalidConfig(
                f"the entries at {at:#x} are not aligned to 8 bytes", argument="address"
            )
        grid = -(-count // self._threads)
        args = (self._tables, np.uint64(at), np.uint32(count))
        self._launch((grid,), (self._threads,), args)

    def warm_up(self) -> None:
        """Launches once without entries."""
        args = (self._tables, np.uint64(0), np.uint32(0))
        self._launch((1,), (self._threads,), args)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies: address, shape, strides and size of an element in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, array: Any) -> Place:
        """Of a torch tensor (on any device) or a NumPy array."""
        if isinstance(array, np.ndarray):
            return cls(array.ctypes.data, array.shape, array.strides, array.itemsize)
        size = array.element_size()
        strides = tuple(stride * size for stride in array.stride())
        return cls(array.data_ptr(), tuple(array.shape), strides, size)


class WriteKV(_OnWarps):
    """``write_kv``: writes the K and V of new tokens of one layer to their slots.

    Args:
        launch: the kernel.
        k_pool, v_pool: K and V of the layer, in any layout as ``[blocks, block_size, heads, dim]``
            with the strides that they have there (``Layers.logical``); v None without V. The last
            axis is dense. K and V may differ in heads and dim.

    Raises:
        InvalidConfig: another number of axes, a last axis that is not dense, or K and V of
            different block sizes.
    """

    def __init__(
        self,
        launch: Launcher,
        k_pool: Place,
        v_pool: Place | None,
        *,
        threads: int = 256,
        max_thread_blocks: int | None = None,
    ) -> None:
        super().__init__(launch, threads, max_thread_blocks)
        self._pools = (k_pool, v_pool)
        for name, pool in zip(("k_pool", "v_pool"), self._pools, strict=True):
            if pool is not None:
                _check_place(name, pool, 4)
                if pool.shape[1] != k_pool.shape[1]:
                    raise InvalidConfig(
                        f"v_pool has blocks of {pool.shape[1]} tokens, k_pool of {k_pool.shape[1]}",
                        argument="v_pool",
                    )
        self._block_size = np.uint32(k_pool.shape[1])
        self._halves = np.zeros(1, _HALVES)

    def warm_up(self) -> None:
        """Launches once without tokens."""
        nothing = np.uint64(0)
        args = (nothing, np.uint32(0), self._block_size, *[nothing] * 4, np.zeros(1, _HALVES))
        self._launch((1,), (self._threads,), args)

    def __call__(self, k: Place, v: Place | None, slots: int) -> None:
        """Writes token ``i`` of ``k`` and ``v`` to slot ``slots[i]``, nothing where it is negative.

        Args:
            k, v: ``[T, heads, dim]`` of the pool's dtype; v None exactly when the layer has no V.
            slots: address of int64 [T] on the device, ``block * block_size + offset``. Nobody
                checks that they lie inside of the pool: they are those that the MMU wrote.

        Raises:
            InvalidConfig: shapes that do not fit. Nothing has been launched then.
        """
        chunks = 0
        for name, half, pool, given in zip(
            ("k", "v"), self._halves["half"][0], self._pools, (k, v), strict=True
        ):
            chunks += _describe(name, half, pool, given)
        tokens = k.shape[0]
        if v is not None and v.shape[0] != tokens:
            raise InvalidConfig(
                f"v has {v.shape[0]} tokens, k {tokens}", argument="v", tokens=v.shape[0]
            )
        most = _MAX_CHUNKS // chunks
        for first in range(0, tokens, most):
            count = min(most, tokens - first)
            addresses = [0 if g is None else g.address + first * g.strides[0] for g in (k, v)]
            pools = [0 if pool is None else pool.address for pool in self._pools]
            args = (
                np.uint64(slots + 8 * first),
                np.uint32(count),
                self._block_size,
                *(np.uint64(address) for address in addresses + pools),
                self._halves,
            )
            self._launch((self._grid(count * chunks),), (self._threads,), args)


class ChecksumBlocks(_OnRegions):
    """``checksum_blocks``: the checksums of blocks, as :func:`kvmmu.cuda.block_checksums`.

    Args: as :class:`MoveBlocks`; ``max_thread_blocks`` is for each block.
    """

    def __call__(
        self, blocks: npt.NDArray[np.integer[Any]], sums: int, address: int | None = None
    ) -> None:
        """Adds the checksum of ``blocks[i]`` to ``sums[i]``.

        Args:
            blocks: ids [n] in host memory, the null block allowed.
            sums: address of uint64 [n] on the device, zero.
            address: where the device reads the ids as uint32 [n]; None: in ``blocks`` itself, which
                is then a contiguous uint32 array that the device can read.

        Raises:
            InvalidBlock, InvalidConfig: as :func:`kvmmu.cuda.block_checksums`. Nothing has been
                launched then.
        """
        checked = checked_blocks(blocks, self._table.storage)
        if address is None:
            if checked.ctypes.data != blocks.ctypes.data:
                raise InvalidConfig(
                    "without an address, blocks must be a contiguous uint32 array, not "
                    f"{blocks.dtype}",
                    argument="blocks",
                )
            address = blocks.ctypes.data
        if len(checked) == 0:
            return
        # A few chunks a warp: it adds to the sum once for all of them.
        grid = self._grid(-(-self._table.chunks_per_block // 4))
        args = (*self._head, np.uint64(address), np.uint32(len(checked)), np.uint64(sums))
        self._launch((grid, min(len(checked), 65535)), (self._threads,), args)


def _checked_pairs(pairs: Pairs, storage: Storage) -> CheckedPairs:
    """A copy of the pairs, after every check of the CPU mover."""
    checked = checked_pairs(pairs, storage).copy()
    _core.copy_blocks(_NO_REGIONS, checked, storage.span)  # checks, and copies in no region
    return CheckedPairs(checked)


def _width(*numbers: int) -> int:
    """The largest of 16, 8, 4, 2 and 1 that divides all."""
    bits = 16
    for number in numbers:
        bits |= number
    return bits & -bits


def _check_place(name: str, place: Place, axes: int) -> None:
    if (
        len(place.shape) != axes
        or place.itemsize < 1
        or 0 in place.shape[-3:]
        or min(place.strides) < 0
        or (place.shape[-1] > 1 and place.strides[-1] != place.itemsize)
    ):
        what = "[blocks, block_size, heads, dim]" if axes == 4 else "[T, heads, dim]"
        raise InvalidConfig(
            f"{name} must be {what} with a dense last axis, not {place.shape} with strides "
            f"{place.strides} (bytes) of {place.itemsize} bytes an element",
            argument=name,
            shape=place.shape,
            strides=place.strides,
        )


def _describe(name: str, half: Any, pool: Place | None, given: Place | None) -> int:
    """Fills in the kernel's description of K or V; returns the chunks of a token."""
    if pool is None or given is None:
        if pool is not None or given is not None:
            what = "the layer has none" if pool is None else "the layer has it, and it is missing"
            raise InvalidConfig(f"{name}: {what}", argument=name)
        half["heads"] = half["words_per_head"] = 0
        half["width"] = 16
        return 0
    if (
        len(given.shape) != 3
        or given.shape[1:] != pool.shape[2:]
        or given.itemsize != pool.itemsize
    ):
        raise InvalidConfig(
            f"{name} has shape {given.shape} with {given.itemsize} bytes an element; [T, "
            f"{pool.shape[2]}, {pool.shape[3]}] with {pool.itemsize} are needed",
            argument=name,
            shape=given.shape,
        )
    if given.shape[0] == 0:
        return 1
    _check_place(name, given, 3)
    heads, dim = given.shape[1:]
    row = dim * given.itemsize
    source_token, source_head = given.strides[:2]
    pool_block, pool_offset, pool_head = pool.strides[:3]
    if heads == 1 or source_head == pool_head == row:  # one head as wide as all
        heads, row, source_head, pool_head = 1, heads * row, 0, 0
    if given.shape[0] == 1:
        source_token = 0
    strides = (source_token, source_head, pool_block, pool_offset, pool_head)
    width = _width(given.address, pool.address, row, *strides)
    words = heads * (row // width)
    if words >= _MAX_CHUNKS:
        raise InvalidConfig(
            f"{name}: a token has {words} words of {width} bytes; allowed are {_MAX_CHUNKS}",
            argument=name,
        )
    half["source_token"], half["source_head"] = source_token, source_head
    half["pool_block"], half["pool_offset"], half["pool_head"] = pool_block, pool_offset, pool_head
    half["heads"], half["words_per_head"], half["width"] = heads, row // width, width
    return -(-words // _CHUNK_WORDS)
