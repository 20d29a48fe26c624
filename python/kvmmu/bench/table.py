"""What a kernel reads: writing block tables, and looking up slots. And what the page table costs.

The rivals of the export are NumPy, a row assigned from an array of ids that an engine already has,
and memcpy of the whole table. The rival of the look-up is NumPy arithmetic on such an array. Those
of the page table are in rust/kvmmu/examples/page_table.rs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from .. import MMU, BlockTables, PrefixGroups, prefix_groups
from .harness import Bench, Goal, Row, medians, of_the_core, seconds

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

BLOCK = 16
BATCH = 256
DEPTH = 512
LONG = 8192
# Page orders of the pool, what its rows are exported as, and the goal against memcpy.
FORMS: list[tuple[tuple[int, ...], str, dict[str, int], float | None]] = [
    ((0,), "single blocks", {}, 2),
    ((0,), "kernel blocks of 4", {"kernel_block_size": 4}, None),
    ((0, 3, 9), "blocks of huge pages", {}, 1.2),
    ((0, 3, 9), "pages of 8", {"page_order": 3}, None),
]


def rows(bench: Bench) -> Iterator[Row]:
    yield from page_table(bench)
    yield from looked_up()
    yield from whole_tables()
    yield from new_blocks()


def page_table(bench: Bench) -> Iterator[Row]:
    """From Rust: looking up, mapping and unmapping, forking, and the memory of tables."""
    found = of_the_core(bench, "page_table")
    if found is None:
        return
    for heat, limit in (("hot", 5), ("cold", 20)):
        rivals = {
            "vec": "Vec of Vecs",
            "short": "walk from level 2, a copy",
            "cached": "walk cache of 256, a copy",
        }
        for other, name in rivals.items():
            yield Row(
                f"look, {heat}: no lock, all four levels",
                "ns",
                found[f"look {heat}"],
                name,
                found[f"{other} {heat}"],
                Goal(limit) if other == "vec" else None,
            )
    yield Row("translate, a position of a batch", "ns", found["translate batch"], goal=Goal(5))
    yield Row("translate, one of 1000 sequences a call", "ns", found["translate one a call"])

    plain = "Vec of blocks, counts, free list"
    for shape, map_goal, fork_goal in (
        ("huge", 20, 20),
        ("contiguous", 40, 25),
        ("scattered", 130, 80),
        ("holes", 130, 80),
    ):
        verbs: tuple[tuple[str, str | None, Goal | None], ...] = (
            ("map + unmap", "map + unmap vec", Goal(map_goal)),
            ("fork", "fork vec", Goal(fork_goal)),
            ("close child", "close child vec", None),
            ("fork published", None, Goal(fork_goal)),
        )
        for verb, rival, goal in verbs:
            yield Row(
                f"{verb} {LONG} blocks, {shape}",
                "us",
                found[f"{verb} {shape}"],
                rival and plain,
                found[rival] if rival else None,
                goal,
            )
        yield Row(
            f"open, 5000 of {LONG} blocks cached, {shape}",
            "us",
            found[f"open part {shape}"],
            "match alone",
            found[f"match part {shape}"],
        )
    for what in ("16 pages", "5000 blocks"):
        yield Row(
            f"count {what}, two blocks a word (a copy)",
            "ns",
            found[f"count {what} packed"],
            "a count a page (a copy)",
            found[f"count {what} by_page"],
        )
    for form, goal_bytes in (
        (f"huge, {LONG} blocks", 1.5),
        (f"contiguous, {LONG} blocks", 16),
        ("contiguous, 128 blocks", None),
    ):
        yield Row(
            f"tables, {form}",
            "bytes/block",
            found[f"bytes a block, {form}"],
            goal=None if goal_bytes is None else Goal(goal_bytes),
        )


def looked_up() -> Iterator[Row]:
    mmu = MMU(BATCH * DEPTH, BLOCK, max_sequences=BATCH, prefix_caching=False)
    prompt = np.zeros(DEPTH * BLOCK, np.int32)
    sequences = np.array([mmu.open(prompt) for _ in range(BATCH)], np.int64)
    held = [mmu.block_table(int(sequence)) for sequence in sequences]
    out = np.empty((BATCH, DEPTH), np.int32)
    buffers = mmu.register_tables(
        np.empty((BATCH, DEPTH), np.int32),
        np.empty(BATCH, np.int32),
        np.empty(BATCH, np.int64),
        np.empty(BATCH + 1, np.int32),
    )
    first = int(sequences[0])
    positions = np.random.default_rng(0).integers(0, len(prompt), len(prompt), dtype=np.int64)

    others = np.roll(sequences, 1)

    def export_changed() -> float:
        mmu.export(sequences, buffers)
        return seconds(lambda: mmu.export(others, buffers)) * 1e6

    def export_unchanged() -> float:
        mmu.export(sequences, buffers)
        return seconds(lambda: mmu.export(sequences, buffers)) * 1e6

    def assign() -> None:
        for row, blocks in enumerate(held):
            out[row, : len(blocks)] = blocks

    def arithmetic() -> object:
        return held[0][positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK

    found = medians(
        {
            "changed": export_changed,
            "unchanged": export_unchanged,
            "assign": lambda: seconds(assign) * 1e6,
            "translate": lambda: (
                seconds(lambda: mmu.translate(first, positions)) * 1e9 / len(positions)
            ),
            "arithmetic": lambda: seconds(arithmetic) * 1e9 / len(positions),
        },
        rounds=51,
    )
    name = f"export {BATCH} rows of {DEPTH} blocks"
    rival = "NumPy, one assignment a row"
    yield Row(f"{name}, all others", "us", found["changed"], rival, found["assign"])
    yield Row(f"{name}, none changed", "us", found["unchanged"], rival, found["assign"])
    yield Row(
        f"translate {len(positions)} positions",
        "ns/position",
        found["translate"],
        "NumPy arithmetic on the row",
        found["arithmetic"],
    )


def registered(mmu: MMU, width: int, **form: int) -> BlockTables:
    return mmu.register_tables(
        np.empty((BATCH, width), np.int32),
        np.empty(BATCH, np.int32),
        np.empty(BATCH, np.int64),
        np.empty(BATCH + 1, np.int32),
        **form,
    )


def whole_tables() -> Iterator[Row]:
    """Every row of another sequence than before, in each form of table."""
    pools: dict[tuple[int, ...], tuple[MMU, Longs]] = {}
    for orders, name, form, goal in FORMS:
        if orders not in pools:
            pools = {orders: _full(orders)}
        mmu, sequences = pools[orders]
        entries = LONG * BLOCK // registered(mmu, 1, **form).kernel_block_size
        buffers = registered(mmu, entries, **form)
        # Written, so that it has memory of its own to be read: zeros are all one page.
        source = np.ones((BATCH, entries), np.int32)
        target = np.ones_like(source)
        order = [sequences]

        def export(
            mmu: MMU = mmu, buffers: BlockTables = buffers, order: list[Longs] = order
        ) -> float:
            order[0] = np.roll(order[0], 1)
            return seconds(lambda: mmu.export(order[0], buffers)) * 1e6

        def copy(target: Ints = target, source: Ints = source) -> float:
            return seconds(lambda: np.copyto(target, source)) * 1e6

        found = medians({"kvmmu": export, "memcpy": copy}, rounds=25)
        yield Row(
            f"export {BATCH} x {LONG}: {name}, all others",
            "us",
            found["kvmmu"],
            "memcpy of the table",
            found["memcpy"],
            None if goal is None else Goal(goal, of="ratio"),
        )


def _full(orders: tuple[int, ...]) -> tuple[MMU, Longs]:
    """A pool with long sequences alone."""
    mmu = MMU(
        BATCH * LONG + LONG - 1,
        BLOCK,
        max_sequences=BATCH + 1,
        prefix_caching=False,
        null_block="first",
        anchor=0.0,
        page_orders=orders,
        hold_blocks=0,
    )
    prompt = np.zeros(LONG * BLOCK, np.int32)
    return mmu, np.array([mmu.open(prompt) for _ in range(BATCH)], np.int64)


def new_blocks() -> Iterator[Row]:
    """One new block in every row since the export before."""
    rounds = 51
    depth = DEPTH + rounds + 2
    mmu = MMU(BATCH * depth, BLOCK, max_sequences=BATCH, prefix_caching=False)
    prompt = np.zeros(DEPTH * BLOCK, np.int32)
    sequences = np.array([mmu.open(prompt) for _ in range(BATCH)], np.int64)
    buffers = registered(mmu, depth)
    mmu.export(sequences, buffers)

    def export() -> float:
        for sequence in sequences:
            mmu.append(int(sequence), prompt[:BLOCK])
        return seconds(lambda: mmu.export(sequences, buffers)) * 1e6

    found = medians({"kvmmu": export}, rounds)
    yield Row(f"export {BATCH} rows, one new block each", "us", found["kvmmu"], goal=Goal(10))

    step = mmu.begin_step()
    mmu.prepare(step, sequences, buffers, query_lens=np.zeros(BATCH, np.int32))
    mmu.end_step(step)
    out = PrefixGroups.allocate(BATCH, depth)
    found = medians({"kvmmu": lambda: seconds(lambda: prefix_groups(buffers, out=out)) * 1e6})
    yield Row(f"prefix_groups of {BATCH} rows that share nothing", "us", found["kvmmu"])
