"""The CPU mover: one budget of blocks of an 80-layer model, copied within host memory.

32 blocks x 160 pieces (K and V of 80 layers) x 32 KiB = 168 MB read and as much written. Rivals:
NumPy, piece by piece and by fancy indexing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from kvmmu import CPUMover, Storage

from harness import Bench, Row, medians, seconds

BLOCKS = 32
REGIONS = 160
PIECE = 32 * 1024
POOL = 96  # blocks of the pool: sources and destinations scattered over it


def rows(bench: Bench) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    arrays = [np.ones((POOL + 1, PIECE), np.uint8) for _ in range(REGIONS)]
    mover = CPUMover(Storage.from_numpy(arrays))
    chosen = rng.permutation(POOL)[: 2 * BLOCKS].astype(np.uint32)
    pairs = np.ascontiguousarray(chosen.reshape(2, BLOCKS).T)
    listed = [(int(source), int(destination)) for source, destination in pairs]

    def piece_by_piece() -> None:
        for source, destination in listed:
            for array in arrays:
                array[destination] = array[source]

    def fancy_indexing() -> None:
        for array in arrays:
            array[pairs[:, 1]] = array[pairs[:, 0]]

    found = medians(
        {
            "kvmmu": lambda: seconds(lambda: mover.move(pairs)) * 1e3,
            "NumPy, one assignment a piece": lambda: seconds(piece_by_piece) * 1e3,
            "NumPy fancy indexing, one a region": lambda: seconds(fancy_indexing) * 1e3,
        }
    )
    ours = found.pop("kvmmu")
    for rival, value in found.items():
        yield Row(
            f"move {BLOCKS} blocks x {REGIONS} pieces x {PIECE // 1024} KiB",
            "ms",
            ours,
            rival,
            value,
        )
