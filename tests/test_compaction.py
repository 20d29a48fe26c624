"""What passes of compaction promise, told as stories: they end, they keep their bounds, and what
they could not do changes nothing. ``test_compaction_machine.py`` does the same at random.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from kvmmu import OutOfBlocks, compact

from .small import SmallPool

WINDOW = 512


def passes(pool: SmallPool, most: int = 100) -> int:
    """Passes until the trigger has nothing more to do; at most so many."""
    for turn in range(most):
        if not compact(pool.mmu, pool.mover):
            return turn
    raise AssertionError(f"after {most} passes there is still something to move")


def scattered(seed: int, **config: Any) -> tuple[SmallPool, random.Random]:
    """A pool of 64 blocks with sequences in pieces, some of which share a beginning."""
    r = random.Random(seed)
    pool = SmallPool(64, 1, placement="scatter", seed=seed, **config)
    sequences = [pool.alloc(r.randrange(2, 9)) for _ in range(7)]
    for parent in r.sample(sequences, 2):
        pool.append(pool.fork(parent), r.randrange(1, 5))
    pool.free(*r.sample(sequences, 2))
    return pool, r


@pytest.mark.parametrize("page_orders", [(0,), (0, 2)])
@pytest.mark.parametrize("trigger", ["default", "ratio"])
def test_passes_come_to_an_end(trigger: str, page_orders: tuple[int, ...]) -> None:
    """Kind 9. What one goal moved no other moves back, nor one sequence what it shares with
    another."""
    config: dict[str, Any] = {"page_orders": page_orders, "budget_blocks": 8}
    if trigger == "ratio":
        config |= {"compaction_start": 0.1, "compaction_stop": 0.05}
    moved = 0
    for seed in range(60):
        pool, r = scattered(seed, **config)
        mapped = [block for sequence in pool.tokens for block in pool.blocks(sequence)]
        pool.pin(*r.sample(sorted(set(mapped)), r.choice([0, 0, 8])))
        passes(pool)
        moved += pool.mmu.stats()["moves_committed"]
        pool.check()
    assert moved > 0


@pytest.mark.parametrize("placement", ["address", "scatter"])
def test_small_churn_moves_a_bounded_number_of_blocks(placement: str) -> None:
    """Kind 9, with the default trigger: 1,000 steps that each free and claim two blocks. Where
    claims fill holes, none moves. Where each block is claimed at random, in any window, at most
    three for each that was freed (2.3 to 2.9 over five seeds)."""
    pool = SmallPool(8 * WINDOW, 1, page_orders=(0, 2, 9), placement=placement, seed=1)
    r = random.Random(1)
    kept = [pool.alloc(r.randrange(1, 40)) for _ in range(80)]
    hot = [pool.alloc(2) for _ in range(80)]
    pool.free(*kept[::2])
    passes(pool, 4000)
    settled = pool.mmu.stats()["moves_committed"]
    for _ in range(1000):
        at = r.randrange(len(hot))
        pool.free(hot[at])
        hot[at] = pool.alloc(2)
        compact(pool.mmu, pool.mover)
    moves = pool.mmu.stats()["moves_committed"] - settled
    assert moves <= {"address": 0, "scatter": 6 * 1000}[placement]
    assert (settled > 0) == (placement == "scatter")
    pool.check()


def test_a_refused_claim_evicts_nothing_under_the_guarantee() -> None:
    pool = SmallPool(6, 1, guarantee=0)
    cached, kept, _ = pool.alloc(1), pool.alloc(2), pool.alloc(3)
    pool.free(cached)
    step = pool.mmu.begin_step()
    before = pool.snapshot()
    assert pool.state("cached") == 1
    for refused in (
        lambda: pool.mmu.append(kept, np.array([7, 8], np.int32)),
        lambda: pool.mmu.open(np.array([7, 8], np.int32)),
        lambda: pool.mmu.prepare(
            step, np.array([kept], np.int64), pool.tables, query_lens=np.array([2], np.int32)
        ),
    ):
        with pytest.raises(OutOfBlocks):
            refused()
        assert pool.snapshot() == before
    pool.mmu.end_step(step)
    pool.append(kept, 1)
    assert pool.state("cached") == 0
    pool.check()


def test_a_free_window_is_made_with_the_room_of_a_short_last_one() -> None:
    """700 blocks are one window and a short one, which never counts as free."""
    pool = SmallPool(700, 1, prefix_caching=False)
    low = pool.alloc(600)
    pool.truncate(low, 5)
    assert pool.mmu.measure().free_windows == 0
    plan = pool.mmu.plan_huge_pages(1)
    assert (len(plan), plan.complete, plan.predicted_windows) == (5, True, 1)
    pool.run(plan)
    assert pool.mmu.measure().free_windows == 1
    pool.check()
