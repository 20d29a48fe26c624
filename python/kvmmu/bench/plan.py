"""Planning and measuring compaction on a scattered pool, half of it live, and carrying a pass out.

The rival is a planner that slides every live block to the front, in plain Python, written for
this benchmark: one pass over the pool, one pair a block that is not where it should be. It stands
for managers that compact as a heap does; behind a page table order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import numpy as np

from .. import MMU
from .harness import Bench, Goal, Row, medians, seconds

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
    yield from goals(mmu, size)
    yield from transaction(mmu, size)
    yield Row(f"measure {size} blocks", "us", found["measure"], "plain Python", found["ratio"])


def goals(mmu: MMU, size: int) -> Iterator[Row]:
    """What choosing windows costs, and what each move costs beyond that."""
    most = 8
    moves = len(mmu.plan_huge_pages(most))
    found = medians(
        {
            "choose": lambda: seconds(lambda: mmu.plan_huge_pages(most, max_blocks=1)) * 1e6,
            "shrink": lambda: seconds(lambda: mmu.plan_groups(64, 8, max_blocks=1)) * 1e6,
            "guarantee": lambda: seconds(mmu.guarantee) * 1e6,
            "emit": lambda: seconds(lambda: mmu.plan_huge_pages(most)) * 1e6,
        },
        rounds=9,
    )
    goal = Goal(10 if size < 100_000 else 50)
    for name, text in (
        ("choose", f"choose windows for {most} huge pages"),
        ("shrink", "choose granules of 64 blocks"),
        ("guarantee", "the guarantee"),
    ):
        yield Row(f"{text}, {size} blocks", "us", found[name], goal=goal)
    each = (found["emit"] - found["choose"]) * 1e3 / max(moves - 1, 1)
    yield Row(f"emit a move, {size} blocks", "ns/move", each, goal=Goal(30))


def transaction(mmu: MMU, size: int) -> Iterator[Row]:
    """Begin and commit, and a whole pass without its copies."""

    def whole_pass() -> float:
        def run() -> None:
            plan = mmu.plan_compaction()
            if plan is not None:
                mmu.commit(mmu.begin(plan))

        return seconds(run) * 1e6

    yield Row(
        f"a pass of 32 moves from Python, without the copy, {size} blocks",
        "us",
        medians({"pass": whole_pass}, rounds=30)["pass"],
        goal=Goal(40),
    )
    if size > 100_000:
        return
    for sharers, goal in ((1, 10.0), (100, 200.0)):
        small = MMU(4096, 1, max_sequences=256, prefix_caching=False, placement="scatter")
        first = small.open(np.zeros(64, np.int32))
        others = [small.fork(first) for _ in range(sharers - 1)]
        taken: list[float] = []
        for _ in range(30):
            plan = small.plan_gather(first, max_blocks=32)
            if len(plan) < 32:
                # All in few runs: somewhere else, scattered again.
                for other in others:
                    small.close(other)
                small.close(first)
                first = small.open(np.zeros(64, np.int32))
                others = [small.fork(first) for _ in range(sharers - 1)]
                continue
            begin = perf_counter()
            small.commit(small.begin(plan))
            taken.append((perf_counter() - begin) * 1e6)
        yield Row(
            f"begin and commit of 32 moves, each block mapped {sharers} times",
            "us",
            median(taken),
            goal=Goal(goal),
        )
    yield from churned()


def churned() -> Iterator[Row]:
    """Passes of 32 blocks until a sequence of 8k tokens lies in at most 16 runs."""
    mmu = MMU(4096, 16, max_sequences=1024, prefix_caching=False, placement="scatter")
    others = [mmu.open(np.zeros(16 * 8, np.int32)) for _ in range(320)]
    for other in others[::4]:
        mmu.close(other)
    sequence = mmu.open(np.zeros(8192, np.int32))
    before, passes = mmu.info(sequence).num_runs, 0
    while mmu.info(sequence).num_runs > 16 and passes < 1000:
        mmu.commit(mmu.begin(mmu.plan_gather(sequence, max_blocks=32)))
        passes += 1
    yield Row(
        f"a sequence of 8,192 tokens in {before} runs, pool 62 % in use: passes to at most 16",
        "passes",
        float(passes),
        goal=Goal(40),
    )
