"""Which cached blocks go first, seen from Python: leaves, windows, uses.

What lives here: stories. What never lives here: the choice against a plain model
(`rust/kvmmu/src/state/evict.rs`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvmmu import MMU

from .small import SmallPool

WINDOW = 512


def serve(pool: SmallPool, tokens: list[int]) -> None:
    pool.free(pool.alloc(tokens))


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("page_aware", [True, False])
def test_a_leaf_goes_before_its_parent_whatever_was_used_how_often(
    eviction: str, page_aware: bool
) -> None:
    pool = SmallPool(32, 2, eviction=eviction, page_aware=page_aware, placement="scatter", seed=5)
    trunk = pool.fresh(6)
    branches = [[*trunk, *pool.fresh(4)] for _ in range(4)]
    for turn in range(12):
        serve(pool, [*branches[turn % 3], 0])
    serve(pool, branches[3])
    known = {tuple(branch[:end]) for branch in branches for end in range(2, 11, 2)}
    cached = pool.state("cached")
    while cached:
        assert pool.mmu.evict(1) == 1
        cached -= 1
        assert pool.state("cached") == cached, "one block went, and took no other with it"
        found = {prefix for prefix in known if pool.match([*prefix, 0]) == len(prefix)}
        assert all(prefix[:-2] in found for prefix in found if len(prefix) > 2)
        pool.check()


@pytest.mark.parametrize("page_aware", [True, False])
def test_of_blocks_as_old_those_in_the_window_with_the_fewest_live_ones_go_first(
    page_aware: bool,
) -> None:
    """Window 1 is cached wholly, every second block of window 0; in the order of age they
    alternate. 64 victims are chosen among 64 and a tenth of 768."""
    pool = SmallPool(2 * WINDOW, 1, width=4, page_aware=page_aware, anchor=0.0)
    ids = [pool.alloc(1) for _ in range(2 * WINDOW)]
    tokens = {pool.blocks(each)[0]: pool.tokens[each] for each in ids}
    for block, (first, second) in enumerate(zip(ids[:WINDOW], ids[WINDOW:], strict=True)):
        if block % 2:
            pool.free(first)
        pool.free(second)
    assert pool.state("cached") == WINDOW + WINDOW // 2
    assert pool.mmu.evict(64) == 64
    gone = [block for block in tokens if pool.match([*tokens[block], 0]) == 0]
    assert len(gone) == 64
    assert sum(block >= WINDOW for block in gone) == (64 if page_aware else 43)
    pool.mmu.validate()


@pytest.mark.parametrize(("eviction", "kept"), [("lru", 0), ("lfu", 32)])
def test_a_hot_prefix_outlives_a_scan_under_lfu_and_is_let_go_when_it_has_grown_old(
    eviction: str, kept: int
) -> None:
    pool = SmallPool(64, 4, eviction=eviction)
    hot = pool.fresh(32)
    for _ in range(9):
        serve(pool, [*hot, *pool.fresh(1)])
    for _ in range(60):
        serve(pool, pool.fresh(8))
    assert pool.match([*hot, 0]) == kept
    pool.check()
    for _ in range(300):
        serve(pool, pool.fresh(8))
    assert pool.match([*hot, 0]) == 0
    pool.check()


def test_without_prefix_caching_there_is_nothing_to_evict() -> None:
    options: dict[str, Any] = {"eviction": "lfu", "page_aware": True, "prefix_caching": False}
    mmu = MMU(8, 4, **options)
    mmu.close(mmu.open(np.arange(8, dtype=np.int32)))
    assert mmu.evict(8) == 0
    mmu.validate()


@pytest.mark.slow
def test_page_aware_eviction_finds_as_much_of_a_published_trace(traces: Any) -> None:
    from kvmmu.replay.options import Options
    from kvmmu.replay.run import replay
    from kvmmu.replay.traces import read

    trace = read(traces / "mooncake_conversation.jsonl", limit=4000)
    rates = [
        replay(trace, Options(blocks=90_000, compaction=False, page_aware=aware))["prefix_hit_rate"]
        for aware in (True, False)
    ]
    assert rates[0] == pytest.approx(rates[1], abs=0.002)
    assert rates[0] > 0.03
