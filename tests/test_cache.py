"""What a KVCache promises, one test a promise. Contents are compared byte by byte."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvmmu import CUDAUnavailable, cuda, errors

torch = pytest.importorskip("torch")

from kvmmu import (  # noqa: E402
    ConcurrentUse,
    InvalidConfig,
    InvalidLease,
    InvalidStep,
    KVCache,
    KVCacheError,
    LimitExceeded,
    OutOfBlocks,
    UnknownSequence,
    UsedAfterFork,
)

from .small_cache import Broken, SmallCache, raw  # noqa: E402

LAYOUTS = ("NHD", "HND", "packed", "block_major")
EAGER: dict[str, Any] = {
    "placement": "scatter",
    "compaction_start": 0.0,
    "compaction_stop": 0.0,
    "budget_blocks": 4,
}
"""Options under which every pass finds something to move."""


def story(pool: SmallCache) -> int:
    """A bit of everything, contents checked on the way. Returns how many blocks moved."""
    moved = 0
    first = [pool.open(2 * pool.block_size + k) for k in range(1, 4)]
    for turn in range(3):
        child = pool.fork(first[0])
        pool.step([first[0], child, first[1]], [1, 2, 3])
        pool.check()
        pool.close(first.pop())
        first.append(child)
        moved += pool.cache.compact()
        pool.check()
        first.append(pool.open(pool.block_size * (turn + 1)))
        pool.truncate(first[0], pool.block_size + 1)
        pool.check()
        if len(first) > 3:
            pool.close(first.pop(0))
    while count := pool.cache.compact():
        moved += count
        pool.check()
    pool.step(first, known=False)
    pool.check()
    return moved


# -- steps -----------------------------------------------------------------------------------


def test_a_step_that_is_left_normally_publishes() -> None:
    pool = SmallCache()
    prompt = pool.fresh(9)
    handle = pool.open(prompt, write=False)
    with pool.cache.step() as step:
        pool.launch([handle], [9], step=step)
        assert handle.num_written == 0
    assert (handle.num_written, pool.cache.mmu.steps_in_flight()) == (9, 0)
    assert pool.open(prompt).num_cached_tokens == 8
    pool.check()


def test_an_exception_rolls_lengths_back_and_publishes_nothing() -> None:
    pool = SmallCache()
    prompt = pool.fresh(9)
    handle = pool.open(prompt, write=False)
    with pytest.raises(ZeroDivisionError), pool.cache.step() as step:
        step.prepare([handle], query_lens=[12], new_tokens=[1, 2, 3])
        raise ZeroDivisionError
    assert (handle.num_tokens, handle.num_scheduled, handle.num_written) == (9, 0, 0)
    assert pool.cache.mmu.steps_in_flight() == 0
    assert pool.cache.mmu.match(np.array([*prompt, 0], np.int32)) == 0
    pool.step([handle], [9])
    pool.check()


@pytest.mark.parametrize("defer", [False, True])
def test_an_exception_after_a_copy_on_write_leaves_both_sequences_their_bytes(defer: bool) -> None:
    pool = SmallCache()
    parent = pool.open(6)
    child = pool.fork(parent)
    with pytest.raises(ZeroDivisionError), pool.cache.step() as step:
        batch = step.prepare([child], new_tokens=[7], defer_copies=defer)
        assert len(batch.copies) == (1 if defer else 0)
        raise ZeroDivisionError
    assert pool.cache.mmu.stats()["copied_on_write"] == 1
    assert (child.num_tokens, child.num_written) == (6, 6)
    pool.check()
    pool.step([parent, child])
    pool.check()


def test_a_copy_on_write_that_fails_is_made_up_for_when_its_step_is_cancelled() -> None:
    pool = SmallCache()
    parent = pool.open(6)
    child = pool.fork(parent)
    pool.mover.fails_after = 0
    step = pool.cache.begin_step()
    with pytest.raises(Broken):
        step.prepare([child], new_tokens=[7])
    pool.mover.fails_after = None
    step.cancel()
    pool.cache.end_step(step)
    pool.check()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_steps_in_flight_end_in_order_as_their_events_are_over(depth: int) -> None:
    pool = SmallCache(32, late=True, steps_in_flight=depth)
    handles = [pool.open(5, write=False) for _ in range(2)]
    flying: list[Any] = []
    for turn in range(4 * depth):
        step = pool.launch(handles, [5, 5] if turn == 0 else None)
        step.written()
        event = pool.device.event()
        pool.cache.end_step(step, event)
        flying.append(event)
        assert pool.cache.poll() == len(flying) == pool.cache.mmu.steps_in_flight()
        if len(flying) == depth:
            pool.device.run(flying.pop(0).place)
            assert pool.cache.poll() == len(flying)
    pool.cache.synchronize()
    assert pool.cache.poll() == pool.cache.mmu.steps_in_flight() == 0
    pool.check()


class Signal:
    """An event that is over when it is told."""

    def __init__(self) -> None:
        self.over = False
        self.broken = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        if self.broken:
            raise Broken
        self.over = True


def test_a_newer_step_does_not_end_before_an_older_one() -> None:
    pool = SmallCache(steps_in_flight=2)
    signals = [Signal(), Signal()]
    for signal in signals:
        pool.cache.end_step(pool.cache.begin_step(), signal)
    signals[1].over = True
    assert pool.cache.poll() == 2
    signals[0].over = True
    assert pool.cache.poll() == 0


def test_a_step_whose_event_fails_stays_in_flight() -> None:
    pool = SmallCache()
    signal = Signal()
    signal.broken = True
    pool.cache.end_step(pool.cache.begin_step(), signal)
    with pytest.raises(Broken):
        pool.cache.synchronize()
    assert pool.cache.poll() == 1
    signal.broken = False
    pool.cache.synchronize()
    assert pool.cache.poll() == 0


def test_a_step_ends_once_and_no_earlier_than_its_event() -> None:
    pool = SmallCache()
    signal = Signal()
    with pool.cache.step() as step:
        step.written()
        pool.cache.end_step(step, signal)
        for event in (None, signal):
            with pytest.raises(InvalidStep):
                pool.cache.end_step(step, event)
    assert pool.cache.poll() == 1, "left before the event was over"
    signal.over = True
    assert pool.cache.poll() == 0
    with pytest.raises(InvalidStep) as caught:
        pool.cache.end_step(step)
    assert caught.value.step == step.number
    with pytest.raises(InvalidStep):
        SmallCache().cache.end_step(pool.cache.begin_step())


def test_too_many_steps_in_flight_are_refused_and_nothing_changes() -> None:
    pool = SmallCache(steps_in_flight=2)
    handle = pool.open(5)
    open_steps = [pool.launch([handle]) for _ in range(3)]  # two in flight and one prepared
    before = pool.everything()
    step = pool.cache.begin_step()
    with pytest.raises(InvalidStep) as caught:
        step.prepare([handle], new_tokens=[1])
    assert caught.value.step == step.number
    assert pool.everything() == before
    open_steps[0].written()
    pool.cache.end_step(open_steps[0])
    pool.launch([handle], step=step)
    for one in (*open_steps[1:], step):
        one.written()
        pool.cache.end_step(one)
    pool.check()


def test_a_slow_step_does_not_keep_newer_ones_from_their_buffers() -> None:
    pool = SmallCache(steps_in_flight=2)
    slow, quick = pool.open(3), pool.open(3)
    waiting = pool.launch([slow])
    mine = waiting.batch.block_table.clone()
    for _ in range(6):
        pool.step([quick])
        assert torch.equal(waiting.batch.block_table, mine)
    waiting.written()
    pool.cache.end_step(waiting)
    pool.check()


def test_a_batch_can_be_prepared_once_a_step() -> None:
    pool = SmallCache()
    handle = pool.open(3)
    with pool.cache.step() as step:
        pool.launch([handle], step=step)
        with pytest.raises(InvalidStep):
            step.prepare([handle])
    pool.check()


@pytest.mark.parametrize("what", ["close", "truncate", "cancel", "preempt"])
@pytest.mark.parametrize("fenced", [True, False])
def test_what_a_step_in_flight_touches_is_not_reused_before_it_ends(
    what: str, fenced: bool
) -> None:
    """The device runs late. Without the fence (the steps are ended before their event) the same
    story must damage something, else it proves nothing."""
    pool = SmallCache(6, late=True, steps_in_flight=2, prefix_caching=False)
    handle = pool.open(12, write=False)
    steps = [pool.launch([handle], [12])]
    steps[0].written()
    if what == "cancel":  # an abort of what is queued: its kernels run all the same
        steps.append(pool.launch([handle], [5]))
        steps[1].cancel()
        pool.texts[handle.id].cut(12)
    elif what == "truncate":
        pool.truncate(handle, 1)
    else:
        pool.close(handle)
    assert pool.states()["fenced"] >= 2
    event = pool.device.event()
    for step in steps:
        pool.cache.end_step(step, event if fenced else None)

    # All that can be had is written by somebody else, ahead of what the device has queued.
    other = pool.open(4 * pool.states()["available"], write=False)
    values = pool.texts[other.id].values
    slots = pool.cache.mmu.translate(other.id, np.arange(len(values), dtype=np.int64))
    pool.write(torch.from_numpy(slots), values)

    def run() -> None:
        pool.device.run()
        pool.read(torch.from_numpy(other.block_table().astype(np.int64)), values)

    if fenced:
        run()
        assert pool.cache.poll() == pool.states()["fenced"] == 0
        pool.check()
        if what == "preempt":  # and later again
            pool.close(other)
            again = pool.open(12, write=False)
            step = pool.launch([again], [12])
            step.written()
            pool.device.run()
            pool.cache.end_step(step)
            pool.check()
    else:
        with pytest.raises(AssertionError):
            run()


# -- buffers ---------------------------------------------------------------------------------


def addresses(cache: Any) -> list[int]:
    return [
        getattr(buffers, name).data_ptr()
        for buffers in cache._rotation
        for name in ("block_table", "seq_lens", "slot_mapping", "query_start_loc")
    ]


def test_buffers_rotate_and_stay_where_they_are() -> None:
    """Kind 45 of the list of hazards: 1000 operations, compaction, fork, close."""
    pool = SmallCache(24, steps_in_flight=2, **EAGER)
    before = addresses(pool.cache)
    seen = set()
    handles: list[Any] = [pool.open(5)]
    moved = 0
    csr = pool.launch(handles)
    where = [tensor.data_ptr() for tensor in csr.batch.csr()]
    csr.written()
    pool.cache.end_step(csr)
    for turn in range(1000):
        if turn % 7 == 0 and len(handles) < 4:
            handles.append(pool.fork(handles[-1]))
        if turn % 11 == 0 or handles[0].num_tokens > 12:
            pool.close(handles.pop(0))
        if not handles:
            handles.append(pool.open(5))
        step = pool.launch(handles)
        seen.add(step.batch.block_table.data_ptr())
        step.written()
        pool.cache.end_step(step)
        moved += pool.cache.compact()
    assert moved > 100
    assert addresses(pool.cache) == before
    assert seen == set(before[::4]) and len(seen) == 3
    while True:
        step = pool.launch(handles)
        again = [tensor.data_ptr() for tensor in step.batch.csr()]
        step.written()
        pool.cache.end_step(step)
        if again == where:
            break
    pool.check()


def own_buffers(kind: Any, rows: int = 4, width: int = 16, tokens: int = 32) -> dict[str, Any]:
    shapes = {
        "block_table": ((rows, width), "int32"),
        "seq_lens": ((rows,), "int32"),
        "slot_mapping": ((tokens,), "int64"),
        "query_start_loc": ((rows + 1,), "int32"),
    }
    return {
        name: kind.zeros(shape, dtype=getattr(kind, dtype))
        for name, (shape, dtype) in shapes.items()
    }


@pytest.mark.parametrize("kind", [np, torch])
def test_own_buffers_are_the_ones_that_are_written(kind: Any) -> None:
    sets = [own_buffers(kind) for _ in range(2)]
    pool = SmallCache(16, 4, buffers=sets)
    handle = pool.open(6)
    pool.step([handle])
    addressed = [torch.as_tensor(one["block_table"]).data_ptr() for one in sets]
    assert addresses(pool.cache)[::4] == addressed
    rows = [one["block_table"][0].tolist() for one in sets]
    assert rows[0] == rows[1] == [*handle.block_table().tolist(), *[16] * 14]
    assert sorted(int(one["seq_lens"][0]) for one in sets) == [6, 7]
    pool.check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_table", np.zeros((4, 16), np.int64)),
        ("block_table", np.zeros(64, np.int32)),
        ("block_table", np.zeros((16, 4), np.int32).T),
        ("block_table", torch.zeros((4, 16), dtype=torch.int32, device="meta")),
        ("block_table", [[0] * 16] * 4),
        ("seq_lens", np.zeros(5, np.int32)),
        ("seq_lens", torch.zeros(4, dtype=torch.int64)),
        ("slot_mapping", np.zeros(32, np.int32)),
        ("slot_mapping", np.zeros(64, np.int64)[::2]),
        ("query_start_loc", np.zeros(4, np.int32)),
        ("extra", np.zeros(4, np.int32)),
    ],
)
def test_own_buffers_of_another_form_are_refused(name: str, value: Any) -> None:
    sets = [own_buffers(np) for _ in range(2)]
    sets[1][name] = value
    with pytest.raises(InvalidConfig):
        SmallCache(16, 4, buffers=sets)


def test_a_wrong_number_of_own_buffers_is_refused() -> None:
    with pytest.raises(InvalidConfig):
        SmallCache(16, 4, buffers=[own_buffers(np)])
    with pytest.raises(InvalidConfig):
        SmallCache(16, 4, steps_in_flight=2, buffers=[own_buffers(np) for _ in range(2)])


@pytest.mark.parametrize("bad", [{"eviction": "fifo"}, {"page_aware": 1}])
def test_an_order_of_eviction_that_there_is_not_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="allowed"):
        SmallCache(16, 4, **bad)


def test_a_cache_keeps_what_is_often_found_under_lfu() -> None:
    pool = SmallCache(16, 4, eviction="lfu", page_aware=False)
    hot = pool.fresh(8)
    for _ in range(5):
        pool.close(pool.open([*hot, *pool.fresh(1)]))
    for _ in range(12):
        pool.close(pool.open(pool.fresh(8)))
    found = pool.open([*hot, 0])
    assert found.num_cached_tokens == 8
    pool.check()


# -- handles ---------------------------------------------------------------------------------


def test_a_handle_closes_once_and_is_of_no_use_after() -> None:
    pool = SmallCache()
    handle = pool.open(6)
    with handle as same:
        assert same is handle
        assert "closed" not in repr(handle)
    assert "closed" in repr(handle)
    assert handle.closed
    handle.close()
    calls: list[Callable[[], object]] = [
        lambda: handle.num_tokens,
        handle.block_table,
        handle.runs,
        handle.fork,
        handle.lease,
        lambda: handle.append([1]),
        lambda: handle.truncate(0),
        lambda: pool.cache.gather(handle, 0),
        lambda: pool.cache.views(handle, 0),
    ]
    for call in calls:
        with pytest.raises(UnknownSequence) as caught:
            call()
        assert caught.value.sequence == handle.id
    with pytest.raises(UnknownSequence), pool.cache.step() as step:
        step.prepare([handle], new_tokens=[1])
    assert pool.states()["available"] == 16
    pool.handles.clear()
    pool.texts.clear()
    pool.check()


def test_a_dropped_handle_warns_and_is_released_at_the_next_step() -> None:
    pool = SmallCache()
    number = pool.open(6).id
    del pool.texts[number]
    with pytest.warns(ResourceWarning, match=f"Sequence\\({number}\\)"):
        del pool.handles[number]
    assert pool.cache.mmu.sequences().tolist() == [number]
    with pool.cache.step():
        assert pool.cache.mmu.sequences().tolist() == []
        assert pool.states()["in_use"] == 0
    pool.check()


def test_a_closed_handle_is_dropped_in_silence() -> None:
    pool = SmallCache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.close(pool.open(6))
        gc.collect()


def test_handles_of_another_cache_are_refused() -> None:
    pool, other = SmallCache(), SmallCache()
    mine, theirs = pool.open(5), other.open(7)
    assert mine.id == theirs.id, "what makes it dangerous"
    before = pool.everything()
    for wrong in ([theirs], [mine, theirs], [mine.id], torch.tensor([mine.id])):
        step = pool.cache.begin_step()
        with pytest.raises(InvalidConfig):
            step.prepare(wrong, new_tokens=[1])
        step.cancel()
        pool.cache.end_step(step)
    assert pool.everything() == before


def test_a_second_thread_on_one_sequence_is_refused() -> None:
    """Whoever comes second gets ConcurrentUse, and changes nothing."""
    cache: Any = KVCache(1, 1, 1, torch.uint8, 300_000, block_size=1, max_batch=1, v_head_dim=0)
    handle = cache.open([])
    many = np.arange(250_000, dtype=np.int32)
    refused: list[ConcurrentUse] = []
    done = threading.Event()

    def other() -> None:
        while not done.is_set():
            try:
                handle.append([])
            except ConcurrentUse as error:
                refused.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    deadline = time.monotonic() + 20
    while not refused and time.monotonic() < deadline:
        try:
            handle.append(many)
            assert handle.num_tokens == len(many)
            handle.truncate(0)
        except ConcurrentUse as error:
            refused.append(error)
    done.set()
    thread.join()
    assert refused
    assert refused[0].sequence == handle.id
    handle.close()
    cache.mmu.validate()


def test_a_sequence_twice_in_a_batch_is_refused() -> None:
    pool = SmallCache()
    handle = pool.open(5)
    before = pool.everything()
    with pytest.raises(ConcurrentUse), pool.cache.step() as step:
        step.prepare([handle, handle], new_tokens=[1, 2])
    assert pool.everything() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_use_in_a_forked_child_is_refused() -> None:
    pool = SmallCache()
    handle = pool.open(5)
    lease = handle.lease()
    step = pool.cache.begin_step()
    calls: list[Callable[[], object]] = [
        lambda: pool.cache.open([1]),
        pool.cache.begin_step,
        pool.cache.compact,
        pool.cache.validate,
        lambda: step.prepare([handle], new_tokens=[1]),
        step.written,
        lambda: pool.cache.end_step(step),
        lambda: pool.cache.gather(handle, 0),
        lambda: handle.append([1]),
        handle.fork,
        handle.close,
        handle.lease,
        lease.done,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads do not matter here
        child = os.fork()
    if child == 0:
        wrong = 0
        for number, call in enumerate(calls, 1):
            try:
                call()
                wrong = wrong or number
            except UsedAfterFork:
                pass
            except BaseException:
                wrong = wrong or 100 + number
        os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lease.done()
    pool.cache.end_step(step)
    pool.step([handle])
    pool.check()


ERRORS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_pickle_with_their_numbers(kind: Any) -> None:
    error = kind("a sentence", needed=3, available=2**40)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is kind
        assert str(again) == "a sentence"
        assert again.numbers == {"needed": 3, "available": 2**40}
        assert (again.needed, again.available) == (3, 2**40)
    with pytest.raises(AttributeError):
        error.nothing  # noqa: B018
    assert issubclass(kind, KVCacheError)


def test_errors_of_a_cache_pickle_as_they_were_raised() -> None:
    pool = SmallCache(4, 4)
    pool.open(16)
    with pytest.raises(OutOfBlocks) as caught:
        pool.open(4)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.numbers == caught.value.numbers != {}
    assert str(again) == str(caught.value)


# -- what a batch is made of -----------------------------------------------------------------


def test_ids_in_an_int64_array_do_what_handles_do() -> None:
    pool = SmallCache()
    handles = [pool.open(5), pool.open(3)]
    ids = np.array([handle.id for handle in handles], np.int64)
    found = []
    for sequences in (handles, ids, iter(handles)):
        step = pool.cache.begin_step()
        batch = step.prepare(sequences, query_lens=[2, 1], new_tokens=[1, 2, 3])
        assert batch.sequences.tolist() == ids.tolist() and len(batch) == 2
        assert batch.num_tokens == 3
        found.append(
            [t.tolist() for t in (batch.block_table, batch.seq_lens, batch.slot_mapping)]
            + [t.tolist() for t in batch.csr()]
        )
        step.cancel()
        pool.cache.end_step(step)
    assert found[0] == found[1] == found[2]
    for wrong in (ids.astype(np.int32), ids[:, None], ids.astype(np.float64)):
        step = pool.cache.begin_step()
        with pytest.raises(InvalidConfig):
            step.prepare(wrong, new_tokens=[1, 2])
        step.cancel()
        pool.cache.end_step(step)
    pool.check()


def test_query_start_loc_says_the_same_as_query_lens() -> None:
    pool = SmallCache()
    handles = [pool.open(5), pool.open(3), pool.open(4)]
    slots = []
    for how in (
        {"query_lens": [2, 0, 1]},
        {"query_start_loc": [0, 2, 2, 3]},
        {"query_start_loc": torch.tensor([0, 2, 2, 3], dtype=torch.int32)},
    ):
        step = pool.cache.begin_step()
        batch = step.prepare(handles, new_tokens=[1, 2, 3], **how)
        assert batch.query_start_loc.tolist() == [0, 2, 2, 3]
        slots.append(batch.slot_mapping.tolist())
        step.cancel()
        pool.cache.end_step(step)
    assert slots[0] == slots[1] == slots[2]
    before = pool.everything()
    for how in (
        {"query_lens": [2, 0, 1], "query_start_loc": [0, 2, 2, 3]},
        {"query_start_loc": [1, 2, 2, 3]},
        {"query_start_loc": [0, 2, 3]},
        {"query_start_loc": [0, 2, 1, 3]},
        {"query_start_loc": []},
        {"query_lens": [2, 1]},
        {"query_lens": [2, -1, 2]},
        {"query_lens": [2.0, 0, 1]},
        {"query_lens": np.array([2, 0, 1])},
    ):
        step = pool.cache.begin_step()
        with pytest.raises(InvalidConfig):
            step.prepare(handles, new_tokens=[1, 2, 3], **how)
        step.cancel()
        pool.cache.end_step(step)
        assert pool.everything() == before, how


def test_tokens_may_be_lists_arrays_and_tensors_of_int32() -> None:
    pool = SmallCache(32)
    values = [5, 2**31 - 1, 0, 7, 9]
    forms: list[Any] = [
        values,
        tuple(values),
        np.array(values, np.int32),
        np.repeat(np.array(values, np.int32), 2)[::2],
        torch.tensor(values, dtype=torch.int32),
        torch.tensor(values, dtype=torch.int32).repeat_interleave(2)[::2],
    ]
    pool.open(values)
    for form in forms:
        handle = pool.cache.open(form)
        assert (handle.num_tokens, handle.num_cached_tokens) == (5, 4)
        handle.append(form)
        with pool.cache.step() as step:
            step.prepare([handle], query_lens=[11], new_tokens=form)
        assert handle.num_tokens == 15
        handle.close()
    before = pool.everything()
    for wrong in (
        torch.tensor(values),
        torch.tensor(values).float().requires_grad_(),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.int32, device="meta"),
        np.array(values, np.int64),
        np.array([values], np.int32),
        [1.5],
        ["a"],
        [2**31],
        [-(2**31) - 1],
        [2**70],
        [[1]],
        7,
        None,
    ):
        with pytest.raises(InvalidConfig):
            pool.cache.open(wrong)
    assert pool.everything() == before


def test_blocks_of_unknown_tokens_are_never_shared() -> None:
    pool = SmallCache()
    handle = pool.open(4)
    pool.step([handle], [8], known=False)
    cached = pool.cache.mmu.states()
    assert pool.cache.mmu.stats()["published_blocks"] == 1
    pool.check()
    prompt = [*pool.texts[handle.id].identities[:4], *[0] * 8, 1]
    assert pool.cache.mmu.match(np.array(prompt, np.int32)) == 4
    pool.close(handle)
    assert pool.cache.mmu.match(np.array(prompt, np.int32)) == 4
    assert pool.states()["cached"] == 1
    assert cached["in_use"] == 3


# -- leases ----------------------------------------------------------------------------------


def test_leases_end_in_any_order_and_once() -> None:
    for order in itertools.permutations(range(3)):
        pool = SmallCache(prefix_caching=False)
        handle = pool.open(12)
        leases = [handle.lease(), handle.lease(range(4, 8)), handle.lease(slice(-5, None))]
        assert [(lease.start, lease.stop) for lease in leases] == [(0, 12), (4, 8), (7, 12)]
        table = handle.block_table().tolist()
        assert [lease.blocks.tolist() for lease in leases] == [table, table[1:2], table[1:]]
        pool.close(handle)
        for at, number in enumerate(order):
            assert pool.states()["available"] < 16
            (leases[number].done if at % 2 else leases[number].cancel)()
            for again in (leases[number].done, leases[number].cancel):
                with pytest.raises(InvalidLease) as caught:
                    again()
                assert caught.value.lease == leases[number].id
        assert pool.states()["empty"] == 16
        assert pool.cache.mmu.num_leases() == 0
        pool.check()


def test_a_lease_past_its_timeout_is_reported_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    pool = SmallCache()
    handle = pool.open(8)
    calm = handle.lease(timeout_s=1000)
    late = handle.lease(timeout_s=1e-4)
    while not late.overdue:
        time.sleep(1e-3)
    for _ in range(3):
        with pool.cache.step():
            pass
    assert pool.cache.overdue_leases() == [late]
    assert len(caplog.records) == 1 and repr(late) in caplog.text
    assert pool.cache.mmu.num_leases() == 2
    pool.close(handle)
    assert pool.states()["in_use"] == 2
    late.done()
    assert pool.cache.overdue_leases() == []
    calm.done()
    assert pool.states()["available"] == 16
    handle = pool.open(8)
    for wrong in (0, -1, float("nan")):
        with pytest.raises(InvalidConfig):
            handle.lease(timeout_s=wrong)
    assert pool.cache.mmu.num_leases() == 0


def test_a_lease_of_tokens_that_are_not_there_is_refused() -> None:
    pool = SmallCache()
    handle = pool.open(8)
    for wrong in (range(4, 9), range(-1, 4), range(0, 8, 2), slice(0, 8, 2), range(8, 0, -1)):
        with pytest.raises(InvalidConfig):
            handle.lease(wrong)
    assert pool.cache.mmu.num_leases() == 0


def test_a_lease_of_no_tokens_holds_nothing() -> None:
    pool = SmallCache()
    handle = pool.open(8)
    for none in (range(0), range(4, 4), range(8, 8), range(3, 3)):
        empty = handle.lease(none)
        found = empty.blocks.tolist()
        empty.done()
        assert found == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leased_blocks_are_not_moved_evicted_or_reused(layout: str) -> None:
    """And the lease outlives its sequence."""
    pool = SmallCache(12, 4, layout=layout, **EAGER)
    others = [pool.open(4) for _ in range(5)]
    handle = pool.open(12)
    lease = handle.lease(range(4, 12), timeout_s=100)
    before, blocks = pool.leased(lease), lease.blocks.tolist()
    child = pool.fork(handle)
    pool.truncate(handle, 6)
    pool.step([handle], [5])  # writes into a leased block: copies it first
    assert handle.block_table()[1] != blocks[0]
    pool.close(handle, child, *others[::2])
    others = others[1::2]
    moved = 0
    for _ in range(20):
        moved += pool.cache.compact()
        pool.cache.mmu.evict(12)
        free = pool.states()["available"]
        pool.close(pool.open(4 * free))
        pool.check()
    with pytest.raises(OutOfBlocks):
        pool.open(4 * (free + 1))
    assert lease.blocks.tolist() == blocks
    for was, now in zip(before, pool.leased(lease), strict=True):
        assert torch.equal(was, now)
    lease.done()
    pool.close(pool.open(4 * (free + 2)))
    pool.check()


def test_runs_and_byte_ranges_are_those_of_the_blocks() -> None:
    pool = SmallCache(16, 4, placement="scatter")
    handle = pool.open(30)
    blocks = handle.block_table().tolist()
    runs = handle.runs()
    assert [start + k for start, count in runs for k in range(count)] == blocks
    ranges = handle.byte_ranges()
    regions = pool.cache.storage.regions
    assert len(ranges) == len(regions) == 4
    for region, found in zip(regions, ranges, strict=True):
        places = [
            (region.address + start * region.stride, count * region.block_bytes)
            for start, count in runs
        ]
        assert [tuple(pair) for pair in found.tolist()] == places


# -- layouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_every_layout_keeps_its_contents_through_everything(layout: str, dtype: str) -> None:
    pool = SmallCache(20, 4, layout=layout, dtype=getattr(torch, dtype), **EAGER)
    assert story(pool) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_the_gathered_bytes_without_a_copy(layout: str) -> None:
    pool = SmallCache(20, 4, layout=layout, placement="scatter")
    handle = pool.open(18)
    if not pool.cache.layers.can["views"]:
        with pytest.raises(InvalidConfig):
            pool.cache.views(handle, 0)
        return
    for layer in range(2):
        views = pool.cache.views(handle, layer)
        assert len(views) == len(handle.runs()) > 1
        for half, gathered in enumerate(pool.cache.gather(handle, layer)):
            joined = torch.cat([pair[half] for pair in views])
            assert torch.equal(raw(joined), raw(gathered))
        views[0][0][0] = 0.0
        assert (pool.cache.gather(handle, layer)[0][0] == 0).all(), "a copy"
    empty = pool.open(0)
    assert pool.cache.views(empty, 0) == []
    assert pool.cache.gather(empty, 0)[0].shape == (0, 2, 4)


def engine_tensors(kind: str, blocks: int) -> tuple[Any, dict[str, Any]]:
    """Two layers of an engine's own, blocks of 4 tokens: what to attach, and how."""
    shape = (blocks, 4, 2, 4)
    if kind == "NHD":
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)], {"layout": "NHD"}
    if kind == "HND":
        hnd = (blocks, 2, 4, 4)
        return [(torch.zeros(hnd), torch.zeros(hnd)) for _ in range(2)], {"layout": "HND"}
    if kind == "packed":
        return [torch.zeros((2, *shape)) for _ in range(2)], {"layout": "packed"}
    if kind == "packed in the block":
        return [torch.zeros((blocks, 2, *shape[1:])) for _ in range(2)], {"layout": "packed"}
    if kind == "block_major":
        return torch.zeros((blocks, 2, 2, *shape[1:])), {"layout": "block_major"}
    if kind == "K only":
        return [torch.zeros(shape) for _ in range(2)], {"layout": "NHD"}
    if kind == "widths":
        wide = (*shape[:3], 6)
        return [(torch.zeros(wide), torch.zeros(shape)) for _ in range(2)], {"layout": "NHD"}
    if kind == "fp8 and scales":
        dtype = torch.float8_e4m3fn
        tensors = [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))] * 1
        return tensors, {"layout": "NHD", "extra": [torch.zeros(blocks, 2)]}
    assert kind == "side by side"
    both = [torch.zeros((*shape[:3], 8)) for _ in range(2)]
    return [(one[..., :4], one[..., 4:]) for one in both], {"layout": "NHD"}


KINDS = [
    "NHD",
    "HND",
    "packed",
    "packed in the block",
    "block_major",
    "K only",
    "widths",
    "fp8 and scales",
    "side by side",
]


@pytest.mark.parametrize("null", ["first", "last", 7])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_an_engine_are_adopted_as_they_are(kind: str, null: str | int) -> None:
    tensors, how = engine_tensors(kind, 21)
    cache = KVCache.attach(
        tensors,
        num_blocks=20,
        block_size=4,
        null_block=null,
        max_batch=8,
        max_tokens=64,
        **EAGER,
        **how,
    )
    number = {"first": 0, "last": 20, 7: 7}[null]
    assert cache.mmu.null_block == cache.storage.null_block == number
    pool = SmallCache(20, 4, cache=cache)
    assert story(pool) > 0
    used = {block for handle in pool.handles.values() for block in handle.block_table().tolist()}
    assert number not in used
    handle = pool.open(4)
    pool.step([handle])
    first = tensors if kind == "block_major" else tensors[0]
    first = first[0] if isinstance(first, tuple) else first
    assert raw(first).any(), "written elsewhere"
    filler = pool.open(4 * pool.states()["available"])
    used = {block for one in pool.handles.values() for block in one.block_table().tolist()}
    assert filler.num_tokens and used == set(range(21)) - {number}
    pool.check()


def test_what_else_belongs_to_a_block_moves_with_it() -> None:
    tensors, how = engine_tensors("fp8 and scales", 21)
    scales = how["extra"][0]
    cache = KVCache.attach(tensors, num_blocks=20, block_size=4, max_batch=8, **EAGER, **how)
    handle = cache.open(list(range(32)))
    keep = [cache.open([k]) for k in range(4)]
    for place, block in enumerate(handle.block_table().tolist()):
        scales[block] = place
    before = handle.block_table().tolist()
    for one in keep[::2]:
        one.close()
    with cache.step() as step:
        step.prepare([handle], query_lens=[32])
    while cache.compact():
        pass
    table = handle.block_table().tolist()
    assert table != before
    assert scales[torch.tensor(table), 0].tolist() == list(range(8))
    for one in (handle, *keep[1::2]):
        one.close()


def test_a_device_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = cuda.Installed()
    monkeypatch.setattr(cuda.availability, "installed", lambda: nothing)
    with pytest.raises(CUDAUnavailable, match="no CUDA driver"):
        KVCache(1, 1, 8, torch.float32, 4, device="cuda")
    with pytest.raises(InvalidConfig, match="'overlap'"):
        KVCache(1, 1, 8, torch.float32, 4, copy="overlap")
    with pytest.raises(InvalidConfig, match="host memory"):
        KVCache(1, 1, 8, torch.float32, 4, device="meta")


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0, "max_sequence_tokens": 4},
        {"block_size": "16", "max_sequence_tokens": 4},
        {"max_sequence_tokens": 0},
        {"max_sequence_tokens": True},
        {"max_sequence_tokens": 4 * 16 + 1},
        {"max_batch": 0},
        {"max_batch": 2.0},
        {"max_tokens": 0},
        {"steps_in_flight": 0},
        {"steps_in_flight": True},
        {"layout": "DHN"},
        {"v_head_dim": -1},
        {"no_such_option": 1},
        {"null_block": 5},
        {"layout": "packed", "v_head_dim": 4},
    ],
)
def test_a_setting_that_is_not_allowed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        KVCache(1, 1, 8, torch.float32, 4, **wrong)


def test_a_longest_sequence_is_kept_to() -> None:
    pool = SmallCache(16, 4, max_sequence_tokens=10)
    assert pool.cache.mmu.max_blocks_per_sequence == 3
    handle = pool.open(12)
    with pytest.raises(LimitExceeded):
        pool.step([handle])
    with pytest.raises(LimitExceeded):
        pool.open(13)
    pool.check()


# -- compaction ------------------------------------------------------------------------------


def test_auto_compact_moves_when_a_step_begins() -> None:
    for auto in (False, True):
        pool = SmallCache(20, 4, auto_compact=auto, **EAGER)
        handles = [pool.open(6) for _ in range(8)]
        pool.close(*handles[::2])
        for _ in range(10):
            pool.step(handles[1::2])
            pool.check()
            if handles[1].num_tokens > 10:
                break
        assert (pool.cache.mmu.stats()["moves_committed"] > 0) == auto


@pytest.mark.parametrize("after", range(4))
def test_a_mover_that_fails_costs_nothing(after: int) -> None:
    pool = SmallCache(20, 4, **EAGER)
    handles = [pool.open(6) for _ in range(8)]
    pool.close(*handles[::2])
    pool.mover.fails_after = after
    before = pool.everything()
    with pytest.raises(Broken):
        pool.cache.compact()
    assert pool.everything()[1:] == before[1:]
    states = pool.states()  # a cached block may have given way to a copy
    for name in ("in_use", "destined", "fenced", "available"):
        assert states[name] == before[0][name]
    pool.check()
    pool.mover.fails_after = None
    assert pool.cache.compact() > 0
    pool.check()


# -- manners ---------------------------------------------------------------------------------


def test_nothing_is_held_alive() -> None:
    """Without the garbage collector: there is no cycle through a tensor or a cache."""
    k, v = torch.zeros(9, 4, 1, 2), torch.zeros(9, 4, 1, 2)
    sets = [own_buffers(torch, 4, 8) for _ in range(2)]
    gc.collect()
    gc.disable()
    try:
        cache: Any = KVCache.attach(
            [(k, v)], layout="NHD", num_blocks=8, block_size=4, buffers=sets, **EAGER
        )
        handle = cache.open([1, 2, 3, 4, 5])
        with cache.step() as step:
            batch = step.prepare([handle], query_lens=[5])
            cache.write(0, torch.ones(5, 1, 2), torch.ones(5, 1, 2), batch)
        cache.end_step(cache.begin_step(), Signal())
        lease = handle.lease(timeout_s=100)
        cache.compact()
        views, layer = cache.views(handle, 0), cache.layer(0)
        with pytest.raises(OutOfBlocks):
            cache.open(list(range(100, 130)))
        handle.close()
        tensors = [k, v, *sets[0].values(), *sets[1].values()]
        refs = [weakref.ref(one) for one in (*tensors, cache, handle, step, batch_of(step))]
        del batch, views, layer, tensors, step, handle, cache, k, v, sets
        left = [ref() for ref in refs if ref() is not None]
        assert left == []
        lease.done()
        assert "Lease" in repr(lease)
    finally:
        gc.enable()


def batch_of(step: Any) -> Any:
    """Its tables (a batch itself takes no weak reference)."""
    return step.batch._buffers


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    pool = SmallCache(prefix_caching=False)
    for _ in range(50):
        with pytest.raises(OutOfBlocks), pool.cache.step() as step:
            handle = pool.cache.open([1] * 20)
            step.prepare([handle], query_lens=[60], new_tokens=[1] * 40)
            pool.cache.open([1] * 40)
        handle.close()
        assert pool.states()["empty"] == 16
        assert pool.cache.mmu.steps_in_flight() == 0


def test_many_threads_may_call_at_once() -> None:
    """The pool holds all that is ever released, since one slow step fences it."""
    cache: Any = KVCache(
        1, 1, 1, torch.float32, 2048, block_size=4, max_batch=4, max_tokens=16, steps_in_flight=8
    )
    failures: list[BaseException] = []

    def serve(number: int) -> None:
        try:
            for turn in range(25):
                first = 1000 * number + turn
                text = [first * 100 + k for k in range(7)]
                with cache.open(text) as handle:
                    with cache.step() as step:
                        batch = step.prepare([handle], query_lens=[7 - handle.num_cached_tokens])
                        write(batch, text[handle.num_cached_tokens :])
                    with handle.fork() as child:
                        for extra in range(6):
                            new = [first * 100 + 50 + extra, first * 100 + 70 + extra]
                            with cache.step() as step:
                                write(step.prepare([handle, child], new_tokens=new), new)
                            text.append(new[0])
                        lease = handle.lease()
                        found, _ = cache.gather(handle, 0)
                        assert found.flatten().tolist() == [float(t) for t in text]
                        lease.done()
                        child.truncate(turn % 8)
        except BaseException as error:
            failures.append(error)

    def write(batch: Any, tokens: list[int]) -> None:
        kv = torch.tensor(tokens, dtype=torch.float32)[:, None, None]
        cache.write(0, kv, kv, batch)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    cache.validate()
    assert cache.mmu.states()["available"] == 2048
    assert cache.mmu.num_leases() == cache.mmu.steps_in_flight() == 0


def test_import_kvmmu_does_not_import_torch() -> None:
    """Its time is measured as well, best of five, and shown; no test depends on a clock."""
    code = (
        "import sys, time; began = time.perf_counter(); import kvmmu; "
        "took = time.perf_counter() - began; assert 'torch' not in sys.modules; "
        "assert 'KVCache' in dir(kvmmu); assert 'torch' not in sys.modules; print(took)"
    )
    times = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        times.append(float(done.stdout))
    print(f"import kvmmu: {min(times) * 1000:.1f} ms (best of 5)")
