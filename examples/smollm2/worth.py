"""What contiguity is worth to attention without a paged kernel, measured.

What lives here: one decode query over a long sequence, through every layer, read in several ways.
What never lives here: a model's weights or its requests; KV is random numbers.

The sequence lies where pools put it that were churned by sequences which came and went: one that
hands out blocks in the order of their release, as engines do; one that places by address, which is
kvmmu's default; and the same one once blocks of others were moved out of the way. There the moves
are made in the page table alone, since the bytes are random anyway.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import kvmmu
import numpy as np
import torch
from torch import Tensor

from .model import Shape, attention

ROUNDS = 7
BLOCK_SIZE = 16
POOL = 3  # times the blocks of the sequence
STAY = 6  # one block in so many stays with others

Runs = list[tuple[int, int]]
"""(first block, blocks) of each run of consecutive ones."""


@dataclass(frozen=True)
class Reading:
    """How long the attention of one step took over all layers: median of :data:`ROUNDS`."""

    tokens: int
    way: str
    runs: int
    ms: float


def measure(shape: Shape, tokens: int, seed: int) -> list[Reading]:
    """A sequence of so many tokens; all ways in turn, in the same minute.

    Raises:
        AssertionError: two ways gave different answers.
    """
    blocks = -(-tokens // BLOCK_SIZE)
    layers = kvmmu.Layers.allocate(
        "NHD",
        num_layers=shape.layers,
        num_blocks=POOL * blocks + 1,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        dtype=torch.float32,
    )
    draw = torch.Generator().manual_seed(seed)
    for tensor in layers.tensors:
        tensor.normal_(generator=draw)
    queries = torch.randn(shape.layers, 1, shape.heads, shape.dim, generator=draw)
    released, gathered = churned_runs("fifo", tokens, seed)
    placed, _ = churned_runs("address", tokens, seed)

    def gather(runs: Runs, layer: int) -> tuple[Tensor, Tensor]:
        table = torch.cat([torch.arange(first, first + count) for first, count in runs])
        k, v = layers.gather(layer, table, tokens)
        assert v is not None
        return k, v

    own = [gather(released, layer) for layer in range(shape.layers)]
    table = torch.cat([torch.arange(first, first + count) for first, count in released])

    def by_gather() -> list[Tensor]:
        out = []
        for layer, q in enumerate(queries):
            k, v = (
                half.index_select(0, table).flatten(0, 1)[:tokens]
                for half in (layers[layer].k, layers[layer].v)
            )
            out.append(attention(q, k, v))
        return out

    def by_views(runs: Runs) -> Callable[[], list[Tensor]]:
        return lambda: [
            kvmmu.attend(q, layers.views(layer, runs, tokens)) for layer, q in enumerate(queries)
        ]

    ways: dict[str, tuple[Runs, Callable[[], list[Tensor]]]] = {
        "gather: index_select, SDPA": (released, by_gather),
        "views, churned, order of release": (released, by_views(released)),
        "views, churned, by address": (placed, by_views(placed)),
        "views, after gather": (gathered, by_views(gathered)),
        "contiguous tensors: SDPA": (
            [(0, blocks)],
            lambda: [attention(q, *kv) for q, kv in zip(queries, own, strict=True)],
        ),
        "contiguous tensors: kvmmu.attend": (
            [(0, blocks)],
            lambda: [kvmmu.attend(q, [kv]) for q, kv in zip(queries, own, strict=True)],
        ),
    }
    for name, (runs, work) in ways.items():
        places = released if name.startswith("contiguous") else runs
        for layer, found in enumerate(work()):
            expected = attention(queries[layer], *gather(places, layer))
            torch.testing.assert_close(
                found, expected, msg=lambda text, name=name: f"{name}: {text}"
            )
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (_, work) in ways.items():
            began = time.perf_counter()
            work()
            spent[name].append((time.perf_counter() - began) * 1e3)
    return [
        Reading(tokens, name, len(runs), statistics.median(spent[name]))
        for name, (runs, _) in ways.items()
    ]


def churned_runs(placement: str, tokens: int, seed: int) -> tuple[Runs, Runs]:
    """Where a sequence of so many tokens lies in a churned pool, and where it lies once it was
    gathered, in passes of 32 blocks."""
    blocks = -(-tokens // BLOCK_SIZE)
    mmu = kvmmu.MMU(POOL * blocks, BLOCK_SIZE, placement=placement, prefix_caching=False)
    churn(mmu, random.Random(seed))
    sequence = mmu.open(np.zeros(tokens, dtype=np.int32))
    before = kvmmu.block_runs(mmu.block_table(sequence))
    while len(plan := mmu.plan_gather(sequence, max_blocks=32)):
        mmu.commit(mmu.begin(plan))
    return before, kvmmu.block_runs(mmu.block_table(sequence))


def churn(mmu: kvmmu.MMU, draw: random.Random) -> None:
    """Short sequences come and go; a few stay."""
    running: list[int] = []
    for _ in range(4 * mmu.num_blocks):
        prompt = np.zeros(draw.randrange(1, 8 * mmu.block_size), dtype=np.int32)
        while mmu.quote(prompt).when != "now":
            mmu.close(running.pop(draw.randrange(len(running))))
        running.append(mmu.open(prompt))
    draw.shuffle(running)
    while mmu.states()["in_use"] > mmu.num_blocks // STAY:
        mmu.close(running.pop())
