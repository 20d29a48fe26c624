"""Planning and measuring compaction on a scattered pool, half of it live.

The rival is a planner that slides every live block to the front, in plain Python, written for
this benchmark: one pass over the pool, one pair a block that is not where it should be. It stands
for managers that compact as a heap does; behind a page table order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from kvmmu import MMU

from harness import Bench, Row, medians, seconds

SIZES = (65_536, 1_048_576)
SEQUENCE_BLOCKS = 64
BYTES_A_BLOCK = 400  # generous, both sides: what a pool may take here


def scattered(num_blocks: int) -> tuple[MMU, list[int]]:
    """A pool with every second block live, pseudo-randomly, and the holder of each (or -1)."""
    mmu = MMU(
        num_blocks,
        block_size=1,
        max_sequences=num_blocks // SEQUENCE_BLOCKS,
        max_blocks_per_sequence=SEQUENCE_BLOCKS,
        prefix_caching=False,
        placement="scatter",
    )
    owner = np.full(num_blocks, -1, np.int64)
    tokens = np.zeros(SEQUENCE_BLOCKS, np.int32)
    for index in range(num_blocks // SEQUENCE_BLOCKS // 2):
        owner[mmu.block_table(mmu.open(tokens))] = index
    return mmu, owner.tolist()


def full_slide(owner: list[int]) -> list[tuple[int, int]]:
    """Moves that bring all live blocks to the front and keep their order."""
    moves = []
    target = 0
    for source, holder in enumerate(owner):
        if holder >= 0:
            if source != target:
                moves.append((source, target))
            target += 1
    return moves


def fragmentation(owner: list[int]) -> float:
    """1 - largest free run / free blocks."""
    free = run = largest = 0
    for holder in owner:
        run = run + 1 if holder < 0 else 0
        free += holder < 0
        largest = max(largest, run)
    return 1 - largest / free if free else 0.0


def available_memory() -> int:
    """Bytes that may still be taken, from /proc/meminfo."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def rows(bench: Bench) -> Iterator[Row]:
    for size in SIZES:
        if size * BYTES_A_BLOCK > available_memory():
            bench.note(f"plan: not enough memory for {size} blocks")
            continue
        yield from rows_of(bench, size)


def rows_of(bench: Bench, size: int) -> Iterator[Row]:
    mmu, owner = scattered(size)
    available = mmu.measure().available
    if mmu.plan_compaction() is None:
        bench.note(f"plan: plan_compaction finds nothing to do in a scattered pool of {size}")
    found = medians(
        {
            "pass": lambda: seconds(mmu.plan_compaction) * 1e6,
            "run": lambda: seconds(lambda: mmu.plan_free_run(512)) * 1e6,
            "all": lambda: seconds(lambda: mmu.plan_free_run(available)) * 1e6,
            "measure": lambda: seconds(mmu.measure) * 1e6,
            "slide": lambda: seconds(lambda: full_slide(owner)) * 1e6,
            "ratio": lambda: seconds(lambda: fragmentation(owner)) * 1e6,
        },
        rounds=9,
    )
    slide = "full slide, plain Python"
    yield Row(f"plan one pass of {size} (32 moves)", "us", found["pass"], slide, found["slide"])
    yield Row(f"plan a free run of 512 of {size}", "us", found["run"], slide, found["slide"])
    yield Row(f"plan full compaction of {size}", "us", found["all"], slide, found["slide"])
    yield Row(f"measure {size} blocks", "us", found["measure"], "plain Python", found["ratio"])
