"""Attention of one query over a long sequence that lies in few runs, read in place.

8192 tokens of float32 in blocks of 16, in 1, 4 and 16 runs, by ``Layers.views`` and ``attend``.
Rivals: the same sequence gathered by ``index_select`` over its block table, then torch's
scaled_dot_product_attention, which is what there is without a paged kernel; and one run, which
tells what being cut costs. Every call reads another of several sequences, so that none is found in
a cache. With one thread, and with two where two loops really run in parallel: torch's threads wait
for each other several times a view, which costs much beside other busy processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .harness import Bench, Goal, Row, medians, seconds

TOKENS = 8192
BLOCK = 16
RUNS = (1, 4, 16)
COPIES = 3  # sequences of each kind
SHAPES = ((32, 8, 128), (9, 3, 64))  # query heads, KV heads, dim
FASTER = {4: 2.0, 16: 1.4}  # than the gather
AT_MOST = {4: 1.2, 16: 1.7}  # times one run


def rows(bench: Bench) -> Iterator[Row]:
    try:
        import torch
    except ImportError as error:
        bench.note(f"views: {error}")
        return
    before = torch.get_num_threads()
    try:
        for threads in (1, 2) if bench.two_cores else (1,):
            torch.set_num_threads(threads)
            for shape in SHAPES:
                yield from _shape(torch, threads, *shape)
    finally:
        torch.set_num_threads(before)


def _shape(torch: Any, threads: int, q_heads: int, heads: int, dim: int) -> Iterator[Row]:
    from .. import Layers, attend

    blocks = TOKENS // BLOCK
    pool = 2 * blocks * COPIES
    layers = Layers.allocate(
        "NHD",
        num_layers=1,
        num_blocks=pool + 1,
        block_size=BLOCK,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=torch.float32,
    )
    k, v = layers[0].k, layers[0].v
    assert v is not None
    k.normal_()
    v.normal_()
    q = torch.randn(q_heads, dim)

    def by_views(runs: int) -> Callable[[int], object]:
        length = blocks // runs
        places = [
            [(2 * (copy * blocks + run * length), length) for run in range(runs)]
            for copy in range(COPIES)
        ]
        return lambda turn: attend(q, layers.views(0, places[turn % COPIES], TOKENS))

    order = np.random.default_rng(0).permutation(pool)[: blocks * COPIES]
    tables = torch.from_numpy(order.reshape(COPIES, blocks))

    def by_gather(turn: int) -> object:
        found = (half.index_select(0, tables[turn % COPIES]) for half in (k, v))
        key, value = (half.view(1, TOKENS, heads, dim).transpose(1, 2) for half in found)
        return torch.nn.functional.scaled_dot_product_attention(
            q.view(1, heads, q_heads // heads, dim), key, value
        )

    def timed(work: Callable[[int], object]) -> Callable[[], float]:
        turn = iter(range(1 << 30))
        return lambda: seconds(lambda: work(next(turn))) * 1e3

    contenders = {str(runs): timed(by_views(runs)) for runs in RUNS}
    found = medians({**contenders, "gather": timed(by_gather)}, rounds=31)
    with_threads = "1 thread" if threads == 1 else f"{threads} threads"
    what = f"attention, 1 query, {TOKENS} tokens, {q_heads}/{heads} heads of {dim}, {with_threads}"
    for runs in RUNS:
        ours = found[str(runs)]
        goal = Goal(1 / FASTER[runs], of="ratio") if runs in FASTER else None
        words = f"{what}, {runs} {'run' if runs == 1 else 'runs'}"
        yield Row(words, "ms", ours, "index_select + SDPA", found["gather"], goal)
        if runs in AT_MOST:
            one = Goal(AT_MOST[runs], of="ratio")
            yield Row(words, "ms", ours, "one run", found["1"], one)
