"""Compaction as a user of KVCache asks for it: goals, readiness, quotes, budgets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvmmu import Fragmented, InvalidConfig, KVCache, OutOfBlocks, UnknownSequence  # noqa: E402
from kvmmu.pace import Pace  # noqa: E402

# Hundreds of sequences that end with their cache.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dropped without close:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def cache(**options: Any) -> KVCache:
    """2,048 blocks of one token, four windows."""
    plain = {"prefix_caching": False, "windows_below": 0.0, "gather_least": 0.0}
    sizes = {"block_size": 1, "max_tokens": 2048, "max_sequences": 2048}
    return KVCache(1, 1, 4, torch.float32, 2048, **{**plain, **sizes, **options})


def scattered(kv: KVCache, every: int = 3) -> list[Any]:
    """Single blocks all over the pool, one in so many left, each with contents of its own."""
    ones = [kv.open([number]) for number in range(1500)]
    for number, one in enumerate(ones):
        if number % every:
            one.close()
    kept = [one for one in ones if not one.closed]
    for start in range(0, len(kept), 256):
        some = kept[start : start + 256]
        with kv.step() as step:
            batch = step.prepare(some)
            rows = torch.tensor([float(one.id) for one in some]).reshape(-1, 1, 1).expand(-1, 1, 4)
            kv.write(0, rows.contiguous(), rows.contiguous(), batch)
    return kept


def check(kv: KVCache, kept: list[Any]) -> None:
    kv.mmu.validate()
    for one in kept:
        k, v = kv.gather(one, 0)
        assert v is not None
        assert float(k[0, 0, 0]) == float(v[0, 0, 0]) == float(one.id)


def test_a_refused_shape_is_made_by_the_next_passes_and_a_quote_says_how_many_moves() -> None:
    kv = cache()
    kept = scattered(kv)
    prompt = list(range(1024))
    asked = kv.mmu.quote(np.arange(1024, dtype=np.int32), require="huge")
    assert asked.when == "moves" and asked.moves > 0
    assert kv.compact() == 0, "nobody has asked for anything yet"
    with pytest.raises(Fragmented):
        kv.open(prompt, require="huge")
    moved = []
    while (passed := kv.compact()) > 0:
        moved.append(passed)
        check(kv, kept[::50])
    assert sum(moved) == asked.moves and max(moved) == 32
    assert kv.ready(512)
    huge = kv.open(prompt, require="huge")
    assert kv.mmu.info(huge.id).pages[9] == 2
    check(kv, kept)


def test_goals_are_reached_a_pass_at_a_time() -> None:
    kv = cache(budget_blocks=48)
    kept = scattered(kv)
    while kv.compact(huge_pages=2):
        pass
    assert kv.mmu.measure().free_windows >= 2
    while kv.compact(free_run=1100):
        pass
    assert kv.ready(1100) and not kv.ready(2048)
    while kv.compact(below=0.05):
        pass
    assert kv.mmu.measure().ratio_available < 0.05
    check(kv, kept)


def test_a_gathered_sequence_ends_in_few_runs_and_keeps_its_bytes() -> None:
    kv = cache(placement="scatter", max_tokens=4096)
    others = [kv.open([0] * 4) for _ in range(200)]
    sequence = kv.open(list(range(300)))
    with kv.step() as step:
        batch = step.prepare([sequence], query_start_loc=[0, 300])
        rows = torch.arange(300.0).reshape(-1, 1, 1).expand(-1, 1, 4).contiguous()
        kv.write(0, rows, -rows, batch)
    before = len(sequence.runs())
    passes = 0
    while kv.compact(gather=sequence):
        passes += 1
        kv.mmu.validate()
    after = len(sequence.runs())
    assert before > 200 and after <= 16, (before, after, passes)
    k, v = kv.gather(sequence, 0)
    assert v is not None
    assert torch.equal(k, rows) and torch.equal(v, -rows)
    assert sum(len(other.runs()) for other in others) > 0


def test_what_cannot_be_reached_raises_before_anything_moves() -> None:
    kv = cache()
    kept = scattered(kv, every=2)
    moves = kv.mmu.stats()["moves_begun"]
    with pytest.raises(OutOfBlocks):
        kv.compact(free_run=2048)
    with pytest.raises(OutOfBlocks):
        kv.compact(huge_pages=4)
    with pytest.raises(InvalidConfig, match=r"free_run = 8, below = 0\.1"):
        kv.compact(free_run=8, below=0.1)
    with pytest.raises(InvalidConfig):
        kv.compact(below=1.5)
    with pytest.raises(InvalidConfig):
        cache().compact(gather=kept[0])
    kept[0].close()
    with pytest.raises(UnknownSequence):
        kv.compact(gather=kept[0])
    pinned = np.arange(0, 2048, 512, dtype=np.int64)
    kv.mmu.pin(pinned[[block in live(kv) for block in pinned.tolist()]])
    assert kv.mmu.stats()["moves_begun"] == moves


def live(kv: KVCache) -> set[int]:
    tables = [kv.mmu.block_table(sequence).tolist() for sequence in kv.mmu.sequences().tolist()]
    return {block for table in tables for block in table}


def test_windows_that_cannot_be_emptied_are_named() -> None:
    kv = cache()
    scattered(kv, every=2)
    held = sorted(live(kv))
    one_each = [next(b for b in held if b // 512 == window) for window in {b // 512 for b in held}]
    kv.mmu.pin(np.array(one_each, np.int64))
    free = kv.mmu.measure().free_windows
    with pytest.raises(Fragmented) as refused:
        kv.compact(huge_pages=free + 1)
    assert refused.value.needed == (free + 1) * 512
    assert refused.value.largest_run == free * 512


def test_a_pass_stays_within_its_budgets_and_moves_one_block_at_least() -> None:
    kv = cache(budget_bytes=10 * 32)  # K and V of one token: 2 x 16 bytes a block
    assert kv.pace.bytes_per_block == 32
    scattered(kv)
    assert kv.compact(free_run=1000) == 10
    tiny = cache(budget_bytes=1)
    scattered(tiny)
    assert tiny.compact(free_run=1000) == 1
    timed = cache(budget_us=50.0)
    scattered(timed)
    assert timed.compact(free_run=1000) == 8, "before the rate is known"
    assert timed.pace.us_per_block is not None
    timed.pace.watched(1, 100.0)  # a block takes 25 s by now
    assert timed.compact(free_run=1000) == 1


def test_a_pace_learns() -> None:
    pace = Pace(1000, budget_us=200.0, us_per_block=10.0)
    assert pace.blocks() == 20 and pace.us(5) == 50.0
    for _ in range(40):
        pace.watched(10, 400e-6)
    assert pace.blocks() == 5
    pace.watched(0, 1.0)
    assert pace.blocks() == 5
    assert Pace(1000).blocks() is None
    assert Pace(1000, budget_bytes=4500, budget_us=1e9, us_per_block=1.0).blocks() == 4


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "200"])
@pytest.mark.parametrize("name", ["budget_us", "budget_bytes"])
def test_bad_budgets_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=name):
        cache(**{name: value})
