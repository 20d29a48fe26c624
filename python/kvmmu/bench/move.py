"""The CPU mover: one budget of blocks of an 80-layer model, copied within host memory.

32 blocks x 160 pieces (K and V of 80 layers) x 32 KiB = 168 MB read and as much written, in memory
of huge pages, as KVCache allocates it. Sources and destinations lie all over the pool; with "in
runs" they come in 4 runs of 8 blocks, as evacuated windows do.

The rival of the goal is a copy of as many bytes past the caches (non-temporal stores) in one
piece, also between huge pages: what scattered pieces cost shows in the ratio. C's ``memcpy`` of one
piece is measured too. The other rivals copy the same pieces: NumPy and torch, piece by piece and by
indexing.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import CPUMover, Storage
from .harness import Bench, Goal, Row, medians, seconds

BLOCKS = 32
REGIONS = 160
PIECE = 32 * 1024
POOL = 127  # and the null block: each region is whole huge pages
HUGE = 2 * 2**20
BYTES = BLOCKS * REGIONS * PIECE


def huge_pages(size: int) -> npt.NDArray[np.uint8]:
    """Touched memory of huge pages; bytes, a multiple of 2 MiB."""
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    offset = -whole.ctypes.data % HUGE
    memory.madvise(mmap.MADV_HUGEPAGE, offset, size)
    found = whole[offset : offset + size]
    found[:] = 1
    return found


def rows(bench: Bench) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    size = (POOL + 1) * PIECE
    arrays = [huge_pages(size).reshape(POOL + 1, PIECE) for _ in range(REGIONS)]
    mover = CPUMover(Storage.from_numpy(arrays))
    block_major = huge_pages(REGIONS * size).reshape(POOL + 1, REGIONS * PIECE)
    one_region = CPUMover(Storage.from_numpy([block_major]))
    chosen = rng.permutation(POOL)[: 2 * BLOCKS].astype(np.uint32)
    scattered = np.ascontiguousarray(chosen.reshape(2, BLOCKS).T)
    firsts = 8 * rng.permutation(POOL // 8)[: 2 * BLOCKS // 8].astype(np.uint32)
    runs = (firsts[:, None] + np.arange(8, dtype=np.uint32)).reshape(2, BLOCKS)
    in_runs = np.ascontiguousarray(runs.T, dtype=np.uint32)
    first = np.arange(BLOCKS, dtype=np.uint32)
    one_run = np.stack([first, first + POOL // 2], axis=1).astype(np.uint32)
    source, destination = huge_pages(BYTES), huge_pages(BYTES)
    listed = [(int(source), int(destination)) for source, destination in scattered]

    def piece_by_piece(tensors: list[Any]) -> None:
        for one, other in listed:
            for tensor in tensors:
                tensor[other] = tensor[one]

    def indexing(tensors: list[Any], froms: Any, tos: Any) -> None:
        for tensor in tensors:
            tensor[tos] = tensor[froms]

    def timed(work: Callable[[], object]) -> Callable[[], float]:
        return lambda: seconds(work) * 1e3

    rivals = ["NumPy, one assignment a piece", "NumPy fancy indexing, one a region"]
    contenders = {
        "scattered": timed(lambda: mover.move(scattered)),
        "in runs": timed(lambda: mover.move(in_runs)),
        "block-major": timed(lambda: one_region.move(scattered)),
        "one piece": timed(lambda: one_region.move(one_run)),
        "memcpy of one piece": timed(lambda: np.copyto(destination, source)),
        rivals[0]: timed(lambda: piece_by_piece(arrays)),
        rivals[1]: timed(lambda: indexing(arrays, scattered[:, 0], scattered[:, 1])),
    }
    torch_names = ["torch, one copy a piece", "torch indexing, one a region"]
    try:
        import torch
    except ImportError:
        bench.note("move: torch is not installed")
    else:
        tensors = [torch.from_numpy(array) for array in arrays]
        froms, tos = torch.from_numpy(scattered.astype(np.int64).T)
        contenders[torch_names[0]] = timed(lambda: piece_by_piece(tensors))
        contenders[torch_names[1]] = timed(lambda: indexing(tensors, froms, tos))

    found = medians(contenders)
    what = f"move {BLOCKS} blocks x {REGIONS} pieces x {PIECE // 1024} KiB"
    streamed, goal = "one piece, past the caches", Goal(1.1, of="ratio")
    yield Row(f"{what}, scattered", "ms", found["scattered"], streamed, found["one piece"], goal)
    yield Row(f"{what}, in runs of 8", "ms", found["in runs"], streamed, found["one piece"], goal)
    whole = f"move {BLOCKS} blocks of {REGIONS * PIECE / 1e6:.2f} MB (block-major), scattered"
    yield Row(whole, "ms", found["block-major"], streamed, found["one piece"], goal)
    for rival in ["memcpy of one piece", *rivals, *torch_names]:
        yield Row(f"{what}, scattered", "ms", found["scattered"], rival, found.get(rival))
