"""Launches with one fault planted in each, for the sanitizers: ``python -m tests.shim_faults
LIBRARY CASE``.

What lives here: the cases, each a launch that the host's checks would have refused, and ``clean``,
which launches every kernel rightly. What never lives here: whether a fault is found; the sanitizer
that LIBRARY was built with says so by the exit status (see test_cuda_shim.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from kvmmu import Storage, cuda
from kvmmu.cuda import launches

from .cuda_shim import ShimKernel, kernel

NUM_BLOCKS, TOKENS = 7, 4


class Device:
    """Buffers and launches of every kernel, as an executor would keep them."""

    def __init__(self, library: Path) -> None:
        self.library = library
        shape = (NUM_BLOCKS + 1, TOKENS, 2, 256)  # 2 KiB a block in each region: one chunk
        self.arrays = [np.full(shape, n, np.uint8) for n in range(2)]
        self.table = cuda.RegionTable.of(Storage.from_numpy(self.arrays))
        self.rows = self.table.rows.copy()
        self.capacity = 600
        self.buffer = np.zeros(2 + 2 * self.capacity, np.uint32)
        self.refused = np.zeros(1, np.uint32)
        self.tables = np.zeros(1000, np.int32)

    def kernel(self, name: str) -> ShimKernel:
        return kernel(name, parallel=True, library=self.library)

    def move(self, *pairs: tuple[int, int]) -> None:
        launch = self.kernel("move_blocks")
        cuda.MoveBlocks(launch, self.table, self.rows.ctypes.data, threads=64)(
            np.array(pairs, np.uint32)
        )

    def move_indirect(self, *pairs: tuple[int, int], capacity: int | None = None) -> None:
        indirect = cuda.MoveBlocksIndirect(
            self.kernel("move_blocks_indirect"),
            self.table,
            self.rows.ctypes.data,
            buffer=self.buffer.ctypes.data,
            refused=self.refused.ctypes.data,
            capacity=capacity or self.capacity,
            thread_blocks=2,
            threads=64,
        )
        moves = np.array(pairs, np.uint32).reshape(-1)
        self.buffer[0] = len(pairs)
        self.buffer[2 : 2 + len(moves)] = moves[: len(self.buffer) - 2]
        indirect()

    def update(self, indices: list[int], count: int | None = None) -> None:
        entries = np.array([[index, 7] for index in indices], np.uint32)
        args = (
            np.uint64(self.tables.ctypes.data),
            np.uint64(entries.ctypes.data),
            np.uint32(count or len(entries)),
        )
        self.kernel("update_tables")((2,), (64,), args)

    def write(self, slots: list[int], tokens: int | None = None) -> None:
        k_pool, v_pool = map(cuda.Place.of, self.arrays)
        new = np.ones((tokens or len(slots), 2, 256), np.uint8)
        where = np.array(slots, np.int64)
        write = cuda.WriteKV(self.kernel("write_kv"), k_pool, v_pool, threads=64)
        write(cuda.Place.of(new), cuda.Place.of(new), where.ctypes.data)

    def checksum(self, blocks: list[int], count: int | None = None) -> None:
        ids = np.array(blocks, np.uint32)
        sums = np.zeros(count or len(ids), np.uint64)
        args = (
            np.uint64(self.table.base),
            np.uint64(self.rows.ctypes.data),
            np.uint32(len(self.table.rows)),
            np.uint32(self.table.chunks_per_block),
            np.uint64(ids.ctypes.data),
            np.uint32(len(sums)),
            np.uint64(sums.ctypes.data),
        )
        self.kernel("checksum_blocks")((2, 2), (64,), args)

    def shorter_region_table(self) -> None:
        self.rows = self.rows.reshape(-1)[:-1].copy()

    def wider_than_aligned(self) -> None:
        """As if a table had been made for memory that lies 8 bytes before this."""
        self.table = replace(self.table, base=self.table.base + 8)


def clean(device: Device) -> None:
    """Every kernel, more work than threads, and moves that share their source."""
    device.move((0, 1), (0, 2), (3, 4))
    device.move_indirect((5, 6), (0, 1), (0, 4))
    device.move_indirect()
    device.update(list(range(0, 1000, 2)))
    device.write([-1, 0, 9, 30, -1, 2])
    device.checksum([0, 3, 3, NUM_BLOCKS])


def region_table_for(verb: str) -> Callable[[Device], None]:
    def run(device: Device) -> None:
        device.shorter_region_table()
        getattr(device, verb)(*([[0]] if verb == "checksum" else [(0, 1)]))

    return run


def misaligned(device: Device) -> None:
    device.wider_than_aligned()
    device.move((0, 1))


THREAD: dict[str, Callable[[Device], None]] = {
    "move_blocks: duplicate destination": lambda d: d.move((0, 2), (1, 2)),
    "move_blocks: chain": lambda d: d.move((0, 1), (1, 2)),
    "move_blocks_indirect: duplicate destination": lambda d: d.move_indirect((0, 2), (1, 2)),
    "move_blocks_indirect: chain": lambda d: d.move_indirect((0, 1), (1, 2)),
    "update_tables: duplicate entry": lambda d: d.update([5, 6, 5]),
    "write_kv: duplicate slot": lambda d: d.write([3, 8, 3]),
}
ADDRESS: dict[str, Callable[[Device], None]] = {
    "move_blocks: bad source": lambda d: d.move((NUM_BLOCKS + 1, 0)),
    "move_blocks: bad destination": lambda d: d.move((0, NUM_BLOCKS + 1)),
    "move_blocks: region table shorter than the count": region_table_for("move"),
    "move_blocks: words wider than the alignment": misaligned,
    "move_blocks_indirect: bad source": lambda d: d.move_indirect((NUM_BLOCKS + 1, 0)),
    "move_blocks_indirect: bad destination": lambda d: d.move_indirect((0, NUM_BLOCKS + 1)),
    "move_blocks_indirect: region table shorter than the count": region_table_for("move_indirect"),
    "move_blocks_indirect: buffer shorter than the count": lambda d: d.move_indirect(
        *[(0, 1)] * 700, capacity=1000
    ),
    "update_tables: bad entry": lambda d: d.update([1000]),
    "update_tables: entries shorter than the count": lambda d: d.update([1, 2], count=3),
    "write_kv: bad slot": lambda d: d.write([(NUM_BLOCKS + 1) * TOKENS]),
    "write_kv: slots shorter than the tokens": lambda d: d.write([0, 1], tokens=3),
    "checksum_blocks: bad block": lambda d: d.checksum([NUM_BLOCKS + 1]),
    "checksum_blocks: region table shorter than the count": region_table_for("checksum"),
    "checksum_blocks: blocks shorter than the count": lambda d: d.checksum([1], count=2),
}
CASES = {"clean": clean, **THREAD, **ADDRESS}


def main(library: str, case: str) -> None:
    if case != "clean":  # past what refuses such a launch
        launches._checked_pairs = lambda pairs, storage: launches.CheckedPairs(
            np.asarray(pairs, np.uint32)
        )
    CASES[case](Device(Path(library)))


if __name__ == "__main__":
    main(*sys.argv[1:])
