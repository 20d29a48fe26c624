"""One test for each fault of the torch-facing cache that a hostile user found.

Each is named after what must hold, and is written for the whole kind of the fault.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvmmu import InvalidConfig, InvalidStep, RankedCompaction, RankTimeout

torch = pytest.importorskip("torch")
kvmmu: Any = pytest.importorskip("kvmmu")


def tokens(*bounds: int) -> Any:
    return torch.arange(*bounds, dtype=torch.int32)


def kv(count: int, value: float) -> Any:
    return torch.full((count, 2, 8), float(value))


def make(blocks: int = 32, **options: Any) -> Any:
    return kvmmu.KVCache(1, 2, 8, torch.float32, blocks, block_size=4, **options)


def put(cache: Any, sequence: Any, count: int, value: float, **options: Any) -> Any:
    with cache.step() as step:
        batch = step.prepare([sequence], query_lens=[count], **options)
        cache.write(0, kv(count, value), kv(count, value), batch)
    return batch


def seen(cache: Any, sequence: Any) -> list[float]:
    return sorted(set(cache.gather(sequence, 0)[0].reshape(-1).tolist()))


class Failing:
    """A mover that fails so many times."""

    def __init__(self, mover: Any, times: int) -> None:
        self.mover, self.times = mover, times

    def move(self, pairs: Any) -> None:
        if self.times:
            self.times -= 1
            raise OSError("on purpose")
        self.mover.move(pairs)


class Never:
    over = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        raise OSError("the device is gone")


def test_a_copy_that_failed_is_made_before_its_blocks_can_change_hands() -> None:
    cache = make(16, prefix_caching=False)
    one = cache.open(tokens(6))
    put(cache, one, 6, 1)
    other = one.fork()
    cache.mover = Failing(cache.mover, 1)
    with pytest.raises(OSError, match="on purpose"):
        one.append([9])
    one.close()
    later = cache.open(tokens(100, 108))
    put(cache, later, 8, 7)
    put(cache, other, 1, 3, new_tokens=[5])
    assert seen(cache, later) == [7.0]
    assert seen(cache, other) == [1.0, 3.0]
    for sequence in (other, later):
        sequence.close()


def test_nothing_is_compacted_by_itself_while_a_step_still_writes() -> None:
    cache = make(steps_in_flight=2, auto_compact=True)
    opened = [cache.open(tokens(50 * i, 50 * i + 20)) for i in range(6)]
    kept, dropped = opened[1::2], opened[::2]
    step = cache.begin_step()
    for sequence in dropped:
        sequence.close()
    slots = step.prepare(kept, query_lens=[20] * 3).slot_mapping.clone()
    step.written()
    event = Never()
    cache.end_step(step, event)
    cache.end_step(cache.begin_step())
    cache.layers.write(0, kv(60, 1), kv(60, 1), slots)
    event.over = True
    assert [seen(cache, sequence) for sequence in kept] == [[1.0]] * 3
    for sequence in kept:
        sequence.close()


def test_what_stands_for_memory_is_not_copied_or_pickled() -> None:
    cache = make(8)
    sequence = cache.open(tokens(8))
    step = cache.begin_step()
    batch = step.prepare([sequence], query_lens=[8])
    lease = sequence.lease()
    bound = [cache, sequence, step, batch, lease, cache.storage, cache.storage.regions[0]]
    bound += [cache.layers, cache.mover, kvmmu.Mover(cache.storage)]
    ways: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, pickle.dumps]
    for thing in bound:
        for way in ways:
            with pytest.raises(TypeError, match="copied or pickled"):
                way(thing)
    lease.done()
    step.cancel()
    cache.end_step(step)
    sequence.close()


def test_handles_and_batches_of_another_cache_are_refused() -> None:
    one, other = make(), make()
    mine, theirs = one.open(tokens(8)), other.open(tokens(50, 58))
    put(one, mine, 8, 1)
    with other.step() as step:
        batch = step.prepare([theirs], query_lens=[8])
        with pytest.raises(InvalidConfig):
            one.write(0, kv(8, 9), kv(8, 9), batch)
    for look in (one.gather, one.views):
        with pytest.raises(InvalidConfig):
            look(theirs, 0)
    assert seen(one, mine) == [1.0]
    for sequence in (mine, theirs):
        sequence.close()


@pytest.mark.parametrize("end", ["ended", "cancelled"])
def test_a_batch_writes_nothing_once_its_step_is_over(end: str) -> None:
    cache = make(4, prefix_caching=False)
    first = cache.open(tokens(8))
    step = cache.begin_step()
    batch = step.prepare([first], query_lens=[8])
    step.cancel() if end == "cancelled" else step.written()
    cache.end_step(step)
    first.close()
    second = cache.open(tokens(60, 68))
    put(cache, second, 8, 2)
    with pytest.raises(InvalidStep):
        cache.write(0, kv(8, 9), kv(8, 9), batch)
    assert seen(cache, second) == [2.0]
    second.close()


def test_the_exception_of_the_caller_survives_a_step_that_cannot_be_taken_back() -> None:
    cache = make()
    sequence = cache.open(tokens(8))

    def fail() -> None:
        with cache.step() as step:
            step.prepare([sequence], query_lens=[9], new_tokens=[1])
            sequence.append([2])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert any("not taken back" in note for note in caught.value.__notes__)
    with cache.open(tokens(9)) as again:
        assert again.num_cached_tokens == 0, "nobody wrote it"
    sequence.close()


def test_a_settled_step_is_settled_once() -> None:
    cache = make()
    step = cache.begin_step()
    step.written()
    for again in (step.written, step.cancel):
        with pytest.raises(InvalidStep):
            again()
    cache.end_step(step)


def test_sets_of_buffers_that_share_memory_are_refused() -> None:
    one = {
        "block_table": np.empty((8, 32), np.int32),
        "seq_lens": np.empty(8, np.int32),
        "slot_mapping": np.empty(64, np.int64),
        "query_start_loc": np.empty(9, np.int32),
    }
    with pytest.raises(InvalidConfig, match="overlap"):
        make(buffers=[one, one])


def test_a_channel_that_never_falls_silent_holds_nobody_up() -> None:
    class Chatty:
        rank = 0

        def send(self, rank: int, data: bytes) -> None:
            pass

        def receive(self, timeout_s: float) -> tuple[int, bytes]:
            return 7, b"hello"

    cache = make(8)
    one, other = cache.open(tokens(4)), cache.open(tokens(50, 54))
    one.close()
    ranks = RankedCompaction(cache.mmu, Chatty(), [1], timeout_s=0.2)
    started = time.monotonic()
    with pytest.raises(RankTimeout):
        ranks.run_plan(cache.mmu.plan_below(0.0))
    ranks.poll()
    assert time.monotonic() - started < 10
    other.close()


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "block_major"])
def test_a_write_from_a_view_of_the_pool_itself_is_exact_or_refused_whole(layout: str) -> None:
    cache = make(layout=layout)
    source = cache.open(tokens(8))
    with cache.step() as step:
        batch = step.prepare([source], query_lens=[8])
        values = torch.arange(8 * 2 * 8, dtype=torch.float32).view(8, 2, 8)
        cache.write(0, values, values + 1000, batch)
    target = cache.open(tokens(90, 94))
    k, v = (half[:, :4].reshape(-1, 2, 8) for half in cache.layers.logical(0))
    with cache.step() as step:
        batch = step.prepare([target], query_lens=[4])
        first = int(source.block_table()[0])
        k, v = (half[first] for half in cache.layers.logical(0))
        cache.write(0, k, v, batch)
        with pytest.raises(InvalidConfig):
            cache.write(0, kv(4, 5), v.to_sparse(), batch)
    found = cache.gather(target, 0)
    assert torch.equal(found[0], values[:4])
    assert torch.equal(found[1], values[:4] + 1000)
    for sequence in (source, target):
        sequence.close()


@pytest.mark.parametrize("timeout", [float("nan"), 0, -1, 10**400, "soon"])
def test_a_lease_that_is_refused_holds_nothing(timeout: Any) -> None:
    cache = make()
    with cache.open(tokens(8)) as sequence:
        with pytest.raises(InvalidConfig):
            sequence.lease(timeout_s=timeout)
        assert cache.mmu.num_leases() == 0


def test_an_event_that_is_none_is_refused_and_a_dead_one_can_be_passed() -> None:
    cache = make()
    step = cache.begin_step()
    with pytest.raises(InvalidConfig):
        cache.end_step(step, True)
    event = Never()
    cache.end_step(step, event)
    assert cache.poll() == 1
    cache.end_without_event(step)
    assert cache.poll() == 0
    with pytest.raises(InvalidStep):
        cache.end_without_event(step)
