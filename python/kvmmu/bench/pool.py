"""The pool from Python: a batch each way through ``kvmmu.Pool``.

The array of block numbers is made and read. The pool itself, beside its rivals, is measured from a
checkout (``benches/pool.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from .. import Pool
from .harness import Bench, Goal, Row, medians

POOL = 1 << 20
BATCH = 8192


def rows(bench: Bench) -> Iterator[Row]:
    pool = Pool(POOL)

    def each_way() -> tuple[float, float]:
        start = time.perf_counter()
        blocks = pool.claim(BATCH)
        claimed = time.perf_counter()
        pool.release(blocks)
        return claimed - start, time.perf_counter() - claimed

    found = medians({"claim": lambda: each_way()[0], "release": lambda: each_way()[1]}, rounds=201)
    for way, figure in found.items():
        words = f"batch of {BATCH} from Python, private, {way}"
        yield Row(words, "ns/block", figure * 1e9 / BATCH, goal=Goal(1))
