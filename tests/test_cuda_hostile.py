"""Hostile use of a CUDA device, over recorded streams: handles of others, steps that are over,
failures in the middle, things dropped while the device still needs them, a fork of the process.

What lives here: one test a fault that was found so. What never lives here: the order of work as
such (``test_cuda_order.py``).
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvmmu import (  # noqa: E402
    InvalidConfig,
    InvalidStep,
    KVCache,
    Region,
    Storage,
    UsedAfterFork,
    compact,
    cuda,
    kernels,
)
from kvmmu.cuda import launches, tables  # noqa: E402

from . import cuda_shim  # noqa: E402
from .recorded import RecordedStreams, World  # noqa: E402
from .small_cache import contents  # noqa: E402
from .test_cuda_order import Serving, churn, pool  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_shim.compiler() is None, reason="needs g++")


def test_a_batch_whose_tables_another_step_has_is_refused() -> None:
    serving = Serving(World(), 2)
    one, two = serving.open(5), serving.open(5)
    step, old, lens = serving.prepare([one])
    serving.kernels(old, [one], lens)
    step.written()
    other, batch, lens = serving.prepare([two])
    nodes = len(serving.world.nodes)
    right = torch.zeros(5, 2, 4)
    with pytest.raises(InvalidStep, match=f"step {step.number}: .* step {other.number}"):
        serving.cache.write(0, right, right, old)  # its slots would be those of the other
    with pytest.raises(InvalidStep, match=f"step {step.number}: .* step {other.number}"):
        old.csr()
    assert len(serving.world.nodes) == nodes
    serving.kernels(batch, [two], lens)
    serving.cache.end_step(step)
    serving.end(other)
    serving.finish()
    assert serving.world.errors == []


def test_a_cache_that_is_dropped_keeps_staging_until_the_device_has_read_it() -> None:
    world = World()
    serving = Serving(world)
    handle = serving.open(5)
    serving.step([handle])
    handle.close()
    serving.texts.clear()
    del handle, serving.cache
    gc.collect()
    assert any(node.what == "host gives staging back" for node in world.nodes)
    assert [race.kind for race in world.races()] == []


def test_moves_that_were_put_outlive_the_handle() -> None:
    world = World()
    streams = RecordedStreams(world)
    storage, array = pool(world, streams)
    mover = cuda.CUDAMover(storage, streams=streams)
    moves = mover.graph_moves(2, thread_blocks=2)
    expected = array[0].copy()
    moves.move(np.array([[0, 4]], np.uint32))
    del moves
    gc.collect()
    mover.move(np.array([[4, 5]], np.uint32))
    assert np.array_equal(array[4], expected)
    assert np.array_equal(array[5], expected)
    assert world.races() == []


def test_a_copy_is_finished_by_the_mover_that_started_it() -> None:
    world = World()
    streams = RecordedStreams(world)
    movers = [cuda.CUDAMover(pool(world, streams)[0], streams=streams) for _ in range(2)]
    copying = movers[0].start(np.array([[0, 4]], np.uint32))
    with pytest.raises(InvalidConfig, match="no copy that this mover has started"):
        movers[1].finish(copying)
    assert not copying.finished
    movers[0].finish(copying)
    assert copying.finished


def test_memory_of_another_device_than_the_streams_is_refused() -> None:
    streams = RecordedStreams(World())
    there = Storage([Region(4096, 16, 16, 9, device="cuda:1")], 8)
    with pytest.raises(InvalidConfig, match="storage is on cuda:1, the streams are of cuda:0"):
        cuda.CUDAMover(there, streams=streams)


def test_rows_of_an_update_that_failed_half_way_are_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "_ENTRIES", 8)
    serving = Serving(World(), num_blocks=96)
    device = serving.cache._device.tables
    handles = [serving.open(12) for _ in range(5)]
    serving.step(handles[:1])
    serving.cache.synchronize()
    launch, count = device._update._launch, 0

    def failing(*how: Any) -> None:
        nonlocal count
        count += 1
        if count > 6:
            raise ZeroDivisionError
        launch(*how)

    device._update._launch = failing
    with pytest.raises(ZeroDivisionError), serving.cache.step() as step:
        step.prepare(handles, query_lens=[1, 9, 9, 9, 9], new_tokens=[7])
    device._update._launch = launch
    assert (device.block_table[1:].numpy() != serving.cache.mmu.null_block).any()
    serving.cache.synchronize()
    step, batch, _ = serving.prepare(handles[:1])
    host = batch._buffers
    for name in ("slot_mapping", "block_table", "seq_lens", "query_start_loc"):
        assert torch.equal(getattr(device, name), getattr(host, name)), name
    step.cancel()
    serving.cache.end_step(step)
    serving.close_all()


def test_a_dropped_step_frees_the_tables_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(World(), 2)
    one, two, three = (serving.open(5) for _ in range(3))
    device = serving.cache._device.tables
    first = serving.cache.begin_step()
    with monkeypatch.context() as patch:
        patch.setattr(device, "update", lambda buffers: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            first.prepare([one], query_lens=[5])
    second = serving.prepare([two])[0]
    del first
    gc.collect()
    third = serving.cache.begin_step()
    with pytest.raises(InvalidStep, match=f"step {second.number} is prepared"):
        third.prepare([three], query_lens=[5])
    second.cancel()
    for step in (second, third):
        serving.cache.end_step(step)
    serving.close_all()


@pytest.mark.parametrize("given", [5, None, np.zeros((0, 3), np.uint32), np.zeros((0, 2))])
def test_what_is_no_array_of_moves_is_refused_by_name(given: Any) -> None:
    world = World()
    streams = RecordedStreams(world)
    mover = cuda.CUDAMover(pool(world, streams)[0], streams=streams)
    graph = mover.graph_moves(2)
    for call in (mover.move, mover.start, graph.move):
        with pytest.raises(InvalidConfig, match="pairs must be"):
            call(given)


@pytest.mark.parametrize("count", [None, 0, -1, True, 2.0])
def test_a_number_of_thread_blocks_is_a_number(count: Any) -> None:
    world = World()
    streams = RecordedStreams(world)
    storage = pool(world, streams)[0]
    with pytest.raises(InvalidConfig, match="thread_blocks"):
        cuda.CUDAMover(storage, streams=streams, overlap_thread_blocks=count)
    with pytest.raises(InvalidConfig, match="thread_blocks"):
        cuda.CUDAMover(storage, streams=streams).graph_moves(2, thread_blocks=count)


def test_moves_are_checked_once_and_what_was_checked_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    streams = RecordedStreams(world)
    mover = cuda.CUDAMover(pool(world, streams)[0], streams=streams)
    graph = mover.graph_moves(2, thread_blocks=2)
    real, made = launches._checked_pairs, []

    def counting(*given: Any) -> Any:
        made.append(real(*given))
        return made[-1]

    monkeypatch.setattr(launches, "_checked_pairs", counting)
    pairs = np.array([[0, 4], [1, 5]], np.uint32)
    for call in (mover.move, mover.start, graph.move):
        made.clear()
        call(pairs)
        assert len(made) == 1
        assert not np.shares_memory(made[0], pairs), "another thread may write it meanwhile"


def prepared(serving: Serving) -> tuple[Any, Any, list[Any], list[int]]:
    """A step that is prepared while the memory calls for moves."""
    serving.cache.auto_compact = False
    others, handles = [serving.open(8) for _ in range(6)], [serving.open(9) for _ in range(3)]
    serving.step(others)
    serving.close(*others[::2])
    serving.step(handles)
    serving.cache.synchronize()
    step, batch, lens = serving.prepare(handles)
    return step, batch, handles, lens


@pytest.mark.parametrize("copy", ["between_steps", "overlap"])
def test_a_stream_that_is_captured_takes_nothing_that_is_to_run_once(copy: str) -> None:
    """A graph would do it again with each replay, and it is not done now."""
    world = World()
    serving = Serving(world, 2, copy=copy)
    step, batch, handles, lens = prepared(serving)
    cache, mmu, mover = serving.cache, serving.cache.mmu, serving.cache.mover
    moves = mover.graph_moves(2, thread_blocks=2)
    copying = mover.start(np.array([[43, 44]], np.uint32))
    other = cache.begin_step()
    right = torch.zeros(3, 2, 4)
    pairs = np.array([[0, 1]], np.uint32)
    put = np.array([[45, 46]], np.uint32)

    def refused(calls: dict[str, Callable[[], object]]) -> None:
        nodes, before = len(world.nodes), (mmu.stats(), mmu.states())
        with serving.streams.capture() as graph:
            for name, call in calls.items():
                with pytest.raises(InvalidConfig, match="is being captured"):
                    call()
                assert (mmu.stats(), mmu.states()) == before, name
        assert (len(world.nodes), len(graph.work)) == (nodes, 0)

    refused(
        {
            "move": lambda: mover.move(pairs),
            "start": lambda: mover.start(pairs),
            "finish": lambda: mover.finish(copying),
            "follow": mover.follow,
            "put": lambda: moves.move(pairs),
            "graph moves": lambda: mover.graph_moves(2),
            "refused": moves.refused,
            "replaying": lambda: moves.replaying().__enter__(),
            "warm up": cache.warm_up,
            "written": step.written,
            "cancel": step.cancel,
            "end": lambda: cache.end_step(step),
            "end with event": lambda: cache.end_step(step, serving.own[0]),
            "csr": batch.csr,
            "compact": cache.compact,
        }
    )
    moves.move(put)
    refused(
        {
            "write behind moves": lambda: cache.write(0, right, right, batch),
            "flush": mover.flush,
            "synchronize": mover.synchronize,
            "gather": lambda: cache.gather(handles[0], 0),
        }
    )
    moves.flush()
    serving.kernels(batch, handles, lens)
    step.written()
    refused({"prepare": lambda: other.prepare(handles)})
    cache.end_step(step)
    assert len(other.prepare(handles)) == 3
    other.cancel()
    cache.end_step(other)
    serving.finish()
    assert world.errors == []


def test_a_captured_write_follows_the_tables() -> None:
    world = World()
    serving = Serving(world, 2)
    handles = [serving.open(5), serving.open(7)]
    serving.step(handles)
    inputs = [[torch.zeros(2, 2, 4) for _ in range(2)] for _ in range(2)]
    graph: Any = None
    for _ in range(6):
        step, batch, _ = serving.prepare(handles)
        if graph is None:
            with serving.streams.capture() as graph:
                for layer, kv in enumerate(inputs):
                    serving.cache.write(layer, *kv, batch)
        values = [serving.texts[one][one.num_scheduled - 1] for one in handles]
        for layer, kv in enumerate(inputs):
            for half, (given, like) in enumerate(
                zip(kv, serving.layers.logical(layer), strict=True)
            ):
                given.copy_(contents(values, layer, half, like))
        graph.replay()
        csr_texts = [serving.texts[one][: one.num_scheduled] for one in handles]
        serving.attend(batch, csr_texts)
        serving.end(step)
    serving.finish()
    assert world.errors == []
    assert world.races() == []


def test_every_kernel_of_a_cache_is_launched_by_its_warm_up() -> None:
    world = World()
    serving = Serving(world)
    start = len(world.nodes)
    serving.cache.warm_up()
    warmed = {node.what for node in world.nodes[start:]}
    start = len(world.nodes)
    churn(serving, 4)
    names = set(kernels.names())
    assert {node.what for node in world.nodes[start:]} & names <= warmed
    start = len(world.nodes)
    serving.cache.mover.graph_moves(2, thread_blocks=2)
    assert "move_blocks_indirect" in {node.what for node in world.nodes[start:]}
    serving.finish()


def test_what_is_gathered_has_been_moved() -> None:
    serving = Serving(World(), auto_compact=False)
    handles = [serving.open(9) for _ in range(5)]
    serving.step(handles)
    serving.cache.synchronize()
    serving.close(*handles[::2])
    moves = serving.cache.mover.graph_moves(8, thread_blocks=2)
    assert compact(serving.cache.mmu, moves) > 0
    assert not serving.cache.mover.copied()
    for handle in handles[1::2]:
        k, _ = serving.cache.gather(handle, 0)
        like = serving.layers.logical(0)[0]
        assert torch.equal(k, contents(serving.texts[handle], 0, 0, like))
    serving.finish()


class Relay:
    """An MMU that does something else before a call returns."""

    def __init__(self, mmu: Any, name: str, then: Callable[[], object]) -> None:
        self._mmu, self._name, self._then = mmu, name, then

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._mmu, name)
        if name != self._name:
            return real

        def call(*given: Any) -> Any:
            found = real(*given)
            self._then()
            return found

        return call


def test_what_is_published_can_be_read_in_another_stream_at_once() -> None:
    world = World()
    serving = Serving(world, 2, auto_compact=False)
    cache, mmu = serving.cache, serving.cache.mmu
    text = serving.fresh(13)
    first = cache.open(text)
    serving.texts[first] = text
    step, batch, lens = serving.prepare([first])
    serving.kernels(batch, [first], lens)
    found: list[Any] = []

    def another_thread() -> None:
        cache.mmu = mmu
        cache._tables_of = None  # that of the step which is being settled
        with serving.streams.within(serving.streams.other()):
            second = cache.open(text)
            serving.texts[second] = list(text)
            assert second.num_cached_tokens == 12
            serving.step([second])
        found.append(second)

    cache.mmu = Relay(mmu, "written", another_thread)
    serving.end(step)
    assert found
    assert [race.kind for race in world.races()] == []
    serving.finish()
    assert world.errors == []


def at_once(*calls: Callable[[], object]) -> list[BaseException]:
    """Each call in a thread of its own; what they raised."""
    raised: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "two threads wait for each other"
    return raised


def slowed(holder: Any, name: str) -> None:
    """The call takes its time, so that another thread comes in between."""
    real = getattr(holder, name)

    def slow(*given: Any, **more: Any) -> Any:
        time.sleep(0.1)
        found = real(*given, **more)
        time.sleep(0.1)
        return found

    setattr(holder, name, slow)


@pytest.mark.parametrize("call", ["begin_step", "compact", "_finish_moves"])
def test_moves_beside_a_step_are_committed_by_one_of_two_threads(call: str) -> None:
    serving = Serving(World(), 4, copy="overlap")
    step, batch, handles, lens = prepared(serving)
    serving.kernels(batch, handles, lens)
    serving.end(step)
    serving.cache.auto_compact = True
    step, batch, lens = serving.prepare(handles)
    serving.cache.auto_compact = False
    serving.kernels(batch, handles, lens)
    serving.end(step)
    assert serving.cache._moving is not None
    committed = serving.moved
    slowed(serving.cache.mover, "finish")
    calls = [getattr(serving.cache, call)] * 2
    assert at_once(*calls) == []
    assert serving.moved > committed
    assert serving.cache.mmu.stats()["moves_begun"] == serving.moved
    serving.finish()
    assert serving.world.errors == []


def test_moves_beside_a_step_are_begun_by_one_of_two_threads() -> None:
    serving = Serving(World(), 2, copy="overlap")
    step, batch, handles, lens = prepared(serving)
    slowed(serving.cache.mover, "start")
    assert at_once(*[serving.cache._start_moves] * 2) == []
    assert serving.cache._moving is not None
    serving.kernels(batch, handles, lens)
    serving.end(step)
    serving.finish()  # commits: what the other had begun would stay destined
    assert serving.cache.mmu.states()["destined"] == 0
    assert serving.world.errors == []


def test_two_threads_prepare_a_step_and_one_has_the_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = Serving(World(), 2)
    handles = [serving.open(5), serving.open(5)]
    steps = [serving.cache.begin_step() for _ in handles]
    held: list[int | None] = [None]

    def slowly(_: Any) -> int | None:
        found = held[0]
        time.sleep(0.1)  # another thread comes in between
        return found

    whose = property(slowly, lambda _, number: held.__setitem__(0, number))
    monkeypatch.setattr(KVCache, "_tables_of", whose, raising=False)
    raised = at_once(
        *(
            lambda step=step, one=one: step.prepare([one], query_lens=[5])
            for step, one in zip(steps, handles, strict=True)
        )
    )
    assert [type(error) for error in raised] == [InvalidStep]
    assert "the tables on the device are its own" in str(raised[0])
    for step in steps:
        step.cancel()
        serving.cache.end_step(step)
    serving.step(handles)
    serving.finish()
    assert serving.world.errors == []


def test_a_batch_whose_tables_go_while_a_thread_waits_is_refused() -> None:
    serving = Serving(World(), 2)
    handle = serving.open(5)
    step, batch, lens = serving.prepare([handle])
    cache, right = serving.cache, torch.zeros(5, 2, 4)

    def take_the_tables() -> None:
        time.sleep(0.1)  # the other thread has come as far as it comes
        cache._tables_hold = step.number + 1  # as another thread's prepare does
        cache._copying.release()

    for call in (batch.csr, lambda: cache.write(0, right, right, batch)):
        cache._copying.acquire()
        raised = at_once(call, take_the_tables)
        cache._tables_hold = step.number
        assert [type(error) for error in raised] == [InvalidStep]
    serving.kernels(batch, [handle], lens)
    serving.end(step)
    serving.finish()
    assert serving.world.errors == []


def graph_of(world: World) -> tuple[RecordedStreams, Any, Any, Any]:
    """Streams, the contents of a pool, its mover, moves for a graph."""
    streams = RecordedStreams(world)
    storage, array = pool(world, streams)
    mover = cuda.CUDAMover(storage, streams=streams)
    return streams, array, mover, mover.graph_moves(2, thread_blocks=2)


def test_moves_that_were_put_are_not_copied_before_somebody_has_made_them() -> None:
    _, _, mover, moves = graph_of(World("fast"))  # where all that is queued is done at once
    assert mover.copied()
    moves.move(np.array([[0, 4]], np.uint32))
    assert not mover.copied()
    moves.flush()
    assert mover.copied()
    _, array, mover, moves = graph_of(World("late"))
    moves.move(np.array([[0, 4]], np.uint32))
    moves.flush()
    assert not mover.copied()
    mover.synchronize()
    assert mover.copied()
    assert np.array_equal(array[4], array[0])


def test_a_launch_outside_of_a_capture_carries_out_what_was_put_in_any_stream() -> None:
    world = World()
    streams, array, mover, moves = graph_of(world)
    moves.move(np.array([[0, 4]], np.uint32))
    with streams.within(streams.other()):
        moves.launch()
    assert np.array_equal(array[4], array[0])
    assert not mover._put
    moves.move(np.array([[1, 5]], np.uint32))
    assert [race.kind for race in world.races()] == []


def test_what_was_refused_is_known_when_the_kernel_has_run_in_whichever_stream() -> None:
    world = World("late")
    streams, array, _, moves = graph_of(world)
    moves.move(np.array([[0, 4]], np.uint32))
    with streams.within(streams.other()):
        moves.flush()
    assert not np.array_equal(array[4], array[0])
    assert moves.refused() == 0
    assert np.array_equal(array[4], array[0])


def in_child(body: Any) -> str:
    """What the body returns in a forked child, or the error's name."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for a lock
        try:
            said = str(body())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 10_000).decode()
    os.close(reading)
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork with threads
def test_a_child_queues_nothing_on_the_device_of_its_parent() -> None:
    serving = Serving(World(), 2, copy="overlap")
    serving.cache.auto_compact = False
    handles = [serving.open(9) for _ in range(3)]
    others = [serving.open(8) for _ in range(6)]  # whose blocks no step in flight writes
    serving.step(others)
    serving.close(*others[::2])
    serving.step(handles)
    serving.cache.synchronize()
    ending, batch, lens = serving.prepare(handles)
    serving.kernels(batch, handles, lens)
    ending.written()
    serving.cache.auto_compact = True
    step, batch, lens = serving.prepare(handles)
    assert serving.cache._moving is not None
    cache, right = serving.cache, torch.zeros(3, 2, 4)
    moves, waiting = cache.mover.graph_moves(2, thread_blocks=2), cache.begin_step()
    calls = {
        "write": lambda: cache.write(0, right, right, batch),
        "csr": batch.csr,
        "end": lambda: cache.end_step(ending),
        "finish moves": cache._finish_moves,
        "warm up": cache.warm_up,
        "move": lambda: cache.mover.move(np.array([[0, 1]], np.uint32)),
        "synchronize": cache.mover.synchronize,
        "copied": cache.mover.copied,
        "follow": cache.mover.follow,
        "graph moves": lambda: cache.mover.graph_moves(2),
        "launch": moves.launch,
        "put": lambda: moves.move(np.array([[0, 1]], np.uint32)),
        "flush": moves.flush,
        "refused": moves.refused,
        "replaying": lambda: moves.replaying().__enter__(),
        "gather": lambda: cache.gather(handles[0], 0),
        "prepare": lambda: waiting.prepare(handles),
        "close": cache.mover.close,
    }
    nodes = len(serving.world.nodes)
    for name, call in calls.items():

        def body(call: Any = call) -> str:
            with suppress(UsedAfterFork):
                call()
            return str(len(serving.world.nodes) - nodes)

        # Another thread of the parent's may have them.
        with cache._copying, cache._lock, cache.mover._lock:
            assert in_child(body) == "0", name
    serving.kernels(batch, handles, lens)
    serving.cache.end_step(ending)
    serving.end(step)
    serving.finish()
    assert serving.world.errors == []
