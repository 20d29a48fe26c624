"""What a kernel reads: writing block tables, and looking up slots.

The rival of the export is NumPy: a row assigned from an array of ids that an engine already has.
The rival of the look-up is NumPy arithmetic on such an array.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from kvmmu import MMU

from harness import Bench, Row, medians, seconds

BLOCK = 16
BATCH = 256
DEPTH = 512


def rows(bench: Bench) -> Iterator[Row]:
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
